"""When two short answers are the same: the number they state, however it is written, or else the same words.

All arithmetic is on strings and bounded fractions: no answer takes long to compare, and none is ever evaluated. Algebra
(is ``2\\sqrt{2}`` the same as ``\\sqrt{8}``?) is not decided here but in `llmrl.envs.llm.math`.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from itertools import islice

from llmrl.envs.llm.answers.blocks import last_boxed
from llmrl.errors import DataError

__all__ = ["normalize_answer", "reference_answer"]

_FRACTION_DIGITS = 100  # a longer numerator or denominator is compared as text

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d*+)?+|\.\d++)"
_NUMBER = re.compile(
    rf"(?<![\w/.])(?P<sign>[-+]?)(?:(?P<whole>\d++)\s+(?P<upper>\d++)/(?P<lower>\d++)"
    rf"|(?P<number>{_DECIMAL})(?:\s*/\s*(?P<divisor>{_DECIMAL}))?+)"
    r"(?!\d|\.\d|\s*/\s*[\d.]|[eE][-+]?\d)"
)

# LaTeX, in the order in which it is taken away.
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
    """The form in which two answers are compared: the number, where the text has exactly one.

    Currency and percent signs, units, thousands separators, LaTeX around a number and trailing zeros do not matter;
    fractions and mixed numbers are numbers; after an equals sign only what follows it counts. Without a single number
    it is the text itself, in lower case.

    >>> [normalize_answer(t) for t in ("1,234", "$120.00", "100%", ".5", "36 snakes", "\\\\boxed{36}", "6*6 = 36.")]
    ['1234', '120', '100', '0.5', '36', '36', '36']
    >>> [normalize_answer(t) for t in ("1/2", "\\\\frac{1}{3}", "1 1/2 cups", "2/6", "- 5")]
    ['0.5', '1/3', '1.5', '1/3', '-5']
    """
    plain = _plain(text)
    numbers = list(islice(_NUMBER.finditer(plain), 2))
    if len(numbers) == 1 and "^" not in plain and (value := _canonical(numbers[0])) is not None:
        return value
    return " ".join(plain.lower().rstrip(".").split())


@lru_cache(maxsize=65536)
def reference_answer(text: str, row: int | None = None, who: str = "GSM8KRewardParser", of: str = "batch") -> str:
    """The reference in compared form: what follows ``####``, or the whole text where it is one answer by itself.

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
    text = _JOINED.sub("", _EQUALS.split(text)[-1].translate(_SIGNS))
    text = " ".join(text.split())
    if not text.isascii():
        text = "".join(map(_ascii_digit, text))
    for _ in range(3):  # nested ones
        text = _SPACES.sub(" ", _WRAPPED.sub(r" \1 ", text))
    text = _FRAC.sub(_as_quotient, text)
    text = _NOTHING.sub("", text)
    text = _UNIT_POWER.sub(lambda match: match[0].removesuffix(match[1]), text)
    text = text.replace("*", " ").replace("\\", " ")
    text = re.sub(r"(?<=[-+])\s*[$€£¥₹]\s*", "", text.strip())
    text = _CURRENCY.sub(" ", text).strip()
    return re.sub(r"^-\s+(?=[\d.])", "-", text)


def _ascii_digit(char: str) -> str:
    if char in "²³":
        return f"^{unicodedata.digit(char)}"
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if (value := unicodedata.normalize("NFKC", char)) != char and "\N{FRACTION SLASH}" in value:  # one half and others
        return " " + value.replace("\N{FRACTION SLASH}", "/")
    return "/" if char == "\N{FRACTION SLASH}" else char


def _as_quotient(match: re.Match[str]) -> str:
    digit, upper, lower, short_upper, short_lower = match.groups()
    quotient = f"{upper or short_upper or ''}/{lower or short_lower or ''}"
    return f"{digit} {quotient}" if digit else quotient


def _canonical(match: re.Match[str]) -> str | None:
    """The number as a decimal, or as a fraction in lowest terms where it has no end as a decimal."""
    sign = "-" if match["sign"] == "-" else ""
    if match["whole"] is None and match["divisor"] is None:
        value = _decimal(match["number"])  # on strings, so that no number of digits is too many
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
    places, rest = 0, value.denominator
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        places = max(places, power)
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    digits = str(value.numerator * 10**places // value.denominator).rjust(places + 1, "0")
    return _decimal(f"{digits[: len(digits) - places]}.{digits[len(digits) - places :]}")
