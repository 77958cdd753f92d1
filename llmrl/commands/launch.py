"""``llmrl launch``: vLLM servers on some GPUs and torchrun's ranks on the others, as one command.

A server that exits during the run is restarted; the run sends it the weights. All servers end with the command, even
if it is killed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmrl.concurrency.process_monitor import process_state
from llmrl.concurrency.server_process import ServerProcess
from llmrl.errors import ConfigError, WorkerError
from llmrl.run.console import make_console, print_plan

HOST = "127.0.0.1"  # local only: a server that accepts weights obeys any client
INTERRUPTED = 130
_RESTARTS = 3  # of each server
_ENDING_S = 30.0  # for a server to exit after SIGTERM
_SAVING_S = "120"  # for ranks to finish and save a step after Ctrl-C, and to exit after another rank failed


@dataclass(frozen=True)
class Command:
    """A process to start: the command line ``words``, and variables added to this process's environment."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])


@dataclass(frozen=True)
class Launch:
    """The ``rows`` of the recipe's plan, the command of each server by its URL, and the trainer's command."""

    rows: list[tuple[str, str]]
    servers: dict[str, Command]
    trainer: Command


def launch(
    module: str,
    config: Any,
    arguments: Sequence[str],
    *,
    runs: Path,
    port: int,
    trainers: int | None,
    dry_run: bool,
    wait_s: float,
) -> int:
    """Starts the processes that train by ``config`` and returns the exit code; with ``dry_run`` only prints them.

    ``module`` names the recipe's module; ``arguments`` go to the ranks. ``trainers`` None: all other GPUs train; on a
    CPU one rank trains.

    Raises  ConfigError if this machine cannot run it, or a port is in use
    """
    rollout = config.rollout
    if not rollout.gpus or rollout.servers:
        raise ConfigError(
            f"llmrl launch  starts the engines of rollout.gpus: got {rollout.gpus}; give rollout.gpus=N"
            if not rollout.servers
            else "llmrl launch  starts servers itself: leave out rollout.servers, or start ranks by torchrun"
        )
    for number in range(port, port + rollout.gpus // rollout.tensor_parallel):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, number))
            except OSError as error:
                raise ConfigError(
                    f"llmrl launch  needs port {number} for a server: {error.strerror}; give others with --port"
                ) from None
    # Planned in a separate process: querying CUDA devices leaves a context in the GPU's memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        planned = pool.submit(_plan, module, config, list(arguments), runs, port, trainers, dry_run).result()
    if not dry_run:
        say = partial(print, "launch       ", file=sys.stderr, flush=True)
        return run_launch(planned, runs=runs, wait_s=wait_s, say=say)
    print_plan(make_console(), "launch (dry run)", planned.rows)
    print(*planned.servers.values(), planned.trainer, sep="\n")
    return 0


def _plan(
    module: str, config: Any, arguments: list[str], runs: Path, port: int, trainers: int | None, dry_run: bool
) -> Launch:
    import torch

    from llmrl.modules.llm.engines.vllm.compat import server_command
    from llmrl.train.gpus import find_gpu
    from llmrl.train.planning.memory import trainer_gpus

    rollout, count = config.rollout, torch.cuda.device_count()
    gpu = find_gpu(torch.device("cuda", 0), count) if count else None
    if gpu is None:
        trainers = trainers or 1
    elif trainers is None:
        trainers = trainer_gpus(config, gpu).count
    elif trainers + rollout.gpus > count:
        raise ConfigError(
            f"llmrl launch  needs {trainers} + {rollout.gpus} GPUs (--trainers, rollout.gpus): got {count}"
        )
    if config.prompts_per_step % trainers:
        raise ConfigError(f"prompts_per_step {config.prompts_per_step} must be a multiple of the {trainers} trainers")
    gpu = gpu and replace(gpu, count=trainers + rollout.gpus)
    rows, engine = importlib.import_module(module).plan_with_engine(config, runs=runs, gpu=gpu)

    # Ranks get the first GPUs and servers the last ones, by their names in this process's CUDA_VISIBLE_DEVICES.
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(count)]

    def visible(names: list[str]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if gpu else {}

    model, options = served_model(config, runs, engine.options, port, dry_run)
    servers = {}
    for number in range(engine.apart):
        first = len(names) - rollout.gpus + number * rollout.tensor_parallel
        words, variables = server_command(model, options, host=HOST, port=port + number)
        placed = visible(names[first : first + rollout.tensor_parallel])
        servers[f"http://{HOST}:{port + number}"] = Command(words, placed | variables)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainers)]
    words += ["-m", "llmrl.commands.cli", *arguments, f"rollout.servers=[{', '.join(servers)}]"]
    return Launch(rows, servers, Command(words, visible(names[:trainers])))


def served_model(
    config: Any, runs: Path, options: Mapping[str, Any], port: int, dry_run: bool
) -> tuple[str, Mapping[str, Any]]:
    """The model that servers load. A randomly initialised model is written without weights; the run sends them."""
    from llmrl.train.models.loading import load_tokenizer, meta_model, model_files

    # The run sends weights before the first request, so such a model needs no weight file.
    if isinstance(config.model, str):
        return str(model_files(config, runs=runs)), options
    folder = runs.absolute() / ".launch" / f"model-{port}"
    if not dry_run:
        tokenizer = load_tokenizer(config, runs=runs)
        for part in (meta_model(config, tokenizer, runs=runs).config, tokenizer):
            part.save_pretrained(folder)
    return str(folder), {**options, "load_format": "dummy"}


# --- processes --------------------------------------------------------------------------------------------------------


def run_launch(launch: Launch, *, runs: Path, wait_s: float, say: Callable[[str], None]) -> int:
    """Starts the servers and the trainer; returns the trainer's exit code, 130 after an interruption.

    wait_s  seconds for the servers to answer
    say     prints a line
    Raises  WorkerError, with the end of the server's log, if a server does not answer
    """
    logs = runs.absolute() / ".launch"
    logs.mkdir(parents=True, exist_ok=True)
    servers = []
    for url, command in launch.servers.items():
        log = logs / f"server-{url.rpartition(':')[2]}.log"
        log.unlink(missing_ok=True)
        servers.append(ServerProcess(url, command.words, command.environment, log.open("a+b")))
    stop = threading.Event()
    watch = threading.Thread(target=_watch, args=[servers, stop, say], name="llmrl-launch", daemon=True)
    with _signals(signal.default_int_handler), _ended(servers):
        began = time.monotonic()
        for server in servers:
            server.start()
            say(f"server {server.url} starts; its log: {server.output.name}")
        _wait(servers, began + wait_s, wait_s)
        say(f"{len(servers)} servers answer after {time.monotonic() - began:.0f} s")
        watch.start()
        try:
            return _train(launch.trainer)
        finally:
            stop.set()
            watch.join()


def _wait(servers: Sequence[ServerProcess], end: float, wait_s: float) -> None:
    waiting = list(servers)
    while waiting:
        for server in waiting:
            if server.exitcode is not None or time.monotonic() > end:
                raise WorkerError(
                    f"llmrl launch: server {server.url} must answer within {wait_s:g} s: it {process_state(server)}.\n"
                    f"{_log_end(server)}"
                )
        time.sleep(0.2)
        waiting = [server for server in waiting if not server.answers()]


def _log_end(server: ServerProcess) -> str:
    return server.last_lines(f"The end of {server.output.name}:")


def _watch(servers: Sequence[ServerProcess], stop: threading.Event, say: Callable[[str], None]) -> None:
    left = list(servers)
    while not stop.wait(1.0):
        for server in [server for server in left if server.exitcode is not None]:
            again = server.starts <= _RESTARTS
            then = "it is restarted" if again else f"it stays down after {_RESTARTS} restarts"
            say(f"server {server.url} {process_state(server)}; {then}. {_log_end(server)}")
            server.signal(signal.SIGKILL)  # its child processes may still hold the GPU
            if again:
                server.start()
            else:
                left.remove(server)


def _train(command: Command) -> int:
    """Runs torchrun in this process, which gives access to the ranks' exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ |= command.environment
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SAVING_S)
    try:
        run(parse_args(list(command.words[3:])))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if isinstance(failure.message, dict):  # of llmrl's command; after it torchrun has logged the ends of all ranks
            print(f"error         {failure.message['message']}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException:
        return INTERRUPTED
    return 0


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Installs ``handler`` for the signals that end a command, and restores the earlier handlers afterwards."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended(servers: Sequence[ServerProcess]) -> Iterator[None]:
    """Ends all servers and their process groups on exit."""
    try:
        yield
    finally:
        with _signals(signal.SIG_IGN):
            started = [server for server in servers if server.starts]
            for server in started:
                server.signal(signal.SIGTERM)
            end = time.monotonic() + _ENDING_S
            # A list, so that every server is polled: that reaps those that have exited. A group may outlive its server.
            while any([server.exitcode is None or server.signal(0) for server in started]) and time.monotonic() < end:
                time.sleep(0.1)
            for server in started:
                server.signal(signal.SIGKILL)
            for server in servers:
                server.output.close()
