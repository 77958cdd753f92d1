"""Which characters of a rendered conversation the assistant wrote: one span per assistant message.

Three ways, in this order: the same roles around stand-ins for the contents, which needs no further rendering; the
template's generation blocks; rendering what came before a turn. Texts are escaped by then: no message can spell a
control token. Tokens are the work of `llmrl.data.llm.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from llmrl.data.llm.masks import Span, common_prefix_length
from llmrl.data.llm.span_cache import Skeleton
from llmrl.data.llm.template_text import REFUSALS, Chat, Tools, rendered
from llmrl.data.llm.templates import ChatTemplate
from llmrl.errors import TemplateError

__all__ = ["SpanFinder"]

_CONTENT_STAND_IN = 0x100000  # private-use plane B: marks the place of a content in a skeleton
_MAX_SKELETONS = 512


class SpanFinder:
    """Finds the assistant's spans in what one template writes with one tokenizer's special tokens.

    Reads  variables       what the template is rendered with
           end_of_turn     what follows an answer, and ``end_is_control``, whether that is a control token
    """

    def __init__(
        self, template: ChatTemplate, variables: Mapping[str, Any], end_of_turn: str, *, end_is_control: bool
    ) -> None:
        self._template = template
        self._marks_generation = template.marks_generation
        self._kwargs = variables
        self._end_of_turn = end_of_turn
        self._end_is_control = end_is_control
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}

    def find(
        self,
        chats: Sequence[Chat],
        texts: Sequence[str],
        blocks: Sequence[list[Span] | None],
        tools: Tools | None,
        *,
        add_generation_prompt: bool,
    ) -> list[list[Span]]:
        """Half-open character spans per conversation; ``blocks`` are its generation blocks where they are known.

        Raises  TemplateError naming the conversation and the message whose span cannot be found
        """
        skeletons = self._skeletons if tools is None else {}
        spans = []
        for row, (chat, text) in enumerate(zip(chats, texts, strict=True)):
            found = None
            if blocks[row] is None:
                found = self._from_skeleton(chat, text, skeletons, add_generation_prompt, tools)
            if found is None and self._marks_generation:
                found = self._from_blocks(chat, row, tools, blocks[row])
            elif found is None:
                found = self._from_prefixes(chat, text, row, tools)
            spans.append(found)
        return spans

    def _from_skeleton(
        self,
        chat: Chat,
        text: str,
        skeletons: dict[tuple[str, ...], Skeleton | None],
        add_generation_prompt: bool,
        tools: Tools | None,
    ) -> list[Span] | None:
        """Spans by comparison with the same roles around stand-in contents; None if the template did anything else."""
        try:
            contents = [message["content"] for message in chat if len(message) == 2]
            roles = (*[message["role"] for message in chat], "+" if add_generation_prompt else "")
        except KeyError:
            return None
        if len(contents) != len(chat):
            return None
        if roles not in skeletons:
            if len(skeletons) >= _MAX_SKELETONS:
                skeletons.clear()
            skeletons[roles] = self._skeleton(roles, tools)
        skeleton = skeletons[roles]
        if skeleton is None:
            return None
        try:
            found = skeleton.spans(contents, text)
            return skeleton.spans([content.strip() for content in contents], text) if found is None else found
        except (AttributeError, TypeError):  # a content that is no string
            return None

    def _skeleton(self, roles: tuple[str, ...], tools: Tools | None) -> Skeleton | None:
        """What the template writes around contents; None if that is not simply in their order."""
        *roles, prompt = roles
        stand_ins = [chr(_CONTENT_STAND_IN + index) for index in range(len(roles))]
        chat = [{"role": role, "content": stand_in} for role, stand_in in zip(roles, stand_ins, strict=True)]
        try:
            text = self._render(chat, bool(prompt), tools)
            places = [text.index(stand_in) for stand_in in stand_ins]
            if places != sorted(places) or any(text.count(stand_in) != 1 for stand_in in stand_ins):
                return None
            spans = self._from_blocks(chat, 0, tools) if self._marks_generation else None
            if spans is None:
                spans = self._from_prefixes(chat, text, 0, tools)
        except REFUSALS:
            return None
        turns = [index for index, role in enumerate(roles) if role == "assistant"]
        leads, trails = [], []
        for turn, (start, end) in zip(turns, spans, strict=True):
            if not start <= places[turn] < end:
                return None
            leads.append(places[turn] - start)
            trails.append(end - places[turn] - 1)
        cuts = [-1, *places, len(text)]
        pieces = [text[left + 1 : right] for left, right in pairwise(cuts)]
        return Skeleton(pieces, turns, leads, trails)

    def _from_blocks(self, chat: Chat, row: int, tools: Tools | None, blocks: list[Span] | None = None) -> list[Span]:
        """Spans of the template's generation blocks, one per assistant message."""
        turns = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
        if blocks is None:
            blocks = self._blocks(chat, tools)
        if len(blocks) == len(turns):
            return blocks
        spans: list[Span] = []
        for turn in turns:  # several blocks, or none, for a message: see what each message adds
            own = self._blocks(chat[: turn + 1], tools)
            new = [block for block in own if not spans or block[0] >= spans[-1][1]]
            if not new:
                raise TemplateError(
                    f"ChatCodec: each assistant message must lie in a generation block of template "
                    f"{self._template.name!r}: message {turn} of conversation {row} does not."
                )
            spans.append((new[0][0], new[-1][1]))
        return spans

    def _blocks(self, chat: Chat, tools: Tools | None) -> list[Span]:
        options = {"return_assistant_tokens_mask": True, **self._kwargs}
        return rendered([chat], tools, chat_template=self._template.jinja, **options)[1][0]

    def _from_prefixes(self, chat: Chat, text: str, row: int, tools: Tools | None) -> list[Span]:
        """Spans by rendering what came before: a turn starts where its generation prompt ends in the whole text.

        It ends at the first end-of-turn marker after that (contents hold none, they are escaped) or, in a template
        without one, where the conversation up to and including the turn ends.
        """
        spans: list[Span] = []
        before = 0
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            start = self._start_from_prefix(chat, turn, text, row, tools)
            if self._end_is_control:
                end = text.find(self._end_of_turn, start)
                if end < 0:
                    raise TemplateError(self._no_span(turn, row, f"no {self._end_of_turn!r} follows it"))
            else:
                upto = self._render(chat[: turn + 1], False, tools)
                if not text.startswith(upto):
                    raise TemplateError(self._no_span(turn, row, "its text changes when later messages are added"))
                end = len(upto[start:].rstrip()) + start
                if self._end_of_turn and text.endswith(self._end_of_turn, start, end):
                    end -= len(self._end_of_turn)
            if spans and start < spans[-1][1]:
                raise TemplateError(
                    self._no_span(before, row, f"another turn begins before {self._end_of_turn!r} ends it")
                )
            spans.append((start, end))
            before = turn
        return spans

    def _start_from_prefix(self, chat: Chat, turn: int, text: str, row: int, tools: Tools | None) -> int:
        """Where the generation prompt of a turn ends, or what the whole text has of it."""
        try:
            prompt = self._render(chat[:turn], True, tools)
            if text.startswith(prompt):
                return len(prompt)
            # A prompt that goes on (with an opened thought) where the text has none: up to what any answer follows. The
            # answer itself may begin as the prompt goes on, "<think>" and "<tool_call>" do.
            probe = {"role": "assistant", "content": chr(_CONTENT_STAND_IN)}
            other = self._render([*chat[:turn], probe], False, tools)
            before = self._render(chat[:turn], False, tools)
        except REFUSALS as error:
            raise TemplateError(self._no_span(turn, row, "the messages before it cannot be rendered alone")) from error
        header = other[: common_prefix_length(prompt, other)]
        if len(header) < len(before) or not text.startswith(header):
            raise TemplateError(self._no_span(turn, row, "the text before it changes when it is added"))
        return len(header)

    def _no_span(self, turn: int, row: int, reason: str) -> str:
        return (
            f"ChatCodec: the text of each assistant message must be found in what template {self._template.name!r} "
            f"writes: message {turn} of conversation {row} is not, {reason}; put {{% generation %}} blocks in it."
        )

    def _render(self, chat: Chat, add_generation_prompt: bool, tools: Tools | None) -> str:
        options = {"add_generation_prompt": add_generation_prompt, **self._kwargs}
        return rendered([chat], tools, chat_template=self._template.jinja, **options)[0][0]
