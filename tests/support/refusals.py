"""Tables of calls that must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refusals(*cases: tuple[type[Exception], str, Callable[[], object]]) -> Callable[..., None]:
    """A test of calls that raise: each case has the class of the error, words of its message, and the call."""

    @pytest.mark.parametrize(("error", "words", "call"), cases)
    def test(error: type[Exception], words: str, call: Callable[[], object]) -> None:
        with pytest.raises(error, match=words):
            call()

    return test
