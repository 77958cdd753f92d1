"""`RowSource`: conversations of an environment, or calls of an agent, from which a step's rollouts are drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from tensordict import TensorDictBase

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.envs.llm.transforms.reward import RewardFunction
from llmrl.envs.llm.transforms.user_turn import UserTurn
from llmrl.errors import RolloutError, caused_by

if TYPE_CHECKING:
    from llmrl.train.distributed import Session


class RowSource(Protocol):
    """Draws this rank's rollouts in the order of the data; `RolloutSource` and `RolloutQueue` know no more of them.

    Rows of a rollout are consecutive and the last one is done; failed rollouts have a reward of NaN (docs/keys.md).

    primers         of the prompts, by source; without env.mix there is one, ""
    policy_version  of the weights that sample
    first_error     the first traceback of the user's code; "" if none was kept
    failure         what failed first, to raise
    """

    @property
    def primers(self) -> Mapping[str, DataLoadingPrimer]: ...

    @property
    def policy_version(self) -> int: ...

    @property
    def first_error(self) -> str: ...

    @property
    def failure(self) -> RolloutError: ...

    def place(self, draw: int) -> tuple[str, int]:
        """The source of a draw, which is the number of a group, and the number of the draw in that source."""

    def rollout(self) -> TensorDictBase:
        """The rollouts of one step; returns when nothing is being sampled."""

    def begin(self, count: int) -> Callable[[threading.Event], TensorDictBase]:
        """Draws ``count`` rollouts; returns a function that samples them in the calling thread.

        Its event stops them: it then raises `ConversationsStopped`.
        """

    def paused(self) -> AbstractContextManager[None]:
        """Context in which weights arrive: what would be sampled meanwhile waits, unless the engine sees to that."""

    def metrics(self, session: Session) -> dict[str, float]:
        """Metrics of the rollouts since the last call, over all ranks; a collective."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data; with "version", that of the weights."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``, whose version becomes the engine's."""

    def stop(self) -> None:
        """Begins nothing more; called before the engine is closed."""

    def close(self) -> None:
        """Ends what is left of it, after the engine."""


class EnvironmentRollouts:
    """A `RowSource`: conversations of an environment, which a collector holds."""

    def __init__(self, collector: LLMCollector) -> None:
        self._collector, env = collector, collector.env
        self.place = env.place if hasattr(env, "envs") else lambda draw: ("", draw)  # envs: of a mix
        self.rollout, self.begin = collector.rollout, collector.begin
        self.state_dict, self.load_state_dict = collector.state_dict, collector.load_state_dict

    @property
    def primers(self) -> dict[str, DataLoadingPrimer]:
        sources = getattr(self._collector.env, "envs", None) or {"": self._collector.env}
        leaves = [(name, leaf) for name, env in sources.items() for leaf in env.transform.leaves()]
        return {name: leaf for name, leaf in leaves if isinstance(leaf, DataLoadingPrimer)}

    @property
    def policy_version(self) -> int:
        return self._collector.policy_version

    @property
    def first_error(self) -> str:
        return next((part.first_error for part in self._parts if part.first_error), "")

    @property
    def failure(self) -> RolloutError:
        """What failed first: the environment, a reward function or a user; else the rewards that returned None."""
        for part in self._parts:
            if part.first_error:
                reward = isinstance(part, RewardFunction)
                who = f"reward {part.name!r}" if reward else "user" if isinstance(part, UserTurn) else "environment"
                return caused_by(who, part.first_error)
        messages = (part.none_message for part in self._parts if isinstance(part, RewardFunction))
        return RolloutError(" ".join(filter(None, messages)) or "no reward was given.")

    @property
    def _parts(self) -> list[Any]:
        env = self._collector.env
        envs = (env, *getattr(env, "envs", {}).values())  # of a mix
        parts = (self._collector, *(leaf for each in envs for leaf in each.transform.leaves()))
        return [part for part in parts if hasattr(part, "first_error")]

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()  # between turns nothing is sampled; during a turn the engine waits or continues

    def metrics(self, session: Session) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        self._collector.shutdown(close_env=False)

    def close(self) -> None:
        self._collector.env.close()
