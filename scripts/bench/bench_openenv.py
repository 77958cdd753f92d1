"""Times the steps of OpenEnv episodes against OpenEnv's own client; no rows without a Python that has openenv.

    python scripts/bench/bench_openenv.py [--steps 20] [--rounds 15] [--json FILE]

One server, in a process of its own. The client plays all sessions at once, each step after step. llmrl's side is the
calls that `EpisodeTurns` makes: a step of all sessions, then the next one. One session is also compared with the
client's methods for programs without an event loop, as llmrl's side is one. For comparison whole conversations, with a
policy that answers at once, prompts, tokens and rewards; and the same with episodes of this process, without a server.
The sides take turns, and the least of the rounds counts, which others on the machine disturb least.
scripts/foreign_clients installs openenv, in LLMRL_CLIENTS.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from table import Row, benchmark

from llmrl.collectors.llm import LLMCollector
from llmrl.concurrency.deadline import AsyncRunner, Calls
from llmrl.envs.llm.tasks.episodes import EpisodeEnv
from llmrl.envs.llm.tasks.openenv import OpenEnvEnv, OpenEnvServer
from llmrl.envs.llm.transforms.episodes import EpisodeTurns, Observed
from llmrl.testing import ScriptedPolicy, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LLMRL_CLIENTS", ROOT / "build" / "clients"), "openenv", "bin", "python")
SESSIONS = (1, 64)


class Here:
    """An episode of this process."""

    async def start(self, **row: Any) -> Observed:
        return Observed("Guess a number from 1 to 8.")

    async def step(self, text: str) -> Observed:
        return Observed("More.")

    def close(self) -> None: ...


class HereEnv(EpisodeEnv):
    @classmethod
    def turns(cls) -> tuple[list[Any], EpisodeTurns]:
        return [], EpisodeTurns(Here)


def never(text: str) -> dict[str, int]:
    """An action that ends no episode."""
    return {"guess": 0}


def episodes(env: OpenEnvEnv, sessions: int, steps: int) -> float:
    """The seconds of the steps of as many episodes."""
    turns = next(each for each in env.transform.leaves() if isinstance(each, EpisodeTurns))
    runner, own = AsyncRunner("bench", sessions), [turns.make() for _ in range(sessions)]
    runner.run(Calls([partial(each.start, seed=seed) for seed, each in enumerate(own)]), timeout_s=60)
    began = time.perf_counter()
    for _ in range(steps):
        outcomes = runner.run(Calls([partial(each.step, "5") for each in own]), timeout_s=60)
        assert all(outcome.value is not None for outcome in outcomes), outcomes[0]
    seconds = time.perf_counter() - began
    for each in own:
        each.close()
    runner.close()
    return seconds


def conversations(env: EpisodeEnv) -> Callable[[], float]:
    """A function that plays them once, and returns the seconds."""
    collector = LLMCollector(env, policy=ScriptedPolicy(["5"]), yield_only_last_steps=True)

    def play() -> float:
        began = time.perf_counter()
        collector.rollout()
        return time.perf_counter() - began

    return play


def main(steps: int, rounds: int) -> list[Row]:
    if not PYTHON.exists():
        print(f"openenv: there is no {PYTHON}; scripts/foreign_clients environments installs it")
        return []
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = ROOT / "scripts" / "clients" / "openenv_servers.py"
    server = subprocess.Popen([PYTHON, program, str(port), str(2 * max(SESSIONS) + 2), "guess"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    client = subprocess.Popen([PYTHON, Path(__file__).with_name("openenv_client.py")], **pipes)
    url, rows = f"http://127.0.0.1:{port}", []

    def alone(sessions: int) -> float:
        client.stdin.write(json.dumps([url, sessions, steps]) + "\n")
        client.stdin.flush()
        return float(client.stdout.readline())

    try:
        OpenEnvServer(url, None, start_timeout_s=300).close()
        for sessions in SESSIONS:
            options = {"num_envs": sessions, "items": sessions, "max_steps": steps, "shuffle": False}
            envs = [
                make(tokenizer=tiny_tokenizer(), **options, **given)
                for make, given in ((OpenEnvEnv, {"url": url, "action": never}), (HereEnv, {}))
            ]
            served, here = map(conversations, envs)
            sides = []
            for _ in range(rounds + 1):
                sides.append((episodes(envs[0], sessions, steps), alone(sessions), alone(0), served(), here()))
            step, bare, blocking, whole, own = (
                1e3 * min(side) / (sessions * steps) for side in zip(*sides[1:], strict=True)
            )
            blocking *= sessions  # always of one
            print(
                f"{sessions} sessions, ms a step: {step:.3f}, OpenEnv's client {bare:.3f}, or {blocking:.3f} in calls "
                f"that block; conversations {whole:.3f}"
            )
            rows += [
                Row(f"a step of OpenEnv, {sessions} sessions: llmrl / its own client", step / bare, 1.11),
                *([Row("the same / its client in calls that block", step / blocking, 1.11)] if sessions == 1 else []),
                Row(f"a step of whole conversations, {sessions} sessions / its own client", whole / bare),
                Row(f"the same without a server, {sessions} sessions", own / bare),
            ]
    finally:
        for process in (client, server):
            process.kill()
            process.wait()
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, steps=20, rounds=15)
