"""`AgentRollouts`: the rollouts of an agent, which calls the policy through a `RecordingEndpoint`."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.collectors.llm.batches import cat_rows
from llmrl.collectors.llm.rollout import ConversationsStopped
from llmrl.concurrency.daemon_threads import DaemonThreads
from llmrl.data.ragged.tensordicts import column, column_values
from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint.agents import Agent, AgentResult
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer, row_seeds
from llmrl.errors import RolloutError, caused_by
from llmrl.modules.llm.conversation import SampledTurn
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies import LLMWrapperBase
from llmrl.train.distributed import Session
from llmrl.train.settings.grpo import GRPOConfig

_LOOK_S = 0.1  # between looks at whether rollouts were stopped
_COUNTED = ("calls", "trained", "rows", "rewritten", "replayed", "overridden/temperature", "overridden/top_p")


@dataclass(frozen=True)
class _Task:
    """A rollout to run: a row of the data, the number of its draw, the seed of its sampling."""

    row: Mapping[str, Any]
    group: int
    seed: int


class AgentRollouts:
    """A `RowSource`: the agent of ``env.agent`` on each prompt, ``group_size`` times, all at the same time.

    A rollout is repeated up to ``env.retries`` times if it raises, within one deadline. One that failed, never called
    the model, or was not done in time has a reward of NaN, with the rows of its last attempt. After `rollout` nothing
    is sampled: calls of agents that go on beyond their deadline are refused.
    """

    def __init__(
        self, config: GRPOConfig, session: Session, prompts: Sequence[Mapping[str, Any]], policy: LLMWrapperBase
    ) -> None:
        settings = config.env.agent
        scored = config.env.NEEDS_REWARD
        self._agent = Agent(settings.run, settings.command, process=settings.process, scored=scored)
        self._deadline_s, self._retries = settings.deadline_s, config.env.retries
        self._engine = policy.engine
        self._endpoint = RecordingEndpoint(
            policy.engine,
            policy.renderer,
            params=policy.options.params,
            train=settings.train,
            max_tokens=config.env.max_conversation_tokens,
            modes=session.autocast,
        )
        self._data = DataLoadingPrimer(
            prompts,
            batch_size=config.prompts_per_step // session.world_size,
            repeats=config.group_size,
            group_repeats=True,
            shuffle=True,
            seed=config.seed,
            rank=session.rank,
            world_size=session.world_size,
        )
        most = config.rollout.concurrency
        self._slots = None if most is None else threading.BoundedSemaphore(most)
        self._threads = DaemonThreads("agents")
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self.first_error = ""

    @property
    def policy_version(self) -> int:
        return self._engine.version

    @property
    def failure(self) -> RolloutError:
        return caused_by("agent", self.first_error) if self.first_error else RolloutError("no agent failed.")

    def rollout(self) -> TensorDictBase:
        rows = self.begin(self._data.batch_size[0])(threading.Event())
        with self._endpoint.paused():  # of agents that were given up an answer may be in progress
            return rows

    def begin(self, count: int) -> Callable[[threading.Event], TensorDictBase]:
        drawn = self._data.pull(count)
        columns = {name: column_values(drawn, name) for name in self._data.columns}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        places = zip(rows, drawn["group_id"].tolist(), drawn["seed"].tolist(), strict=True)
        return partial(self._run, [_Task(*place) for place in places])

    def _run(self, tasks: Sequence[_Task], stopped: threading.Event) -> TensorDictBase:
        """The rows of all tasks, in their order. Raises ConversationsStopped; what llmrl itself raised in a thread."""
        ended: list[Any] = [None] * len(tasks)
        left, all_ended = len(tasks), threading.Event()

        def over() -> bool:
            return stopped.is_set() or self._stopped.is_set()

        def work(place: int) -> None:
            nonlocal left
            try:
                with self._slots or nullcontext():
                    ended[place] = self._rollout(tasks[place], over)
            except BaseException as error:
                ended[place] = error
            with self._lock:
                left -= 1
                if not left:
                    all_ended.set()

        for place in range(len(tasks)):
            self._threads.start(partial(work, place))
        while not all_ended.wait(_LOOK_S):
            if over():
                raise ConversationsStopped
        if error := next((each for each in ended if isinstance(each, BaseException)), None):
            raise error
        return cat_rows(ended)

    def _rollout(self, task: _Task, over: Callable[[], bool]) -> TensorDict:
        """The rows of one task, after as many attempts as it needs."""
        end = time.monotonic() + self._deadline_s
        for attempt in range(self._retries + 1):
            if over():
                raise ConversationsStopped
            seed = int(row_seeds(task.seed, [attempt]))
            key = self._endpoint.begin(task.row, group=task.group, seed=seed)
            rollout, error, result = self._endpoint.rollout(key), "", AgentResult(math.nan, {})
            left = max(0.0, end - time.monotonic())
            outcome = self._agent.call(self._endpoint.base_url, key, task.row, timeout_s=left, stopped=over)
            if not outcome.done:
                error = f"the agent was not done within env.agent.deadline_s = {self._deadline_s:g} s"
            elif outcome.error is not None:
                error = outcome.error
            else:
                result = outcome.value
            rows = self._endpoint.finish(key, result.reward)
            if rows is None and not error:
                error = "the agent must call the model at the base URL, with its API key: it made no call"
            if error:
                result = AgentResult(math.nan, {})
                with self._lock:
                    self.first_error = self.first_error or error
            if not error or not outcome.done or attempt == self._retries:
                break
            with self._lock:
                self._counts["retried"] += 1
        if rows is None:
            rows = self._endpoint.rows_of(rollout, [self._no_turn()], math.nan)
        with self._lock:
            self._counts["rollouts"] += 1
        count = len(rows)
        rows["seed"] = torch.full((count,), task.seed)
        rows["next", "scores"] = column([""] * (count - 1) + [json.dumps(result.metrics)])
        return rows

    def _no_turn(self) -> SampledTurn:
        """In place of the turns of a rollout that has none: no id of it is trained."""
        ids = torch.tensor([next(iter(self._endpoint.sampler.renderer.stop_token_ids), 0)] * 2)
        nothing, version = torch.zeros(0, dtype=torch.int64), self.policy_version
        return SampledTurn([], {}, None, None, ids, nothing, nothing.float(), None, None, version, StopReason.ABORT)

    def paused(self) -> AbstractContextManager[None]:
        return self._endpoint.paused() if self._engine.in_flight == "finish" else nullcontext()

    def metrics(self, session: Session) -> dict[str, float]:
        with self._lock:
            counts = self._counts + Counter({name: self._endpoint.counters[name] for name in _COUNTED})
            new = {name: counts[name] - self._reported[name] for name in (*_COUNTED, "rollouts", "retried")}
            self._reported = counts
        now = session.sum(new)
        rollouts, calls = max(1, now["rollouts"]), max(1, now["calls"])
        return {
            "agent/calls_mean": now["calls"] / rollouts,
            "agent/rows_mean": now["rows"] / rollouts,
            "agent/untrained_frac": 1 - now["trained"] / calls,
            "agent/rewritten": now["rewritten"],
            "agent/retried": now["retried"],
            "agent/overridden": now["overridden/temperature"] + now["overridden/top_p"],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._data.state_dict(), "version": self.policy_version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state["data"])
        self._engine.version = state["version"]

    def stop(self) -> None:
        self._stopped.set()
        self._endpoint.close()

    def close(self) -> None:
        self._agent.close()
        self._threads.close()
