"""Seconds of a step of several ranks that share what their engines have finished, against ranks that train their own.

    python scripts/bench/bench_shared_queue.py [--ranks 4] [--steps 12]

Real processes, session, collector and queue. The engines sleep: 4 groups of each rank in a step, 4 at a time, whose
answers take seconds of lognormal length (median .2, sigma .9, at most 1.5), and with the last rank's engine twice as
long; an update takes .2 s, in which all ranks wait for each other.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
GROUPS, UPDATE_S = 4, 0.2


def rank(shared: bool, staleness: int, steps: int) -> None:
    """What each process does; the first prints the seconds of a step."""
    from llmrl.collectors.llm import LLMCollector
    from llmrl.envs.llm import DatasetChatEnv
    from llmrl.modules.llm import LLMWrapperBase
    from llmrl.testing import FakeEngine, tiny_tokenizer
    from llmrl.train.distributed import Session
    from llmrl.train.rollouts.queue import RolloutQueue
    from llmrl.train.settings import GRPOConfig
    from tests.support.simulated import long_tailed

    class Sleeping(FakeEngine):
        def generate(self, prompts, params, *, seeds=None):
            is_slow = session.rank == session.world_size - 1
            time.sleep(max(map(length, seeds)) / 1000 * (1 + is_slow))
            return super().generate(prompts, params, seeds=seeds)

    length = long_tailed(200, 0.9, 1500)
    with Session(GRPOConfig(model={}, env={"name": "sums"})) as session:
        engine = Sleeping(["yes"], tokenizer=tiny_tokenizer())
        options = {"num_envs": GROUPS, "repeats": 2, "group_repeats": True, "shuffle": False, "seed": 0, "max_steps": 1}
        options |= {"rank": session.rank, "world_size": session.world_size}
        env = DatasetChatEnv(dataset=[{"query": f"{n}?"} for n in range(997)], **options)
        policy = LLMWrapperBase(engine, tokenizer=engine.tokenizer)
        rows = LLMCollector(env, policy=policy, yield_only_last_steps=True, track_policy_version=True)
        given = {"concurrency": 2 * GROUPS, **({"session": session} if shared else {})}
        queue = RolloutQueue(rows, groups=GROUPS, group_size=2, max_staleness=staleness, **given)
        first = staleness + 2  # until then the queue fills
        for step in range(first + steps):
            if step == first:
                began = time.perf_counter()
            queue.take(step)
            queue.begin_next(first + steps - step)
            session.wait()
            time.sleep(UPDATE_S)
            engine.version = step + 1
        seconds = (time.perf_counter() - began) / steps
        queue.close()
        if session.is_first:
            print(json.dumps(seconds))


def measure(shared: bool, staleness: int, ranks: int, steps: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    command = [sys.executable, __file__, "rank", json.dumps([shared, staleness, steps])]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **{name: str(value) for name, value in (given | {"RANK": n, "LOCAL_RANK": n}).items()}},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    return json.loads(outputs[0])


def main(ranks: int, steps: int) -> list[object]:
    from table import Row

    rows: list[object] = []
    for staleness in (2, 4):
        shared, own = (measure(which, staleness, ranks, steps) for which in (True, False))
        name = f"{ranks} ranks, max_staleness {staleness}"
        rows.append(Row(f"{name}: a step with one queue / with a queue of each rank", shared / own, 1.0))
        rows.append(Row("the same in seconds, one queue", shared, unit="s"))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*json.loads(sys.argv[2]))
    else:
        from table import benchmark

        benchmark(main, __doc__, ranks=4, steps=12)
