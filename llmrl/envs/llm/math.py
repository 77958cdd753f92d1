"""MATH: competition problems whose answers are expressions, compared as mathematics (the ``math`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from llmrl.envs.llm.answers import AnswerParser, Blocks, find_blocks, last_boxed
from llmrl.envs.llm.math_equality import MathEquality
from llmrl.envs.llm.task import Row, TaskEnv
from llmrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MATHEnv", "MATHRewardParser"]


class MATHRewardParser(AnswerParser):
    """Scores the answer of a response as mathematics: equal to the reference, wrong but in the asked form, or nothing.

    Reads   the last ``<answer>`` block outside thinking, else the last ``\\boxed{}`` there; "answer": the reference, an
            expression or a solution that boxes one
    Raises  DataError naming the row of an empty reference; MissingDependencyError without math-verify

    Other keys and the arguments are those of `AnswerParser`. A comparison takes at most ``deadline_s`` seconds, and
    what it cannot decide by then is wrong; ``equality.counters`` counts those.

    >>> parser = MATHRewardParser()
    >>> parser.score(r"Half of it: \\boxed{\\frac{1}{2}}", "0.5"), parser.score("0.5", "0.5")
    (1.0, 0.0)
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
        deadline_s: float = 5.0,
    ):
        super().__init__(
            tokenizer, in_keys, out_keys, eos_token, set_done_if_answer, input_mode, format_reward, correct_reward
        )
        self.equality = MathEquality(deadline_s)

    def find_answer(self, blocks: Blocks) -> str | None:
        return blocks.answers[-1] if blocks.answers else last_boxed(blocks.outside)

    def score(self, completion: str, reference: str) -> float:
        """The reward of one response: correct_reward, format_reward or 0."""
        answer = self.find_answer(find_blocks(completion))
        if answer is None:
            return 0.0
        return self.correct_reward if self.equality.equal(_reference(reference), answer) else self.format_reward

    def judge(self, answers: list[str | None], td: TensorDictBase) -> list[bool]:
        references = [_reference(str(text), row) for row, text in enumerate(self.references(td), 1)]
        given = [row for row, answer in enumerate(answers) if answer is not None]
        right = [False] * len(answers)
        equal = self.equality.equal_all([(references[row], answers[row]) for row in given])
        for row, verdict in zip(given, equal, strict=True):
            right[row] = verdict
        return right

    def close(self) -> None:
        self.equality.close()


class MATHEnv(TaskEnv):
    """MATH as an environment: a problem, an answer with thinking and answer blocks, a reward of 0, 0.1 or 1.

    The arguments are those of `TaskEnv`; a local file needs the columns ``problem`` and ``solution`` (with the answer
    in its last ``\\boxed{}``) or ``answer``.

    >>> rows = [{"problem": "Half of 1?", "solution": r"It is $\\boxed{\\frac12}$.", "level": "Level 1"}]
    >>> MATHEnv(dataset=rows).reset().get("answer").tolist()
    ['\\\\frac12']
    """

    DATASET = "DigitalLearningGmbH/MATH-lighteval"
    SYSTEM_PROMPT = (
        "You solve mathematical problems. Think step by step between <think> and </think>, then give the final answer "
        "alone, in LaTeX, between <answer> and </answer>, for example <think>Half of 3 is 3/2.</think>"
        "<answer>\\frac{3}{2}</answer>."
    )

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        prompt = cls.row_with_reference(row, number)
        prompt["answer"] = _reference(prompt["answer"], number, "dataset")
        return prompt

    @classmethod
    def scorer(cls, tokenizer: PreTrainedTokenizerBase | None = None) -> MATHRewardParser:
        return MATHRewardParser(tokenizer=tokenizer)


def _reference(text: str, row: int | None = None, of: str = "batch") -> str:
    boxed = last_boxed(text)
    answer = (text if boxed is None else boxed).strip()
    if not answer:
        where = "" if row is None else f" of row {row} of the {of}"
        raise DataError(
            f"MATHRewardParser: the reference{where} must be an expression, or a solution with one in \\boxed{{}}: got "
            f"{text!r:.120}."
        )
    return answer
