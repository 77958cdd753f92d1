"""One tokenizer and one template: messages -> text -> ids, with the spans that the assistant wrote.

The template's text is the Transformers library's own rendering, with the tools that are given or that the first message
of a conversation declares under ``"tools"``; this file adds the spans, for templates with and
without generation blocks, and the end-of-turn text, which belongs to the assistant's span. Control tokens inside
messages are left to `llmrl.data.llm.control_tokens`, streams of ids to `llmrl.modules.llm.rendering`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import render_jinja_template

from llmrl.data.llm.control_tokens import ControlTokens
from llmrl.data.llm.masks import Span, common_prefix_length, end_span, token_span
from llmrl.data.llm.skeleton import Skeleton, only_contents
from llmrl.data.llm.templates import ChatTemplate, Message
from llmrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Message]
Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]

_CONTENT_STAND_IN = 0x100000  # private-use plane B: marks the place of a content in a skeleton
_MAX_SKELETONS = 512
_REFUSALS = (
    JinjaError,
    TypeError,
    KeyError,
    ValueError,
)  # what a template raises for a conversation that it does not do


class ChatCodec:
    """Writes conversations as one model reads them.

    Reads   tokenizer            a fast tokenizer (its ids, its special tokens, its character offsets)
            template             from ``find_template``
            include_end_of_turn  whether the end-of-turn text belongs to the assistant's span
            template_kwargs      passed to the template by name, such as ``enable_thinking``
    Raises  TemplateError if the template cannot render a user's turn and an assistant's answer

    ``end_of_turn`` is what follows the assistant's content up to its control token (``"<|im_end|>"``), ``""`` if the
    template has none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        *,
        include_end_of_turn: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.include_end_of_turn = include_end_of_turn
        self._kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._marks_generation = template.marks_generation
        self._controls = ControlTokens(tokenizer, (*template.special_tokens, *template.text_markers))
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}
        self.end_of_turn = self._find_end_of_turn()
        self.end_of_turn_ids: list[int] = self.encode([self.end_of_turn])[0] if self.end_of_turn else []
        self.end_is_control = self._controls.first_end(self.end_of_turn) is not None
        if not self.end_is_control:
            self._controls.forbidden = self.end_of_turn.strip()

    def render(
        self,
        chats: Sequence[Chat],
        *,
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
        continue_final_message: bool = False,
    ) -> list[str]:
        """The text of each conversation, escaped: to be given to :meth:`encode`."""
        chats, tools = self._controls.escape(chats), self._escaped_tools(tools)
        return self._render(chats, add_generation_prompt, tools, continue_final_message)

    def refuse_markers(self, chats: Sequence[Chat]) -> None:
        """Raises TemplateError if a message spells a control token: for those who tokenise without :meth:`encode`."""
        for row, (chat, escaped) in enumerate(zip(chats, self._controls.escape(chats), strict=True)):
            for index, (message, other) in enumerate(zip(chat, escaped, strict=True)):
                if message is not other and _differs(message, other):
                    raise TemplateError(
                        f"ChatCodec: a message must not spell control tokens where a processor tokenises it: message "
                        f"{index} of conversation {row} does; remove them."
                    )

    def render_with_spans(
        self, chats: Sequence[Chat], *, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> tuple[list[str], list[list[Span]]]:
        """The text of each conversation, escaped, and the character spans of its assistant messages.

        Raises  TemplateError naming the conversation and the message whose span cannot be found
        """
        chats, tools = self._controls.escape(chats), self._escaped_tools(tools)
        blocks: Sequence[list[Span] | None] = [None] * len(chats)
        if self._marks_generation and not add_generation_prompt and not only_contents(chats):
            texts, blocks = self._render_with_blocks(chats, tools)  # no skeleton would fit
        else:
            texts = self._render(chats, add_generation_prompt, tools)
        skeletons = self._skeletons if tools is None else {}
        spans = []
        for row, (chat, text) in enumerate(zip(chats, texts, strict=True)):
            found = None
            if blocks[row] is None:
                found = self._spans_from_skeleton(chat, text, skeletons, add_generation_prompt, tools)
            if found is None and self._marks_generation:
                found = self._spans_from_blocks(chat, row, tools, blocks[row])
            elif found is None:
                found = self._spans_from_prefixes(chat, text, row, tools)
            spans.append([end_span(text, span, self.end_of_turn, include=self.include_end_of_turn) for span in found])
        return texts, spans

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of escaped texts, in one call of the tokenizer."""
        return self.encode_with_spans(texts, None)[0]

    def escape(self, content: str) -> str:
        """What a message says, to be written without the template and given to :meth:`encode`."""
        return self._controls.escape_value(content, "a message")

    def encode_with_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]] | None
    ) -> tuple[list[list[int]], list[list[Span]]]:
        """Ids of escaped texts and the token spans of the character spans, in one call of the tokenizer."""
        if not texts:
            return [], []
        pieces, owners = self._controls.cut(texts)
        batch = self.tokenizer(list(pieces), add_special_tokens=False, return_attention_mask=False)
        ids, encodings = batch["input_ids"], batch.encodings
        if spans is not None and encodings is None:
            raise TemplateError(
                f"ChatCodec: masks need the character offsets of a fast tokenizer: got {type(self.tokenizer).__name__}."
            )
        if owners is None:
            if spans is None:
                return ids, []
            found = [
                [token_span(encodings[row], span, len(text)) for span in spans[row]] for row, text in enumerate(texts)
            ]
            return ids, found
        return self._join_pieces(pieces, owners, len(texts), ids, encodings, spans)

    # What the template does

    def _render(
        self,
        chats: Sequence[Chat],
        add_generation_prompt: bool,
        tools: Tools | None,
        continue_final_message: bool = False,
    ) -> list[str]:
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self._written(chats, tools, options)[0]

    def _render_with_blocks(
        self, chats: Sequence[Chat], tools: Tools | None
    ) -> tuple[list[str], list[list[Span] | None]]:
        """Texts, and the characters inside the template's generation blocks."""
        return self._written(chats, tools, {"return_assistant_tokens_mask": True})

    def _written(self, chats: Sequence[Chat], tools: Tools | None, options: dict[str, bool]) -> tuple[Any, Any]:
        try:
            return _rendered(chats, tools, chat_template=self.template.jinja, **options, **self._kwargs)
        except _REFUSALS as error:
            asks = options.get("add_generation_prompt", False)
            raise TemplateError(
                f"ChatCodec: template {self.template.name!r} must render the conversation: got "
                f"{type(error).__name__}: {error}{self._first_refused(chats, asks, tools)}"
            ) from error

    def _first_refused(self, chats: Sequence[Chat], add_generation_prompt: bool, tools: Tools | None) -> str:
        """Names the first conversation that does not render, and the message with which it stops rendering."""
        for row, chat in enumerate(chats):
            for length in range(1, len(chat) + 1):
                try:
                    self._render_one(chat[:length], add_generation_prompt and length == len(chat), tools)
                except _REFUSALS:
                    message = chat[length - 1]
                    role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
                    return f" (conversation {row}, message {length - 1}, role {role!r})."
        return "."

    def _render_one(self, chat: Chat, add_generation_prompt: bool, tools: Tools | None) -> str:
        options = {"add_generation_prompt": add_generation_prompt, **self._kwargs}
        return _rendered([chat], tools, chat_template=self.template.jinja, **options)[0][0]

    def _escaped_tools(self, tools: Tools | None) -> Tools | None:
        return [self._controls.escape_value(tool, "a tool's description") for tool in tools] if tools else None

    def _find_end_of_turn(self) -> str:
        """What the template writes after the assistant's content, up to and including the first control token."""
        stand_in = chr(_CONTENT_STAND_IN)
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": stand_in}]
        text = self._render([probe], False, None)[0]
        if text.count(stand_in) != 1:
            raise TemplateError(
                f"ChatCodec: template {self.template.name!r} must write the assistant's content once: it wrote it "
                f"{text.count(stand_in)} times."
            )
        if self._marks_generation:
            self._check_blocks(probe, text)
        suffix = text.partition(stand_in)[2]
        end = self._controls.first_end(suffix)
        return suffix.rstrip() if end is None else suffix[:end]

    def _check_blocks(self, probe: list[dict[str, str]], text: str) -> None:
        """Raises TemplateError unless the generation blocks hold the assistant's content and not the user's."""
        asked, answered = (text.index(message["content"]) for message in probe)
        blocks = self._render_with_blocks([probe], None)[1][0] or ()
        inside = [any(start <= place < end for start, end in blocks) for place in (asked, answered)]
        if inside != [False, True]:
            held = " and ".join(what for what, is_in in zip(("question", "answer"), inside, strict=True) if is_in)
            raise TemplateError(
                f"ChatCodec: the generation blocks of template {self.template.name!r} must hold what the assistant "
                f"says and nothing that others say: of a question and an answer they hold {held or 'neither'}."
            )

    # Spans

    def _spans_from_skeleton(
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
            text = self._render_one(chat, bool(prompt), tools)
            places = [text.index(stand_in) for stand_in in stand_ins]
            if places != sorted(places) or any(text.count(stand_in) != 1 for stand_in in stand_ins):
                return None
            spans = self._spans_from_blocks(chat, 0, tools) if self._marks_generation else None
            if spans is None:
                spans = self._spans_from_prefixes(chat, text, 0, tools)
        except _REFUSALS:
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

    def _spans_from_blocks(
        self, chat: Chat, row: int, tools: Tools | None, blocks: list[Span] | None = None
    ) -> list[Span]:
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
                    f"{self.template.name!r}: message {turn} of conversation {row} does not."
                )
            spans.append((new[0][0], new[-1][1]))
        return spans

    def _blocks(self, chat: Chat, tools: Tools | None) -> list[Span]:
        options = {"return_assistant_tokens_mask": True, **self._kwargs}
        return _rendered([chat], tools, chat_template=self.template.jinja, **options)[1][0]

    def _spans_from_prefixes(self, chat: Chat, text: str, row: int, tools: Tools | None) -> list[Span]:
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
            if self.end_is_control:
                end = text.find(self.end_of_turn, start)
                if end < 0:
                    raise TemplateError(self._no_span(turn, row, f"no {self.end_of_turn!r} follows it"))
            else:
                upto = self._render_one(chat[: turn + 1], False, tools)
                if not text.startswith(upto):
                    raise TemplateError(self._no_span(turn, row, "its text changes when later messages are added"))
                end = len(upto[start:].rstrip()) + start
                if self.end_of_turn and text.endswith(self.end_of_turn, start, end):
                    end -= len(self.end_of_turn)
            if spans and start < spans[-1][1]:
                raise TemplateError(
                    self._no_span(before, row, f"another turn begins before {self.end_of_turn!r} ends it")
                )
            spans.append((start, end))
            before = turn
        return spans

    def _start_from_prefix(self, chat: Chat, turn: int, text: str, row: int, tools: Tools | None) -> int:
        try:
            prompt = self._render_one(chat[:turn], True, tools)
            if text.startswith(prompt):
                return len(prompt)
            before = self._render_one(chat[:turn], False, tools)
        except _REFUSALS as error:
            raise TemplateError(self._no_span(turn, row, "the messages before it cannot be rendered alone")) from error
        start = common_prefix_length(prompt, text)
        if start < len(before):
            raise TemplateError(self._no_span(turn, row, "the text before it changes when it is added"))
        return start

    def _no_span(self, turn: int, row: int, reason: str) -> str:
        return (
            f"ChatCodec: the text of each assistant message must be found in what template {self.template.name!r} "
            f"writes: message {turn} of conversation {row} is not, {reason}; put {{% generation %}} blocks in it."
        )

    # Texts in pieces

    def _join_pieces(
        self,
        pieces: Sequence[str],
        owners: Sequence[int],
        num_rows: int,
        piece_ids: Sequence[list[int]],
        encodings: Sequence[Any] | None,
        spans: Sequence[Sequence[Span]] | None,
    ) -> tuple[list[list[int]], list[list[Span]]]:
        ids: list[list[int]] = [[] for _ in range(num_rows)]
        starts: list[list[int]] = [[] for _ in range(num_rows)]  # first character of each token
        length = [0] * num_rows
        for index, (piece, row) in enumerate(zip(pieces, owners, strict=True)):
            new = self._controls.plain_ids(piece)
            if new is not None:
                starts[row] += [length[row]] * len(new)
            else:
                new = piece_ids[index]
                if spans is not None:
                    starts[row] += [length[row] + offset[0] for offset in encodings[index].offsets]
            ids[row] += new
            length[row] += len(piece)
        if spans is None:
            return ids, []
        return ids, [
            [(_first_at_least(starts[row], start), _first_at_least(starts[row], end)) for start, end in spans[row]]
            for row in range(num_rows)
        ]


def render_text(
    template: ChatTemplate,
    chats: Sequence[Chat],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """The text of each conversation as the template writes it, nothing escaped: to be shown, not to be tokenised.

    Raises  TemplateError if the template refuses a conversation
    """
    holder = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds its tokenizer
    special_tokens = holder.special_tokens_map if holder is not None else {}
    try:
        return _rendered(
            chats,
            tools,
            chat_template=template.jinja,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**special_tokens, **(template_kwargs or {})},
        )[0]
    except _REFUSALS as error:
        raise TemplateError(
            f"render_text: template {template.name!r} must render the conversation: {error}."
        ) from error


def _rendered(chats: Sequence[Chat], tools: Tools | None, **options: Any) -> tuple[list[str], list[list[Span]]]:
    """The library's rendering; with ``tools`` None, of the tools that a conversation's first message declares."""
    declared = [chat[0].get("tools") if tools is None and len(chat) else None for chat in chats]
    if not any(declared):
        return render_jinja_template(conversations=chats, tools=tools, **options)
    if "tools" not in options["chat_template"]:  # jinja would leave them out without a word
        raise ValueError("its text never speaks of tools: describe them in the system message instead")
    rows = [
        render_jinja_template(conversations=[chat], tools=own or None, **options)
        for chat, own in zip(chats, declared, strict=True)
    ]
    return [text for texts, _ in rows for text in texts], [block for _, blocks in rows for block in blocks]


@lru_cache(maxsize=8)
def codec_for(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, *, include_end_of_turn: bool = True
) -> ChatCodec:
    """The codec of a tokenizer and a template; the last few are kept."""
    return ChatCodec(tokenizer, template, include_end_of_turn=include_end_of_turn)


def _differs(value: Any, other: Any) -> bool:
    """Whether a string inside a JSON-like value was escaped; media, which are no strings, are not compared."""
    if isinstance(value, Mapping):
        return any(_differs(item, new) for item, new in zip(value.values(), other.values(), strict=True))
    if isinstance(value, (list, tuple)):
        return any(_differs(item, new) for item, new in zip(value, other, strict=True))
    return isinstance(value, str) and value != other


def _first_at_least(starts: Sequence[int], position: int) -> int:
    return next((index for index, start in enumerate(starts) if start >= position), len(starts))
