"""The program that plays environments of verifiers; it runs under the Python of an environment that has that package.

    python verifiers_program.py tasks FILE      prints the taskset's tasks, one JSON object a line
    python verifiers_program.py serve FILE      answers POST /run: one task, played once; until it or its owner is ended

FILE holds one JSON object, and so does each request: `llmrl.endpoint.verifiers`, the other side, writes them. It needs
nothing of llmrl.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.metadata
import itertools
import json
import os
import pkgutil
import signal
import sys
from collections import Counter
from typing import Any

REFUSED = 3  # exit code, with the reason as the last line of the errors


class Refused(Exception):
    """What a user must change."""


def main(mode: str, file: str) -> int:
    sys.path.insert(0, os.getcwd())  # the user's tasksets; the servers of their tools find them by the variable
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    with open(file) as opened:
        asked = json.load(opened)
    try:
        config = environment(asked["env"])
        if mode == "tasks":
            for task in tasks(config, asked):
                print(json.dumps(task), flush=True)
        else:
            asyncio.run(serve(config, asked))
    except Refused as reason:
        print("\n" + str(reason).replace("\n", " ").rstrip("."), file=sys.stderr)
        return REFUSED
    return 0


# --- what is played ---------------------------------------------------------------------------------------------------


def environment(settings: dict[str, Any]) -> Any:
    """The ``EnvConfig`` of the settings, in which each seat runs on this machine unless they say where."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    taskset = settings["taskset"]["id"]
    try:
        for seat in agent_config_fields(env_config_type(taskset, settings.get("id", ""))()):
            given = settings.setdefault(seat, {})
            if isinstance(given, dict):
                given.setdefault("runtime", {"type": "subprocess"})
        return resolve_env_config(settings)
    except ModuleNotFoundError as error:
        if "not found (tried to import" not in str(error):  # a module that the taskset's own package imports
            raise Refused(f"{taskset!r} cannot be imported: {error}") from error
        raise Refused(unknown(taskset, settings.get("id", ""), str(error))) from None
    except (AttributeError, ImportError, TypeError) as error:
        raise Refused(older(taskset, error)) from error
    except ValueError as error:  # pydantic's too
        raise Refused(str(error)) from error


def unknown(taskset: str, env: str, said: str) -> str:
    """Why a name leads nowhere, with the nearest one that does."""
    from verifiers.v1 import envs, tasksets

    kind, wanted, home = ("taskset", taskset, tasksets) if said.startswith("taskset") else ("environment", env, envs)
    if said.startswith("harness"):
        return said
    built_in = [module.name for module in pkgutil.iter_modules(home.__path__)]
    known = {*built_in, *(module.name for module in pkgutil.iter_modules())}
    near = difflib.get_close_matches(wanted.replace("-", "_").lower(), known, 1, 0.75)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{kind} {wanted!r} must be a module here or a package of its environment: there is none. verifiers "
        f"itself has {', '.join(built_in)}.{hint} To install a package: {sys.executable} -m pip install NAME"
    )


def older(taskset: str, error: BaseException) -> str:
    """Says so if the package is written for verifiers before 0.4, which had ``load_environment`` and no tasksets."""
    module = taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    have = importlib.metadata.version("verifiers")
    old = "module 'verifiers' has no attribute" in str(error) or "from 'verifiers'" in str(error)
    if old or hasattr(sys.modules.get(module), "load_environment"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            module = f"{module} {importlib.metadata.version(module)}"
        return (
            f"{module} is written for verifiers before 0.4 (vf.Environment, load_environment), and this is verifiers "
            f"{have}: {str(error).rstrip('.')}. Install a release of it that has a Taskset, or write one: load() "
            "yields its tasks, and methods with @vf.reward score them"
        )
    return f"{taskset!r} cannot be loaded by verifiers {have}: {type(error).__name__}: {error}"


def tasks(config: Any, asked: dict[str, Any]) -> Any:
    """The data of the selected tasks, as they go into a request."""
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    try:
        select = SelectConfig.model_validate(asked["select"])
        taskset = load_taskset(config.taskset)
        if taskset.INFINITE and select.limit is None and not taskset.include(**select.include.model_dump()).bounded:
            raise Refused(f"{config.taskset.id!r} has tasks without end: set select: {{limit: 1000}}")
        chosen = taskset.select(select)
        for task in itertools.islice(chosen, asked["most"]):
            yield task.data.model_dump(mode="json", exclude_defaults=True)
    except ValueError as error:
        raise Refused(str(error)) from error


# --- playing ----------------------------------------------------------------------------------------------------------


async def serve(config: Any, asked: dict[str, Any]) -> None:
    from aiohttp import web
    from verifiers.v1.utils.loaders import load_environment

    try:
        env = load_environment(config)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error
    task_class = type(env.taskset).task_type()

    async def run(request: Any) -> Any:
        body = await request.json()
        try:
            task = task_class(task_class.data_type().model_validate(body["task"]), config.taskset.task)
            return web.json_response(await play(env, task, body, asked))
        except Exception as error:  # of one rollout
            return web.json_response({"error": f"{type(error).__name__}: {error}"})

    async def health(request: Any) -> Any:
        return web.json_response({})

    app, ended = web.Application(client_max_size=1 << 30), asyncio.Event()
    app.add_routes([web.post("/run", run), web.get("/health", health)])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    # A client that leaves has given the rollout up.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    async with env.serving():
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", asked["port"], backlog=1024).start()
            while os.getppid() == asked["owner"] and not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 1)
        finally:
            await runner.cleanup()


async def play(env: Any, task: Any, body: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """One episode: {"error"}, or {"seats": [[session, name, reward]], "metrics"}, of the traces that are trained."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    minted = itertools.count()

    def name(trace: Any) -> None:
        # Clients send the trace's id with each call, and all rollouts share one client: so it must name the rollout.
        trace.id = f"{body['key']}.{next(minted)}"

    where = {"base_url": body["base_url"], "api_key_var": "LLMRL_NO_KEY"}
    renderer = asked["renderer"]
    client = EvalClientConfig(**where)
    if renderer is not None:
        client = TrainClientConfig(**where, renderer=renderer, renderer_model_name=asked["tokenizer"])
    context = ModelContext(model=body["model"], client=client, sampling=SamplingConfig())
    [slot] = env.slots(task)
    episode = await env.run_slot(slot, context, on_trace=name)
    answer: dict[str, Any] = {"traces": [dump(trace) for trace in episode.traces]} if body.get("traces") else {}
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok"
        return {**answer, "error": last}
    seats = asked["seats"]
    trained = [t for t in episode.traces if t.agent.trainable and (seats is None or t.agent.name in seats)]
    if not trained:
        names = ", ".join(dict.fromkeys(trace.agent.name for trace in episode.traces))
        return {**answer, "error": f"no trace of this episode is trained: its seats are {names}"}
    return {**answer, **scored(trained)}


def scored(traces: list[Any]) -> dict[str, Any]:
    """The seats of the traces, None for a reward that was not given, and the mean of each number that was measured.

    A seat is named after its agent; that of an agent's second trace, which other rollouts may lack, is "agent.2".
    """
    seats: list[tuple[str, str, float | None]] = []
    named: Counter[str] = Counter()
    numbers: dict[str, list[float]] = {}
    for trace in traces:
        given = {key: reward for key, reward in trace.rewards.items() if reward is not None}
        named[trace.agent.name] += 1
        place = named[trace.agent.name]
        name = trace.agent.name if place == 1 else f"{trace.agent.name}.{place}"
        seats.append((trace.id, name, trace.reward if given else None))
        measured = {key: reward.score for key, reward in given.items()} | dict(trace.metrics)
        measured |= {"turns": trace.num_turns, "timeout": trace.is_timeout}
        for key, value in measured.items():
            if value is not None:
                numbers.setdefault(key, []).append(float(value))
    return {"seats": seats, "metrics": {key: sum(values) / len(values) for key, values in numbers.items()}}


def dump(trace: Any) -> dict[str, Any]:
    """What a trainer of verifiers would train: for comparison."""
    keys = ("token_ids", "sampled_mask", "logprobs")
    branches = [{key: getattr(branch, key) for key in keys} for branch in trace.branches if branch.trainable]
    return {"id": trace.id, "seat": trace.agent.name, "reward": trace.reward, "branches": branches}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
