"""GSM8K: grade-school word problems with one number as the answer, and the parser that scores an answer block.

The parser serves any task whose reference is a number: `extract_tags` finds the answer, `normalize_answer` says when
two answers are the same. Turning a dataset into prompts belongs to `DatasetChatEnv`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.data.llm.columns import column_values
from llmrl.data.specs import Categorical, Composite, Unbounded
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.completions import completion_texts
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, DataError, MissingKeyError

__all__ = ["GSM8KEnv", "GSM8KRewardParser"]

OUT_KEYS = ("reward_answer", "reward_think", "reward_right", "reward", "success")


class GSM8KRewardParser(Transform):
    """Scores the answer block of a response against the reference: right, wrong but in the asked form, or nothing.

    Reads   the response as text (`completion_texts`: the response only, the same score in every input mode), "answer"
    Writes  "reward"         float32[B, 1, 1]  += correct_reward | format_reward | 0, in the ``next`` tensordict
            "reward_right"   float32[B, 1, 1]  correct_reward where the answer is right
            "reward_answer"  float32[B, 1, 1]  format_reward where there is an answer block
            "reward_think"   float32[B, 1, 1]  format_reward where there is a thinking block; reported, no part of the
                             reward
            "success"        bool[B, 1, 1]
            "done", "terminated"  bool[B, 1]   True where there is an answer block, unless ``set_done_if_answer=False``
    Raises  DataError naming the row where the reference is no single answer; MissingKeyError without references

    The last ``<answer>`` block outside thinking counts. ``in_keys`` (response view, reference) and ``out_keys`` (the
    five above) rename; ``input_mode`` reads one view only; ``eos_token`` is one more marker to cut off a response's
    end.

    >>> parser = GSM8KRewardParser()
    >>> parser.score("<think>6 * 6</think><answer>36 snakes</answer>", "6 * 6 = 36 #### 36")
    1.0
    >>> parser.score("<answer>35</answer>", "36"), parser.score("36", "36")
    (0.1, 0.0)
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
        if input_mode not in (None, "history", "text", "tokens"):
            raise ConfigError(f"GSM8KRewardParser: input_mode must be history, text or tokens: got {input_mode!r}.")
        if in_keys is not None and len(in_keys) != 2:
            raise ConfigError(f"GSM8KRewardParser: in_keys must be (response view, reference): got {in_keys!r}.")
        if out_keys is not None and len(out_keys) != len(OUT_KEYS):
            raise ConfigError(f"GSM8KRewardParser: out_keys must rename {', '.join(OUT_KEYS)}: got {out_keys!r}.")
        names = tuple(out_keys) if out_keys is not None else OUT_KEYS
        super().__init__()
        self.tokenizer = tokenizer
        self.input_mode = input_mode
        self.answer_key = "answer"
        if in_keys is not None:
            view, self.answer_key = in_keys
            self.input_mode = view[0] if isinstance(view, tuple) else view
        self.names = names
        self.markers = (eos_token,) if eos_token else ()
        self.set_done_if_answer = set_done_if_answer
        self.format_reward = format_reward
        self.correct_reward = correct_reward

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        """(thinking, answer) of a response, each "" where there is none."""
        think, answer = extract_tags(text)
        return think or "", answer or ""

    @staticmethod
    def normalize_answer(text: str) -> str:
        """The answer in the form in which answers are compared."""
        return normalize_answer(text)

    def score(self, completion: str, reference: str) -> float:
        """The reward of one response: correct_reward, format_reward or 0."""
        _, answer = extract_tags(completion)
        if answer is None:
            return 0.0
        return self.correct_reward if normalize_answer(answer) == reference_answer(reference) else self.format_reward

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        texts = completion_texts(
            td, self.tokenizer, who="GSM8KRewardParser", mode=self.input_mode, markers=self.markers
        )
        references = column_values(td, self.answer_key)
        if references is None:
            raise MissingKeyError(
                f"GSM8KRewardParser: the reference must be in {self.answer_key!r}: the batch has "
                f"{', '.join(map(str, td.keys()))}."
            )
        tags = [extract_tags(text) for text in texts]
        right = [
            answer is not None and normalize_answer(answer) == reference_answer(str(reference), row)
            for row, ((_, answer), reference) in enumerate(zip(tags, references, strict=True), 1)
        ]
        answered = [answer is not None for _, answer in tags]
        reward = [
            self.correct_reward if r else self.format_reward if a else 0.0 for r, a in zip(right, answered, strict=True)
        ]
        columns = (
            [self.format_reward * a for a in answered],
            [self.format_reward * (think is not None) for think, _ in tags],
            [self.correct_reward * r for r in right],
            reward,
        )
        for name, values in zip(self.names, columns, strict=False):
            value_B = torch.tensor(values, dtype=torch.float32, device=td.device).view(-1, 1, 1)
            if name == self.names[3] and (before := next_td.get(name, None)) is not None:
                value_B = value_B + before
            next_td.set(name, value_B)
        next_td.set(self.names[4], torch.tensor(right, device=td.device).view(-1, 1, 1))
        if self.set_done_if_answer:
            answered_B = torch.tensor(answered, device=td.device).view(-1, 1)
            for flag in ("done", "terminated"):
                before = next_td.get(flag, None)
                next_td.set(flag, answered_B.clone() if before is None else before | answered_B)
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        shape = (*reward_spec.shape, 1, 1)
        for name in self.names[:4]:
            reward_spec[name] = Unbounded(shape)
        reward_spec[self.names[4]] = Categorical(2, shape=shape, dtype=torch.bool)
        return reward_spec


class GSM8KEnv(DatasetChatEnv):
    """GSM8K as an environment: a question, an answer with thinking and answer blocks, a reward of 0, 0.1 or 1.

    The arguments are those of `DatasetChatEnv`; ``dataset`` may also be a local file with ``question`` and ``answer``.
    ``compute_reward=False`` leaves the reward to a transform that is appended later.
    """

    SYSTEM_PROMPT = (
        "You solve word problems. Think step by step between <think> and </think>, then give the final number alone "
        "between <answer> and </answer>, for example <think>2 bags of 3 apples are 6 "
        "apples.</think><answer>6</answer>."
    )

    def __init__(
        self,
        *,
        dataset: Any = "openai/gsm8k",
        name: str | None = "main",
        compute_reward: bool = True,
        max_steps: int = 1,
        shuffle: bool = True,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any | None = None,
        device: torch.device | str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        input_mode: str = "history",
        data_key: str | None = None,
        primers: Any | None = None,
        system_prompt: str | None = None,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        super().__init__(
            dataset=dataset,
            name=name,
            max_steps=max_steps,
            shuffle=shuffle,
            split=split,
            num_envs=num_envs,
            repeats=repeats,
            seed=seed,
            group_repeats=group_repeats,
            tokenizer=tokenizer,
            device=device,
            template_kwargs=template_kwargs,
            collate_fn=collate_fn,
            input_mode=input_mode,
            data_key=data_key,
            primers=primers,
            system_prompt=system_prompt,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
        )
        if compute_reward:
            self.append_transform(GSM8KRewardParser(tokenizer=tokenizer))


_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?<!\w)[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?!\d|[eE][-+]?\d)")
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "*": " ", "\\": " ", "$": "", "€": "", "£": "", "%": ""})


def extract_tags(text: str) -> tuple[str | None, str | None]:
    """(thinking, answer) of a response, each None where there is none. An answer inside the thinking does not count."""
    thoughts = _THINK.findall(text)
    outside = _THINK.sub("", text)
    if "</think>" in outside:  # the prompt has opened the block
        before, _, outside = outside.rpartition("</think>")
        thoughts.insert(0, before)
    answers = _ANSWER.findall(outside)
    return "\n".join(thoughts) if thoughts else None, answers[-1] if answers else None


def normalize_answer(text: str) -> str:
    """The form in which two answers are compared: the number, where the text has exactly one.

    Dollar and percent signs, units, thousands separators, ``\\boxed{}`` and trailing zeros do not matter; after an
    equals sign only what follows it counts. Without a single number it is the text itself, in lower case.

    >>> [normalize_answer(t) for t in ("1,234", "$120.00", "100%", ".5", "36 snakes", "\\\\boxed{36}", "6*6 = 36.")]
    ['1234', '120', '100', '0.5', '36', '36', '36']
    """
    text = _unboxed(text).rpartition("=")[2].translate(_SIGNS).strip()
    numbers = _NUMBER.findall(text)
    if len(numbers) == 1:
        return _canonical(numbers[0])
    return " ".join(text.lower().rstrip(".").split())


@lru_cache(maxsize=65536)
def reference_answer(text: str, row: int | None = None) -> str:
    """The reference in compared form: what follows ``####``, or the whole text where it is one answer by itself.

    Raises  DataError naming ``row`` for an empty reference, or for one with several numbers and no ``####``
    """
    _, marker, answer = text.rpartition("####")
    normal = normalize_answer(answer)
    if not normal or (not marker and len(normal.split()) > 3 and len(_NUMBER.findall(normal)) > 1):
        where = "" if row is None else f" of row {row} of the batch"
        raise DataError(
            f"GSM8KRewardParser: the reference{where} must end in '#### <number>' or be one answer: got {text!r:.120}."
        )
    return normal


def _unboxed(text: str) -> str:
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    start += len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]


def _canonical(number: str) -> str:
    # On strings, so that no number of digits is too many.
    sign = "-" if number[0] == "-" else ""
    whole, _, fraction = number.lstrip("+-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value
