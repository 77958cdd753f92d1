"""`AnswerParser`: the transform that scores the answer of a turn, whatever it means for an answer to be right.

A subclass says where the answer stands (`find_answer`) and which answers are right (`judge`). The reward, its parts,
and the end of the episode are the same for all: right, wrong but in the asked form, or nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.data.ragged.tensordicts import column_values
from llmrl.data.specs import Categorical, Composite, Unbounded
from llmrl.envs.llm.answers.blocks import Blocks, find_blocks
from llmrl.envs.llm.completions import completion_texts, tokenizer_of
from llmrl.envs.llm.scoring import ScoringTransform
from llmrl.errors import ConfigError, MissingKeyError

__all__ = ["AnswerParser"]

OUT_KEYS = ("reward_answer", "reward_think", "reward_right", "reward", "success")


class AnswerParser(ScoringTransform):
    """Scores the answer of a response: right, wrong but in the asked form, or nothing.

    Reads   the response as text (`completion_texts`: the response only, the same score in every input mode), and the
            columns that `judge` reads: "answer", unless ``in_keys`` names another
    Writes  "reward"         float32[B, 1, 1]  += correct_reward | format_reward | 0, in the ``next`` tensordict
            "reward_right"   float32[B, 1, 1]  correct_reward where the answer is right
            "reward_answer"  float32[B, 1, 1]  format_reward where there is an answer
            "reward_think"   float32[B, 1, 1]  format_reward where there is a thinking block; reported, no part of the
                             reward
            "success"        bool[B, 1, 1]
            "done", "terminated"  bool[B, 1]   True where there is an answer, unless ``set_done_if_answer=False``
    Raises  DataError naming the row whose reference cannot be compared with; MissingKeyError without references

    ``in_keys`` (response view, reference) and ``out_keys`` (the five above) rename; ``input_mode`` reads one view only;
    ``eos_token`` is one more marker to cut off a response's end.

    >>> class YesNo(AnswerParser):
    ...     def judge(self, answers, td):
    ...         return [a == r for a, r in zip(answers, self.references(td), strict=True)]
    >>> from llmrl.envs.llm import DatasetChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> rows = [{"question": "Is 7 prime?", "answer": "yes"}]
    >>> env = DatasetChatEnv(dataset=rows, num_envs=3).append_transform(YesNo())
    >>> policy = ScriptedPolicy(["<answer>yes</answer>", "<answer>no</answer>", "yes"])
    >>> [round(reward, 1) for reward in env.step(policy(env.reset()))["next", "reward"].flatten().tolist()]
    [1.0, 0.1, 0.0]
    """

    def __init__(
        self,
        tokenizer: Any | None = None,
        in_keys: Sequence[Any] | None = None,
        out_keys: Sequence[str] | None = None,
        eos_token: str | None = None,
        set_done_if_answer: bool = True,
        input_mode: str | None = None,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
    ):
        who = type(self).__name__
        if input_mode not in (None, "history", "text", "tokens"):
            raise ConfigError(f"{who}: input_mode must be history, text or tokens: got {input_mode!r}.")
        if in_keys is not None and len(in_keys) != 2:
            raise ConfigError(f"{who}: in_keys must be (response view, reference): got {in_keys!r}.")
        if out_keys is not None and len(out_keys) != len(OUT_KEYS):
            raise ConfigError(f"{who}: out_keys must rename {', '.join(OUT_KEYS)}: got {out_keys!r}.")
        super().__init__()
        self.tokenizer = tokenizer
        self.input_mode = input_mode
        self.answer_key = "answer"
        if in_keys is not None:
            view, self.answer_key = in_keys
            self.input_mode = view[0] if isinstance(view, tuple) else view
        self.names = tuple(out_keys) if out_keys is not None else OUT_KEYS
        self.markers = (eos_token,) if eos_token else ()
        self.set_done_if_answer = set_done_if_answer
        self.format_reward = format_reward
        self.correct_reward = correct_reward

    @abstractmethod
    def judge(self, answers: list[str | None], td: TensorDictBase) -> list[bool]:
        """Which of the answers are right, given the batch that they belong to. None is a response without an answer."""

    def find_answer(self, blocks: Blocks) -> str | None:
        """The answer of a response: the last answer block outside thinking."""
        return blocks.answers[-1] if blocks.answers else None

    def references(self, td: TensorDictBase, key: str | None = None) -> list[Any]:
        """A column of the batch, by default the reference; MissingKeyError where it is not there."""
        key = key or self.answer_key
        values = column_values(td, key)
        if values is None:
            raise MissingKeyError(
                f"{type(self).__name__}: the reference must be in {key!r}: the batch has "
                f"{', '.join(map(str, td.keys()))}."
            )
        return values

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        texts = completion_texts(
            td, tokenizer_of(self), who=type(self).__name__, mode=self.input_mode, markers=self.markers
        )
        blocks = [find_blocks(text) for text in texts]
        answers = [self.find_answer(found) for found in blocks]
        right = self.judge(answers, td)
        answered = [answer is not None for answer in answers]
        reward = [
            self.correct_reward if r else self.format_reward if a else 0.0 for r, a in zip(right, answered, strict=True)
        ]
        columns = (
            [self.format_reward * a for a in answered],
            [self.format_reward * bool(found.thoughts) for found in blocks],
            [self.correct_reward * r for r in right],
            reward,
        )
        for name, values in zip(self.names[:4], columns, strict=True):
            value_B = torch.tensor(values, dtype=torch.float32, device=td.device).view(-1, 1, 1)
            if name == self.names[3] and (before := next_td.get(name, None)) is not None:
                value_B = value_B + before
            next_td.set(name, value_B)
        next_td.set(self.names[4], torch.tensor(right, device=td.device).view(-1, 1, 1))
        if self.set_done_if_answer:
            end_where(next_td, torch.tensor(answered, device=td.device).view(-1, 1))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        shape = (*reward_spec.shape, 1, 1)
        for name in self.names[:4]:
            reward_spec[name] = Unbounded(shape)
        reward_spec[self.names[4]] = Categorical(2, shape=shape, dtype=torch.bool)
        return reward_spec


def end_where(next_td: TensorDictBase, ended_B: torch.Tensor) -> None:
    """Sets "done" and "terminated" where ``ended_B``, bool[B, 1]; those that had ended before stay ended."""
    for flag in ("done", "terminated"):
        before = next_td.get(flag, None)
        next_td.set(flag, ended_B.clone() if before is None else before | ended_B)
