"""GSM8K: grade-school word problems. The parser works for any task whose reference is one number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.data.ragged.tensordicts import column
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.answers import AnswerParser, extract_tags, normalize_answer, reference_answer
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.completions import required_column
from llmrl.envs.llm.tasks.task import Row, TaskEnv
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FORMAT = (
    "Think step by step between <think> and </think>, then give the final number alone between <answer> and </answer>, "
    "for example <think>2 bags of 3 apples are 6 apples.</think><answer>6</answer>."
)


class GSM8KRewardParser(AnswerParser):
    """Scores the answer block of a response against the reference, which ends with ``#### <number>`` or is one answer.

    The last ``<answer>`` block outside thinking counts. Keys, arguments and errors are those of `AnswerParser`. It also
    writes "reward_contained" float32[B, 1, 1]: format_reward where the right number is anywhere in the response; this
    is not part of the reward.

    >>> parser = GSM8KRewardParser()
    >>> parser.score("<think>6 * 6</think><answer>36 snakes</answer>", "6 * 6 = 36 #### 36")
    1.0
    >>> parser.score("<answer>35</answer>", "36"), parser.score("36", "36")
    (0.1, 0.0)
    """

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        """(thinking, answer) of a response, each "" if it is missing."""
        think, answer = extract_tags(text)
        return think or "", answer or ""

    @staticmethod
    def normalize_answer(text: str) -> str:
        """The normalised form of an answer, for comparison."""
        return normalize_answer(text)

    def judge(self, answers: list[str | None], td: TensorDictBase) -> list[bool]:
        pairs = zip(answers, self._numbers(td), strict=True)
        return [answer is not None and normalize_answer(answer) == reference for answer, reference in pairs]

    def _numbers(self, td: TensorDictBase) -> list[str]:
        return [reference_answer(str(text), row) for row, text in enumerate(self.references(td), 1)]

    def _scored(self, texts: list[str], td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        next_td = super()._scored(texts, td, next_td)
        found = [{normalize_answer(number) for number in _NUMBER.findall(text)} for text in texts]
        contained = [number in numbers for number, numbers in zip(self._numbers(td), found, strict=True)]
        contained_B = self.format_reward * torch.tensor(contained, device=td.device).float()
        return next_td.set("reward_contained", contained_B.view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec = super().transform_reward_spec(reward_spec)
        reward_spec["reward_contained"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


class GSM8KPrepareQuestion(Transform):
    """Prepends the format instructions to the question when a conversation starts.

    Reads   ``in_keys``   the question, NonTensor [B]; default "query", the user's message in `ChatEnv`
    Writes  ``out_keys``  the question with the instructions; default the same key

    For chat templates without a system role. `GSM8KEnv` does not need it: its system prompt has the instructions.

    >>> from llmrl.envs.llm import DatasetChatEnv
    >>> env = DatasetChatEnv(dataset=[{"question": "2 + 2?", "answer": "#### 4"}])
    >>> td = env.append_transform(GSM8KPrepareQuestion()).reset()
    >>> td["history"].prompt.to_chats()[0][0]["content"].endswith("Question: 2 + 2?")
    True
    """

    INSTRUCTIONS = f"Solve the problem. {_FORMAT}"

    def __init__(self, in_keys: Sequence[str] | None = None, out_keys: Sequence[str] | None = None):
        super().__init__(in_keys=["query"] if in_keys is None else in_keys, out_keys=out_keys)
        if len(self.in_keys) != 1 or len(self.out_keys) != 1:
            raise ConfigError(
                f"GSM8KPrepareQuestion: in_keys, out_keys must have one key each: got {self.in_keys}, {self.out_keys}."
            )

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase | None:
        questions = required_column(td, self.in_keys[0], "GSM8KPrepareQuestion.reset", "the question")
        td = shallow_copy(td)
        td.set(self.out_keys[0], column(f"{self.INSTRUCTIONS}\n\nQuestion: {question}" for question in questions))
        return td

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td


class GSM8KEnv(TaskEnv):
    """GSM8K as an environment: a question, an answer with thinking and answer blocks, a reward of 0, 0.1 or 1.

    The arguments are those of `TaskEnv`; a local file needs the columns ``question`` and ``answer``.

    >>> env = GSM8KEnv(dataset=[{"question": "2 + 2?", "answer": "Add. #### 4"}], num_envs=2)
    >>> env.reset()["history"].prompt.shape
    torch.Size([2, 2])
    """

    DATASET = "openai/gsm8k"
    CONFIG = "main"
    SCORER = GSM8KRewardParser
    SYSTEM_PROMPT = f"You solve word problems. {_FORMAT}"

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        prompt = cls.row_with_reference(row, number)
        reference_answer(prompt["answer"], number, cls.__name__, "dataset")
        return prompt


def make_gsm8k_env(
    dataset: str | Path | Sequence[Mapping[str, Any]] = GSM8KEnv.DATASET,
    num_envs: int = 1,
    repeats: int | None = None,
    batch_size_dl: int = 1,
    seed: int | None = None,
    group_repeats: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> DatasetChatEnv:
    """GSM8K without a system prompt, for chat templates without a system role: the question has the instructions.

    ``options`` are the other arguments of `DatasetChatEnv`.

    >>> env = make_gsm8k_env([{"question": "2 + 2?", "answer": "#### 4"}])
    >>> len(env.reset()["history"].prompt.to_chats()[0])
    1
    """
    given = {"num_envs": num_envs, "repeats": repeats, "batch_size_dl": batch_size_dl, "seed": seed}
    given |= {"group_repeats": group_repeats, "tokenizer": tokenizer, "collate_fn": GSM8KEnv.prompt_rows}
    rows = GSM8KEnv.rows(dataset) if isinstance(dataset, (str, Path)) else dataset
    env = DatasetChatEnv(dataset=rows, **given, **options)
    return env.append_transform(GSM8KPrepareQuestion()).append_transform(GSM8KRewardParser(tokenizer=tokenizer))
