"""`LLMCollector`: runs a policy in a chat environment and yields turns or whole conversations.

It decides when conversations are reset, stepped, finished and yielded, and counts every turn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.collectors.background import HasBackground, check_not_started
from llmrl.collectors.llm.arguments import check_arguments, with_tracker
from llmrl.collectors.llm.batches import cat_rows
from llmrl.collectors.llm.rollout import (
    ConversationsStopped,
    ConversationStream,
    Stepper,
    TurnLog,
    rollout_concurrent,
    rollout_lockstep,
)
from llmrl.collectors.weight_updaters import EngineUpdater, WeightUpdaterBase
from llmrl.concurrency.background_work import BackgroundWork
from llmrl.data.ragged.tensordicts import new_tensordict
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.transforms.dataloading import EndOfData
from llmrl.envs.llm.transforms.policy_version import PolicyVersion
from llmrl.envs.td_ops import stack_steps
from llmrl.errors import ConfigError
from llmrl.weight_update import publish

Policy = Callable[[TensorDictBase], TensorDictBase]
_TURN_S = 900.0  # for current turns to end; engines and tools have their own deadlines


class LLMCollector(HasBackground):
    """Iterates over the turns of ``policy`` in ``env``, or fills a replay buffer in the background (`start`).

    Yields                       default: lazy stacks (B, T), T = ``dialog_turns_per_batch`` / B rounded up, or 1 turn
    ``yield_completed_trajectories``  the turns of finished conversations, [N], one conversation after another
    ``yield_only_last_steps``    one row per finished conversation: its last turn, whose "full" views, masks and
                                 log-probs cover all turns, and the sum of their rewards; or one row per "new_record"
    ``replay_buffer``            receives the rows, one per turn; None is yielded
    ``total_dialog_turns``       an exact budget of turns (rounded up to a multiple of B in the default form); -1: none
    ``max_dialog_turns``         truncates a conversation
    ``postproc(data)``           runs before data are yielded; ``flatten_data``: [B * T] instead of (B, T)
    ``concurrency``              max concurrent conversations, each in its own thread; None: all advance in lockstep
    ``async_envs``               a new conversation begins as soon as one ends; yields them in order of completion
    ``retries``                  of a failing env.step; then the reward is NaN. None: the exception is raised
    Raises                       ConfigError for arguments that exclude each other, or an env that may never be done

    ``counters``: turns "produced" = "delivered" + "dropped" (cut off by a budget, an error or the end); "failed"
    conversations. ("masks", "trained_from") marks the tokens of a row that a loss trains: each sampled token once.

    >>> from llmrl.envs.llm import DatasetChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> env = DatasetChatEnv(dataset=[{"question": "2 + 2?", "answer": "4"}], num_envs=2)
    >>> collector = LLMCollector(env, policy=ScriptedPolicy(["4"]), total_dialog_turns=4, yield_only_last_steps=True)
    >>> [len(batch) for batch in collector], collector.counters["delivered"]
    ([2, 2], 4)
    """

    def __init__(
        self,
        env: EnvBase,
        *,
        policy: Policy | None = None,
        policy_factory: Callable[[], Policy] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: Any | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdaterBase | None = None,
        track_policy_version: bool | PolicyVersion = False,
        max_dialog_turns: int | None = None,
        concurrency: int | None = None,
        retries: int | None = None,
    ):
        self.yield_only_last_steps = bool(yield_only_last_steps)
        self.yield_completed_trajectories = bool(yield_completed_trajectories or yield_only_last_steps)
        check_arguments(locals())
        self.env, self.policy_version_tracker = with_tracker(env, track_policy_version)
        self.policy: Policy = policy if policy is not None else policy_factory()  # type: ignore[misc]
        self.dialog_turns_per_batch = self._whole_steps(dialog_turns_per_batch or env.batch_size[0])
        self.total_dialog_turns = self._whole_steps(total_dialog_turns) if total_dialog_turns > 0 else -1
        self.max_dialog_turns, self.reset_at_each_iter = max_dialog_turns, reset_at_each_iter
        self.postproc, self.replay_buffer = postproc, replay_buffer
        self.flatten_data = replay_buffer is not None if flatten_data is None else flatten_data
        self.concurrency, self.async_envs = concurrency, bool(async_envs)
        self.background = BackgroundWork(type(self).__name__, _TURN_S)
        self._stream: ConversationStream | None = None
        self.counters = dict.fromkeys(("produced", "delivered", "dropped", "conversations", "failed"), 0)
        self._counting = threading.Lock()
        self._stepper = Stepper(
            self.env,
            self.policy,
            max_turns=max_dialog_turns,
            budget=self.total_dialog_turns,
            retries=retries,
            counters=self.counters,
            background=self.background,
        )
        self._root: TensorDictBase | None = None  # the default form: unfinished conversations
        self._turns_B: Tensor | None = None  # number of their turns so far
        self._exhausted = False
        self.weight_updater = EngineUpdater() if weight_updater is None else weight_updater
        self.weight_updater.register_collector(self)
        tracker = self.policy_version_tracker
        counted = tracker.version if tracker is not None and tracker.version_type == "int" else 0
        # The engine's version when last read; without an engine, the number of updates.
        self._version: int = counted if self._engine is None else self._engine.version
        self._set_tracker()
        if callable(register := getattr(self.policy, "register_collector", None)):
            register(self)

    def _whole_steps(self, turns: int) -> int:
        """``turns``, rounded up in the default form, in which all conversations take every step."""
        num_envs = 1 if self.yield_completed_trajectories else self.env.batch_size[0]
        return math.ceil(turns / num_envs) * num_envs

    # -- data ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            try:
                with self._dropping():
                    if (data := self._collect()) is None:
                        return
                    if self.postproc is not None and (data := self.postproc(data)) is None:
                        continue
                    if self.replay_buffer is not None:
                        with self.background.step():
                            self.replay_buffer.extend(data)
            except ConversationsStopped:
                return
            yield data if self.replay_buffer is None else None

    def next(self) -> TensorDictBase:
        """The next batch (None with a replay buffer). Raises StopIteration at the end of the budget or of the data."""
        return next(iter(self))

    def rollout(self) -> TensorDictBase:
        """One batch, without ``postproc`` and not added to the buffer. Raises StopIteration at the end."""
        with self._dropping():
            data = self._collect()
        if data is None:
            raise StopIteration
        return data

    @torch.no_grad()
    def _collect(self) -> TensorDictBase | None:
        self.background.check()
        check_not_started(self, self.background.is_elsewhere)
        if self.async_envs:
            return self._from_stream()
        if self._exhausted or self._left() == 0:
            return None
        self._read_version()
        return self._finished_conversations() if self.yield_completed_trajectories else self._turns()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """If the block raises, counts the turns that are not delivered as dropped."""
        # Rows count as delivered when they are built, but `postproc` or the buffer may still raise.
        before = self.counters["delivered"]
        try:
            yield
        except BaseException:
            self.counters["delivered"] = before
            self._count_dropped()
            raise

    def _count_dropped(self) -> None:
        """Counts all turns that were not delivered as dropped; must be called when no turn is in progress."""
        with self._counting:
            self.counters["dropped"] = self.counters["produced"] - self.counters["delivered"]

    # -- in the background ---------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends the collection, and closes the environment with its transforms."""
        self.background.stopped.set()
        self._end_stream(timeout)
        self.background.stop(timeout)
        self._exhausted = True
        self._root = None
        self._count_dropped()
        if close_env and not self.env.is_closed:
            self.env.close()

    def _end_stream(self, timeout: float | None = None) -> None:
        if self._stream is not None:
            self._stream.stop(_TURN_S if timeout is None else timeout)
            self._stream = None

    # -- whole conversations -------------------------------------------------------------------------------------------

    def _finished_conversations(self) -> TensorDictBase | None:
        # Counts produced, not delivered, turns: those of conversations that the budget cuts off cost as much.
        goal = self.counters["produced"] + self.dialog_turns_per_batch
        batches: list[TensorDictBase] = []
        while not batches or self.counters["produced"] < goal:
            root = self._start(min(self.env.batch_size[0], self._left()))
            if root is not None:
                if self.concurrency is None:
                    log = rollout_lockstep(self._stepper, root)
                else:
                    log = rollout_concurrent(self._stepper, root, concurrency=self.concurrency)
                if (rows := self._rows(log)) is not None:
                    batches.append(rows)
            if self._exhausted or self._left() == 0:
                break
        return cat_rows(batches) if batches else None

    @torch.no_grad()
    def begin(self, count: int) -> Callable[[threading.Event], TensorDictBase]:
        """Starts ``count`` conversations; returns a function that runs them in lockstep to their ends.

        Any thread may call that function, even while others run. It takes an event, and raises `ConversationsStopped`
        after the turn in which the event is set. Raises StopIteration at the end of the data; ConfigError if the env
        keeps the state of one batch, because such conversations run independently.
        """
        if self.env.batch_locked:
            raise ConfigError(
                "LLMCollector.begin: the env must keep nothing between calls (batch_locked=False), because groups run "
                f"independently (rollout.max_staleness, rollout.oversample): got {type(self.env).__name__}."
            )
        self._read_version()
        if (root := self._start(count)) is None:
            raise StopIteration

        def run(stopped: threading.Event) -> TensorDictBase:
            with torch.no_grad():
                return self._rows(rollout_lockstep(self._stepper, root, stopped))

        return run

    def _from_stream(self) -> TensorDictBase | None:
        """Finished conversations with ``dialog_turns_per_batch`` turns; the others continue."""
        self._read_version()
        if self._stream is None:
            if self._exhausted:
                return None
            # The stream takes turns in its own threads, so pauses need the lock from now on.
            self.background.allow_pauses()
            self._stream = ConversationStream(
                self._stepper,
                lambda: self._start(1) if self._left() else None,
                width=self.concurrency or self.env.batch_size[0],
                room=self.dialog_turns_per_batch,
            )
        if (log := self._stream.take(self.dialog_turns_per_batch)) is None:
            self._stream, self._exhausted = None, True
            self._count_dropped()
            return None
        return self._rows(log)

    def _rows(self, log: TurnLog) -> TensorDictBase | None:
        turns_of = log.turns_of()
        delivered = sum(map(len, turns_of.values()))
        with self._counting:
            self.counters["delivered"] += delivered
            self.counters["dropped"] += log.num_turns - delivered
            self.counters["conversations"] += len(turns_of)
        return log.rows(last_only=self.yield_only_last_steps)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _turns(self) -> TensorDictBase | None:
        if self.reset_at_each_iter or self._root is None:
            self._root = self._start(self.env.batch_size[0])
            if self._root is None:
                return None
            self._turns_B = torch.zeros(self._root.batch_size[0], dtype=torch.int64)
        steps: list[TensorDictBase] = []
        num_steps = max(1, min(self.dialog_turns_per_batch, self._left()) // self.env.batch_size[0])
        for _ in range(num_steps):
            # Without `claim`, which may grant less: the rows take each turn together, even beyond the budget.
            self.counters["produced"] += self._root.batch_size[0]
            td = self._stepper.turn(self._root, self._turns_B + 1)
            self._stepper.complete([td])
            self._turns_B += 1
            steps.append(td)
            if not self._continue(td):
                break
        count = sum(step.batch_size[0] for step in steps)
        self.counters["delivered"] += count
        return self._flat(steps) if self.flatten_data else stack_steps(steps)

    def _continue(self, td: TensorDictBase) -> bool:
        """Advances to the next turn, with new conversations for finished ones; False at the end of data or budget."""
        done = td.get("next").get("done").view(-1).tolist()
        ended = sum(done)
        self.counters["conversations"] += ended
        if not ended:
            self._root = self.env.step_mdp(td)
            return True
        if self._left() == 0:
            return False
        fresh = self._start(ended)
        if fresh is None:
            return False
        if fresh.batch_size[0] < ended:  # the end of the data: too few rows for a full batch
            self._exhausted = True
            return False
        if ended == len(done):
            self._root, self._turns_B = fresh, torch.zeros_like(self._turns_B)
            return True
        alive = [row for row, is_done in enumerate(done) if not is_done]
        # Joins continuing and new conversations, then restores the row order: a conversation keeps its row.
        going_on = self.env.step_mdp(td[alive])
        order = [0] * len(done)
        for position, row in enumerate([*alive, *(row for row, is_done in enumerate(done) if is_done)]):
            order[row] = position
        self.env._blank(going_on, fresh)  # gives new conversations empty entries, such as token streams
        self._root = cat_rows([going_on.select(*fresh.keys()), fresh])[order]
        self._turns_B = self._turns_B * torch.tensor([not is_done for is_done in done])
        return True

    def _flat(self, steps: list[TensorDictBase]) -> TensorDictBase:
        """[B * T], with the turns of each row in sequence."""
        if len(steps) == 1:
            return steps[0]
        rows = steps[0].batch_size[0]
        return cat_rows(steps)[[t * rows + b for b in range(rows) for t in range(len(steps))]]

    # -- one turn ------------------------------------------------------------------------------------------------------

    def _start(self, count: int) -> TensorDictBase | None:
        """Resets ``count`` conversations; None at the end of the data."""
        try:
            if count == self.env.batch_size[0]:
                return self.env.reset()
            return self.env.reset(new_tensordict({}, [count]))
        except EndOfData:
            self._exhausted = True
            return None

    def _left(self) -> int:
        """Number of turns that the budget still allows."""
        if self.total_dialog_turns < 0:
            return 1 << 62
        return max(0, self.total_dialog_turns - self.counters["produced"])

    # -- weights and versions ------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int | str:
        """The version of the weights in use: the engine's, or the tracker's if that is a uuid."""
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.version_type == "uuid":
            return tracker.version
        return self._version if self._engine is None else self._engine.version

    def update_policy_weights_(self, weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None) -> None:
        """Sends new weights to the policy's engine, all or nothing, and updates the policy version.

        Reads   a module, a TensorDict or a mapping of named tensors; None: the engine shares the trainer's module, so
                only the version changes
        Raises  WeightSyncError if they do not arrive; the version is then unchanged
        """
        # No pause if the engine interrupts answers in flight: it would wait for them to end.
        interrupts = self._engine is not None and self._engine.in_flight != "finish"
        with nullcontext() if interrupts else self.pause():
            self.weight_updater.push_weights(weights)

    def receive_weights(self, weights: Any, *, model_id: str | None = None, version: int) -> None:
        """`update_policy_weights_` under a given version."""
        publish(weights, self.policy.engine, version)
        self.increment_version()

    def increment_version(self) -> None:
        """Reads the engine's version, or increments it if the policy has no engine; called after each update."""
        self._version = self._version + 1 if self._engine is None else self._engine.version
        tracker = self.policy_version_tracker
        if tracker is None:
            return
        if tracker.version_type == "uuid":
            tracker.increment_version()
        self._set_tracker()
        if self._root is not None and "policy_version" in self._root.keys():
            tracker._call(self._root)  # unfinished conversations are sampled with the new weights from now on

    def _read_version(self) -> None:
        if self._engine is not None and self._engine.version != self._version:
            self.increment_version()  # the engine was updated without the weight updater

    def _set_tracker(self) -> None:
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.version_type == "int" and tracker.version != self._version:
            tracker.set_version(self._version)

    @property
    def _engine(self) -> Any | None:
        return getattr(self.policy, "engine", None)

    @property
    def first_error(self) -> str | None:
        """The traceback of the first failed env.step, if ``retries`` is set."""
        return self._stepper.first_error

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of the collection: the env's data cursor, the version, the counters.

        Between batches of whole conversations that is the full state. In the default form there are unfinished
        conversations, which are not part of the state; new ones replace them.
        """
        with self.pause():
            return {
                "env": self.env.state_dict(),
                "version": self._version if self._engine is None else self._engine.version,
                "counters": dict(self.counters),
                "exhausted": self._exhausted,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``, and sets the engine's version; the caller must load the weights."""
        self._end_stream()
        self.env.load_state_dict(state["env"])
        self.counters.update(state["counters"])
        self._exhausted = state["exhausted"]
        self._root = self._turns_B = None
        self._version = state["version"]
        if self._engine is not None:
            self._engine.version = self._version
        self._set_tracker()  # the env's state may have restored another version
