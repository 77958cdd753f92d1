"""Times a call of a client to the recording endpoint, over an engine that sleeps.

    python scripts/bench/bench_endpoint.py [--rollouts 1000] [--json FILE]

Clients are in a process of their own, one connection each, as agents are. What the endpoint adds to a call is the time
that the client waits, less that of the engine in the same call. Then the ids that clients got are compared with rows.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
from table import Row, benchmark

from llmrl.endpoint import RecordingEndpoint
from llmrl.modules.llm.engines import SamplingParams
from llmrl.testing import FakeEngine, tiny_tokenizer

AT_ONCE = 64
ENGINE_S = (1.0, 3.0)  # of an answer: 64 clients then ask 32 times a second
ANSWER = 16  # ids


class SleepingEngine(FakeEngine):
    """Scripted answers, each after some of ``seconds``, for any number of callers at the same time."""

    concurrent = True

    def __init__(self, answers: Any, tokenizer: Any, seconds: tuple[float, float]) -> None:
        super().__init__(answers, tokenizer=tokenizer)
        self.seconds, self.took = seconds, {}  # `took`: by the ids of the answer
        self._lock, self._random = threading.Lock(), random.Random(0)

    def generate(self, prompts: Any, params: SamplingParams, *, seeds: Any = None) -> Any:
        began = time.perf_counter()
        with self._lock:
            drawn, pause = super().generate(prompts, params, seeds=seeds), self._random.uniform(*self.seconds)
        time.sleep(pause)
        self.took[tuple(drawn.ids[0].tolist())] = time.perf_counter() - began
        return drawn


async def ask(url: str, keys: list[str], turns: int) -> list[list[dict[str, Any]]]:
    """What the clients see: for each key its calls, with seconds and ids."""
    import httpx

    slots, limits = asyncio.Semaphore(AT_ONCE), httpx.Limits(max_connections=AT_ONCE)

    async def agent(client: httpx.AsyncClient, key: str) -> list[dict[str, Any]]:
        messages: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
        seen = []
        async with slots:
            for _ in range(turns):
                body = {"model": "m", "messages": messages, "return_token_ids": True}
                began = time.perf_counter()
                answer = await client.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key})
                seconds = time.perf_counter() - began
                [choice] = answer.raise_for_status().json()["choices"]
                seen.append({"s": seconds, "ids": choice["token_ids"]})
                messages += [choice["message"], {"role": "user", "content": "And one more?"}]
        return seen

    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        return await asyncio.gather(*(agent(client, key) for key in keys))


def measure(num: int, turns: int, seconds: tuple[float, float] = (0.0, 0.0)) -> tuple[list[list[float]], Counter[str]]:
    """The milliseconds that the endpoint adds to each call of each rollout; and counts: ids, those that the rows do not
    have as the clients got them, the most rows of a rollout.
    """
    tokenizer = tiny_tokenizer()
    words = torch.tensor(tokenizer.encode("one two three four five six seven eight nine ten"))
    draws = torch.Generator().manual_seed(0)

    def answer(prompt: torch.Tensor) -> torch.Tensor:
        picked = torch.randint(len(words), (ANSWER - 1,), generator=draws)
        return torch.cat([words[picked], torch.tensor([tokenizer.eos_token_id])])

    engine, added, counts = SleepingEngine(answer, tokenizer, seconds), [], Counter()
    with RecordingEndpoint(engine, tokenizer) as endpoint:
        keys = [endpoint.begin() for _ in range(num)]
        given = json.dumps([endpoint.base_url, keys, turns])
        command = [sys.executable, __file__, "--clients"]
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        for key, calls in zip(keys, json.loads(done.stdout), strict=True):
            rows = endpoint.finish(key, 0.0)
            ids, masks = (
                rows.get(name, as_list=True) for name in (("tokens", "full"), ("masks", "all_assistant_mask"))
            )
            trained = [token for row, mask in zip(ids, masks, strict=True) for token in row[mask].tolist()]
            sampled = [token for call in calls for token in call["ids"]]
            counts["ids"] += len(sampled)
            same = sum(one == other for one, other in zip(trained, sampled, strict=False))
            counts["differ"] += max(len(trained), len(sampled)) - same
            counts["rows"] = max(counts["rows"], len(rows))
            added.append([1e3 * (call["s"] - engine.took[tuple(call["ids"])]) for call in calls])
    return added, counts


def main(rollouts: int, clients: bool) -> list[Row] | None:
    if clients:
        print(json.dumps(asyncio.run(ask(*json.loads(sys.stdin.read())))))
        return None
    torch.set_num_threads(1)
    busy, counts = measure(AT_ONCE, 5, ENGINE_S)
    later = [ms for calls in busy for ms in calls[1:]]  # all begin at the same moment
    long = [measure(1, 64)[0][0] for _ in range(4)][1:]  # the first meets the template for the first time
    first, last = (
        statistics.median(ms for calls in long for ms in calls[part]) for part in (slice(4), slice(-4, None))
    )
    _, most = measure(rollouts, 1)
    return [
        Row(f"added to a call, {AT_ONCE} at once, median", statistics.median(later), 3.0, "ms"),
        Row("added to a call, one client, turns 1 to 4", first, None, "ms"),
        Row("added to a call, one client, turns 61 to 64 against 1 to 4", last / first),
        Row(f"rows of a conversation, {rollouts} rollouts on one port", max(counts["rows"], most["rows"]), 1, "rows"),
        Row(f"ids that differ, of {counts['ids'] + most['ids']}", counts["differ"] + most["differ"], 0, "ids"),
    ]


if __name__ == "__main__":
    benchmark(main, __doc__, rollouts=1000, clients=False)
