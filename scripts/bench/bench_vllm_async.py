"""Times conversations with slow tools: independent ones over ``AsyncVLLMEngine``, against all in lock step.

    python scripts/bench/bench_vllm_async.py [--conversations 32] [--turns 4] [--tokens 32] [--engine vllm|fake]

Every turn ends in a tool that takes between 0.05 and 2 s, drawn once per conversation and turn, and the same on both
sides. In lock step a turn of the batch takes as long as all its tools, if the transform runs them one after the other,
or as long as the slowest, if it starts all at once. Both are shown. ``--engine fake`` takes no time, which leaves the
collector's overhead. The lower bound for any order, the tools of the longest conversation, is shown too. Without vllm
the script prints a note and uses the fake engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from table import Row, benchmark, has_vllm

from llmrl.collectors.llm import LLMCollector
from llmrl.data.llm.chat import History
from llmrl.envs import Transform
from llmrl.envs.llm import DatasetChatEnv
from llmrl.modules.llm import AsyncVLLMEngine, LLMWrapperBase, vLLMWrapper
from llmrl.modules.llm.policies.containers import ChatHistory
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer

SHORTEST_S, LONGEST_S = 0.05, 2.0


class SlowTool(Transform):
    """Answers every conversation after its latency. ``at_once``: all rows of a call wait at the same time."""

    def __init__(self, latency_of: dict[tuple[str, int], float], *, at_once: bool):
        super().__init__()
        self.latency_of, self.at_once = latency_of, at_once

    def _step(self, td: Any, next_td: Any) -> Any:
        prompt = next_td["history"].prompt
        chats = prompt.to_chats()
        waits = [self.latency_of[_question(chat), sum(m["role"] == "assistant" for m in chat)] for chat in chats]
        time.sleep(max(waits) if self.at_once else sum(waits))
        answers = History.from_chats([[{"role": "user", "content": "The tool says 7. Go on."}]] * len(chats))
        next_td["history"] = ChatHistory.from_rows({"prompt": prompt.extend(answers, inplace=False, dim=-1)})
        return next_td


def _question(chat: list[dict[str, Any]]) -> str:
    return next(message["content"] for message in chat if message["role"] == "user")


def seconds(
    make_policy: Callable[[], Any],
    latency_of: dict[tuple[str, int], float],
    questions: list[str],
    turns: int,
    *,
    at_once: bool,
    concurrency: int | None,
) -> float:
    """Seconds of one batch of conversations, each of ``turns`` turns."""
    rows = [{"query": question} for question in questions]
    env = DatasetChatEnv(dataset=rows, num_envs=len(rows), shuffle=False, seed=0, max_steps=turns)
    env.append_transform(SlowTool(latency_of, at_once=at_once))
    collector = LLMCollector(env, policy=make_policy(), yield_only_last_steps=True, concurrency=concurrency)
    began = time.perf_counter()
    batch = collector.next()
    taken = time.perf_counter() - began
    assert len(batch) == len(rows), len(batch)
    assert collector.counters["delivered"] == turns * len(rows), collector.counters
    collector.shutdown()
    return taken


def main(conversations: int, turns: int, tokens: int, repeats: int, engine: str) -> list[Row]:
    fake = engine == "fake" or not has_vllm()
    tokenizer = tiny_tokenizer()
    questions = [f"What is the sum of {n} and 30? Use the tool." for n in range(conversations)]
    draws = torch.rand(len(questions), turns, generator=torch.Generator().manual_seed(0))
    latencies_QT = SHORTEST_S + (LONGEST_S - SHORTEST_S) * draws
    latency_of = {
        (question, turn + 1): float(latencies_QT[row, turn])
        for row, question in enumerate(questions)
        for turn in range(turns)
    }
    options = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": tokens}}
    server = None
    if fake:

        def make_policy() -> Any:
            return LLMWrapperBase(FakeEngine(["Let me see."], tokenizer=tokenizer), **options)
    else:
        model = tiny_model(tokenizer, hidden_size=256, layers=4, heads=4)
        server = AsyncVLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, max_model_len=4096)

        def make_policy() -> Any:
            policy = vLLMWrapper(server, **options)
            policy.stop_token_ids = ()  # every answer has its full length, on both sides
            return policy

    def run(**how: Any) -> float:
        return seconds(make_policy, latency_of, questions, turns, **how)

    try:
        none = dict.fromkeys(latency_of, 0.0)
        seconds(make_policy, none, questions, turns, at_once=True, concurrency=None)  # warm
        apart, together = float("inf"), float("inf")
        for _ in range(repeats):
            apart = min(apart, run(at_once=True, concurrency=len(questions)))
            together = min(together, run(at_once=True, concurrency=None))
        in_turn = run(at_once=False, concurrency=None)
        free = seconds(make_policy, none, questions, turns, at_once=True, concurrency=len(questions))
    finally:
        if server is not None:
            server.close()
    least = float(latencies_QT.sum(1).max())
    name = "fake engine" if fake else "vLLM"
    print(f"{len(questions)} conversations x {turns} turns x {tokens} tokens, in seconds:")
    for what, taken in (
        ("each on its own", apart),
        ("  without tools", free),
        ("  tools alone, the least possible", least),
        ("lock step, tools one after the other", in_turn),
        ("lock step, tools at once", together),
        ("  tools alone, the least possible", float(latencies_QT.max(0).values.sum())),
    ):
        print(f"  {what:37} {taken:7.2f}")
    return [
        Row(f"{name}: concurrent conversations / lock step, tools one after the other", apart / in_turn, 1 / 3),
        Row(f"{name}: concurrent conversations / lock step, tools at once", apart / together),
        Row(f"{name}: concurrent conversations / the longest one's tools", apart / least),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    benchmark(
        main,
        __doc__,
        conversations=32,
        turns=4,
        tokens=(32, "tokens of an answer"),
        repeats=(2, "of all variants except tools one after the other"),
        engine={"choices": ["vllm", "fake"], "default": "vllm"},
    )
