"""Rollouts in turn with the updates, or sampled while the trainer updates: one version behind, never more.

Ahead of the trainer one thread runs the collector; weights change only between its batches, so a batch has one version.
How long either side waited for the other is measured here. A checkpoint holds the batch that is on its way: the weights
that sampled it are gone by the time a run is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.modules.llm.policies.containers import LogProbs, Masks, Text, Tokens

if TYPE_CHECKING:
    from llmrl.collectors.llm import LLMCollector
    from llmrl.modules.llm.log_probs import TokenScorer
    from llmrl.train.distributed import Session
    from llmrl.train.rollout_engine import RolloutEngine

__all__ = ["RolloutSource", "RolloutsAhead"]


class RolloutSource:
    """The rollouts of each step, and the weights that sample them.

    ``ahead``  `begin_next` starts sampling the next step's rollouts, so that they run beside the update; else they are
               sampled when they are taken
    """

    def __init__(
        self,
        collector: LLMCollector,
        engine: RolloutEngine,
        scorer: TokenScorer,
        session: Session,
        *,
        ahead: bool = False,
    ):
        self._collector, self._engine, self._scorer, self._session = collector, engine, scorer, session
        self._ahead = RolloutsAhead(collector, session) if ahead else None
        self._error_reported = False

    @property
    def version(self) -> int:
        """The version of the weights that sample: the number of optimizer steps behind them."""
        return self._collector.policy_version

    @property
    def in_progress(self) -> bool:
        """True while the next rollouts are being sampled, or wait to be taken."""
        return self._ahead is not None and self._ahead.in_progress

    def take(self) -> TensorDictBase:
        """This step's rollouts; engine and trainer are compared on some of them."""
        data = self._ahead.take() if self._ahead else self.sample()
        self._engine.set_probe_rows(data, self._scorer)
        return data

    def sample(self) -> TensorDictBase:
        """More rollouts, sampled now."""
        if self._ahead:
            return self._ahead.sample()
        with self._session.autocast(), self._session.in_step(self._engine.policy):
            return self._collector.rollout()

    def end_sampling(self) -> None:
        """Nothing is sampled before `sync_weights`: an engine on the trainer's GPU sleeps until then."""
        self._engine.sleep()

    def begin_next(self) -> None:
        """Starts sampling the next rollouts, if they run ahead."""
        if self._ahead:
            self._ahead.begin()

    def sync_weights(self, version: int) -> dict[str, float]:
        """Publishes the weights of optimizer step ``version`` to the engine, unless it has them.

        Waits for rollouts in progress: a batch has one version.

        Returns  "time/sync", and "mismatch/probe" where engine and trainer were compared
        Raises   WeightSyncError if the weights do not arrive, or the engine does not score as the trainer does
        """
        if self.version >= version:
            return {}
        if self._ahead:
            self._ahead.wait()
        clock = time.perf_counter()
        proof = self._engine.push(self._scorer)
        return proof | {"time/sync": time.perf_counter() - clock}

    def idle(self, seconds: float) -> dict[str, float]:
        """The shares of a step that trainer and engine waited for each other; nothing where they take turns."""
        return self._ahead.idle(seconds) if self._ahead else {}

    @property
    def first_error(self) -> str:
        """The first traceback of the env, of a reward function or of a user, if one is kept."""
        parts = (self._collector, *self._collector.env.transform.leaves())
        errors = [getattr(part, "first_error", None) for part in parts]
        return next((f"First error:\n{error}" for error in errors if error), "")

    def first_unreported_error(self) -> str:
        """`first_error`, the first time that it is asked for."""
        error, self._error_reported = "" if self._error_reported else self.first_error, True
        return error

    def state_dict(self) -> dict[str, Any]:
        """The collector's state and, where a batch is on its way, the batches of all ranks.

        With such a batch, "collector" is for a run that has to sample it again: the state before it, with the version
        of the weights that are saved beside it, one more than those that sampled it.
        """
        batch = self._ahead.batch() if self.in_progress else None  # waits for it: the collector moves until then
        state = {"collector": self._collector.state_dict(), "ahead": None}
        if not self.in_progress:
            return state
        batches = self._session.gather([batch])
        if None not in batches:
            state["ahead"] = {"collector": state["collector"], "batches": batches}
        before = self._ahead.collector_before
        return state | {"collector": before | {"version": before["version"] + 1}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; another number of ranks samples the batch that was on its way again."""
        collector, ahead = state["collector"], state["ahead"]
        if self._ahead and ahead and len(ahead["batches"]) == self._session.world_size:
            before = collector | {"version": collector["version"] - 1}
            self._ahead.restore(ahead["batches"][self._session.rank], before)
            collector = ahead["collector"]
        self._collector.load_state_dict(collector)

    def close(self) -> None:
        """Ends what still samples, an engine of its own, and the environment."""
        self._collector.shutdown(close_env=False)
        self._engine.close()
        if self._ahead:
            self._ahead.close()
        self._collector.env.close()


class RolloutsAhead:
    """One batch of conversations ahead of the trainer: `begin` starts sampling it, `take` hands it out."""

    def __init__(self, collector: LLMCollector, session: Session):
        self._collector, self._session = collector, session
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        self._pending: Future[tuple[TensorDictBase, float]] | None = None
        self.collector_before: dict[str, Any] = {}  # the collector's state before the batch that is on its way
        self._ended = time.perf_counter()
        self._trainer_idle = self._engine_idle = 0.0

    @property
    def in_progress(self) -> bool:
        """True while a batch is on its way: begun, and not taken."""
        return self._pending is not None

    def begin(self) -> None:
        """Starts sampling the next batch."""
        self.collector_before = self._collector.state_dict()
        self._engine_idle += time.perf_counter() - self._ended
        self._pending = self._pool.submit(lambda: (self.sample(), time.perf_counter()))

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
        """The shares of ``seconds`` that each side waited for the other, since this was last asked."""
        trainer, engine = self._trainer_idle, self._engine_idle
        self._trainer_idle = self._engine_idle = 0.0
        return {"async/trainer_idle": min(1.0, trainer / seconds), "async/engine_idle": min(1.0, engine / seconds)}

    def sample(self) -> TensorDict:
        """A batch that is sampled now, of the columns that a restored one has."""
        with self._session.autocast():
            return _from_plain(_plain(self._collector.rollout()))

    def batch(self) -> dict[str, Any] | None:
        """The batch that is on its way, once it is complete, as plain data; None if sampling it failed."""
        self.wait()
        return _plain(self._pending.result()[0]) if self._pending.exception() is None else None

    def restore(self, batch: dict[str, Any], collector_before: dict[str, Any]) -> None:
        """Hands out ``batch`` next."""
        self.collector_before = collector_before
        self._pending = Future()
        self._pending.set_result((_from_plain(batch), time.perf_counter()))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


_RAGGED = {
    ("tokens", "full"): Tokens,
    ("masks", "all_assistant_mask"): Masks,
    ("log_probs", "full"): LogProbs,
    ("log_probs", "plain"): LogProbs,
    ("text", "prompt"): Text,
    ("text", "response"): Text,
}


def _plain(data: TensorDictBase) -> dict[str, Any]:
    """The columns that a training step reads of its rollouts, as tensors, strings, lists and dicts alone.

    Returns  "ragged", lists of rows by "container.field"; "root" and "next", tensors[B, ...] and nested dicts of them
    """
    ragged = {}
    for (container, field), kind in _RAGGED.items():
        holder = data.get(container, None)
        rows = None if holder is None else holder.rows(field)
        if rows is not None:
            ragged[f"{container}.{field}"] = [row if kind is Text else row.cpu() for row in rows]
    return {"ragged": ragged, "root": _tensors(data.exclude("next")), "next": _tensors(data.get("next"))}


def _from_plain(plain: dict[str, Any]) -> TensorDict:
    """The rollouts that `_plain` took apart."""
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
