"""What a template writes around the contents of one sequence of roles: finds contents in a text without another render.

Pure strings: which template, and how a skeleton is made, is known to `llmrl.data.llm.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.data.llm.masks import Span


def only_contents(chats: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether every message is a role and a content, as nearly all are."""
    return all(len(message) == 2 for chat in chats for message in chat)


class Skeleton:
    """What a template writes around the contents of one sequence of roles."""

    __slots__ = ("_leads", "_pieces", "_trails", "_turns")

    def __init__(self, pieces: list[str], turns: list[int], leads: list[int], trails: list[int]) -> None:
        self._pieces = pieces  # one more than messages
        self._turns = turns  # which messages are the assistant's
        self._leads = leads  # characters of the span before the content
        self._trails = trails  # and after it

    def spans(self, contents: list[str], text: str) -> list[Span] | None:
        """The assistant's spans if ``text`` is exactly the contents in the skeleton, else None."""
        parts = [self._pieces[0]]
        for content, piece in zip(contents, self._pieces[1:], strict=True):
            parts += (content, piece)
        if "".join(parts) != text:
            return None
        place, places = 0, []
        for part in parts:
            places.append(place)
            place += len(part)
        return [
            (places[2 * turn + 1] - lead, places[2 * turn + 2] + trail)
            for turn, lead, trail in zip(self._turns, self._leads, self._trails, strict=True)
        ]
