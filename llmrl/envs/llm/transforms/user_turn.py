"""`UserTurn`: a plain function that answers the model between its turns: a simulated user, a critic, a game.

How messages become ids is `tool_messages`' and the wrapper's part, how calls run at the same time `llmrl.tools.calls`'.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDictBase

from llmrl.data.ragged.tensordicts import column_values
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.envs.llm.transforms.tool_messages import append_messages
from llmrl.envs.transforms.base import Transform, innermost
from llmrl.errors import ConfigError, MissingKeyError, did_you_mean
from llmrl.tools.calls import AsyncRunner, Calls, Outcome, ThreadRunner

if TYPE_CHECKING:
    from llmrl.envs.base import EnvBase

__all__ = ["UserTurn"]


class UserTurn(Transform):
    """Calls ``reply`` after each turn of the policy, and appends what it says as the user's next message.

    Reads   ("next", "history", "prompt"): the conversation with the policy's turn; the columns that ``reply`` names
    Calls   ``reply(messages)``, the messages as a list of {"role", "content"}, per conversation, ``concurrency`` at a
            time; not where the conversation is over, nor where a tool has answered. Further parameters are columns of
            the data by name. ``reply`` may be a coroutine function
    Writes  ("next", "history", "prompt"): one message more, where ``reply`` returned text
            ("next", "terminated"), ("next", "done"): True where it returned None
            ("next", "truncated"), ("next", "done"): True, and ("next", "reward") NaN, where it failed: it raised
            (``retries`` times more than once), returned something else, or was not done after ``deadline_s`` seconds
    Raises  ConfigError for a column that the data do not have, or an env that is not in history mode

    Place it behind tools, which need ``end_without_call=False`` then, and before rewards. ``counters`` and
    ``first_error`` say how often it failed, and how at first.

    >>> from tensordict import TensorDict
    >>> from llmrl.envs.llm import ChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> def sure(messages):
    ...     return "Are you sure?" if len(messages) < 4 else None
    >>> env = ChatEnv(batch_size=[1]).append_transform(UserTurn(sure))
    >>> batch = env.rollout(9, ScriptedPolicy(["4", "Yes."]), tensordict=TensorDict(query="2 + 2?", batch_size=[1]))
    >>> [message["content"] for message in batch[:, -1]["next", "history"].prompt.to_chats()[0]]
    ['2 + 2?', '4', 'Are you sure?', 'Yes.']
    """

    def __init__(
        self,
        reply: Callable[..., Any],
        *,
        deadline_s: float | None = 60.0,
        retries: int = 0,
        concurrency: int = 16,
        role: str = "user",
    ):
        if not callable(reply):
            raise ConfigError(f"UserTurn: reply must be a function: got a {type(reply).__name__}.")
        if retries < 0 or concurrency < 1:
            raise ConfigError(
                f"UserTurn: retries must not be negative and concurrency at least 1: got {retries} and {concurrency}."
            )
        super().__init__()
        self.reply = reply
        self.deadline_s = deadline_s
        self.retries = retries
        self.concurrency = concurrency
        self.role = role
        self.columns = _columns(reply)
        self.counters = {"replies": 0, "ended": 0, "failed": 0, "retries": 0}
        self.first_error: str | None = None
        self._runner = self._new_runner()

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        base = innermost(container)
        if getattr(base, "input_mode", "history") != "history":
            raise ConfigError(
                f"UserTurn: reads the conversation as messages: needs an env with input_mode='history': got "
                f"{base.input_mode!r}."
            )
        for transform in container.transform.leaves():
            if isinstance(transform, DataLoadingPrimer) and (known := transform.columns) is not None:
                for name in self.columns:
                    if name not in known:
                        raise ConfigError(
                            f"UserTurn: the parameter {name!r} of the reply must be a column of the dataset: the "
                            f"columns are {', '.join(known)}.{did_you_mean(name, known)}"
                        )

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        done = next_td.get("done")
        chats = next_td.get("history").prompt.to_chats()
        rows = [row for row, over in enumerate(done.flatten().tolist()) if not over and _policy_spoke_last(chats[row])]
        given = {name: self._column(td, name) for name in self.columns}
        calls = Calls(
            [partial(self.reply, chats[row], **{name: given[name][row] for name in given}) for row in rows],
            self.retries,
        )
        outcomes = dict(zip(rows, self._runner.run(calls, timeout_s=self.deadline_s), strict=True))
        self.counters["retries"] += calls.retried
        failed = {row for row, outcome in outcomes.items() if self._failed(outcome)}
        ended = {row for row, outcome in outcomes.items() if row not in failed and outcome.value is None}
        said: list[list[dict[str, Any]]] = [
            [{"role": self.role, "content": outcomes[row].value}] if row in outcomes.keys() - failed - ended else []
            for row in range(len(chats))
        ]
        self.counters["failed"] += len(failed)
        self.counters["ended"] += len(ended)
        self.counters["replies"] += sum(map(len, said))
        if any(said):
            append_messages(next_td, "history", said, None)
        for flag, ends in (("terminated", ended), ("truncated", failed), ("done", ended | failed)):
            which = torch.tensor([row in ends for row in range(len(chats))], device=done.device).view(done.shape)
            next_td.set(flag, next_td.get(flag) | which)
        reward = torch.tensor([math.nan if row in failed else 0.0 for row in range(len(chats))], device=done.device)
        before = next_td.get("reward", None)
        next_td.set("reward", reward.view(-1, 1, 1) if before is None else before + reward.view(-1, 1, 1))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec

    def clone(self) -> Self:
        """A copy for another env, with threads of its own."""
        other = super().clone()
        other.counters = dict.fromkeys(self.counters, 0)
        other._runner = other._new_runner()
        return other

    def close(self) -> None:
        """Ends the threads."""
        self._runner.close()

    def _new_runner(self) -> AsyncRunner | ThreadRunner:
        asynchronous = inspect.iscoroutinefunction(self.reply) or inspect.iscoroutinefunction(type(self.reply).__call__)
        return (AsyncRunner if asynchronous else ThreadRunner)("user", self.concurrency)

    def _column(self, td: TensorDictBase, name: str) -> list[Any]:
        values = column_values(td, name)
        if values is None:
            raise MissingKeyError(
                f"UserTurn: the parameter {name!r} of the reply must be an entry of the batch: it has "
                f"{', '.join(map(str, td.keys()))}."
            )
        return values

    def _failed(self, outcome: Outcome) -> bool:
        error = outcome.error
        if not outcome.done:
            error = f"the user did not answer within {self.deadline_s} s"
        elif error is None and not isinstance(outcome.value, str | None):
            error = f"the user must say a text, or None to end: got a {type(outcome.value).__name__}"
        if error is not None and self.first_error is None:
            self.first_error = error
        return error is not None


def _policy_spoke_last(chat: list[dict[str, Any]]) -> bool:
    return bool(chat) and chat[-1]["role"] == "assistant"


def _columns(reply: Callable[..., Any]) -> list[str]:
    """The parameters after the first, which are columns of the data."""
    try:
        parameters = list(inspect.signature(reply).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise ConfigError(
            f"UserTurn: the first parameter must take the messages by position: the signature is "
            f"{inspect.signature(reply)}."
        )
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters[1:] if p.kind in named and p.default is inspect.Parameter.empty]
