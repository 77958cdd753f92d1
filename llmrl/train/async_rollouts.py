"""Rollouts of the next step, sampled while the trainer updates: one version behind, never more.

One thread runs the collector; weights change only between its batches, so a batch has one version. How long either side
waited for the other is measured here. A checkpoint holds the batch that is on its way: the weights that sampled it are
gone by the time a run is resumed.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.modules.llm.policies.containers import LogProbs, Masks, Text, Tokens

if TYPE_CHECKING:
    from llmrl.collectors.llm import LLMCollector
    from llmrl.train.distributed import Session

__all__ = ["RolloutsAhead", "as_rollouts", "plain_rollouts"]


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
        """The collector's state as "collector", and, where a batch is on its way, the batch.

        Then "collector" is what it was before that batch, for a run that has to sample it again; "ahead" holds the
        "batch" itself, which is waited for (see `plain_rollouts`), and the "collector" after it.
        """
        if self._pending is None:
            return {"collector": self._collector.state_dict(), "ahead": None}
        self.wait()
        ahead = None
        if self._pending.exception() is None:  # else it is raised where the batch is taken
            data, _ = self._pending.result()
            ahead = {"collector": self._collector.state_dict(), "batch": plain_rollouts(data)}
        return {"collector": self._before, "ahead": ahead}

    def restore(self, batch: dict[str, Any], before: dict[str, Any]) -> None:
        """Hands out ``batch`` next, as `state_dict` had it; ``before`` is the collector's state before it was sampled.

        The collector is to stand behind the batch already.
        """
        self._before = before
        self._pending = Future()
        self._pending.set_result((as_rollouts(batch), time.perf_counter()))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def sample(self) -> TensorDict:
        """A batch that is sampled now, of the columns that a restored one has."""
        with self._session.autocast():
            return as_rollouts(plain_rollouts(self._collector.rollout()))

    def _run(self) -> tuple[TensorDictBase, float]:
        return self.sample(), time.perf_counter()


_RAGGED = {
    ("tokens", "full"): Tokens,
    ("masks", "all_assistant_mask"): Masks,
    ("log_probs", "full"): LogProbs,
    ("log_probs", "plain"): LogProbs,
    ("text", "prompt"): Text,
    ("text", "response"): Text,
}


def plain_rollouts(data: TensorDictBase) -> dict[str, Any]:
    """What a training step reads of its rollouts, as tensors, strings, lists and dicts alone.

    Returns  "ragged", lists of rows by "container.field"; "root" and "next", tensors[B, ...] and nested dicts of them
    """
    ragged = {}
    for (container, field), kind in _RAGGED.items():
        holder = data.get(container, None)
        rows = None if holder is None else holder.rows(field)
        if rows is not None:
            ragged[f"{container}.{field}"] = [row if kind is Text else row.cpu() for row in rows]
    return {"ragged": ragged, "root": _tensors(data.exclude("next")), "next": _tensors(data.get("next"))}


def as_rollouts(plain: dict[str, Any]) -> TensorDict:
    """The rollouts that `plain_rollouts` made plain."""
    columns: dict[str, dict[str, Any]] = {}
    for name, rows in plain["ragged"].items():
        container, field = name.split(".")
        columns.setdefault(container, {})[field] = rows
    kinds = {container: kind for (container, _), kind in _RAGGED.items()}
    containers = {container: kinds[container].from_rows(fields) for container, fields in columns.items()}
    size = [len(plain["ragged"]["tokens.full"])]
    return TensorDict(
        {**plain["root"], **containers, "next": TensorDict(plain["next"], batch_size=size)}, batch_size=size
    )


def _tensors(td: TensorDictBase) -> dict[str, Any]:
    plain = {key: _tensors(value) for key, value in td.items() if type(value) is TensorDict}
    return plain | {key: value.cpu() for key, value in td.items() if isinstance(value, Tensor)}
