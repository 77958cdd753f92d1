"""`AddThinkingPrompt`: asks the model to think again where a condition (usually on the reward) holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.data.llm.chat import History
from llmrl.data.ragged.tensordicts import present_keys
from llmrl.envs.llm.completions import (
    completion_texts,
    renderer_of,
    special_tokens,
    tokenizer_of,
    trim_markers,
    unpadded_ids,
    view_of,
)
from llmrl.envs.llm.transforms.dataloading import row_seeds
from llmrl.envs.llm.transforms.tool_messages import append_messages, begin_anew
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, MissingKeyError
from llmrl.modules.llm.policies.containers import ChatHistory, Text, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EGOCENTRIC = (
    "But wait, before I answer I should check this once more, step by step.",
    "But wait, I may have made a mistake. Let me go through it again.",
    "But wait, I am not sure of this yet. Let me work it out another way and compare.",
)
ADDRESSED = (
    "Wait: check this once more, step by step, before you answer.",
    "Wait: you may have made a mistake. Go through it again.",
    "Wait: work it out another way, and compare.",
)


class AddThinkingPrompt(Transform):
    """Makes the model think again in rows that ``cond`` selects; append it after the transform that scores.

    Reads   each row of ``next``, which is passed to ``cond``
    Writes  ("next", view, "prompt"): with ``edit_last_turn`` the policy's message ends in ``prompt`` instead of its
                          last answer block, and is left open for the policy to continue. Else one more message
                          {"role", "content": prompt}, also open if the role is "assistant"
            ("next", "reward")  float32[B, 1, 1]  0 in these rows with ``zero_reward``; NaN (it failed) stays
            ("next", "terminated" | "done")       False in these rows with ``undo_done``
    Raises  ConfigError for contradictory settings; MissingKeyError without a conversation in ``next``

    ``prompt`` None: the first of a built-in list, or with ``random_prompt`` a random one (seed: `set_seed`), in the
    first person if ``egocentric`` (None: if the role is "assistant"). ``zero_reward`` None: as ``edit_last_turn``.

    Truncated conversations stay ended. An edited turn starts a new record (docs/keys.md), in which it is part of the
    prompt; messages of the env after it are dropped. An appended message continues the token stream.

    >>> from llmrl.envs.llm import ChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> from tensordict import TensorDict
    >>> env = ChatEnv(batch_size=[1]).append_transform(AddThinkingPrompt(lambda row: True, prompt="Hm, again."))
    >>> policy = ScriptedPolicy(["<think>2 + 2 is 5</think><answer>5</answer>"])
    >>> td = env.step(policy(env.reset(TensorDict(query="2 + 2?", batch_size=[1]))))
    >>> td["next", "history"].prompt.to_chats()[0][-1]["content"]
    '<think>2 + 2 is 5</think>Hm, again.'
    """

    def __init__(
        self,
        cond: Callable[[TensorDictBase], Any],
        prompt: str | None = None,
        random_prompt: bool = False,
        role: str = "assistant",
        edit_last_turn: bool = True,
        zero_reward: bool | None = None,
        undo_done: bool = True,
        egocentric: bool | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__()
        if not callable(cond):
            raise ConfigError(f"AddThinkingPrompt: cond must be a function of a row of 'next': got {cond!r}.")
        if prompt is not None and random_prompt:
            raise ConfigError("AddThinkingPrompt: random_prompt draws from the built-in prompts: leave prompt out.")
        if edit_last_turn and role != "assistant":
            raise ConfigError(
                f"AddThinkingPrompt: edit_last_turn edits the policy's message, whose role is 'assistant': got "
                f"role={role!r}; pass edit_last_turn=False to append a message of that role."
            )
        self.cond = cond
        if egocentric is None:
            egocentric = role == "assistant"
        self.prompts = (prompt,) if prompt is not None else EGOCENTRIC if egocentric else ADDRESSED
        self.random_prompt = random_prompt
        self.role = role
        self.edit_last_turn = edit_last_turn
        self.zero_reward = edit_last_turn if zero_reward is None else zero_reward
        self.undo_done = undo_done
        self.tokenizer = tokenizer
        self._seed, self._drawn = 0, 0

    def _set_seed(self, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed, self._drawn = state["seed"], state["drawn"]

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        view = view_of(next_td)
        if view is None:
            raise MissingKeyError(
                f"AddThinkingPrompt: there must be a conversation in 'next': keys present: {present_keys(next_td)}."
            )
        truncated, done = next_td.get("truncated"), next_td.get("done")
        rows = [
            row for row, ended in enumerate(truncated.flatten().tolist()) if not ended and bool(self.cond(next_td[row]))
        ]
        if not rows:
            return next_td
        prompts = {row: self._prompt() for row in rows}
        if self.edit_last_turn:
            self._edit(td, next_td, view, prompts)
        else:
            count = next_td.batch_size[0]
            messages = [[_open(self.role, prompts[row])] if row in prompts else [] for row in range(count)]
            append_messages(next_td, view, messages, renderer_of(self.container))
        reward = next_td.get("reward", None)
        if self.zero_reward and reward is not None:
            reward = reward.clone()
            reward[rows] = reward[rows] * 0.0  # NaN, a failed reward, stays NaN
            next_td.set("reward", reward)
        if self.undo_done:
            going_on = torch.zeros_like(done)
            going_on[rows] = True
            next_td.set("terminated", next_td.get("terminated") & ~going_on)
            next_td.set("done", done & ~going_on)
        return next_td

    def _prompt(self) -> str:
        if not self.random_prompt:
            return self.prompts[0]
        self._drawn += 1
        return self.prompts[int(row_seeds(self._seed, [self._drawn])) % len(self.prompts)]

    def _edit(self, td: TensorDictBase, next_td: TensorDictBase, view: str, prompts: Mapping[int, str]) -> None:
        if view == "history":
            history = next_td.get("history").prompt
            chats = {row: history[row].to_chats() for row in prompts}
            edited = list(history.unbind(0))
            for row, chat in chats.items():
                while chat[-1]["role"] != "assistant":  # messages that the env appended after the turn
                    chat.pop()
                content = self._edited(chat[-1]["content"], prompts[row])
                edited[row] = History.from_messages([*chat[:-1], _open(self.role, content)])
            next_td.set("history", ChatHistory.from_rows({"prompt": History.stack(edited)}, next_td.batch_size))
            begin_anew(next_td, list(prompts), view)
            return
        tokenizer = tokenizer_of(self)
        said = completion_texts(td, tokenizer, who="AddThinkingPrompt", mode=view, as_drawn=True)
        answers = {row: self._edited(said[row], prompt) for row, prompt in prompts.items()}
        begin_anew(next_td, list(prompts), view)
        if view == "text":
            texts = next_td.get("text").rows("prompt")
            asked = td.get("text").rows("prompt")
            texts = [asked[row] + answers[row] if row in answers else text for row, text in enumerate(texts)]
            next_td.set("text", Text.from_rows({"prompt": texts}, next_td.batch_size))
            return
        asked = unpadded_ids(td, "prompt")
        rows = list(next_td.get("tokens").rows("prompt"))
        # Tokenising the edited text is safe: it becomes part of a prompt, so no loss reads its ids as sampled.
        ids = tokenizer(list(answers.values()), add_special_tokens=False)["input_ids"]
        for row, answer in zip(answers, ids, strict=True):
            rows[row] = torch.cat([asked[row], torch.tensor(answer, dtype=torch.int64).to(asked[row].device)])
        next_td.set("tokens", Tokens.from_rows({"prompt": rows}, next_td.batch_size))

    def _edited(self, text: str, prompt: str) -> str:
        """The text up to its last answer block (all of it without a block), followed by the prompt."""
        cut = text.rfind("<answer>")
        kept = text[:cut] if cut >= 0 else trim_markers(text, special_tokens(tokenizer_of(self)))
        return kept + prompt


def _open(role: str, content: str) -> dict[str, Any]:
    """A message; one of the assistant is marked as open, for the policy to continue."""
    return {"role": role, "content": content, **({"is_complete": False} if role == "assistant" else {})}
