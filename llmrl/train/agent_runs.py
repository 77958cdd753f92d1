"""`AgentRuns`: a user's agent on rows of the data, which calls the policy through a `RecordingEndpoint`."""

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
from llmrl.endpoint import RecordingEndpoint, Rollout
from llmrl.endpoint.agents import Agent, AgentResult, Seat
from llmrl.endpoint.self_play import SelfPlayAgent
from llmrl.endpoint.verifiers import VerifiersAgent
from llmrl.envs.llm.transforms.dataloading import row_seeds
from llmrl.errors import RolloutError, caused_by
from llmrl.modules.llm.conversation import SampledTurn
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies import LLMWrapperBase
from llmrl.modules.llm.policies.columns import SEAT
from llmrl.train.environments import env_maker
from llmrl.train.settings.environment import TaskSettings
from llmrl.train.settings.types import VERIFIERS

_ENDING_S = 2.0  # for threads to free the rows that they made
_SEATS = 1 << 40  # apart from the attempts of a rollout, whose seeds are numbered from 0
_LOOK_S = 0.1  # between looks at whether rollouts were stopped
_BY_ENDPOINT = ("overridden/temperature", "overridden/top_p")
COUNTED = (*_BY_ENDPOINT, "calls", "trained", "rows", "rewritten", "rollouts", "retried")


@dataclass(frozen=True)
class AgentTask:
    """A rollout to run: a row of the data, the number of its draw, the seed of its sampling."""

    row: Mapping[str, Any]
    group: int
    seed: int


@dataclass
class _Ended:
    """A rollout's rows, the last of them done; ``seats``: the rewards of all that are trained, by name."""

    rows: TensorDict
    rollout: Rollout
    seats: Mapping[str, float]


class AgentRuns:
    """The agent of ``env.agent`` on any tasks, all at the same time, or at most ``concurrency`` of them.

    A rollout is repeated up to ``env.retries`` times if it raises, within one deadline. One that failed, never called
    the model, or was not done in time has a reward of NaN, with the rows of its last attempt.

    policy   whose engine and sampling parameters answer the agent
    scored   False: it may return None, which is a reward of 0
    by_seat  seats have rows and rewards of their own: each rollout of all seats of its group, where need be without an
             answer, and NaN if it failed. False: all rows have the mean reward
    modes    returns a context in which the engine is called, such as autocast

    ``first_error``: why the first rollout failed; "" if none did
    """

    def __init__(
        self,
        env: TaskSettings,
        policy: LLMWrapperBase,
        *,
        scored: bool = True,
        by_seat: bool = True,
        concurrency: int | None = None,
        modes: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        settings = env.agent
        self._agent: Agent | SelfPlayAgent | VerifiersAgent
        if env.name == VERIFIERS:
            self._agent = VerifiersAgent(env.options, policy.renderer.tokenizer, scored=scored)
        elif env.plays_itself:
            self._agent = SelfPlayAgent(env_maker(env.name), env.options)
        else:
            self._agent = Agent(
                settings.run, settings.command, process=settings.process, scored=scored, seats=settings.seats
            )
        self._by_seat = by_seat and self._agent.by_session
        self._deadline_s, self._retries = settings.deadline_s, env.retries
        self._engine = policy.engine
        self._endpoint = RecordingEndpoint(
            policy.engine,
            policy.renderer,
            params=policy.options.params,
            train=settings.train,
            max_tokens=env.max_conversation_tokens,
            modes=modes,
        )
        self._slots = None if concurrency is None else threading.BoundedSemaphore(concurrency)
        self._threads = DaemonThreads("agents")
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.first_error = ""

    @property
    def failure(self) -> RolloutError:
        return caused_by("agent", self.first_error) if self.first_error else RolloutError("no agent failed.")

    def run(self, tasks: Sequence[AgentTask], stopped: threading.Event | None = None) -> TensorDictBase:
        """The rows of all tasks, in their order; without ``stopped`` nothing is sampled when it returns.

        Raises  ConversationsStopped; what llmrl itself raised in a thread
        """
        if stopped is None:
            rows = self.run(tasks, threading.Event())
            with self.paused():  # of agents that were given up an answer may be in progress
                return rows
        ended: list[_Ended | BaseException | None] = [None] * len(tasks)
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
        if self._by_seat:
            self._fill_seats(tasks, ended)
        return cat_rows([each.rows for each in ended])

    def _fill_seats(self, tasks: Sequence[AgentTask], ended: Sequence[_Ended]) -> None:
        """Gives each rollout rows of all seats of its group, each with a seed of its own."""
        seats: dict[int, dict[str, None]] = {}
        for task, each in zip(tasks, ended, strict=True):
            seats.setdefault(task.group, {}).update(dict.fromkeys(each.seats))
        for task, each in zip(tasks, ended, strict=True):
            names = list(seats[task.group]) or [""]
            own = (
                column_values(each.rows, SEAT) if each.seats else names[:1] * len(each.rows)
            )  # or it failed, as a whole
            each.rows[SEAT] = column(own)
            absent = [Seat(name, each.seats.get(name, math.nan)) for name in names if name not in own]
            each.rows = cat_rows([*(self._without_answer(each.rollout, seat) for seat in absent), each.rows])
            seeds = [int(row_seeds(task.seed, [_SEATS + place])) if place else task.seed for place in range(len(names))]
            each.rows["seed"] = torch.tensor([seeds[names.index(name)] for name in column_values(each.rows, SEAT)])

    def _rollout(self, task: AgentTask, over: Callable[[], bool]) -> _Ended:
        """What became of one task, after as many attempts as it needs."""
        end, counts = time.monotonic() + self._deadline_s, Counter({"rollouts": 1})
        for attempt in range(self._retries + 1):
            if over():
                raise ConversationsStopped
            seed = int(row_seeds(task.seed, [attempt]))
            key = self._endpoint.begin(task.row, group=task.group, seed=seed, by_session=self._agent.by_session)
            rollout, error, result = self._endpoint.rollout(key), "", AgentResult(math.nan, {})
            left = max(0.0, end - time.monotonic())
            outcome = self._agent.call(self._endpoint.base_url, key, task.row, timeout_s=left, stopped=over)
            if not outcome.done:
                error = f"the agent was not done within env.agent.deadline_s = {self._deadline_s:g} s"
            elif outcome.error is not None:
                error = outcome.error
            else:
                result = outcome.value
            seats = result.seats
            if seats is not None and not self._by_seat:
                seats = dict.fromkeys(seats, Seat("", result.reward))
            rows = self._endpoint.finish(key, result.reward, seats)
            counts.update({**rollout.counters})
            if rows is None and not error and not (seats and rollout.calls):  # of seats one may have had no turn
                error = "the agent must call the model at the base URL, with its API key: it made no call"
            if error:
                result, seats = AgentResult(math.nan, {}), None
                with self._lock:
                    self.first_error = self.first_error or error
            if not error or not outcome.done or attempt == self._retries:
                break
            counts["retried"] += 1
        if rows is None:
            rows = self._without_answer(rollout, next(iter((seats or {}).values()), Seat("", math.nan)))
        with self._lock:  # of a whole rollout at once: others may be under way when they are read
            self._counts.update(counts)
        rows["seed"] = torch.full((len(rows),), task.seed)
        _measured(rows, json.dumps(result.metrics), json.dumps(rollout.record))
        return _Ended(rows, rollout, {seat.name: seat.reward for seat in (result.seats or {}).values()})

    def _without_answer(self, rollout: Rollout, seat: Seat) -> TensorDict:
        """A row for a seat, or a rollout, that made no call: no id of it is trained."""
        ids = torch.tensor([next(iter(self._endpoint.sampler.renderer.stop_token_ids), 0)] * 2)
        nothing, version = torch.zeros(0, dtype=torch.int64), self._engine.version
        turn = SampledTurn([], {}, None, None, ids, nothing, nothing.float(), None, None, version, StopReason.ABORT)
        return _measured(self._endpoint.rows_of(rollout, [turn], [seat]), "", "")

    def paused(self) -> AbstractContextManager[None]:
        """Context in which nothing is sampled: answers in progress are waited for, and later requests are held."""
        return self._endpoint.paused()

    def counts(self) -> Counter[str]:
        """How much was asked, failed and recorded in the rollouts that ended so far, by name."""
        with self._lock:
            return self._counts + Counter({name: self._endpoint.counters[name] for name in _BY_ENDPOINT})

    def stop(self) -> None:
        """Begins nothing more, and ends the endpoint; called before the engine is closed."""
        self._stopped.set()
        self._endpoint.close()

    def close(self) -> None:
        """Ends what is left of the agents; a second call does nothing."""
        self.stop()
        self._agent.close()
        self._threads.close(_ENDING_S)


def _measured(rows: TensorDict, scores: str, calls: str) -> TensorDict:
    """The rows, the last one with what was measured in their rollout and with its calls, as JSON."""
    for name, value in (("scores", scores), ("model_calls", calls)):
        rows["next", name] = column([""] * (len(rows) - 1) + [value])
    return rows
