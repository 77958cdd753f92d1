"""`LLMCollector`: runs a policy in a chat environment and hands out turns or whole conversations.

It decides when a conversation is reset, stepped, finished and handed out, and counts every turn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.collectors.llm.batches import cat_rows
from llmrl.collectors.llm.rollout import Stepper, TurnLog, rollout_concurrent, rollout_lockstep, truncate
from llmrl.collectors.weight_updaters import EngineUpdater, WeightUpdaterBase
from llmrl.data.ragged.tensordicts import new_tensordict
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.chat import ChatEnv
from llmrl.envs.llm.transforms.dataloading import EndOfData
from llmrl.envs.llm.transforms.policy_version import PolicyVersion
from llmrl.envs.td_ops import stack_steps
from llmrl.envs.transforms.base import Transform
from llmrl.envs.transforms.step_counter import StepCounter
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, ShapeError

__all__ = ["LLMCollector"]

Policy = Callable[[TensorDictBase], TensorDictBase]


class LLMCollector:
    """Iterates over the turns of ``policy`` in ``env``, synchronously.

    Yields, by default           (B, T) lazy stacks of turns, T = ``dialog_turns_per_batch`` / B rounded up, or 1;
                                 conversations that end are reset in place, or all of them ``reset_at_each_iter``
    ``yield_completed_trajectories``  the turns of finished conversations, [N], conversation after conversation
    ``yield_only_last_steps``    one row per finished conversation: its last turn, whose "full" views, masks and
                                 log-probs cover all turns; ("next", "reward") is the sum over its turns. One row per
                                 record where a template rewrites the past ("new_record"), reward 0 before the last
    ``replay_buffer``            gets the rows, one per turn, and None is yielded
    ``total_dialog_turns``       an exact budget of turns (rounded up to a multiple of B in the default form); -1: none
    ``max_dialog_turns``         truncates a conversation
    ``postproc(data)``           runs before data are handed out; ``flatten_data``: [B * T] instead of (B, T)
    ``concurrency``              conversations that run at a time, each in a thread of its own; None: all in lockstep
    ``retries``                  of a failing env.step; then the reward is NaN. None: the exception is raised
    Raises                       ConfigError for arguments that exclude each other, or an env whose turns need not end

    ("masks", "trained_from") of every row says which tokens a loss trains, each sampled token once. ``counters``: turns
    "produced" = "delivered" + "dropped" (of conversations that a budget cut off); "failed" conversations.

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
        _check_arguments(locals())
        self.env, self.policy_version_tracker = _with_tracker(env, track_policy_version)
        self.policy: Policy = policy if policy is not None else policy_factory()  # type: ignore[misc]
        num_envs = env.batch_size[0]
        self.dialog_turns_per_batch = dialog_turns_per_batch or num_envs
        self.total_dialog_turns = total_dialog_turns
        if not self.yield_completed_trajectories:
            self.dialog_turns_per_batch = math.ceil(self.dialog_turns_per_batch / num_envs) * num_envs
            if total_dialog_turns > 0:
                self.total_dialog_turns = math.ceil(total_dialog_turns / num_envs) * num_envs
        self.max_dialog_turns = max_dialog_turns
        self.postproc = postproc
        self.replay_buffer = replay_buffer
        self.reset_at_each_iter = reset_at_each_iter
        self.flatten_data = replay_buffer is not None if flatten_data is None else flatten_data
        self.concurrency = concurrency
        self.counters = {"produced": 0, "delivered": 0, "dropped": 0, "conversations": 0, "failed": 0}
        self._counting = threading.Lock()
        self._stepper = Stepper(
            self.env,
            self.policy,
            max_turns=max_dialog_turns,
            sums=self.yield_only_last_steps,
            retries=retries,
            counters=self.counters,
        )
        self._root: TensorDictBase | None = None  # the default form: conversations on their way
        self._turns_B: Tensor | None = None  # their turns so far
        self._exhausted = False
        self.weight_updater = EngineUpdater() if weight_updater is None else weight_updater
        self.weight_updater.register_collector(self)
        tracker = self.policy_version_tracker
        counted = tracker.version if tracker is not None and tracker.version_type == "int" else 0
        # The engine's version as it was last read; without an engine, the number of updates.
        self._version: int = counted if self._engine is None else self._engine.version
        self._set_tracker()
        if callable(register := getattr(self.policy, "register_collector", None)):
            register(self)

    # -- data ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while (data := self._collect()) is not None:
            if self.postproc is not None and (data := self.postproc(data)) is None:
                continue
            if self.replay_buffer is None:
                yield data
            else:
                self.replay_buffer.extend(data)
                yield None

    def next(self) -> TensorDictBase | None:
        """The next batch (None with a replay buffer). Raises StopIteration at the end of the budget or of the data."""
        return next(iter(self))

    def rollout(self) -> TensorDictBase:
        """One batch as it is collected: before ``postproc``, not into the buffer. Raises StopIteration at the end."""
        if (data := self._collect()) is None:
            raise StopIteration
        return data

    @torch.no_grad()
    def _collect(self) -> TensorDictBase | None:
        if self._exhausted or self._left() == 0:
            return None
        self._read_version()
        return self._finished_conversations() if self.yield_completed_trajectories else self._turns()

    # -- whole conversations -------------------------------------------------------------------------------------------

    def _finished_conversations(self) -> TensorDictBase | None:
        goal = self.counters["produced"] + self.dialog_turns_per_batch
        batches: list[TensorDictBase] = []
        while not batches or self.counters["produced"] < goal:
            batch = self._run_to_the_end()
            if batch is not None:
                batches.append(batch)
            if self._exhausted or self._left() == 0:
                break
        return cat_rows(batches) if batches else None

    @torch.no_grad()
    def begin(self, count: int) -> Callable[[threading.Event], TensorDictBase]:
        """Starts ``count`` conversations; the function that is returned runs them in lockstep to their ends.

        Any thread may call it, also while others run. It is given an event, and raises `ConversationsStopped` after the
        turn in which that is set. Raises StopIteration at the end of the data
        """
        self._read_version()
        if (root := self._start(count)) is None:
            raise StopIteration

        def run(stopped: threading.Event) -> TensorDictBase:
            with torch.no_grad():
                return self._rows(rollout_lockstep(self._stepper, root, self.total_dialog_turns, stopped))

        return run

    def _run_to_the_end(self) -> TensorDictBase | None:
        """Starts a batch of conversations and runs them until they end, or the budget is used up."""
        root = self._start(min(self.env.batch_size[0], self._left()))
        if root is None:
            return None
        if self.concurrency is None:
            log = rollout_lockstep(self._stepper, root, self.total_dialog_turns)
        else:
            log = rollout_concurrent(self._stepper, root, self.total_dialog_turns, concurrency=self.concurrency)
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
            self._stepper.claim(self._root.batch_size[0], -1)
            td = self._stepper.turn(self._root)
            self._stepper.complete([td])
            next_td = td.get("next")
            self._turns_B += 1
            if self.max_dialog_turns is not None:
                truncate(next_td, (self._turns_B >= self.max_dialog_turns).view(-1, 1))
            steps.append(td)
            if not self._continue(td):
                break
        count = sum(step.batch_size[0] for step in steps)
        self.counters["delivered"] += count
        return self._flat(steps) if self.flatten_data else stack_steps(steps)

    def _continue(self, td: TensorDictBase) -> bool:
        """Moves to the next turn, new conversations in place of finished ones; False where the data have ended."""
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
        if fresh.batch_size[0] < ended:  # the last of the data: too few to go on with whole batches
            self._exhausted = True
            return False
        if ended == len(done):
            self._root, self._turns_B = fresh, torch.zeros_like(self._turns_B)
            return True
        alive = [row for row, is_done in enumerate(done) if not is_done]
        going_on = self.env.step_mdp(td[alive])
        order = [0] * len(done)
        for position, row in enumerate([*alive, *(row for row, is_done in enumerate(done) if is_done)]):
            order[row] = position
        self.env._blank(going_on, fresh)  # a new conversation has no stream of tokens yet
        self._root = cat_rows([going_on.select(*fresh.keys()), fresh])[order]
        self._turns_B = self._turns_B * torch.tensor([not is_done for is_done in done])
        return True

    def _flat(self, steps: list[TensorDictBase]) -> TensorDictBase:
        """[B * T], the turns of a row after each other."""
        if len(steps) == 1:
            return steps[0]
        rows = steps[0].batch_size[0]
        return cat_rows(steps)[[t * rows + b for b in range(rows) for t in range(len(steps))]]

    # -- one turn ------------------------------------------------------------------------------------------------------

    def _start(self, count: int) -> TensorDictBase | None:
        """A reset of ``count`` conversations; None where the data have ended."""
        try:
            if count == self.env.batch_size[0]:
                return self.env.reset()
            return self.env.reset(new_tensordict({}, [count]))
        except EndOfData:
            self._exhausted = True
            return None

    def _left(self) -> int:
        """Turns that the budget still allows."""
        if self.total_dialog_turns < 0:
            return 1 << 62
        return max(0, self.total_dialog_turns - self.counters["produced"])

    # -- weights and versions ------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int | str:
        """The version of the weights that sample now: the engine's, or the tracker's where that is a uuid."""
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.version_type == "uuid":
            return tracker.version
        return self._version if self._engine is None else self._engine.version

    def update_policy_weights_(self, weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None) -> None:
        """Hands new weights to the policy's engine, all or nothing, and moves the policy version with them.

        Reads   a module, a TensorDict or a mapping of named tensors; None: the engine shares the trainer's module, so
                only the version moves
        Raises  WeightSyncError where they do not arrive; the version then stays
        """
        self.weight_updater.push_weights(weights)

    def increment_version(self) -> None:
        """Called after each update: reads the engine's version, or counts where the policy has no engine."""
        self._version = self._version + 1 if self._engine is None else self._engine.version
        tracker = self.policy_version_tracker
        if tracker is None:
            return
        if tracker.version_type == "uuid":
            tracker.increment_version()
        self._set_tracker()
        if self._root is not None and "policy_version" in self._root.keys():
            tracker._call(self._root)  # conversations under way are sampled with the new weights from here on

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
        """The traceback of the first step that the env failed to take, if ``retries`` let it go on."""
        return self._stepper.first_error

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of the collection: the env's data cursor, the version, the counters.

        Between batches of whole conversations that is everything. In the default form conversations are on their way;
        they are not part of the state, and new ones take their place.
        """
        return {
            "env": self.env.state_dict(),
            "version": self._version if self._engine is None else self._engine.version,
            "counters": dict(self.counters),
            "exhausted": self._exhausted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``, and sets the engine's version; loading the weights is the caller's part."""
        self.env.load_state_dict(state["env"])
        self.counters.update(state["counters"])
        self._exhausted = state["exhausted"]
        self._root = self._turns_B = None
        self._version = state["version"]
        if self._engine is not None:
            self._engine.version = self._version
        self._set_tracker()  # the env's state has what it was when that was saved

    def shutdown(self, close_env: bool = True) -> None:
        """Ends the collection; closes the environment, and with it what its transforms hold."""
        self._exhausted = True
        self._root = None
        if close_env and not self.env.is_closed:
            self.env.close()


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Raises ConfigError and ShapeError for arguments of the collector that cannot be used, or not together."""
    self, env = given["self"], given["env"]
    if (given["policy"] is None) == (given["policy_factory"] is None):
        raise ConfigError("LLMCollector: give exactly one of policy and policy_factory.")
    if len(env.batch_size) != 1:
        raise ShapeError(f"LLMCollector: the env must have one batch dimension: got {tuple(env.batch_size)}.")
    if self.yield_only_last_steps and given["yield_completed_trajectories"] is False:
        raise ConfigError(
            "LLMCollector: yield_only_last_steps is a form of yield_completed_trajectories, which is False."
        )
    for name, least in (("dialog_turns_per_batch", 1), ("max_dialog_turns", 1), ("concurrency", 1), ("retries", 0)):
        if given[name] is not None and given[name] < least:
            raise ConfigError(f"LLMCollector: {name} must be at least {least}: got {given[name]}.")
    total = given["total_dialog_turns"]
    if total < 1 and total != -1:
        raise ConfigError(f"LLMCollector: total_dialog_turns must be positive, or -1 for no limit: got {total}.")
    if self.yield_completed_trajectories and given["max_dialog_turns"] is None:
        _check_can_end(env)
    if self.yield_completed_trajectories and given["reset_at_each_iter"]:
        raise ConfigError(
            "LLMCollector: finished conversations restart at each iteration anyway: drop reset_at_each_iter."
        )
    if given["concurrency"] is not None and (not self.yield_completed_trajectories or env.batch_locked):
        raise ConfigError(
            "LLMCollector: concurrency runs whole conversations, each on its own: it needs yield_only_last_steps "
            f"or yield_completed_trajectories, and an env with batch_locked=False: got {type(env).__name__}."
        )
    if given["replay_buffer"] is not None and given["flatten_data"] is False:
        raise ConfigError("LLMCollector: a replay buffer holds one row per turn: drop flatten_data=False.")


def _check_can_end(env: EnvBase) -> None:
    base = env.base_env if isinstance(env, TransformedEnv) else env
    limited = any(isinstance(t, StepCounter) and t.max_steps is not None for t in _transforms(env))
    if isinstance(base, ChatEnv) and not limited:
        raise ConfigError(
            "LLMCollector: finished conversations were asked for, but this env need never finish one: a ChatEnv does "
            "not by itself; add StepCounter(max_steps=...) to it, or pass max_dialog_turns."
        )


def _with_tracker(env: EnvBase, track: bool | PolicyVersion) -> tuple[EnvBase, PolicyVersion | None]:
    """The env, and the `PolicyVersion` that it has, or is given here."""
    tracker = next((transform for transform in _transforms(env) if isinstance(transform, PolicyVersion)), None)
    if tracker is not None or track is False:
        return env, tracker
    tracker = PolicyVersion() if track is True else track
    return env.append_transform(tracker), tracker


def _transforms(env: EnvBase) -> list[Transform]:
    return list(env.transform.leaves()) if isinstance(env, TransformedEnv) else []
