"""Makes untrusted text printable: a terminal shows its control and format characters and does not obey them."""

from __future__ import annotations

import re
import unicodedata


def printable(text: str) -> str:
    """The text with control and format characters escaped, so that a terminal shows and does not obey them.

    >>> print(printable("\\x1b[2J \\u202eabc"))
    \\x1b[2J \\u202eabc
    """
    return re.sub(r"[^\n\t -~]", lambda match: _escaped(match[0]), text)


def _escaped(letter: str) -> str:
    hidden = unicodedata.category(letter) in ("Cc", "Cf", "Cs")
    return letter.encode("unicode_escape").decode() if hidden else letter
