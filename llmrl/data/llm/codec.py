"""One tokenizer and one template: messages -> text -> ids, with the spans that the assistant wrote.

`llmrl.data.llm.templates` renders the text, `llmrl.data.llm.spans` finds the assistant's part of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from transformers import AddedToken

from llmrl.data.llm.message_forms import MessageForms
from llmrl.data.llm.spans import STAND_IN, Span, SpanFinder, end_span, only_contents, token_span
from llmrl.data.llm.template_text import REFUSALS, cause, render
from llmrl.data.llm.templates import Chat, ChatTemplate, Message, Tools, check_variables
from llmrl.errors import TemplateError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_STAND_IN = 0xFE000  # the end of private-use plane A, where no icon font has characters


# ids; the encoding of the tokenised text; a function from positions in the escaped text to positions in the tokenised
# one; the length of the tokenised text
EncodedText = tuple[list[int], Any, Callable[[int], int], int]


class ChatCodec:
    """Renders and tokenises conversations in the format of one model.

    Reads   tokenizer            a fast tokenizer (its ids, its special tokens, its character offsets)
            template             from ``find_template``
            include_end_of_turn  True if the assistant's span includes the end-of-turn text; False: it does not, and
                                 generation blocks are taken literally, as the Transformers library takes them
            template_kwargs      passed to the template by name, such as ``enable_thinking``
    Raises  TemplateError if the template cannot render a user's turn and an assistant's answer, ConfigError for
            ``template_kwargs`` that it does not use

    ``end_of_turn`` is the text from the end of the assistant's content through its control token (``"<|im_end|>"``),
    ``""`` if the template has none; ``after_end`` is the text that the template writes after it. ``answer_lead`` and
    ``answer_trail`` are the white space between the generation prompt and the content, and between the content and the
    control token.
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
        check_variables(template, template_kwargs)
        self._kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._marks_generation = template.marks_generation
        self.spans_are_blocks = self._marks_generation and not include_end_of_turn
        self.forms = MessageForms(template, self._write)
        self._controls = ControlTokens(tokenizer, (*template.special_tokens, *template.text_markers))
        self.answer_lead, self.answer_trail, self.end_of_turn, self.after_end = self._find_surroundings()
        self.end_of_turn_ids: list[int] = self.encode([self.end_of_turn])[0] if self.end_of_turn else []
        self.end_is_control = self._controls.first(self.end_of_turn) is not None
        if not self.end_is_control:  # ordinary text cannot be escaped: a message that contains it would end its turn
            self._controls.forbidden = self.end_of_turn.strip()
        self._finder = SpanFinder(
            template, self._write, self.end_of_turn, None if self.end_is_control else self.end_of_turn_at
        )

    # Messages -> text

    def render(
        self,
        chats: Sequence[Chat],
        *,
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
        continue_final_message: bool = False,
        checked_from: int = 0,
    ) -> list[str]:
        """The escaped text of each conversation, for :meth:`encode`.

        Raises  TemplateError for a conversation that the template refuses, or of which it leaves a part out: a key of
                a message, or the content of one from number ``checked_from`` on that is not the assistant's
        """
        chats, tools = self._fitted(chats), self._escaped_tools(tools)
        asks = {"add_generation_prompt": add_generation_prompt}
        texts, _ = self._render(chats, tools, continue_final_message=continue_final_message, **asks)
        self.forms.refuse_lost(chats, texts, checked_from, tools=tools, **asks)
        return texts

    def render_with_spans(
        self, chats: Sequence[Chat], *, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> tuple[list[str], list[list[Span]]]:
        """The escaped text of each conversation, and the character spans of its assistant messages; of its generation
        blocks if ``spans_are_blocks``.

        Raises  TemplateError naming the conversation and the message whose span cannot be found, or of which the
                template leaves a part out
        """
        chats, tools = self._fitted(chats), self._escaped_tools(tools)
        asks = {"add_generation_prompt": add_generation_prompt}
        if self.spans_are_blocks:
            texts, blocks = self._render(chats, tools, return_assistant_tokens_mask=True, **asks)
            self.forms.refuse_lost(chats, texts, answers=True, tools=tools, **asks)
            return texts, blocks
        blocks = None
        if self._marks_generation and not add_generation_prompt and not only_contents(chats):
            # Messages with more than role and content match no skeleton, so this rendering returns the blocks as well.
            texts, blocks = self._render(chats, tools, return_assistant_tokens_mask=True)
        else:
            texts, _ = self._render(chats, tools, **asks)
        self.forms.refuse_lost(chats, texts, answers=True, tools=tools, **asks)
        found = self._finder.find(chats, texts, blocks, tools, add_generation_prompt=add_generation_prompt)
        spans = [
            [end_span(text, span, self.end_of_turn, include=self.include_end_of_turn) for span in row]
            for text, row in zip(texts, found, strict=True)
        ]
        return texts, spans

    def _fitted(self, chats: Sequence[Chat]) -> Sequence[Chat]:
        try:
            return self.forms.fit(self._controls.escape(chats))
        except TemplateError as error:
            if hint := self._for_tools(error):
                raise TemplateError(f"{str(error).rstrip('.')}{hint}.") from error
            raise

    def refuse_markers(self, chats: Sequence[Chat]) -> None:
        """Raises TemplateError if a message contains a control token: for callers that do not use :meth:`encode`."""
        for row, (chat, escaped) in enumerate(zip(chats, self._controls.escape(chats), strict=True)):
            for index, (message, other) in enumerate(zip(chat, escaped, strict=True)):
                if message is not other and list(_strings(message)) != list(_strings(other)):
                    raise TemplateError(
                        f"ChatCodec: a message must not spell control tokens where a processor tokenises it: message "
                        f"{index} of conversation {row} does; remove them."
                    )

    def open_answer(self, content: str) -> str:
        """The escaped text of an unfinished assistant message after the generation prompt."""
        return self.answer_lead + self._controls.escape_value(content, "a message") if content else ""

    def end_of_turn_at(self, text: str, start: int = 0) -> int:
        """The position of the end-of-turn text of the last message, an assistant's, in a rendered conversation.

        Contents may contain any text that is not a control token, white space too: without a control token only what
        the template writes after the content shows where that ends.
        """
        written = self.end_of_turn + self.after_end
        if self.end_is_control:
            end = text.rfind(self.end_of_turn, start)
        else:
            end = len(text) - len(written) if text.endswith(written, start) else -1
        return max(start, len(text.rstrip())) if end < 0 else end

    def content_of(self, answer: str, *, begins: bool, ends: bool) -> str:
        """An answer without the white space that the template adds around contents.

        Reads   ``begins``: True if it follows the generation prompt; ``ends``: True if the end of turn followed it
        """
        answer = answer.removeprefix(self.answer_lead) if begins else answer
        return answer.removesuffix(self.answer_trail) if ends else answer

    # Text -> ids

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of escaped texts, in one call of the tokenizer."""
        return self.encode_with_spans(texts, None)[0]

    def encode_with_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]] | None
    ) -> tuple[list[list[int]], list[list[Span]]]:
        """Ids of escaped texts and the token spans of the character spans.

        One call of the tokenizer, and one more for texts that quote control tokens.
        """
        try:
            rows = self._encoded(texts)
        except (TypeError, UnicodeError) as error:  # tokenizers reject half of a surrogate pair
            for row, text in enumerate(texts):
                if found := _SURROGATE.search(text):
                    raise TemplateError(
                        f"ChatCodec: a message must be text that can be encoded: conversation {row} holds half of a "
                        f"surrogate pair, {found[0]!r}, in {text[max(0, found.start() - 40) : found.end()]!r}; remove "
                        "it."
                    ) from error
            raise
        ids = [row[0] for row in rows]
        if spans is None:
            return ids, []
        if any(encoding is None for _, encoding, _, _ in rows):
            raise TemplateError(
                f"ChatCodec: masks need the character offsets of a fast tokenizer: got {type(self.tokenizer).__name__}."
            )
        return ids, [
            [
                token_span(encoding, (place(start), place(end)), length, overlapping=self.spans_are_blocks)
                for start, end in own
            ]
            for (_, encoding, place, length), own in zip(rows, spans, strict=True)
        ]

    def _encoded(self, texts: Sequence[str]) -> list[EncodedText]:
        # Few texts quote control tokens: all others go through the model's own tokenizer, in one batch.
        quoting = {row for row, text in enumerate(texts) if self._controls.quotes(text)}
        plain = [text for row, text in enumerate(texts) if row not in quoting]
        batch = self.tokenizer(plain, add_special_tokens=False, return_attention_mask=False) if plain else {}
        encodings = (batch.encodings if plain else None) or [None] * len(plain)
        as_is = zip(batch["input_ids"] if plain else (), encodings, repeat(int), map(len, plain), strict=False)
        quoted = iter(self._controls.encode_quoting([texts[row] for row in sorted(quoting)]) if quoting else ())
        return [next(quoted) if row in quoting else next(as_is) for row in range(len(texts))]

    # The template

    def _write(self, chats: Sequence[Chat], tools: Tools | None, **options: bool) -> tuple[list[str], list[list[Span]]]:
        return render(chats, tools, chat_template=self.template.jinja, **options, **self._kwargs)

    def _render(
        self, chats: Sequence[Chat], tools: Tools | None, **options: bool
    ) -> tuple[list[str], list[list[Span]]]:
        try:
            return self._write(chats, tools, **options)
        except REFUSALS as error:
            asks = options.get("add_generation_prompt", False)
            raise TemplateError(
                f"ChatCodec: template {self.template.name!r} must render the conversation: got "
                f"{cause(error)}{self._for_tools(error)}{self._first_refused(chats, asks, tools)}"
            ) from error

    def _for_tools(self, error: Exception) -> str:
        """Names the template that the tokenizer has for tools: a run has one template for all conversations."""
        by_name = self.tokenizer.chat_template if isinstance(self.tokenizer.chat_template, dict) else {}
        has_other = "tool_use" in by_name and by_name["tool_use"] != self.template.jinja
        return "; the tokenizer has a template for them: chat_template=tool_use" * (has_other and "tool" in str(error))

    def _first_refused(self, chats: Sequence[Chat], add_generation_prompt: bool, tools: Tools | None) -> str:
        """Names the first conversation that does not render, and the first message at which rendering fails."""
        for row, chat in enumerate(chats):
            for length in range(1, len(chat) + 1):
                asks = add_generation_prompt and length == len(chat)
                try:
                    self._write([chat[:length]], tools, add_generation_prompt=asks)
                except REFUSALS:
                    message = chat[length - 1]
                    role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
                    return f" (conversation {row}, message {length - 1}, role {role!r})."
        return "."

    def _escaped_tools(self, tools: Tools | None) -> Tools | None:
        return [self._controls.escape_value(tool, "a tool's description") for tool in tools] if tools else None

    def _find_surroundings(self) -> tuple[str, str, str, str]:
        """White space before and after the assistant's content, what follows it up to the first control token, and the
        rest.
        """
        stand_in = chr(STAND_IN)  # the template treats it as any other content
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": stand_in}]
        [text], _ = self._render([probe], None, add_generation_prompt=False)
        [prompt], _ = self._render([probe[:1]], None, add_generation_prompt=True)
        if text.count(stand_in) != 1:
            raise TemplateError(
                f"ChatCodec: template {self.template.name!r} must write the assistant's content once: it wrote it "
                f"{text.count(stand_in)} times."
            )
        if self._marks_generation:
            self._check_blocks(probe, text)
        before, _, after = text.partition(stand_in)
        lead = before[len(prompt) :] if before.startswith(prompt) else ""  # a prompt may open a thought
        start, end = self._controls.first(after) or (0, len(after.rstrip()))
        trail = after[:start] if after[:start].isspace() else ""
        return lead if lead.isspace() else "", trail, after[:end], after[end:]

    def _check_blocks(self, probe: list[dict[str, str]], text: str) -> None:
        """Raises TemplateError unless the generation blocks hold the assistant's content and not the user's."""
        asked, answered = (text.index(message["content"]) for message in probe)
        blocks = self._render([probe], None, return_assistant_tokens_mask=True)[1][0] or ()
        inside = [any(start <= place < end for start, end in blocks) for place in (asked, answered)]
        if inside != [False, True]:
            held = " and ".join(what for what, is_in in zip(("question", "answer"), inside, strict=True) if is_in)
            raise TemplateError(
                f"ChatCodec: the generation blocks of template {self.template.name!r} must hold the "
                f"assistant's messages only: of a question and an answer they hold {held or 'neither'}."
            )


@lru_cache(maxsize=8)
def codec_for(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, *, include_end_of_turn: bool = True
) -> ChatCodec:
    """The codec of a tokenizer and a template; the latest ones are cached."""
    return ChatCodec(tokenizer, template, include_end_of_turn=include_end_of_turn)


class ControlTokens:
    """The special tokens of one tokenizer, and their escaping in messages, so that no message can open a turn.

    Before a message reaches the template, every special token written in it is replaced by one private-use character,
    its stand-in. Before the text is tokenised, the two are swapped: a copy of the tokenizer has the stand-ins as its
    control tokens and encodes the quoted markers as plain text. The ids decode to the original text.

    ``markers`` are the structural markers of the template. One that is not a special token of this tokenizer cannot be
    escaped: a quoted one would look like a real one. A message that contains it is refused, except the assistant's own:
    there it is part of an answer and cannot begin another turn.
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
        # A text without any of these beginnings contains no marker: a quick check of whole batches.
        self._heads = sorted({marker[:3] for marker in (*ordered, *self._structure)})
        self._find_markers = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._find_stand_ins = re.compile(f"([{''.join(self._markers)}])" if ordered else r"(?!)")
        self._find_any = re.compile(f"{self._find_markers.pattern}|{self._find_stand_ins.pattern}")

    def first(self, text: str) -> tuple[int, int] | None:
        """The span of the first control token in a text; None if there is none."""
        match = self._find_markers.search(text)
        return match.span() if match else None

    def escape(self, chats: Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
        """Conversations with their control tokens escaped; the same objects if there are none.

        Raises  TemplateError naming a message that is not a mapping, or holds text that cannot be escaped
        """
        if not self._may_hold_markers(chats):
            return chats
        return [
            [self._escape_message(message, f"message {n} of conversation {row}") for n, message in enumerate(chat)]
            for row, chat in enumerate(chats)
        ]

    def _escape_message(self, message: Message, where: str) -> Message:
        structure = () if message.get("role") == "assistant" else self._structure
        for text in _strings(message) if structure else ():
            if marker := next((marker for marker in structure if marker in text), None):
                raise TemplateError(
                    f"ControlTokens: a message must not hold the template's own markers: {where} holds {marker!r}, "
                    "which its tokenizer cannot tell from a real one; remove it, or add it to the tokenizer as a "
                    "special token."
                )
        return self.escape_value(message, where)

    def escape_value(self, value: Any, where: str) -> Any:
        """Escapes the strings of a JSON-like value; ``where`` names it in errors."""
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
        """True for a text that contains stand-ins and must be encoded by `encode_quoting`."""
        return not text.isascii() and self._find_stand_ins.search(text) is not None

    def encode_quoting(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes escaped texts that hold stand-ins, in one call.

        Raises  TemplateError if the tokenizer has no plain ids for a marker that a message quotes
        """
        tokenizer, real_ids = self._quoting
        swapped = [self._swapped(text) for text in texts]
        encodings = tokenizer.encode_batch([text for text, _ in swapped], add_special_tokens=False)
        rows = []
        for (text, place), encoding in zip(swapped, encodings, strict=True):
            # The id of a real control token means that a quoted marker was not split into plain ids. The unknown
            # token is an exception: it stands for any character that the vocabulary lacks.
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
        """A tokenizer that encodes markers as plain text and stand-ins as control tokens, and the real ids of these."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                "ControlTokens: quoted control tokens need a fast tokenizer: got "
                f"{type(self._tokenizer).__name__}; remove them from the messages."
            )
        tokenizer = type(backend).from_str(backend.to_str())  # a copy: the user's tokenizer does not change
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = {str(token): token for token in self._tokenizer.added_tokens_decoder.values()}
        for marker, stand_in in self._stand_ins.items():
            like = added.get(marker, AddedToken(marker, normalized=False))
            # A stand-in matches text and strips white space as its token does.
            sides = {name: getattr(like, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            tokenizer.add_tokens([AddedToken(stand_in, special=False, **sides)])
        tokenizer.encode_special_tokens = True  # special tokens that are spelled out become plain text
        convert = self._tokenizer.convert_tokens_to_ids
        return tokenizer, {tokenizer.token_to_id(mark): convert(marker) for mark, marker in self._markers.items()}

    def _swapped(self, text: str) -> tuple[str, Callable[[int], int]]:
        """The text with markers and stand-ins swapped, and a function from its positions to those of the new text."""
        # Stand-ins are one character, markers are longer: each swap shifts all later positions.
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
                if not isinstance(message, (dict, Mapping)):  # the check for dict is faster
                    raise TemplateError(
                        f"ControlTokens: a message must be a mapping with 'role' and 'content': got "
                        f"{type(message).__name__} for message {index} of conversation {row}."
                    )
                for value in message.values():
                    if type(value) is str:
                        strings.append(value)
                    else:
                        strings.extend(_strings(value))
        everything = "\0".join(strings)  # no marker contains a null, so joining creates none
        return any(head in everything for head in (*self._heads, self.forbidden) if head)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, Mapping)):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
