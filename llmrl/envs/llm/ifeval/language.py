"""Words, sentences, capital words and the language of a text, counted as the public definitions of IFEval count them.

The public scorer leaves the four to NLTK and langdetect. Here words and capital words follow the same rules by regular
expressions, sentences follow those of the Punkt algorithm with a short list of abbreviations, and the language comes
from langdetect (the ``ifeval`` extra) with a fixed seed.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from llmrl.optional import require

__all__ = ["count_capital_words", "count_sentences", "count_words", "is_language"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A period after one of these ends no sentence, whatever follows,
_TITLES = _words("mr mrs ms dr prof st gen gov sen rep capt lt col sgt maj rev hon messrs mt")
# and after one of these only where a word follows that begins sentences.
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
    """Runs of letters, digits and underscores.

    >>> count_words("It's a well-known fact.")
    6
    """
    return len(re.findall(r"\w+", text))


def count_sentences(text: str) -> int:
    """Sentences: what ends in . ? or ! before a space, unless the period belongs to an abbreviation or an initial.

    >>> count_sentences("Dr. J. Smith paid $3.50 at 5 p.m. on Monday! Really? Yes...")
    3
    """
    words = text.split()
    if not words:
        return 0
    # As Punkt has it, the asterisk after "*The end.*" is a sentence of its own.
    extra = _REST.search(words[-1]) is not None
    return 1 + extra + sum(_ends(word, following) for word, following in pairwise(words))


def count_capital_words(text: str) -> int:
    """Words without a lower-case letter; contractions count as two, as in the Penn Treebank.

    >>> count_capital_words("NASA's ROCKET DIDN'T fly: A-OK, I said.")
    5
    """
    text = _ENDING.sub(" ", _CLITIC.sub(r" \1", _SPLIT.sub(" ", text)))
    return sum(token.isupper() for token in text.split())


@lru_cache(maxsize=64)  # the variants of one response, for a few checks; responses may be long
def is_language(text: str, code: str) -> bool:
    """Whether the text is in the language with this ISO 639-1 code; a text without any letters is in every language.

    Raises  MissingDependencyError without langdetect
    """
    # To langdetect what is no letter is a space. Done here, variants that differ in asterisks are looked at once.
    # But it knows addresses, and leaves them out.
    detected = _detected(text if "@" in text or "://" in text else _NO_LETTER.sub(" ", text))
    return detected is None or detected == code


@lru_cache(maxsize=64)
def _detected(text: str) -> str | None:
    langdetect = require("langdetect", extra="ifeval", used_by="IFEval's language instructions")
    detector = _factory().create()
    detector.append(text)
    try:
        return detector.detect()
    except langdetect.LangDetectException:  # nothing in it to go by
        return None


@cache
def _factory() -> Any:
    module = require("langdetect.detector_factory", extra="ifeval", used_by="IFEval's language instructions")
    factory = module.DetectorFactory()  # one of our own: the seed of the shared one is the user's
    factory.load_profile(module.PROFILES_DIRECTORY)
    factory.seed = 0
    return factory


def _ends(word: str, following: str) -> bool:
    """Whether a sentence ends between two words."""
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
    return not (stem.isdigit() and following[:1].islower())  # an ordinal: on the 5. of May
