"""Rollouts ahead of the trainer: begun in order, sampled by threads, taken when they are finished.

Each rank begins its share of the prompts. A step takes the first groups that are finished on any rank, so that a rank
whose engine is slower does not stop the others.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from llmrl.collectors.llm.batches import cat_rows
from llmrl.errors import RolloutError
from llmrl.modules.llm.policies.columns import from_plain, to_plain
from llmrl.train.rollouts.due import Begun, due, trained_by
from llmrl.train.rollouts.row_source import RowSource
from llmrl.train.rollouts.step import oldest_versions

if TYPE_CHECKING:
    from llmrl.train.distributed import Session

_COUNTS = ("produced", "delivered", "moved", "dropped_old", "dropped_stragglers", "restarted")
_LOOK_AROUND_S = 0.02  # between two looks at what the other ranks have finished


@dataclass(eq=False)
class _Part:
    """Conversations that are begun, sampled and taken together.

    number   position in the order in which parts were drawn
    before   the source's state before the part: a resumed run restarts there if the part is unfinished
    run      samples the conversations in the calling thread; None if they are finished
    version  of the weights when a thread began to sample it; infinity: none has, so it does not get older
    oldest   of those that sampled its oldest token
    """

    number: int
    before: dict[str, Any]
    run: Callable[[threading.Event], TensorDictBase] | None
    version: float = math.inf
    stopped: threading.Event = field(default_factory=threading.Event)
    data: TensorDictBase | None = None
    oldest: int = 0
    error: BaseException | None = None


class RolloutQueue:
    """The rollouts of the next steps, sampled while the trainer updates: this rank's part of the queue of all ranks.

    A part is one group, during which weights may change; or, with ``max_staleness`` 1 and no ``oversample``, all groups
    of a step of this rank, sampled by one version.

    groups         per step and rank, of ``group_size`` conversations each
    max_staleness  k: rollouts of at most k steps are queued or in flight; of fewer if the trainer does not have to wait
                   for them, because an earlier start would only make them older. A step waits for the groups that would
                   be more than k versions old in later steps, so slow groups are trained as often as fast ones
    oversample     groups begun beyond those of a step, as a share of them. With it no step waits for slow groups: those
                   whose oldest token would be more than k versions old are dropped
    concurrency    the maximum number of concurrent conversations; None: all
    modes          returns a context that each thread enters, such as autocast
    session        of the ranks that share their groups; None: this rank trains its own
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        groups: int,
        group_size: int,
        max_staleness: int,
        oversample: float = 0.0,
        concurrency: int | None = None,
        modes: Callable[[], AbstractContextManager[Any]] = nullcontext,
        session: Session | None = None,
    ):
        self._rows, self._modes = rows, modes
        self.by_group = max_staleness > 1 or oversample > 0
        self._max_staleness, self._group_size = max_staleness, group_size
        is_shared = self.by_group and session is not None and session.world_size > 1
        self._session = session if is_shared else None
        self._rank, self._num_ranks = (session.rank, session.world_size) if is_shared else (0, 1)
        self._steps_ahead = 1  # at most max_staleness
        self._parts_per_step = groups if self.by_group else 1
        self._surplus = math.ceil(oversample * groups)
        most = (max_staleness + 1) * self._parts_per_step + self._surplus
        threads = most if concurrency is None or not self.by_group else min(most, max(1, concurrency // group_size))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rollouts-ahead")
        self._changed = threading.Condition()
        self._closed = False
        self._num_drawn = 0
        self._drawn: list[_Part] = []  # in a resumed run: not sampled yet
        self._unfinished: list[_Part] = []
        self._finished: list[_Part] = []
        self._ended = time.perf_counter()  # when the last thread became idle
        self._trainer_idle = self._engine_idle = 0.0
        self.counts = dict.fromkeys(_COUNTS, 0)  # of parts, since the run began

    @property
    def in_progress(self) -> bool:
        """True while a part is being sampled, or waits to be taken."""
        return bool(self._unfinished or self._finished)

    # --- the trainer's side -------------------------------------------------------------------------------------------

    def begin_next(self, steps_left: int) -> None:
        """Begins the parts of the next steps, only as far ahead as the trainer needs and ``max_staleness`` allows."""
        steps = min(self._max_staleness, self._steps_ahead, steps_left)
        self._fill(steps * self._parts_per_step + (self._surplus if steps else 0))

    def take(self, version: int) -> TensorDictBase:
        """Waits for the groups of a step that trains the weights ``version``, and returns them in the order of begin.

        Waits for those that later steps could only use too late, unless more are begun than trained (``oversample``).
        Drops groups that are too old, and begins more if too few are in flight. Then stops unfinished groups that
        would be too old for the next step. If ranks share their groups it is a collective, and each returns as many.

        Raises  the error of sampling; RolloutError if the queue is closed
        """
        clock, count = time.perf_counter(), self._parts_per_step * self._num_ranks
        waits_for = 0 if self._surplus else self._max_staleness
        groups = self._begun(version)
        # Adapt how far to sample ahead: one step more if the trainer is about to wait, one less if a whole spare step
        # is finished, because it only gets older.
        spare = sum(group.is_finished for group in groups) - count
        if groups and due(groups, version, count, waits_for) is None:
            self._steps_ahead = min(self._steps_ahead + 1, self._max_staleness)
        elif spare >= count:
            self._steps_ahead = max(1, self._steps_ahead - 1)  # at 0 no part would ever be begun again
        self._fill(self._parts_per_step + self._surplus)
        while (chosen := due(groups := self._begun(version), version, count, waits_for)) is None:
            self._wait_for_change(sum(group.is_finished for group in groups if group.rank == self._rank))
        self._trainer_idle += time.perf_counter() - clock
        own = {group.number: group for group in chosen if group.rank == self._rank}
        with self._changed:
            taken = {own[part.number]: part for part in self._finished if part.number in own}
            self._finished = [part for part in self._finished if part.number not in own]
            self.counts["delivered"] += len(taken)
            # The next step trains version + 1, so parts that were begun k versions ago are too old for it.
            for part in [p for p in self._unfinished if self.by_group and p.version <= version - self._max_staleness]:
                part.stopped.set()
                self._unfinished.remove(part)
                self.counts["produced"] += 1
                self.counts["dropped_stragglers"] += 1
            self._note_end()
        with self._session.raises_on_all() if self._session else nullcontext():
            for part in taken.values():
                if part.error is not None:
                    raise part.error
        return cat_rows(self._deal(chosen, {group: part.data for group, part in taken.items()}))

    def _begun(self, version: int) -> list[Begun]:
        """What is begun on all ranks and not taken; a collective. First drops this rank's groups that are too old."""
        with self._changed:
            kept = [p for p in self._finished if p.error is not None or version - p.oldest <= self._max_staleness]
            dropped, self._finished = len(self._finished) - len(kept), kept
            self.counts["dropped_old"] += dropped
        if dropped:  # begin others: every step trains the full number of groups, however long that takes
            self._fill(self._parts_per_step)
        with self._changed:
            self._check_open()
            states = (self._finished, True), (self._unfinished, False)
            own = [Begun(part.number, self._rank, part.version, ended) for parts, ended in states for part in parts]
        return self._session.gather(own) if self._session else own

    def _wait_for_change(self, num_finished: int) -> None:
        """Returns when this rank has more or fewer finished parts than these, or when others may have."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or len(self._finished) != num_finished, _LOOK_AROUND_S if self._session else None
            )

    def _deal(self, chosen: Sequence[Begun], own: dict[Begun, Any]) -> list[TensorDictBase]:
        """The rows of the groups that this rank trains, ``own`` or sent by others."""
        ranks = trained_by(chosen, self._num_ranks)
        if self._session and any(group.rank != rank for group, rank in ranks.items()):
            messages = []
            for to in range(self._num_ranks):
                given = {group: to_plain(own[group]) for group in own if ranks[group] == to != self._rank}
                self.counts["moved"] += len(given)
                messages.append(pickle.dumps(given, pickle.HIGHEST_PROTOCOL) if given else b"")
            for message in filter(None, self._session.exchange(messages)):
                own |= {group: from_plain(rows) for group, rows in pickle.loads(message).items()}
        return [own[group] for group in chosen if ranks[group] == self._rank]

    def wait(self) -> None:
        """Returns when no part is being sampled, or the queue is closed."""
        clock = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._unfinished)
        self._trainer_idle += time.perf_counter() - clock

    def idle(self, seconds: float) -> dict[str, float]:
        """The shares of ``seconds`` that each side waited for the other since the last call."""
        trainer, engine = self._trainer_idle, self._engine_idle
        self._trainer_idle = self._engine_idle = 0.0
        return {"async/trainer_idle": min(1.0, trainer / seconds), "async/engine_idle": min(1.0, engine / seconds)}

    def totals(self) -> dict[str, int]:
        """`counts`, and "queued": produced = delivered + dropped_old + dropped_stragglers + queued."""
        with self._changed:
            return {**self.counts, "queued": len(self._finished)}

    def sample(self) -> TensorDictBase:
        """A batch that is sampled now, with the columns of a restored one."""
        with self._modes():
            return from_plain(to_plain(self._rows.rollout()))

    def close(self) -> None:
        """Stops sampling and waits for the threads. Blocked calls of `wait` return, those of `take` raise."""
        with self._changed:
            self._closed = True
            for part in self._unfinished:
                part.stopped.set()
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)

    # --- the threads' side --------------------------------------------------------------------------------------------

    def _fill(self, count: int) -> None:
        """Begins parts until ``count`` are in flight or finished."""
        while len(self._unfinished) + len(self._finished) < count:
            part = self._drawn.pop(0) if self._drawn else self._draw()
            with self._changed:
                if not self._unfinished:
                    self._engine_idle += time.perf_counter() - self._ended
                self._unfinished.append(part)
                self._check_open()  # under the lock: `close` may shut down the pool
                self._pool.submit(self._sample, part)

    def _draw(self) -> _Part:
        before, rows = self._rows.state_dict(), self._rows
        run = rows.begin(self._group_size) if self.by_group else lambda stopped: rows.rollout()
        self._num_drawn += 1
        return _Part(self._num_drawn, before, run)

    def _sample(self, part: _Part) -> None:
        data = error = None
        part.version = self._rows.policy_version
        try:
            with self._modes():
                # Converted to the checkpoint format and back, so that a resumed run trains on exactly the same columns.
                data = None if part.stopped.is_set() else from_plain(to_plain(part.run(part.stopped)))
        except BaseException as caught:
            error = caught  # raised when the part is taken
        with self._changed:
            if part.stopped.is_set():  # by `take`, which counted it as dropped, or by `close`
                return
            part.data, part.error, part.oldest = data, error, 0 if data is None else min(oldest_versions(data))
            self._unfinished.remove(part)
            self._finished.append(part)
            self.counts["produced"] += 1
            self._note_end()

    def _note_end(self) -> None:
        if not self._unfinished:
            self._ended = time.perf_counter()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError(
                "RolloutQueue: must be open: got a call after close(), or one that was waiting when it was closed."
            )

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The rows of finished parts, and the source's state before the others; waits unless parts are groups."""
        if not self.by_group:
            self.wait()
        with self._changed:
            parts = sorted([*self._finished, *self._unfinished, *self._drawn], key=lambda part: part.number)
            rows = [None if part.data is None else to_plain(part.data) for part in parts]
            saved = [{"before": part.before, "rows": row} for part, row in zip(parts, rows, strict=True)]
            state = {"collector": self._rows.state_dict(), "parts": saved, "counts": dict(self.counts)}
            return state | {"by_group": self.by_group}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Continues from ``state``; unfinished parts are restarted with the weights ``version``."""
        self.counts |= state["counts"]
        for part in state["parts"]:
            # Reset the source to before each part, so that unfinished parts are drawn again.
            self._rows.load_state_dict(part["before"] | {"version": version})
            if part["rows"] is None:
                self._drawn.append(self._draw())
                self.counts["restarted"] += 1
            else:
                self._num_drawn += 1
                data = from_plain(part["rows"])
                oldest = min(oldest_versions(data))
                self._finished.append(_Part(self._num_drawn, part["before"], None, oldest, data=data, oldest=oldest))
        self._rows.load_state_dict(state["collector"])
