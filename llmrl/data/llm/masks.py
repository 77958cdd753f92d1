"""Which characters, and then which tokens, the assistant wrote: pure functions on texts, spans and encodings.

A span is a half-open pair of positions. Spans are found from what the template does, never by searching for the
answer's text and never from token values; rendering and tokenising are left to `llmrl.data.llm.codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch import Tensor

Span = tuple[int, int]


def end_span(text: str, span: Span, end_of_turn: str, *, include: bool) -> Span:
    """Moves the end of a character span to just after (``include``) or just before the end-of-turn text.

    Templates close their generation block before the marker, after it, or after the newline that follows it: all three
    give the same span here.
    """
    start, end = span
    if not end_of_turn:
        return span
    if text.startswith(end_of_turn, end):
        return start, end + len(end_of_turn) * include
    inside = text.rfind(end_of_turn, start, end)
    if inside >= 0 and not text[inside + len(end_of_turn) : end].strip():
        return start, inside + len(end_of_turn) * include
    return span


def token_span(encoding: Encoding, span: Span, text_length: int) -> Span:
    """The tokens whose first character lies in a character span.

    A token that begins before the span and reaches into it is left out: no generation could have drawn it there.
    """
    return _first_token_from(encoding, span[0], text_length), _first_token_from(encoding, span[1], text_length)


def _first_token_from(encoding: Encoding, position: int, text_length: int) -> int:
    """Index of the first token that begins at ``position`` or later."""
    for char in range(position, text_length):  # one step, but for characters that belong to no token
        token = encoding.char_to_token(char)
        if token is None:
            continue
        if char > position or encoding.token_to_chars(token)[0] >= position:
            return token
        while token < len(encoding) and encoding.token_to_chars(token)[0] < position:
            token += 1
        return token
    return len(encoding)


def common_prefix_length(first: str, second: str) -> int:
    """How many leading characters two texts share."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # halving: comparing slices is faster than comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def rows_to_tensors(rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Lists of ids -> int64[T_i]. One buffer is filled and then cut, which is faster than one tensor per list."""
    if not rows:
        return []
    lengths = [len(row) for row in rows]
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(lengths))
    return [
        row.clone() for row in torch.from_numpy(flat).split(lengths)
    ]  # a view would be pickled with its whole buffer


def spans_to_masks(spans: Sequence[Sequence[Span]], lengths: Sequence[int]) -> list[Tensor]:
    """Token spans per row -> bool[T_i], True inside the spans."""
    if not lengths:
        return []
    flat = np.zeros(sum(lengths), dtype=np.bool_)
    offset = 0
    for row, length in zip(spans, lengths, strict=True):
        for start, end in row:
            flat[offset + start : offset + end] = True
        offset += length
    return [row.clone() for row in torch.from_numpy(flat).split(list(lengths))]
