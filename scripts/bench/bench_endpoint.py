"""Times a call of a client to the recording endpoint, over an engine that sleeps.

    python scripts/bench/bench_endpoint.py [--rollouts 1000] [--json FILE]

Clients are in a process of their own, one connection each, as agents are. What a server adds to a call is the time that
the client waits, less that of the engine in the same call. It is measured twice in each run: of the endpoint, and of a
server that reads requests without looking at them, sleeps as long and answers as much. What the second adds is the
client's own: its JSON, its HTTP, its turn on the processor. The endpoint's part is the difference of the two medians.
What a turn of a long conversation costs is the processor time of this process, less the engine's: the time that a
single client waits depends on how soon the system wakes it, and differs by a third from one run to the next.
Then the ids that clients got are compared with rows.
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
from pathlib import Path
from typing import Any

import torch
from table import Row, benchmark

from llmrl.endpoint import RecordingEndpoint
from llmrl.modules.llm.engines import SamplingParams
from llmrl.testing import FakeEngine, tiny_tokenizer

AT_ONCE = 64
ENGINE_S = (1.0, 3.0)  # of an answer: 64 clients then ask 32 times a second
ANSWER = 16  # ids
TURNS, ROUNDS = 64, 9  # of a long conversation, and how often it is repeated
SHORT, SHORTS = 4, 16  # turns of a short one, and how many follow each other, on one connection too


class SleepingEngine(FakeEngine):
    """Scripted answers, each after some of ``seconds``, for any number of callers at the same time."""

    concurrent = True

    def __init__(self, answers: Any, tokenizer: Any, seconds: tuple[float, float]) -> None:
        super().__init__(answers, tokenizer=tokenizer)
        self.seconds, self.took = seconds, {}  # `took`: by the ids of the answer
        self.cpu_s = 0.0
        self._lock, self._random = threading.Lock(), random.Random(0)

    def generate(self, prompts: Any, params: SamplingParams, *, seeds: Any = None) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        with self._lock:
            drawn, pause = super().generate(prompts, params, seeds=seeds), self._random.uniform(*self.seconds)
        time.sleep(pause)
        self.took[tuple(drawn.ids[0].tolist())] = time.perf_counter() - began
        with self._lock:
            self.cpu_s += time.thread_time() - cpu
        return drawn


class SilentServer:
    """Answers after some of ``seconds`` with ``ANSWER`` ids and "s", how long it slept."""

    def __init__(self, seconds: tuple[float, float]) -> None:
        self.seconds, self._random, self._loop = seconds, random.Random(0), asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = {"role": "assistant", "content": "one two three four five six seven eight nine ten one two three"}
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            except asyncio.IncompleteReadError:
                return writer.close()
            asked = await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
            began = time.perf_counter()
            await asyncio.sleep(self._random.uniform(*self.seconds))
            choice = {"message": message, "token_ids": list(range(100, 100 + ANSWER))}
            body = {"s": time.perf_counter() - began, "choices": [choice]}
            body["prompt_token_ids"] = list(range(100, 100 + len(asked) // 4))
            said = json.dumps(body).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def clients(url: str, keys: list[str], turns: int, at_once: int) -> list[list[dict[str, Any]]]:
    """What endpoint_clients.py sees, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("endpoint_clients.py"))]
    given = json.dumps([url, keys, turns, at_once])
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


class Sides:
    """The endpoint and the `SilentServer`, both over engines that sleep some of ``seconds``; a context manager.

    counts  "ids" that were sampled; "differ", those that the rows have not as the clients got them; "rows", the most of
            a rollout
    """

    def __init__(self, seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        tokenizer = tiny_tokenizer()
        words = torch.tensor(tokenizer.encode("one two three four five six seven eight nine ten"))
        draws = torch.Generator().manual_seed(0)

        def answer(prompt: torch.Tensor) -> torch.Tensor:
            picked = torch.randint(len(words), (ANSWER - 1,), generator=draws)
            return torch.cat([words[picked], torch.tensor([tokenizer.eos_token_id])])

        self.engine, self.counts = SleepingEngine(answer, tokenizer, seconds), Counter()
        self.endpoint, self.silent = RecordingEndpoint(self.engine, tokenizer), SilentServer(seconds)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *error: object) -> None:
        self.endpoint.close()
        self.silent.close()

    def added(self, num: int, turns: int, at_once: int = AT_ONCE) -> list[list[float]]:
        """The milliseconds that the endpoint and the clients add to each call of each of ``num`` rollouts."""
        keys, found = [self.endpoint.begin() for _ in range(num)], []
        for key, calls in zip(keys, clients(self.endpoint.base_url, keys, turns, at_once), strict=True):
            rows = self.endpoint.finish(key, 0.0)
            ids, masks = (
                rows.get(name, as_list=True) for name in (("tokens", "full"), ("masks", "all_assistant_mask"))
            )
            trained = [token for row, mask in zip(ids, masks, strict=True) for token in row[mask].tolist()]
            sampled = [token for call in calls for token in call["ids"]]
            self.counts["ids"] += len(sampled)
            same = sum(one == other for one, other in zip(trained, sampled, strict=False))
            self.counts["differ"] += max(len(trained), len(sampled)) - same
            self.counts["rows"] = max(self.counts["rows"], len(rows))
            found.append([1e3 * (call["s"] - self.engine.took[tuple(call["ids"])]) for call in calls])
        return found

    def cpu_ms(self, num: int, turns: int) -> float:
        """Milliseconds of the processor for a turn of ``num`` conversations, one by one, without the engine's."""
        keys = [self.endpoint.begin() for _ in range(num)]
        cpu, engine = time.process_time(), self.engine.cpu_s
        clients(self.endpoint.base_url, keys, turns, 1)
        spent = time.process_time() - cpu - (self.engine.cpu_s - engine)
        for key in keys:
            self.endpoint.finish(key, 0.0)
        return 1e3 * spent / (num * turns)

    def of_clients(self, num: int, turns: int, at_once: int = AT_ONCE) -> list[list[float]]:
        """The milliseconds that the clients alone add."""
        calls = clients(self.silent.base_url, [""] * num, turns, at_once)
        return [[1e3 * call["s"] for call in own] for own in calls]


def by_turn(pairs: list[Any]) -> list[float]:
    """What the endpoint adds to each turn: the medians of conversations with it, less those of the clients alone."""
    both, alone = ([statistics.median(turn) for turn in zip(*side, strict=True)] for side in zip(*pairs, strict=True))
    return [whole - own for whole, own in zip(both, alone, strict=True)]


def main(rollouts: int) -> list[Row]:
    torch.set_num_threads(1)
    with Sides(ENGINE_S) as busy:
        # All clients begin at the same moment: their first calls wait for each other.
        whole, client = (
            statistics.median(ms for calls in ask(AT_ONCE, 5) for ms in calls[1:])
            for ask in (busy.added, busy.of_clients)
        )
    with Sides() as idle:
        sides = idle.added, idle.of_clients
        first = idle.added(1, TURNS)  # its renderer has not seen such a conversation
        long, short = [], []  # in turn, so that a busy moment affects both
        for _ in range(ROUNDS):
            long.append([ask(1, TURNS)[0] for ask in sides])
            short.append([ask(SHORTS, SHORT, 1)[1:] for ask in sides])
        cpu = [(idle.cpu_ms(2, TURNS), idle.cpu_ms(2 * TURNS // SHORT, SHORT)) for _ in range(ROUNDS)]
        idle.added(rollouts, 1)
    own = by_turn(long)[1:]  # the first call opens the connection, as that of the first short conversation does
    new = by_turn([(first[0], alone) for _, alone in long])[1:]
    few = statistics.mean(by_turn([pair for both in short for pair in zip(*both, strict=True)]))
    cpu_long, cpu_short = (statistics.median(ms) for ms in zip(*cpu, strict=True))
    counts = {name: busy.counts[name] + idle.counts[name] for name in ("ids", "differ")}
    return [
        Row(f"added to a call, {AT_ONCE} at once, median", whole - client, 3.0, "ms"),
        Row("the same with the client's own time", whole, None, "ms"),
        Row("added to a call, one client, conversations of 4", few, None, "ms"),
        Row("added to a call, one client, turns 61 to 64", statistics.mean(own[-4:]), None, "ms"),
        Row("a turn of a conversation of 64, processor time", cpu_long, None, "ms"),
        Row("the same against a turn of one of 4", cpu_long / cpu_short, 1.1),
        Row("the same in what a client waits", statistics.mean(own) / few),
        Row("the same of the first such conversation", statistics.mean(new) / few),
        Row(f"rows of a conversation, {rollouts} rollouts on one port", idle.counts["rows"], 1, "rows"),
        Row(f"ids that differ, of {counts['ids']}", counts["differ"], 0, "ids"),
    ]


if __name__ == "__main__":
    benchmark(main, __doc__, rollouts=1000)
