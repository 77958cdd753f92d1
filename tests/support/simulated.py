"""An engine and a trainer on separate devices, in virtual time: real collector, wrapper and queue around them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm import DatasetChatEnv
from llmrl.modules.llm import LLMWrapperBase
from llmrl.modules.llm.engines import Engine, Generation, StopReason
from llmrl.testing import tiny_tokenizer
from llmrl.train.rollouts.queue import RolloutQueue
from llmrl.train.rollouts.step import oldest_versions

PATIENCE_S = 60.0


@dataclass(eq=False)
class Row:
    """An answer of ``length`` tokens; ``drawn`` of them, a float, are there."""

    length: int
    drawn: float = 0.0
    marks: list = field(default_factory=list)  # (tokens, version): from so many tokens on this version draws
    aborted: bool = False

    @property
    def is_done(self):
        return self.aborted or self.drawn >= self.length - 1e-9

    @property
    def num_tokens(self):
        return int(self.drawn + 1e-6)


@dataclass(eq=False)
class Call:
    rows: list
    seed: int
    stopped: threading.Event
    answered: threading.Event = field(default_factory=threading.Event)


class SimulatedEngine(Engine):
    """An `Engine` of one GPU. n rows that are drawn together take ``1 + n / half`` units of time for a token each.

    ``length(seed)`` is that of a row's answer. New weights take ``update_time``; rows that are being drawn go on with
    them, unless their first token is then more than ``max_age`` versions old. Time moves in `run_for`, and while
    somebody waits inside `driving`.
    """

    eos_token_ids = ()
    in_flight = "continue"

    def __init__(self, length, *, half, update_time, max_age):
        self.version, self.now = 0, 0.0
        self._length, self._half, self._update_time, self._max_age = length, half, update_time, max_age
        self._calls = []
        self._lock = threading.Lock()
        self.local = threading.local()
        self.queue = None

    def generate(self, prompts, params, *, seeds=None):
        rows = [Row(self._length(seed), marks=[(0, self.version)]) for seed in seeds]
        call = Call(rows, seeds[0], getattr(self.local, "stopped", threading.Event()))
        with self._lock:
            self._calls.append(call)
        assert call.answered.wait(PATIENCE_S)
        ids = [torch.arange(5, 5 + row.num_tokens) % 200 for row in rows]
        versions = [self._versions(row) for row in rows]
        reasons = [StopReason.ABORT if row.aborted else StopReason.EOS for row in rows]
        oldest = min(row.marks[0][1] for row in rows)
        return Generation(ids, [torch.zeros(len(row)) for row in ids], None, reasons, oldest, versions)

    @staticmethod
    def _versions(row):
        versions = torch.zeros(row.num_tokens, dtype=torch.int64)
        for start, version in row.marks:
            versions[start:] = version
        return versions

    def score(self, sequences, *, temperature=1.0, masks=None):
        return [torch.zeros(len(row)) for row in sequences]

    def update_weights(self, weights, *, version):
        self._settle()
        self.version = version
        self.now += self._update_time
        for call in self._calls:
            for row in call.rows:
                if row.is_done:
                    continue
                if row.num_tokens and version - row.marks[0][1] > self._max_age:
                    row.aborted = True
                else:
                    row.marks = [*(row.marks if row.num_tokens else []), (row.num_tokens, version)]
        self._answer_all()

    def close(self):
        pass

    # --- time ---

    def run_for(self, duration):
        """The rows are drawn for so long."""
        end = self.now + duration
        self._answer_all()
        while self.now < end:
            self._advance(end)
            self._answer_all()

    @contextmanager
    def driving(self):
        """Inside, time moves whenever the thread that waits for the queue can do nothing but wait."""
        over = threading.Event()

        def drive():
            while not over.is_set():
                with self.queue._changed:
                    waits = bool(self.queue._changed._waiters) and self._is_settled()
                if waits:
                    self._advance(None)
                else:
                    time.sleep(1e-4)

        thread = threading.Thread(target=drive, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _is_settled(self):
        """Whether every part that is being sampled waits for this engine, so that nothing happens before time moves."""
        with self._lock:
            asked = sum(not call.stopped.is_set() for call in self._calls)
        return asked == len(self.queue._unfinished)

    def _settle(self):
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_settled():
            assert time.monotonic() < deadline
            time.sleep(1e-4)

    def _advance(self, end):
        """To the end of the next answer, or to ``end``."""
        if self._answer():
            return
        rows = [row for call in self._calls for row in call.rows if not row.is_done]
        token_time = 1 + len(rows) / self._half
        left = min((row.length - row.drawn for row in rows), default=float("inf"))
        if end is not None:
            left = min(left, (end - self.now) / token_time)
        for row in rows:
            row.drawn += left
        self.now += left * token_time
        self._answer()

    def _answer_all(self):
        self._settle()
        while self._answer():
            self._settle()

    def _answer(self):
        """Answers a call that is over, and returns True; one by one, so that of calls that end together the same is
        the first in every simulation."""
        with self._lock:
            over = [call for call in self._calls if all(row.is_done for row in call.rows)]
            if over:
                first = min(over, key=lambda call: call.seed)
                self._calls.remove(first)
                first.answered.set()
        return bool(over)


@dataclass
class Simulation:
    """What a run of ``steps`` steps took, and the ages of the rows that each step trained."""

    time: float
    ages: list
    totals: dict
    oldest_and_newest: list

    @property
    def max_age(self):
        return max(max(ages) for ages in self.ages)


def long_tailed(median, sigma, longest):
    """Lengths by a lognormal distribution, a function of the seed."""

    def length(seed):
        generator = torch.Generator().manual_seed(seed % (1 << 31))
        return int(min(longest, max(1, median * torch.exp(sigma * torch.randn((), generator=generator)).item())))

    return length


def simulate(
    *, max_staleness, steps, oversample=0.0, groups=8, group_size=8, update=300.0, half=64.0, push=10.0, longest=400
):
    """A trainer whose update takes ``update`` units of time, beside the engine."""
    engine = SimulatedEngine(long_tailed(60, 0.9, longest), half=half, update_time=push, max_age=max_staleness)
    policy = LLMWrapperBase(engine, tokenizer=tiny_tokenizer(), generate_kwargs={"max_new_tokens": longest})
    rows = [{"query": f"{n}?"} for n in range(64)]
    env = DatasetChatEnv(
        dataset=rows, num_envs=groups, repeats=group_size, group_repeats=True, shuffle=False, seed=0, max_steps=1
    )
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True, track_policy_version=True)
    begin = collector.begin

    def begin_tracked(count):
        run = begin(count)

        def tracked(stopped):
            engine.local.stopped = stopped
            return run(stopped)

        return tracked

    collector.begin = begin_tracked
    queue = RolloutQueue(
        collector, groups=groups, group_size=group_size, max_staleness=max_staleness, oversample=oversample
    )
    engine.queue = queue
    ages, mixed = [], []
    for step in range(1, steps + 1):
        with engine.driving():
            data = queue.take(step - 1)
        assert data.batch_size[0] == groups * group_size
        ages.append([step - 1 - version for version in oldest_versions(data)])
        versions = data.get(("log_probs", "versions"), as_list=True)
        masks = data.get(("masks", "all_assistant_mask"), as_list=True)
        mixed += [(int(row[mask].min()), int(row[mask].max())) for row, mask in zip(versions, masks, strict=True)]
        queue.begin_next(steps - step)
        engine.run_for(update)
        if not queue.by_group:
            with engine.driving():
                queue.wait()
        engine.update_weights(None, version=step)
    totals = queue.totals()
    engine.run_for(longest * 10.0)  # what was given up ends
    queue.close()
    return Simulation(engine.now - longest * 10.0, ages, totals, mixed)
