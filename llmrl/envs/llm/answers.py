"""Answers in responses: extraction from blocks, normalisation for comparison, and the transform that scores them.

Comparison uses string arithmetic and bounded fractions: every answer is fast to compare, and none is evaluated. Algebra
(is ``2\\sqrt{2}`` the same as ``\\sqrt{8}``?) is left to `llmrl.envs.llm.tasks.math`.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import column
from llmrl.data.specs import Categorical, Composite, Unbounded
from llmrl.envs.llm.completions import ScoringTransform, add_reward, completion_texts, required_column, tokenizer_of
from llmrl.envs.llm.options import MODES
from llmrl.errors import ConfigError, DataError, check_choice

__all__ = [
    "AnswerParser",
    "Blocks",
    "code_block",
    "extract_tags",
    "fenced_blocks",
    "find_blocks",
    "last_boxed",
    "normalize_answer",
    "reference_answer",
]

# -- blocks ------------------------------------------------------------------------------------------------------------

_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```(?P<info>[^`\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t]*([\w+.-]*)")
_BRACE = re.compile(r"[{}]")


@dataclass(frozen=True)
class Blocks:
    """A parsed response: ``thoughts``, the ``answers`` outside of them, and all text ``outside`` of thinking."""

    thoughts: list[str]
    answers: list[str]
    outside: str


def find_blocks(text: str) -> Blocks:
    """The thinking and answer blocks of a response. An answer block inside the thinking does not count.

    Unclosed thinking extends to the end; a lone ``</think>`` ends thinking that the prompt opened.

    >>> find_blocks("<think>7? <answer>7</answer></think><answer>8</answer>").answers
    ['8']
    """
    thoughts = _THINK.findall(text)
    outside = _THINK.sub("", text)
    if "</think>" in outside:
        before, _, outside = outside.rpartition("</think>")
        # The prompt opened this thought, so it came before all others.
        thoughts.insert(0, before)
    return Blocks(thoughts, _ANSWER.findall(outside), outside)


def extract_tags(text: str) -> tuple[str | None, str | None]:
    """(thinking, last answer) of a response, each None if there is none."""
    blocks = find_blocks(text)
    return "\n".join(blocks.thoughts) if blocks.thoughts else None, blocks.answers[-1] if blocks.answers else None


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}``, including nested braces; None without a box.

    >>> last_boxed(r"so \\boxed{3}, or rather \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return text[start:]


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(info string after the opening fence, lines up to the closing fence) of each block outside thinking.

    >>> fenced_blocks("```sh\\nls\\n```\\n```\\nnot closed")
    [('sh', 'ls\\n')]
    """
    text = find_blocks(text).outside
    blocks, opening = [], None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence["info"].strip():
            blocks.append((opening["info"], text[opening.end() + 1 : fence.start()]))
            opening = None
    return blocks


def code_block(text: str, languages: tuple[str, ...] = ("python", "python3", "py", "")) -> str | None:
    """The last fenced block outside thinking in one of ``languages``; None if there is none.

    >>> code_block("```python\\nprint(1)\\n```\\nwhich prints\\n```text\\n1\\n```")
    'print(1)\\n'
    """
    found = [code for info, code in fenced_blocks(text) if _LANGUAGE.match(info)[1].lower() in languages]
    return found[-1] if found else None


# -- comparison --------------------------------------------------------------------------------------------------------

_FRACTION_DIGITS = 100  # a longer numerator or denominator is compared as text

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d*+)?+|\.\d++)"
_NUMBER = re.compile(
    rf"(?<![\w/.])(?P<sign>[-+]?)(?:(?P<whole>\d++)\s+(?P<upper>\d++)/(?P<lower>\d++)"
    rf"|(?P<number>{_DECIMAL})(?:\s*/\s*(?P<divisor>{_DECIMAL}))?+)"
    r"(?!\d|\.\d|\s*/\s*[\d.]|[eE][-+]?\d)"
)

# LaTeX, in the order in which it is removed.
_SPACES = re.compile(r" {2,}")
_EQUALS = re.compile(r"=|≈|≃|\\approx\b|\\simeq\b")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
_FRAC = re.compile(r"(\d?)\s*\\[dtc]?frac\s*(?:\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|(\d)\s*(\d))")
_JOINED = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]\s*|,\\!|[\u00a0\u202f\u2009])(?=\d{3}(?!\d))")
_NOTHING = re.compile(r"\\(?:left|right|displaystyle)\b|\^\s*\{?\s*\\circ\s*\}?|°|\\?%|\\[()\[\]]")
_UNIT_POWER = re.compile(
    r"\b(?:[mckd]?m|in|ft|yd|mi|feet|foot|inch(?:es)?|\w*met(?:er|re)s?|units?)\s*(\^\s*\{?[23]\}?)"
)
_CURRENCY = re.compile(r"[$€£¥₹]")
_SIGNS = str.maketrans(dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}", "-"))


def normalize_answer(text: str) -> str:
    """The normalised form of an answer for comparison: its number if the text has exactly one, else the text.

    Currency and percent signs, units, thousands separators, LaTeX around a number and trailing zeros do not matter;
    fractions and mixed numbers are numbers; only the text after the last equals sign counts. Text is lower-cased.

    >>> [normalize_answer(t) for t in ("1,234", "$120.00", "100%", ".5", "36 snakes", "\\\\boxed{36}", "6*6 = 36.")]
    ['1234', '120', '100', '0.5', '36', '36', '36']
    >>> [normalize_answer(t) for t in ("1/2", "\\\\frac{1}{3}", "1 1/2 cups", "2/6", "- 5")]
    ['0.5', '1/3', '1.5', '1/3', '-5']
    """
    # With a power or two numbers the whole text is compared.
    plain = _plain(text)
    numbers = list(islice(_NUMBER.finditer(plain), 2))
    if len(numbers) == 1 and "^" not in plain and (value := _canonical(numbers[0])) is not None:
        return value
    return " ".join(plain.lower().rstrip(".").split())


@lru_cache(maxsize=65536)
def reference_answer(text: str, row: int | None = None, who: str = "GSM8KRewardParser", of: str = "batch") -> str:
    """The normalised reference: the text after ``####``, or the whole text if it is a single answer.

    Raises  DataError naming ``row`` of the batch or dataset for an empty reference, or for one with several numbers and
            no ``####``
    """
    _, marker, answer = text.rpartition("####")
    normal = normalize_answer(answer)
    if not normal or (not marker and len(normal.split()) > 3 and len(_NUMBER.findall(normal)) > 1):
        where = "" if row is None else f" of row {row} of the {of}"
        raise DataError(f"{who}: the reference{where} must end in '#### <number>' or be one answer: got {text!r:.120}.")
    return normal


def _plain(text: str) -> str:
    """The text without LaTeX, currency and the like; digits are ASCII digits, signs ASCII signs."""
    if (boxed := last_boxed(text)) is not None:
        text = boxed
    # 1. Text after the last equals sign, without thousands separators, with ASCII signs and digits.
    text = _JOINED.sub("", _EQUALS.split(text)[-1].translate(_SIGNS))
    text = " ".join(text.split())
    if not text.isascii():
        text = "".join(map(_ascii_digit, text))
    # 2. LaTeX: unwraps text, turns fractions into quotients, removes delimiters and powers of units.
    for _ in range(3):  # up to three nested wrappers
        text = _SPACES.sub(" ", _WRAPPED.sub(r" \1 ", text))
    text = _FRAC.sub(_as_quotient, text)
    text = _NOTHING.sub("", text)
    text = _UNIT_POWER.sub(lambda match: match[0].removesuffix(match[1]), text)
    text = text.replace("*", " ").replace("\\", " ")
    # 3. Currency: "-$5" is a negative number, "$5 $6" are two numbers. Spaces may follow a minus sign.
    text = re.sub(r"(?<=[-+])\s*[$€£¥₹]\s*", "", text.strip())
    text = _CURRENCY.sub(" ", text).strip()
    return re.sub(r"^-\s+(?=[\d.])", "-", text)


def _ascii_digit(char: str) -> str:
    if char in "²³":
        return f"^{unicodedata.digit(char)}"
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if (value := unicodedata.normalize("NFKC", char)) != char and "\N{FRACTION SLASH}" in value:  # such as ½
        return " " + value.replace("\N{FRACTION SLASH}", "/")
    return "/" if char == "\N{FRACTION SLASH}" else char


def _as_quotient(match: re.Match[str]) -> str:
    digit, upper, lower, short_upper, short_lower = match.groups()
    quotient = f"{upper or short_upper or ''}/{lower or short_lower or ''}"
    return f"{digit} {quotient}" if digit else quotient


def _canonical(match: re.Match[str]) -> str | None:
    """The number as a decimal, or as a fraction in lowest terms if its decimal expansion does not terminate."""
    sign = "-" if match["sign"] == "-" else ""
    if match["whole"] is None and match["divisor"] is None:
        value = _decimal(match["number"])  # on strings, so any number of digits is exact
    else:
        if match.end() - match.start() > _FRACTION_DIGITS:
            return None
        if match["whole"] is not None:
            parts = int(match["whole"]), int(match["upper"]), int(match["lower"])
            fraction = None if parts[2] == 0 else parts[0] + Fraction(parts[1], parts[2])
        else:
            divisor = Fraction(match["divisor"].replace(",", "").rstrip(".") or "0")
            fraction = None if divisor == 0 else Fraction(match["number"].replace(",", "").rstrip(".")) / divisor
        if fraction is None:
            return None
        value = _fraction(fraction)
    return value if value == "0" else sign + value


def _decimal(number: str) -> str:
    whole, _, fraction = number.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def _fraction(value: Fraction) -> str:
    # The decimal expansion terminates if the denominator has only the prime factors 2 and 5.
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    # The quotient by a power of two of d digits has about 3.3 d decimal places: the precision must cover them exactly.
    with localcontext(prec=6 * _FRACTION_DIGITS):
        return _decimal(format(Decimal(value.numerator) / value.denominator, "f"))


# -- scoring -----------------------------------------------------------------------------------------------------------


class AnswerParser(ScoringTransform, ABC):
    """Scores the answer of a response: right, wrong but in the required form, or missing. A subclass defines `judge`.

    Reads   the response as text (`completion_texts`), and the columns that `judge` reads: "answer", unless ``in_keys``
            names another
    Writes  "reward"         float32[B, 1, 1]  += correct_reward | format_reward | 0, in the ``next`` tensordict
            "reward_right"   float32[B, 1, 1]  correct_reward where the answer is right; "success" bool[B, 1, 1]
            "reward_answer"  float32[B, 1, 1]  format_reward if there is an answer
            "reward_think"   float32[B, 1, 1]  format_reward if there is a thinking block; not part of the reward
            "done", "terminated"  bool[B, 1]   True if there is an answer, unless ``set_done_if_answer=False``
    Raises  DataError naming the row whose reference is not a valid answer; MissingKeyError without references

    ``in_keys`` (response view, reference) and ``out_keys`` (reward_answer, reward_think, reward_right, reward, success)
    rename; ``input_mode`` reads one view only; ``eos_token`` is an extra marker to remove from the end of a response.

    >>> class YesNo(AnswerParser):
    ...     def judge(self, answers, td):
    ...         return [a == r for a, r in zip(answers, self.references(td), strict=True)]
    >>> from llmrl.envs.llm import DatasetChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> env = DatasetChatEnv(dataset=[{"question": "Is 7 prime?", "answer": "yes"}], num_envs=3)
    >>> _ = env.append_transform(YesNo())
    >>> policy = ScriptedPolicy(["<answer>yes</answer>", "<answer>no</answer>", "yes"])
    >>> [round(reward, 1) for reward in env.step(policy(env.reset()))["next", "reward"].flatten().tolist()]
    [1.0, 0.1, 0.0]
    """

    OUT_KEYS = ("reward_answer", "reward_think", "reward_right", "reward", "success")

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
        check_choice(who, "input_mode", input_mode, (None, *MODES))
        if in_keys is not None and len(in_keys) != 2:
            raise ConfigError(f"{who}: in_keys must be (response view, reference): got {in_keys!r}.")
        if out_keys is not None and len(out_keys) != len(self.OUT_KEYS):
            raise ConfigError(f"{who}: out_keys must rename {', '.join(self.OUT_KEYS)}: got {out_keys!r}.")
        super().__init__()
        self.tokenizer = tokenizer
        view, self.answer_key = (input_mode, "answer") if in_keys is None else in_keys
        self.input_mode = view[0] if isinstance(view, tuple) else view
        self.names = tuple(out_keys or self.OUT_KEYS)
        self.markers = (eos_token,) if eos_token else ()
        self.set_done_if_answer = set_done_if_answer
        self.format_reward = format_reward
        self.correct_reward = correct_reward

    @abstractmethod
    def judge(self, answers: list[str | None], td: TensorDictBase) -> list[bool]:
        """True for each right answer of the batch ``td``; None stands for a response without an answer."""

    def find_answer(self, blocks: Blocks) -> str | None:
        """The answer of a response: the last answer block outside thinking."""
        return blocks.answers[-1] if blocks.answers else None

    def score(self, completion: str, reference: Any) -> float:
        """The reward of one response: correct_reward, format_reward or 0."""
        answer = self.find_answer(find_blocks(completion))
        if answer is None:
            return 0.0
        [right] = self.judge([answer], TensorDict({self.answer_key: column([reference])}, batch_size=[1]))
        return self.correct_reward if right else self.format_reward

    def references(self, td: TensorDictBase, key: str | None = None) -> list[Any]:
        """A column of the batch, by default the reference. Raises MissingKeyError if it is missing."""
        return required_column(td, key or self.answer_key, type(self).__name__, "the reference")

    def responses(self, td: TensorDictBase) -> list[str]:
        """The text of each response."""
        who = type(self).__name__
        return completion_texts(td, tokenizer_of(self), who=who, mode=self.input_mode, markers=self.markers)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._scored(self.responses(td), td, next_td)

    def _scored(self, texts: list[str], td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        blocks = [find_blocks(text) for text in texts]
        answers = [self.find_answer(found) for found in blocks]
        success_B = torch.tensor(self.judge(answers, td), device=td.device)
        answered_B = torch.tensor([answer is not None for answer in answers], device=td.device)
        thought_B = torch.tensor([bool(found.thoughts) for found in blocks], device=td.device)
        right_B, form_B = self.correct_reward * success_B.float(), self.format_reward * answered_B.float()
        answer_key, think_key, right_key, reward_key, success_key = self.names
        next_td.set(answer_key, form_B.view(-1, 1, 1))
        next_td.set(think_key, (self.format_reward * thought_B.float()).view(-1, 1, 1))
        next_td.set(right_key, right_B.view(-1, 1, 1))
        # Not the sum of the two: the reward of a right answer already includes its form.
        add_reward(next_td, torch.where(success_B, right_B, form_B), reward_key)
        next_td.set(success_key, success_B.view(-1, 1, 1))
        if self.set_done_if_answer:
            end_where(next_td, answered_B.view(-1, 1))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        shape = (*reward_spec.shape, 1, 1)
        for name in self.names[:4]:
            reward_spec[name] = Unbounded(shape)
        reward_spec[self.names[4]] = Categorical(2, shape=shape, dtype=torch.bool)
        return reward_spec


def end_where(next_td: TensorDictBase, ended_B: torch.Tensor) -> None:
    """Sets "done" and "terminated" where ``ended_B``, bool[B, 1]; rows that ended before stay ended."""
    for flag in ("done", "terminated"):
        before = next_td.get(flag, None)
        next_td.set(flag, ended_B.clone() if before is None else before | ended_B)
