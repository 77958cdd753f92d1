"""Times rollouts of verifiers against the same answers of the same engine; no rows without verifiers.

    python scripts/bench/bench_verifiers.py [--rollouts 32] [--seconds 2] [--json FILE]

The engine takes the same time for any batch, and answers one after the other, as Transformers does. Directly all
rollouts are one batch. Through verifiers they are tasks of reverse_text (scripts/clients/tasksets), one call each,
all at once: the third step counts, and the median of the processor times of its program.
`llmrl env install verifiers` makes the environment.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from table import Row, benchmark

from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint.verifiers import VerifiersAgent, verifiers_rows
from llmrl.modules.llm.engines import SamplingParams
from llmrl.package_envs import is_there
from llmrl.testing import FakeEngine, tiny_tokenizer

TASKSETS = Path(__file__).parents[1] / "clients" / "tasksets"
STEPS = 3


class SlowEngine(FakeEngine):
    """Scripted answers, each batch after as many ``seconds``; ``sizes`` of the batches."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        super().__init__(lambda prompt: "ok", tokenizer=tokenizer)
        self.seconds, self.sizes = seconds, []

    def generate(self, prompts: Any, params: SamplingParams, *, seeds: Any = None) -> Any:
        self.sizes.append(len(prompts))
        time.sleep(self.seconds)
        return super().generate(prompts, params, seeds=seeds)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(rollouts: int, seconds: float) -> list[Row]:
    if not is_there("verifiers"):
        print("verifiers: there is no environment with it: llmrl env install verifiers")
        return []
    os.chdir(TASKSETS)
    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer()
    engine = SlowEngine(tokenizer, seconds)
    options = {"taskset": "reverse_text", "config": {"agent": {"harness": {"id": "chat_loop"}}}}
    row = verifiers_rows(options, split="train")[0]
    agent, took, spent = VerifiersAgent(options, tokenizer), [], []
    pid = agent._servers[0]._process.pid
    with RecordingEndpoint(engine, tokenizer, train="all") as endpoint, ThreadPoolExecutor(rollouts) as pool:

        def play(number: int) -> None:
            key = endpoint.begin(row, by_session=True)
            outcome = agent.call(endpoint.base_url, key, row, timeout_s=300, stopped=lambda: False)
            assert outcome.value is not None, outcome.error
            endpoint.finish(key, 1.0)

        for _ in range(STEPS):
            engine.sizes, began, before = [], time.perf_counter(), processor_s(pid)
            list(pool.map(play, range(rollouts)))
            took.append(time.perf_counter() - began)
            spent.append(1e3 * (processor_s(pid) - before) / rollouts)
            print(
                f"{took[-1]:.2f} s, batches of {engine.sizes}, {spent[-1]:.1f} ms of a core for each rollout",
                flush=True,
            )
    agent.close()
    return [
        Row(
            f"{rollouts} rollouts of verifiers at once, a batch takes {seconds:g} s / the batch alone",
            took[-1] / seconds,
        ),
        Row("processor time of verifiers' program for a rollout of one call", statistics.median(spent), None, "ms"),
    ]


if __name__ == "__main__":
    benchmark(main, __doc__, rollouts=32, seconds=2.0)
