"""The 25 instructions of IFEval (arXiv:2311.07911): `CHECKS` maps their public names to functions of a response.

They count like the public definitions, including the limits. Every check takes time linear in the response, because a
model may repeat one character for thousands of tokens.

The public scorer uses NLTK and langdetect for words, sentences, capital words and the language of a text. Here regular
expressions apply the same rules to words and capital words, sentences follow the Punkt algorithm with a short list of
abbreviations, and the language comes from langdetect (the ``ifeval`` extra) with a fixed seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from llmrl.optional import require


def _compared(actual: int, relation: str, threshold: int) -> bool:
    """True if ``actual`` is "less than" or "at least" ``threshold``, as ``relation`` says."""
    return actual < threshold if relation == "less than" else actual >= threshold


def _first_word_of_paragraph(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True if there are ``num_paragraphs``, separated by empty lines, and the n-th begins with ``first_word``."""
    parts = response.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    # As in the public definition, n also counts the empty parts.
    if count != num_paragraphs or nth_paragraph > count or not (paragraph := parts[nth_paragraph - 1].strip()):
        return False
    word = paragraph.split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _postscript(response: str, postscript_marker: str) -> bool:
    """True if there is a postscript with this marker; ``P.S.`` and ``P.P.S`` may have a space after each period."""
    spaced = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    marker = postscript_marker.strip()
    pattern = spaced.get(marker, re.escape(marker.lower()))
    return re.search(pattern, response.lower()) is not None


def _bullets(response: str, num_bullets: int) -> bool:
    """True if exactly ``num_bullets`` lines are bullet points: they begin with one asterisk, or with a dash."""
    lines = [line.lstrip() for line in response.split("\n")]
    bullets, skip = 0, False
    for line, last in zip(lines, [*[False] * (len(lines) - 1), True], strict=True):
        bullets += line.startswith("-")
        if skip or not line.startswith("*"):
            skip = False
        elif line == "*":  # in the public definition the line after an empty bullet is its text
            bullets, skip = bullets + (not last), True
        else:
            bullets += line[1] != "*"
    return bullets == num_bullets


def _highlights(response: str, num_highlights: int) -> bool:
    """True for at least ``num_highlights`` highlights: *one asterisk* or **two** around text on one line."""
    singles = [part.strip("*") for part in re.findall(r"\*[^\n*]*\*", response)]
    doubles = [part[2:-2] for part in re.findall(r"\*\*[^\n*]*\*\*", response)]
    return sum(bool(part.strip()) for part in singles + doubles) >= num_highlights


def _json(response: str) -> bool:
    """True if the response is JSON, with or without a code fence around it."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str) -> bool:
    """True if there is a title in double angle brackets, as <<title>>."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(response: str) -> bool:
    """True if there are two different responses, separated by ******."""
    parts = response.split("******")
    given = [part.strip() for part in parts if part.strip()]
    return _filled(parts) == 2 and given[0] != given[1]


def _quotation(response: str) -> bool:
    """True if the whole response is in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == '"' == text[-1]


def _occurrences(keyword: str, response: str) -> int:
    return len(re.findall(re.escape(keyword), response, re.IGNORECASE))


def _brackets(line: str) -> int:
    """Number of bracket pairs "[...]". (A regular expression would take quadratic time if no bracket closes.)"""
    count, start = 0, line.find("[")
    while start >= 0 and (end := line.find("]", start)) >= 0:
        count, start = count + 1, line.find("[", end)
    return count


def _filled(parts: list[str]) -> int | None:
    """Number of parts with text; None if a part in the middle is empty."""
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return sum(bool(part.strip()) for part in parts)


# -- words, sentences, language ----------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A period after one of these never ends a sentence.
_TITLES = _words("mr mrs ms dr prof st gen gov sen rep capt lt col sgt maj rev hon messrs mt")
# A period after one of these ends a sentence only before a capitalised word from _STARTERS.
_ABBREVIATIONS = _words("""
    e.g i.e u.s u.k u.n u.s.a d.c n.y l.a a.m p.m a.d b.c ph.d m.d b.a m.a vs inc ltd co corp bros jr sr ave blvd jan
    feb mar apr aug sept oct nov dec mon tues wed thurs fri fig al cf ca approx
""")
_STARTERS = _words("""
    a after all also although an and another any as at because before both but by during each even every first for
    from had has have he her here his how however i if in is it its last let many meanwhile more most my no not now of
    on once one or other our over she since so some such that the their then there these they this those though through
    thus to under until we what when where which while who why with would yet you your
""")
_OPENING = "\"'*_([{\u2018\u201c"
_AFTER = ".,:;?!" + _OPENING
_CLOSING = "\"'*)]};:@"  # between the end of a sentence and the next
_REST = re.compile(r"[.?!][\"')\]}]*[*;:@][\"'*)\]};:@]*\Z")
_NO_LETTER = re.compile(r"[\x00-@\[-`{-\x7f]+")
_INITIAL = re.compile(r"[^\W\d_]")

_SPLIT = re.compile(r"[\[\](){}<>?!;@#$%&\"\u201c\u201d]|[:,](?!\d)|--|\.\.\.|``|''")
_CLITIC = re.compile(r"(?<=\w)(N'T|'(?:S|M|D|LL|RE|VE))\b")
_ENDING = re.compile(r"(?<=[^\s.])[.'](?=\s|$)")


def count_words(text: str) -> int:
    """Number of runs of letters, digits and underscores.

    >>> count_words("It's a well-known fact.")
    6
    """
    return len(re.findall(r"\w+", text))


def count_sentences(text: str) -> int:
    """Number of sentences: text that ends with . ? or ! before a space, except periods of abbreviations and initials.

    >>> count_sentences("Dr. J. Smith paid $3.50 at 5 p.m. on Monday! Really? Yes...")
    3
    """
    words = text.split()
    if not words:
        return 0
    # As in Punkt, the asterisk after "*The end.*" counts as a separate sentence.
    extra = _REST.search(words[-1]) is not None
    return 1 + extra + sum(_ends(word, following) for word, following in pairwise(words))


def count_capital_words(text: str) -> int:
    """Number of words in capitals; contractions count as two words, as in the Penn Treebank.

    >>> count_capital_words("NASA's ROCKET DIDN'T fly: A-OK, I said.")
    5
    """
    text = _ENDING.sub(" ", _CLITIC.sub(r" \1", _SPLIT.sub(" ", text)))
    return sum(token.isupper() for token in text.split())


def is_language(response: str, language: str) -> bool:
    """True if the response is in the language with this ISO 639-1 code; without any letters, True for every language.

    Raises  MissingDependencyError without langdetect
    """
    # Replaces non-letters by spaces, as langdetect does, so that variants that differ only in asterisks share a cache
    # entry. Not in texts with addresses, which langdetect must recognise in order to remove them.
    has_address = "@" in response or "://" in response
    return _detected(response if has_address else _NO_LETTER.sub(" ", response)) in (None, language)


@lru_cache(maxsize=64)  # small, because responses may be long: enough for the variants of one response
def _detected(text: str) -> str | None:
    langdetect = require("langdetect", extra="ifeval", used_by="IFEval's language instructions")
    detector = _factory().create()
    detector.append(text)
    try:
        return detector.detect()
    except langdetect.LangDetectException:  # the text has no features to detect a language from
        return None


@cache
def _factory() -> Any:
    module = require("langdetect.detector_factory", extra="ifeval", used_by="IFEval's language instructions")
    factory = module.DetectorFactory()  # not the shared one, whose seed the user may set
    factory.load_profile(module.PROFILES_DIRECTORY)
    factory.seed = 0
    return factory


def _ends(word: str, following: str) -> bool:
    core = word.rstrip(_CLOSING)
    stem = core.rstrip(".?!")
    mark = core[len(stem) :]
    if not mark or "?" in mark or "!" in mark:
        return bool(mark)
    starts = following[:1].isupper() and following.split("'")[0].rstrip(_AFTER).lower() in _STARTERS
    stem = stem.lstrip(_OPENING).lower()
    if stem in _TITLES:
        return False
    if len(mark) > 1 or stem in _ABBREVIATIONS or _INITIAL.fullmatch(stem):  # len > 1: an ellipsis
        return starts
    return not (stem.isdigit() and following[:1].islower())  # an ordinal, as in "on the 5. of May"


# Short checks are lambdas. Case is ignored in keywords and forbidden words: keywords also count inside other words,
# forbidden words only as whole words. A paragraph in the middle must not be empty.
CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda response, keywords: all(_occurrences(keyword, response) for keyword in keywords),
    "keywords:frequency": lambda response, keyword, frequency, relation: _compared(
        _occurrences(keyword.strip(), response), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation: _compared(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": is_language,
    "length_constraints:number_sentences": lambda response, num_sentences, relation: _compared(
        count_sentences(response), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda response, num_paragraphs: (
        _filled(re.split(r"\s?\*\*\*\s?", response)) == num_paragraphs
    ),
    "length_constraints:number_words": lambda response, num_words, relation: _compared(
        count_words(response), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        sum(map(_brackets, response.split("\n"))) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda response: any(
        f"My answer is {option}." in response for option in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    # Quotation marks may follow the phrase.
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: _compared(
        count_capital_words(response), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: response.isupper() and is_language(response, "en"),
    "change_case:english_lowercase": lambda response: response.islower() and is_language(response, "en"),
    "punctuation:no_comma": lambda response: "," not in response,
}
NEEDS_LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
