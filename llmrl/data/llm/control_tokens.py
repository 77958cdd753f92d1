"""Keeps control tokens that are spelled out inside messages plain text: no user, tool or model can open a turn.

Before a message reaches the template, every special token written in it is replaced by one private-use character, its
stand-in. When the text is tokenised the two change places: a copy of the tokenizer knows the stand-ins as the control
tokens, and the quoted marker is plain text to it. The ids decode to what was written, and none of them is a control id.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import AddedToken

from llmrl.data.llm.templates import Message
from llmrl.errors import TemplateError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_FIRST_STAND_IN = 0xF0000  # supplementary private-use plane A: no text that means anything uses it


class ControlTokens:
    """The special tokens of one tokenizer, and the escape that keeps them out of messages.

    ``markers`` is the structure of the template. A marker that is not a special token of this tokenizer cannot be
    escaped: a quoted one could not be told from a real one. So a message that holds it is refused, unless the assistant
    wrote it: then it is part of an answer, and no other turn can begin there.
    ``forbidden`` is text that must not be in any message: an end-of-turn marker that is not a token of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: Sequence[str] = ()) -> None:
        self.forbidden = ""
        self._tokenizer = tokenizer
        added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        known = {*added.values(), *tokenizer.all_special_tokens} - {""}
        self._ids = {*added, *tokenizer.all_special_ids}
        ordered = sorted(known, key=lambda marker: (-len(marker), marker))  # a marker may begin with another one
        self._stand_ins = {marker: chr(_FIRST_STAND_IN + index) for index, marker in enumerate(ordered)}
        self._markers = {stand_in: marker for marker, stand_in in self._stand_ins.items()}
        self._structure = tuple(marker for marker in markers if marker not in self._stand_ins)
        # a text without any of these holds no marker
        self._heads = sorted({marker[:3] for marker in (*ordered, *self._structure)})
        self._find_markers = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._find_stand_ins = re.compile(f"([{''.join(self._markers)}])" if ordered else r"(?!)")
        self._find_any = re.compile(f"{self._find_markers.pattern}|{self._find_stand_ins.pattern}")

    def first(self, text: str) -> tuple[int, int] | None:
        """The span of the first control token in a text; None if there is none."""
        match = self._find_markers.search(text)
        return match.span() if match else None

    def escape(self, chats: Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
        """Conversations whose strings spell no control token; the same objects where none did.

        Raises  TemplateError naming a message that is not a mapping, or holds text that cannot be escaped
        """
        if not self._may_hold_markers(chats):
            return chats
        return [
            [self._escape_message(message, f"message {n} of conversation {row}") for n, message in enumerate(chat)]
            for row, chat in enumerate(chats)
        ]

    def _escape_message(self, message: Message, where: str) -> Message:
        if self._structure and message.get("role") != "assistant":
            for text in _strings(message):
                for marker in self._structure:
                    if marker in text:
                        raise TemplateError(
                            f"ControlTokens: a message must not hold the template's own markers: {where} holds "
                            f"{marker!r}, which its tokenizer cannot tell from a real one; remove it, or add it to the "
                            "tokenizer as a special token."
                        )
        return self.escape_value(message, where)

    def escape_value(self, value: Any, where: str) -> Any:
        """The same for a JSON-like value; ``where`` names it in errors."""
        if isinstance(value, Mapping):
            return {self.escape_value(key, where): self.escape_value(item, where) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_value(item, where) for item in value]
        if not isinstance(value, str):
            return value
        if self.forbidden and self.forbidden in value:
            raise TemplateError(
                f"ControlTokens: a message must not hold the end-of-turn text: {where} holds {self.forbidden!r}, which "
                "its tokenizer cannot tell from the real one; remove it, or add it to the tokenizer as a special token."
            )
        if not self._find_markers.search(value):
            return value
        if self._find_stand_ins.search(value):
            raise TemplateError(
                f"ControlTokens: a message must not hold control tokens and private-use characters at once: {where} "
                "does; remove one of them."
            )
        return self._find_markers.sub(lambda match: self._stand_ins[match.group()], value)

    def quotes(self, text: str) -> bool:
        """True for a text that holds stand-ins, and so has to be encoded by `encode_quoting`."""
        return not text.isascii() and self._find_stand_ins.search(text) is not None

    def encode_quoting(self, texts: Sequence[str]) -> list[tuple[list[int], Encoding, Callable[[int], int], int]]:
        """Encodes escaped texts that hold stand-ins, in one call.

        Returns  per text its ids, the encoding of the text that was tokenised, a function from positions of the escaped
                 text to those of that one, and its length
        Raises   TemplateError if the tokenizer has no plain ids for a marker that a message quotes
        """
        tokenizer, real_ids = self._quoting
        swapped = [self._swapped(text) for text in texts]
        encodings = tokenizer.encode_batch([text for text, _ in swapped], add_special_tokens=False)
        rows = []
        for (text, place), encoding in zip(swapped, encodings, strict=True):
            if not self._ids.isdisjoint(set(encoding.ids) - {self._tokenizer.unk_token_id}):
                held = sorted({self._markers[mark] for mark in self._find_stand_ins.findall(texts[len(rows)])})
                raise TemplateError(
                    f"ControlTokens: a message holds {' and '.join(held)}, which {type(self._tokenizer).__name__} "
                    "cannot encode as ordinary text; remove it from the message."
                )
            rows.append(([real_ids.get(index, index) for index in encoding.ids], encoding, place, len(text)))
        return rows

    @cached_property
    def _quoting(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer to which markers are plain text and stand-ins control tokens, and the real ids of those."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                "ControlTokens: quoted control tokens need a fast tokenizer: got "
                f"{type(self._tokenizer).__name__}; remove them from the messages."
            )
        tokenizer = type(backend).from_str(backend.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = {str(token): token for token in self._tokenizer.added_tokens_decoder.values()}
        for marker, stand_in in self._stand_ins.items():
            like = added.get(marker, AddedToken(marker, normalized=False))
            sides = {name: getattr(like, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            tokenizer.add_tokens([AddedToken(stand_in, special=False, **sides)])
        tokenizer.encode_special_tokens = True
        convert = self._tokenizer.convert_tokens_to_ids
        return tokenizer, {tokenizer.token_to_id(mark): convert(marker) for mark, marker in self._markers.items()}

    def _swapped(self, text: str) -> tuple[str, Callable[[int], int]]:
        """The text with markers and stand-ins exchanged, and a function from its positions to those of the new text."""
        parts, places, moved, at = [], [0], [0], 0
        for match in self._find_any.finditer(text):
            found = match.group()
            parts += [text[at : match.start()], self._stand_ins.get(found) or self._markers[found]]
            at = match.end()
            places.append(at)
            moved.append(moved[-1] + len(parts[-2]) + len(parts[-1]))

        def place(position: int) -> int:
            before = bisect_right(places, position) - 1
            return moved[before] + position - places[before]

        return "".join([*parts, text[at:]]), place

    def _may_hold_markers(self, chats: Sequence[Sequence[Message]]) -> bool:
        """A quick check of everything at once: most batches hold no marker."""
        strings: list[str] = []
        for row, chat in enumerate(chats):
            for index, message in enumerate(chat):
                if not isinstance(message, Mapping):
                    raise TemplateError(
                        f"ControlTokens: a message must be a mapping with 'role' and 'content': got "
                        f"{type(message).__name__} for message {index} of conversation {row}."
                    )
                for value in message.values():
                    if type(value) is str:
                        strings.append(value)
                    else:
                        strings.extend(_strings(value))
        everything = "\0".join(strings)
        return any(head in everything for head in (*self._heads, self.forbidden) if head)


def _strings(value: Any) -> Iterable[str]:
    """Every string inside a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
