"""The assistant's part of a rendered conversation: character spans, token spans, and the masks made of them.

A span is a half-open pair of positions, one per assistant message. Spans are derived from what the template does, never
by searching for the answer's text and never from token values. The texts are escaped: no message contains a control
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from llmrl.data.llm.template_text import REFUSALS
from llmrl.data.llm.templates import Chat, ChatTemplate, Message, Tools
from llmrl.errors import TemplateError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch import Tensor

Span = tuple[int, int]

STAND_IN = 0x100000  # private-use plane B: marks the place of a content in a skeleton, or in a probe
_MAX_SKELETONS = 512


class SpanFinder:
    """Finds the assistant's spans in the output of one template with one tokenizer's special tokens.

    Reads  write        `render` with the template and its variables
           end_of_turn  the text after an answer
           end_at       its position in a conversation that ends with an answer, from a position on; None if it is a
                        control token, which no content contains

    Three ways are tried in this order: the template's text around stand-in contents (its skeleton), which needs no
    further rendering; the template's generation blocks; rendering what precedes a turn.
    """

    def __init__(
        self,
        template: ChatTemplate,
        write: Callable[..., Any],
        end_of_turn: str,
        end_at: Callable[[str, int], int] | None,
    ) -> None:
        self._template = template
        self._write = write
        self._end_of_turn = end_of_turn
        self._end_at = end_at
        self._skeletons: dict[tuple[str, ...], _Skeleton | None] = {}

    def find(
        self,
        chats: Sequence[Chat],
        texts: Sequence[str],
        blocks: Sequence[list[Span]] | None,
        tools: Tools | None,
        *,
        add_generation_prompt: bool,
    ) -> list[list[Span]]:
        """Character spans per conversation; ``blocks`` are the generation blocks of the texts if they are known.

        Raises  TemplateError naming the conversation and the message whose span cannot be found
        """
        skeletons = self._skeletons if tools is None else {}  # the text of tools is part of a skeleton
        spans = []
        for row, (chat, text) in enumerate(zip(chats, texts, strict=True)):
            if blocks is not None:
                found = self._from_blocks(chat, row, tools, blocks[row])
            else:
                found = self._from_skeleton(chat, text, skeletons, add_generation_prompt, tools)
            if found is None and self._template.marks_generation:
                found = self._from_blocks(chat, row, tools)
            elif found is None:
                found = self._from_prefixes(chat, text, row, tools)
            spans.append(found)
        return spans

    def _from_skeleton(
        self,
        chat: Chat,
        text: str,
        skeletons: dict[tuple[str, ...], _Skeleton | None],
        add_generation_prompt: bool,
        tools: Tools | None,
    ) -> list[Span] | None:
        """Spans by comparison with the same roles around stand-in contents; None if the texts do not match."""
        if not only_contents([chat]):
            return None
        try:
            contents = [message["content"] for message in chat]
            roles = (*[message["role"] for message in chat], "+" if add_generation_prompt else "")
        except KeyError:
            return None
        if roles not in skeletons:
            if len(skeletons) >= _MAX_SKELETONS:  # bounds the memory; skeletons in use are soon built again
                skeletons.clear()
            skeletons[roles] = self._skeleton(roles, tools)
        skeleton = skeletons[roles]
        if skeleton is None or not all(isinstance(content, str) for content in contents):
            return None
        # Comparing the whole text proves the spans right. Most templates write contents unchanged, some trim them.
        found = skeleton.spans(contents, text)
        return skeleton.spans([content.strip() for content in contents], text) if found is None else found

    def _skeleton(self, roles: tuple[str, ...], tools: Tools | None) -> _Skeleton | None:
        """The text around contents; None if the template does more than write them in their order."""
        *roles, prompt = roles
        stand_ins = [chr(STAND_IN + index) for index in range(len(roles))]
        chat = [{"role": role, "content": stand_in} for role, stand_in in zip(roles, stand_ins, strict=True)]
        try:
            text = self._render(chat, bool(prompt), tools)
            places = [text.index(stand_in) for stand_in in stand_ins]
            # A content that is moved, repeated or dropped cannot be found by position.
            if places != sorted(places) or any(text.count(stand_in) != 1 for stand_in in stand_ins):
                return None
            if self._template.marks_generation:
                spans = self._from_blocks(chat, 0, tools)
            else:
                spans = self._from_prefixes(chat, text, 0, tools)
        except REFUSALS:
            return None
        turns = [index for index, role in enumerate(roles) if role == "assistant"]
        margins = []
        for turn, (start, end) in zip(turns, spans, strict=True):
            # A span may contain more than the content, such as "<think>" before it: the margins record that.
            if not start <= places[turn] < end:
                return None
            margins.append((turn, places[turn] - start, end - places[turn] - 1))
        pieces = [text[left + 1 : right] for left, right in pairwise([-1, *places, len(text)])]
        return _Skeleton(pieces, margins)

    def _from_blocks(self, chat: Chat, row: int, tools: Tools | None, blocks: list[Span] | None = None) -> list[Span]:
        """Spans of the template's generation blocks, one per assistant message."""
        turns = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
        if blocks is None:
            blocks = self._blocks(chat, tools)
        if len(blocks) == len(turns):
            return blocks
        spans: list[Span] = []
        for turn in turns:  # a message has several blocks or none: find those that each one adds
            own = self._blocks(chat[: turn + 1], tools)
            new = [block for block in own if not spans or block[0] >= spans[-1][1]]
            if not new:
                raise TemplateError(
                    f"ChatCodec: each assistant message must lie in a generation block of template "
                    f"{self._template.name!r}: message {turn} of conversation {row} does not."
                )
            spans.append((new[0][0], new[-1][1]))
        return spans

    def _from_prefixes(self, chat: Chat, text: str, row: int, tools: Tools | None) -> list[Span]:
        """Spans by rendering what came before: a turn starts where its generation prompt ends in the whole text.

        It ends at the first end-of-turn marker after that (contents are escaped and contain none) or, in a template
        without one, where the conversation up to and including the turn ends.
        """
        spans: list[Span] = []
        before = 0
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            start = self._start_from_prefix(chat, turn, text, row, tools)
            # Contents contain no control token, so the first one ends the turn. They may contain any other marker:
            # then only rendering the conversation up to this turn shows where it ends.
            if self._end_at is None:
                end = text.find(self._end_of_turn, start)
                if end < 0:
                    raise TemplateError(self._no_span(turn, row, f"no {self._end_of_turn!r} follows it"))
            else:
                upto = self._render(chat[: turn + 1], False, tools)
                if not text.startswith(upto):
                    raise TemplateError(self._no_span(turn, row, "its text changes when later messages are added"))
                end = self._end_at(upto, start)
            if spans and start < spans[-1][1]:
                raise TemplateError(
                    self._no_span(before, row, f"another turn begins before {self._end_of_turn!r} ends it")
                )
            spans.append((start, end))
            before = turn
        return spans

    def _start_from_prefix(self, chat: Chat, turn: int, text: str, row: int, tools: Tools | None) -> int:
        """The end of a turn's generation prompt in the text, or of the part of the prompt that the text has."""
        asked, answer = chr(STAND_IN), chr(STAND_IN + 1)
        try:
            prompt = self._render(chat[:turn], True, tools)
            if text.startswith(prompt):
                return len(prompt)
            # The prompt may have more than the text, such as an opened thought, or keep earlier thoughts that the text
            # drops. What follows the message before the turn is compared then. The answer itself cannot be compared:
            # "<tool_call>" begins like an opened "<think>".
            past = _with_content(chat[:turn], turn - 1, asked)
            whole = [*past, *chat[turn:]]
            probed = _with_content(whole, turn, answer)
            texts = [self._render(whole, False, tools), self._render(probed, False, tools)]
            texts += [self._render(past, asks, tools) for asks in (True, False)]
        except REFUSALS as error:
            raise TemplateError(self._no_span(turn, row, "the messages before it cannot be rendered alone")) from error
        own, other, prompt, before = (rendered.partition(asked)[2] for rendered in texts)
        header = other[: common_prefix_length(prompt, other)]
        # A header shorter than what the message before writes would put the start of the turn inside that message.
        found = all(rendered.count(asked) == 1 for rendered in texts) and len(header) >= len(before)
        if not found or not text.endswith(own) or not own.startswith(header):
            raise TemplateError(self._no_span(turn, row, "the text before it changes when it is added"))
        return len(text) - len(own) + len(header)

    def _no_span(self, turn: int, row: int, reason: str) -> str:
        return (
            f"ChatCodec: the text of each assistant message must be found in the output of template "
            f"{self._template.name!r}: message {turn} of conversation {row} is not, {reason}; put "
            f"{{% generation %}} blocks in it."
        )

    def _blocks(self, chat: Chat, tools: Tools | None) -> list[Span]:
        return self._write([chat], tools, return_assistant_tokens_mask=True)[1][0]

    def _render(self, chat: Chat, add_generation_prompt: bool, tools: Tools | None) -> str:
        return self._write([chat], tools, add_generation_prompt=add_generation_prompt)[0][0]


def _with_content(chat: Chat, index: int, content: str) -> list[Message]:
    return [{**message, "content": content} if n == index else message for n, message in enumerate(chat)]


class _Skeleton(NamedTuple):
    """The text that a template writes around the contents of one sequence of roles."""

    pieces: list[str]  # one more than messages
    margins: list[tuple[int, int, int]]  # per answer: its index, characters of the span before and after the content

    def spans(self, contents: list[str], text: str) -> list[Span] | None:
        """The assistant's spans if ``text`` is exactly the contents in the skeleton, else None."""
        parts = [""] * (2 * len(contents) + 1)
        parts[::2], parts[1::2] = self.pieces, contents
        if "".join(parts) != text:
            return None
        places = [0, *accumulate(map(len, parts))]
        return [(places[2 * turn + 1] - lead, places[2 * turn + 2] + trail) for turn, lead, trail in self.margins]


def only_contents(chats: Sequence[Chat]) -> bool:
    """True if every message is a role and a content, as nearly all are."""
    return all(len(message) == 2 for chat in chats for message in chat)


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
    # Inside the span, the marker ends the turn only if nothing but white space follows.
    inside = text.rfind(end_of_turn, start, end)
    if inside >= 0 and not text[inside + len(end_of_turn) : end].strip():
        return start, inside + len(end_of_turn) * include
    return span


def token_span(encoding: Encoding, span: Span, text_length: int, *, overlapping: bool = False) -> Span:
    """The tokens whose first character lies in a character span.

    A token that begins before the span and reaches into it is left out: no generation could have sampled it there.
    ``overlapping`` includes it, as the Transformers library does.
    """
    start, end = (_first_token_from(encoding, position, text_length) for position in span)
    while overlapping and start and encoding.token_to_chars(start - 1)[1] > span[0]:
        start -= 1
    return start, end


def _first_token_from(encoding: Encoding, position: int, text_length: int) -> int:
    for char in range(position, text_length):  # one step, except for characters without a token
        token = encoding.char_to_token(char)
        if token is None:
            continue
        if char > position or encoding.token_to_chars(token)[0] >= position:
            return token
        # This token begins before the position, as may others with bytes of the same character: skip them all.
        while token < len(encoding) and encoding.token_to_chars(token)[0] < position:
            token += 1
        return token
    return len(encoding)


def common_prefix_length(first: str, second: str) -> int:
    """The number of leading characters that two texts share."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # bisection: comparing slices is faster than comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def rows_to_tensors(rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Lists of ids -> int64[T_i]. One buffer is filled and then cut, which is faster than one tensor per list."""
    lengths = [len(row) for row in rows]
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(lengths))
    # copies: a view would be pickled with its whole buffer
    return [row.clone() for row in torch.from_numpy(flat).split(lengths)]


def spans_to_masks(spans: Sequence[Sequence[Span]], lengths: Sequence[int]) -> list[Tensor]:
    """Token spans per row -> bool[T_i], True inside the spans."""
    flat = np.zeros(sum(lengths), dtype=np.bool_)
    offset = 0
    for row, length in zip(spans, lengths, strict=True):
        for start, end in row:
            flat[offset + start : offset + end] = True
        offset += length
    return [row.clone() for row in torch.from_numpy(flat).split(list(lengths))]
