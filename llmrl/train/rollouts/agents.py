"""`AgentRollouts`: the rollouts that a user's own agent makes of each step's prompts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from llmrl.data.ragged.tensordicts import column_values
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.errors import RolloutError
from llmrl.modules.llm.policies import LLMWrapperBase
from llmrl.train.agent_runs import COUNTED, AgentRuns, AgentTask
from llmrl.train.distributed import Session
from llmrl.train.settings.grpo import GRPOConfig


class AgentRollouts:
    """A `RowSource`: the agent of ``env.agent`` on each prompt, ``group_size`` times, all at the same time.

    After `rollout` nothing is sampled: calls of agents that go on beyond their deadline are refused.
    """

    def __init__(
        self, config: GRPOConfig, session: Session, prompts: Sequence[Mapping[str, Any]], policy: LLMWrapperBase
    ) -> None:
        options = {"concurrency": config.rollout.concurrency, "modes": session.autocast}
        self._runs = AgentRuns(config.env, policy, scored=config.env.NEEDS_REWARD, **options)
        self._engine = policy.engine
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
        self.primers = {"": self._data}
        self._reported: Counter[str] = Counter()
        self.stop, self.close = self._runs.stop, self._runs.close

    def place(self, draw: int) -> tuple[str, int]:
        return "", draw

    @property
    def policy_version(self) -> int:
        return self._engine.version

    @property
    def first_error(self) -> str:
        return self._runs.first_error

    @property
    def failure(self) -> RolloutError:
        return self._runs.failure

    def rollout(self) -> TensorDictBase:
        return self._runs.run(self._draw(self._data.batch_size[0]))

    def begin(self, count: int) -> Callable[[threading.Event], TensorDictBase]:
        return partial(self._runs.run, self._draw(count))

    def _draw(self, count: int) -> list[AgentTask]:
        drawn = self._data.pull(count)
        columns = {name: column_values(drawn, name) for name in self._data.columns}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        places = zip(rows, drawn["group_id"].tolist(), drawn["seed"].tolist(), strict=True)
        return [AgentTask(*place) for place in places]

    def paused(self) -> AbstractContextManager[None]:
        return self._runs.paused() if self._engine.in_flight == "finish" else nullcontext()

    def metrics(self, session: Session) -> dict[str, float]:
        counts = self._runs.counts()
        new, self._reported = {name: counts[name] - self._reported[name] for name in COUNTED}, counts
        now = session.sum(new)
        means = {}
        if rollouts := now["rollouts"]:  # none if they are sampled ahead and no more are needed
            means = {"agent/calls_mean": now["calls"] / rollouts, "agent/rows_mean": now["rows"] / rollouts}
        if now["calls"]:
            means["agent/untrained_frac"] = 1 - now["trained"] / now["calls"]
        return {
            **means,
            "agent/rewritten": now["rewritten"],
            "agent/retried": now["retried"],
            "agent/overridden": now["overridden/temperature"] + now["overridden/top_p"],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._data.state_dict(), "version": self.policy_version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state["data"])
        self._engine.version = state["version"]
