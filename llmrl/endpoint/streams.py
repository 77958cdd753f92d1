"""An answer while it is sampled: its ids as an engine reports them, and the part of its text that is certain.

Text becomes certain later than ids. A character may have several tokens; calls come apart from the text, and a stop
string ends it, so what may be the beginning of one waits for what follows.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from llmrl.envs.llm.tool_calls import CallFormat
from llmrl.errors import RolloutError
from llmrl.modules.llm.conversation import SampledTurn
from llmrl.modules.llm.engines.base import Hear
from llmrl.modules.llm.rendering import Renderer
from llmrl.optional import require

_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE


class Piece(NamedTuple):
    """What is new of an answer: its ``row``, texts by the names of the message's fields, ids with log-probs."""

    row: int
    texts: Mapping[str, str]
    ids: list[int]
    log_probs: list[float]


class CertainText:
    """The content of an answer, as far as it is certain: ``shown``.

    form   of calls; None: no tools were offered
    stops  strings that end the content, and are not part of it
    ends   ids that end the answer
    """

    def __init__(
        self, renderer: Renderer, form: CallFormat | None, stops: Sequence[str], ends: Collection[int]
    ) -> None:
        from tokenizers.decoders import DecodeStream

        tokenizer, codec = renderer.tokenizer, renderer.codec
        # A template that reads an answer into several fields reads it as a whole.
        self._open = tokenizer.is_fast and renderer.template.answer is None
        self._tokenizer, self._decoder = tokenizer, DecodeStream(skip_special_tokens=False)
        self._opening: Any = None
        if form is not None:
            patterns = require("regex", extra="serve", used_by="Endpoint")
            self._opening = patterns.compile(form.opening.pattern, form.opening.flags & _FLAGS)
        self._lead, self._stops, self._ends = codec.answer_lead, tuple(stops), frozenset(ends)
        self._held = (*self._stops, codec.answer_trail)
        self._text = ""
        self.shown = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that becomes certain with these next ids."""
        for token in ids:
            self._open = self._open and token not in self._ends
            if self._open:
                try:
                    self._text += self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
                except Exception:  # the bytes are not valid text
                    self._open = False
        if self._lead and not self._lead.startswith(self._text):
            self._text, self._lead = self._text.removeprefix(self._lead), ""
        if self._lead:
            return ""
        first = len(self.shown)
        new = self._text[first : self._certain(first)]
        self.shown += new
        return new

    def _certain(self, first: int) -> int:
        """The end of what is certain, not before ``first``."""
        text = self._text
        end = min([len(text), *(place for stop in self._stops if (place := text.find(stop, first)) >= 0)])
        for held in self._held:
            begun = (size for size in range(min(len(held), end - first), 0, -1) if text.endswith(held[:size], 0, end))
            end -= next(begun, 0)
        if self._opening is not None:
            if found := self._opening.search(text, first, partial=True):
                end = min(end, found.start())
            while end > first and text[end - 1].isspace():  # not part of the content if a call follows
                end -= 1
        return end


class Listener:
    """Hears of the answers to one request in the engine's threads, for any number of readers in the server's loop.

    texts       of each answer; empty: no reader wants pieces
    prompt_ids  int64[P], once they are known
    pieces      so far; a reader takes `news` before it looks at them, and then waits for it
    is_wanted   False: the engine is to end the answers
    """

    def __init__(self, texts: Sequence[CertainText] = ()) -> None:
        self.prompt_ids: Tensor | None = None
        self.pieces: list[Piece] = []
        self.is_wanted = True
        self._texts, self._ids = texts, [list[int]() for _ in texts]
        self._heard: deque[tuple[int, list[int], list[float]]] = deque()
        self._loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self._will_read = False
        self._reading = threading.Lock()

    def begin(self, prompt_ids: Tensor) -> Hear:
        """What is told of the answers to this prompt."""
        self.prompt_ids = prompt_ids
        return self._hear

    def _hear(self, row: int, ids: list[int], log_probs: list[float]) -> bool:
        if self._texts and self.is_wanted:
            self._heard.append((row, ids, log_probs))
            if not self._will_read:
                self._will_read = True
                self._loop.call_soon_threadsafe(self._read)
        return self.is_wanted

    def _read(self) -> None:
        """Makes pieces of what was heard; in the loop."""
        self._will_read = False  # first: what is heard from here on is read, or is told again
        self._make_pieces()
        self.wake()

    def _make_pieces(self) -> None:
        with self._reading:
            new: dict[int, tuple[list[int], list[float]]] = {}
            while self._heard:
                row, ids, log_probs = self._heard.popleft()
                for values, more in zip(new.setdefault(row, ([], [])), (ids, log_probs), strict=True):
                    values += more
            for row, (ids, log_probs) in new.items():
                self._ids[row] += ids
                text = self._texts[row].add(ids)
                self.pieces.append(Piece(row, {"content": text} if text else {}, ids, log_probs))

    def wake(self, *ended: object) -> None:
        """Ends the waiting of readers; in the loop."""
        self.news.set()
        self.news = asyncio.Event()

    def wake_soon(self, *ended: object) -> None:
        """The same from another thread."""
        with suppress(RuntimeError):  # the loop has ended, and with it the readers
            self._loop.call_soon_threadsafe(self.wake)

    def rest(self, turns: Sequence[SampledTurn], messages: Sequence[dict[str, Any]]) -> list[Piece]:
        """What the pieces lack of the complete answers; a message's content becomes what a reader gets of it. May be
        called in any thread, once the engine tells of nothing more.

        Raises  RolloutError if the engine sampled an answer twice, and its ids are not those that were heard of
        """
        self._make_pieces()
        found = []
        for row, (turn, message) in enumerate(zip(turns, messages, strict=True)):
            ids, heard, shown = turn.ids.tolist(), self._ids[row] if self._ids else [], ""
            if heard:
                shown = self._texts[row].shown
                if ids[: len(heard)] != heard:
                    raise RolloutError("Endpoint: an answer must have the ids of its stream: it was sampled again.")
                if not (message.get("content") or "").startswith(shown):  # invalid bytes may be decoded otherwise later
                    message["content"] = shown
            texts = {"reasoning_content": message.get("reasoning_content"), "content": message.get("content")}
            texts["content"] = (texts["content"] or "")[len(shown) :]
            more = turn.log_probs.tolist()[len(heard) :]
            found.append(Piece(row, {name: text for name, text in texts.items() if text}, ids[len(heard) :], more))
        return found
