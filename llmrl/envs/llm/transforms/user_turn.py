"""`UserTurn`: a plain function that replies to the model between its turns: a simulated user, a critic, a game."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from llmrl.concurrency.deadline import Calls, Outcome, runner_of
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.completions import add_reward
from llmrl.envs.llm.transforms.reward import Parameters
from llmrl.envs.llm.transforms.tool_messages import append_messages
from llmrl.envs.transforms.base import Transform, innermost
from llmrl.errors import ConfigError, check_at_least


class UserTurn(Transform):
    """Calls ``reply`` after each turn of the policy, and appends the reply as the user's next message.

    Reads   ("next", "history", "prompt"): the conversation with the policy's turn; the columns that ``reply`` names
    Calls   ``reply(messages)`` per conversation, with messages as a list of {"role", "content"}, ``concurrency`` calls
            at a time; not if the conversation is over or a tool has answered. Further parameters are columns of the
            data by name. ``reply`` may be a coroutine function
    Writes  ("next", "history", "prompt"): one more message, if ``reply`` returned text
            ("next", "terminated"), ("next", "done"): True if it returned None
            ("next", "truncated"), ("next", "done"): True, and ("next", "reward") NaN, if it failed: it raised
            (also in all ``retries``), returned another type, or was not done after ``deadline_s`` seconds
    Raises  ConfigError for a column that the data do not have, or an env that is not in history mode

    Place it after tools, which then need ``end_without_call=False``, and before rewards. ``counters`` counts replies
    and failures; ``first_error`` keeps the first failure.

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
        check_at_least("UserTurn", 0, retries=retries)
        check_at_least("UserTurn", 1, concurrency=concurrency)
        super().__init__()
        self.reply = reply
        self.deadline_s = deadline_s
        self.retries = retries
        self.concurrency = concurrency
        self.role = role
        self._parameters = Parameters.of(reply, "UserTurn", "messages")
        self.counters = {"replies": 0, "ended": 0, "failed": 0, "retries": 0}
        self.first_error: str | None = None
        self._runner = runner_of(reply, "user", concurrency)

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        mode = getattr(innermost(container), "input_mode", "history")
        if mode != "history":
            raise ConfigError(f"UserTurn: must be in an env with input_mode='history', for messages: got {mode!r}.")
        self._parameters.check_datasets(container)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        done = next_td.get("done")
        chats = next_td.get("history").prompt.to_chats()
        rows = [
            row
            for row, (chat, over) in enumerate(zip(chats, done.flatten().tolist(), strict=True))
            if not over and chat and chat[-1]["role"] == "assistant"  # else a tool has answered
        ]
        columns = self._parameters.columns(td, self.container)
        named = [{name: values[row] for name, values in columns.items()} for row in rows]
        replies = [partial(self.reply, chats[row], **given) for row, given in zip(rows, named, strict=True)]
        # All rows share one deadline, so slow replies delay a batch by at most that time.
        calls = Calls(replies, self.retries)
        outcomes = dict(zip(rows, self._runner.run(calls, timeout_s=self.deadline_s), strict=True))
        failed = {row for row, outcome in outcomes.items() if self._failed(outcome)}
        ended = {row for row, outcome in outcomes.items() if row not in failed and outcome.value is None}
        answered = outcomes.keys() - failed - ended
        added = {"replies": len(answered), "ended": len(ended), "failed": len(failed), "retries": calls.retried}
        self.counters = {name: count + added[name] for name, count in self.counters.items()}
        if answered:
            said = {row: [{"role": self.role, "content": outcomes[row].value}] for row in answered}
            append_messages(next_td, "history", [said.get(row, []) for row in range(len(chats))], None)
        for flag, ends in (("terminated", ended), ("truncated", failed), ("done", ended | failed)):
            ends_B = torch.tensor([row in ends for row in range(len(chats))], device=done.device)
            next_td.set(flag, next_td.get(flag) | ends_B.view(done.shape))
        # The policy is not to blame for a failed reply: the row gets a NaN reward, which is ignored.
        rewards = [math.nan if row in failed else 0.0 for row in range(len(chats))]
        add_reward(next_td, torch.tensor(rewards, device=done.device))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec

    def clone(self) -> Self:
        """A copy for another env, with its own threads and counters."""
        other = super().clone()
        other.counters = dict.fromkeys(self.counters, 0)
        other._runner = runner_of(self.reply, "user", self.concurrency)
        return other

    def close(self) -> None:
        self._runner.close()

    def _failed(self, outcome: Outcome) -> bool:
        error = outcome.error
        if not outcome.done:
            error = f"the user did not answer within {self.deadline_s} s"
        elif error is None and not isinstance(outcome.value, str | None):
            error = f"the user must return text, or None to end: got a {type(outcome.value).__name__}"
        self.first_error = self.first_error or error
        return error is not None
