"""Times rollouts of verifiers against the same answers of the same engine; no rows without verifiers.

    python scripts/bench/bench_verifiers.py [--rollouts 32] [--tokens 64] [--seconds 2] [--json FILE]

Through verifiers rollouts are tasks of reverse_text (scripts/clients/tasksets), one call each, all at once; directly
the prompts that the engine got are one batch of it, with the same seeds. The sides take turns after a round that does
not count, and the median counts. The engine is Transformers with SmolLM2-135M-Instruct (`scripts/real_model`), on one
thread, with answers of at most as many ``tokens``; and one that takes ``seconds`` for any batch and answers one after
the other. The engine's time within the same round is the steadier measure on a busy machine.
`llmrl env install verifiers` makes the environment.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from table import Row, benchmark

from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint.verifiers import VerifiersAgent, verifiers_rows
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.package_envs import is_there
from llmrl.testing import FakeEngine, tiny_tokenizer

MODEL = Path(__file__).parents[2] / "models" / "smollm2"
OPTIONS = {"taskset": "reverse_text", "config": {"agent": {"harness": {"id": "chat_loop"}}}}
TASKSETS = Path(__file__).parents[1] / "clients" / "tasksets"
ROUNDS = 3


class SlowEngine(FakeEngine):
    """Scripted answers, each batch after as many ``seconds``."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        super().__init__(lambda prompt: "ok", tokenizer=tokenizer)
        self.seconds = seconds

    def generate(self, prompts: Any, params: SamplingParams, *, seeds: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().generate(prompts, params, seeds=seeds)


class Noted:
    """An engine, with what it was asked in ``calls``, and the ``seconds`` that it computed."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.calls, self.seconds = engine, [], 0.0

    def generate(self, prompts: Any, params: SamplingParams, *, seeds: Any = None, **more: Any) -> Any:
        self.calls.append((prompts, params, seeds))
        began = time.perf_counter()
        drawn = self._engine.generate(prompts, params, seeds=seeds, **more)
        self.seconds += time.perf_counter() - began
        return drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rounds(engine: Any, tokenizer: Any, rollouts: int, params: SamplingParams | None) -> Iterator[tuple[float, ...]]:
    """Of each round after the first the values of three rows."""
    row, engine = verifiers_rows(OPTIONS, split="train")[0], Noted(engine)
    agent = VerifiersAgent(OPTIONS, tokenizer)
    pid = agent._servers[0]._process.pid
    served = RecordingEndpoint(engine, tokenizer, params=params, train="all")
    with served as endpoint, ThreadPoolExecutor(rollouts) as pool:

        def play(number: int) -> None:
            key = endpoint.begin(row, by_session=True, seed=number)
            outcome = agent.call(endpoint.base_url, key, row, timeout_s=600, stopped=lambda: False)
            assert outcome.value is not None, outcome.error
            endpoint.finish(key, 1.0)

        for number in range(ROUNDS + 1):
            engine.calls, engine.seconds = [], 0.0
            began, before = time.perf_counter(), processor_s(pid)
            list(pool.map(play, range(rollouts)))
            took, spent = time.perf_counter() - began, processor_s(pid) - before
            asked, computed = list(engine.calls), engine.seconds
            prompts, seeds = ([one for call in asked for one in call[place]] for place in (0, 2))
            began = time.perf_counter()
            engine.generate(prompts, asked[0][1], seeds=seeds)
            alone = time.perf_counter() - began
            batches = [len(call[0]) for call in asked]
            print(
                f"{took:.2f} s, of which {took - computed:.2f} s beside the engine, in batches of {batches}; ", end=""
            )
            print(f"{alone:.2f} s directly; {1e3 * spent / rollouts:.1f} ms of a core for each rollout", flush=True)
            if number:
                yield took / alone, took / computed, 1e3 * spent / rollouts
    agent.close()


def main(rollouts: int, tokens: int, seconds: float) -> list[Row]:
    if not is_there("verifiers"):
        print("verifiers: there is no environment with it: llmrl env install verifiers")
        return []
    os.chdir(TASKSETS)
    torch.set_num_threads(1)
    sides = {f"a batch takes {seconds:g} s": (SlowEngine(tiny_tokenizer(), seconds), tiny_tokenizer(), None)}
    if MODEL.exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        engine = TransformersEngine(model, eos_token_ids=(), pad_token_id=tokenizer.pad_token_id)
        sides[f"SmolLM2-135M, {tokens} tokens"] = engine, tokenizer, SamplingParams(max_new_tokens=tokens)
    rows = []
    for name, (engine, tokenizer, params) in sides.items():
        whole, added, spent = map(statistics.median, zip(*rounds(engine, tokenizer, rollouts, params), strict=True))
        target = 1.05 if params else None  # of a real model
        rows += [
            Row(f"{rollouts} rollouts of verifiers at once / the same calls as one batch: {name}", whole, target),
            Row("the same / what the engine computed meanwhile", added, target),
            Row("processor time of verifiers' program for a rollout of one call", spent, None, "ms"),
        ]
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, rollouts=32, tokens=64, seconds=2.0)
