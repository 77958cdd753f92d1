"""Rollouts of the next step, sampled while the trainer updates: one version behind, never more.

One thread runs the collector; weights change only between its batches, so a batch has one version. How long either side
waited for the other is measured here.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from llmrl.collectors.llm import LLMCollector
    from llmrl.recipes.session import Session

__all__ = ["RolloutsAhead"]


class RolloutsAhead:
    """One batch of conversations ahead of the trainer.

    `begin` starts sampling it, `take` hands it out. ``trainer_idle`` and ``engine_idle`` are the seconds that one side
    waited for the other since they were last read by `idle`.
    """

    def __init__(self, collector: LLMCollector, session: Session):
        self._collector, self._session = collector, session
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        self._pending: Future[tuple[TensorDictBase, float]] | None = None
        self._before: dict[str, Any] | None = None  # the collector's state before the batch that is on its way
        self._ended = time.perf_counter()
        self._trainer_idle = self._engine_idle = 0.0

    def begin(self) -> None:
        """Starts sampling the next batch."""
        self._before = self._collector.state_dict()
        self._engine_idle += time.perf_counter() - self._ended
        self._pending = self._pool.submit(self._run)

    def take(self) -> TensorDictBase:
        """The batch that was begun, or, where none was, one that is sampled now."""
        if self._pending is None:
            self.begin()
        clock = time.perf_counter()
        data, self._ended = self._pending.result()
        self._trainer_idle += time.perf_counter() - clock
        self._pending = None
        return data

    def wait(self) -> None:
        """Returns when nothing is being sampled."""
        if self._pending is not None:
            clock = time.perf_counter()
            self._pending.exception()  # raised where it is taken
            self._trainer_idle += time.perf_counter() - clock

    def idle(self, seconds: float) -> dict[str, float]:
        """What share of ``seconds`` each side waited, since this was last asked."""
        trainer, engine = self._trainer_idle, self._engine_idle
        self._trainer_idle = self._engine_idle = 0.0
        return {"async/trainer_idle": min(1.0, trainer / seconds), "async/engine_idle": min(1.0, engine / seconds)}

    def state_dict(self) -> dict[str, Any]:
        """The collector's: a batch that is on its way is sampled again by a run that goes on from here."""
        return self._collector.state_dict() if self._pending is None else self._before

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self) -> tuple[TensorDictBase, float]:
        with self._session.autocast():
            data = self._collector.rollout()
        return data, time.perf_counter()
