"""The rollouts of each step: sampled in turn with the updates, or taken from a queue that is filled during updates.

Checkpoints store the finished rollouts of the queue: the weights that sampled them no longer exist after a resume.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from tensordict import TensorDictBase

from llmrl.errors import RolloutError
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives.metric import Metric
from llmrl.train.curriculum import MOVED, Curriculum
from llmrl.train.distributed import Session
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.rollouts.queue import RolloutQueue
from llmrl.train.rollouts.row_source import RowSource
from llmrl.train.settings.grpo import GRPOConfig


class RolloutSource:
    """The rollouts of each step, and the weights that sample them.

    With ``rollout.max_staleness`` or ``rollout.oversample`` rollouts come from a `RolloutQueue`, otherwise `take`
    samples them.
    """

    def __init__(
        self,
        rows: RowSource,
        engine: RolloutEngine,
        scorer: TokenScorer,
        session: Session,
        config: GRPOConfig,
    ):
        self._rows, self._engine, self._scorer, self._session = rows, engine, scorer, session
        settings = config.rollout
        self._curriculum: Curriculum | None = None
        if config.curriculum is not None:
            options = {"seed": config.seed, "max_staleness": settings.max_staleness}
            self._curriculum = Curriculum(config.curriculum, session, rows.primers, rows.place, **options)
        self._queue: RolloutQueue | None = None
        if settings.max_staleness or settings.oversample:
            self._queue = RolloutQueue(
                rows,
                groups=config.prompts_per_step // session.world_size,
                group_size=config.group_size,
                max_staleness=settings.max_staleness,
                oversample=settings.oversample,
                concurrency=settings.concurrency,
                modes=session.autocast,
                session=session,
            )
        self._engine.take_gauges()  # resets them: the first step starts here
        self._trained = 0  # the version that this step's rollouts train
        self._error_reported = False

    @property
    def columns(self) -> list[Metric]:
        """Metrics that have columns in the console."""
        return [MOVED] if self._curriculum else []

    @property
    def version(self) -> int:
        """The version of the sampling weights: the number of optimizer steps that produced them."""
        return self._rows.policy_version

    @property
    def takes_weights(self) -> bool:
        """False while a step that a single version must sample is in progress: new weights must wait for it."""
        return self._queue is None or self._queue.by_group or not self._queue.in_progress

    def take(self, version: int) -> TensorDictBase:
        """The rollouts of a step that trains the weights ``version``; some are used to compare engine and trainer."""
        self._trained = version
        if self._queue is None:
            self._engine.take_gauges()  # drops those of probe and evaluation
        data = self._queue.take(version) if self._queue else self.sample()
        self._engine.set_probe_rows(data, self._scorer)
        return data

    def sample(self) -> TensorDictBase:
        """More rollouts for this step."""
        if self._queue:
            return self._queue.take(self._trained) if self._queue.by_group else self._queue.sample()
        with self._session.autocast(), self._session.in_step(self._engine.policy):
            return self._rows.rollout()

    def end_sampling(self, data: TensorDictBase) -> dict[str, float]:
        """Ends sampling until `sync_weights`: an engine on the trainer's GPU sleeps until then. The curriculum draws
        the next prompts by the rewards of ``data``, the rollouts of this step.

        Returns  the engine's gauges since the last call: of this step's rollouts, unless rollouts run ahead; metrics of
                 the curriculum
        """
        gauges = self._engine.take_gauges()
        self._engine.sleep()
        return gauges | (self._curriculum.observe(data) if self._curriculum else {})

    def begin_next(self, steps_left: int) -> None:
        """Starts sampling the rollouts of the next steps, if rollouts run ahead."""
        if self._queue:
            self._queue.begin_next(steps_left)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Publishes the weights of optimizer step ``version`` to the engine, unless it has them.

        Waits for a step that a single version must sample. Groups in flight are interrupted and continue with the new
        weights.

        Returns  "time/sync", and "mismatch/probe" if engine and trainer were compared
        Raises   WeightSyncError if the weights do not arrive, or the engine's scores differ from the trainer's
        """
        if self.version >= version:
            return {}
        if not self.takes_weights:
            self._queue.wait()
        clock = time.perf_counter()
        with self._rows.paused():
            proof = self._engine.push(self._scorer)
        return proof | {"time/sync": time.perf_counter() - clock}

    def metrics(self, seconds: float) -> dict[str, float]:
        """Metrics of the source's own; and if rollouts run ahead, the shares of a step that trainer and engine waited
        for each other, and the counts of all groups so far.
        """
        own = self._rows.metrics(self._session)
        if self._queue is None:
            return own
        totals = self._session.sum(self._queue.totals()) if self._queue.by_group else {}
        if ended := totals and totals["produced"] - totals["queued"]:
            totals["delivered_frac"] = totals["delivered"] / ended
        return own | self._queue.idle(seconds) | {f"async/{name}": value for name, value in totals.items()}

    @property
    def failure(self) -> RolloutError:
        """What failed first, to raise."""
        return self._rows.failure

    def warning(self, num_failed: float) -> str:
        """The engine's warning, and the number of failed rollouts; the first error is included the first time."""
        if not num_failed:
            return self._engine.warning
        error = "" if self._error_reported else self._rows.first_error
        self._error_reported = self._error_reported or bool(error)  # a reward of None is a failure without traceback
        shown = f" First error:\n{error}" if error else ""
        return self._engine.warning + f"{num_failed} rollouts failed.{shown}".rstrip()

    def state_dict(self) -> dict[str, Any]:
        """The state of the source and, if rollouts run ahead, the queues of all ranks.

        "collector" is then the state before the first of these rollouts, with the version of the weights in the same
        checkpoint, for a run that has to sample them again.
        """
        ahead = self._state_ahead()  # first: it may wait for draws
        return ahead | ({"curriculum": self._curriculum.state_dict()} if self._curriculum else {})

    def _state_ahead(self) -> dict[str, Any]:
        state = {"collector": self._rows.state_dict(), "ahead": None}
        if self._queue is None or not (self._queue.by_group or self._queue.in_progress):
            return state
        queues = self._session.gather([self._queue.state_dict()])
        parts = [part for queue in queues for part in queue["parts"]]
        if parts:  # the first rank's: all ranks load its state
            state["collector"] = parts[0]["before"] | {"version": self._trained + 1}
        if self._queue.by_group or all(part["rows"] is not None for part in parts):
            state["ahead"] = {"queues": queues}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; with another number of ranks or way of sampling, queued rollouts are restarted."""
        if self._curriculum:  # first: what is restarted draws from it
            self._curriculum.load_state_dict(state["curriculum"])
        self._rows.load_state_dict(state["collector"])
        queues = (state["ahead"] or {}).get("queues", ())
        if self._queue and len(queues) == self._session.world_size and queues[0]["by_group"] == self._queue.by_group:
            self._queue.load_state_dict(queues[self._session.rank], self.version)

    def close(self) -> None:
        """Stops sampling, and closes the engine and the source of the rows."""
        with ExitStack() as stack:  # runs in reverse order, all even if one fails
            stack.callback(self._rows.close)
            if self._queue:
                stack.callback(self._queue.close)
            stack.callback(self._engine.close)  # before the queue: its threads wait for the engine
            stack.callback(self._rows.stop)
