"""Renders messages as token ids: conversations with the mask of trained tokens, prompts, and the ids of new messages.

Sampled ids are never re-tokenised from text: `Renderer.extend` returns only the ids that new messages add.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from llmrl.data.llm.codec import ChatCodec
from llmrl.data.llm.images import take_images
from llmrl.data.llm.message_forms import FLAGS, is_trained
from llmrl.data.llm.spans import Span, common_prefix_length, rows_to_tensors, spans_to_masks
from llmrl.data.llm.template_analysis import conversation_shape, reads_contents, stand_ins
from llmrl.data.llm.templates import Chat, Tools, find_template
from llmrl.errors import RewriteError, TemplateError
from llmrl.modules.llm.vision import POSITIONS, Media, Vision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_MAX_SHAPES = 4096
_CONTENT = methodcaller("get", "content")
_Anchor = tuple[Chat, str]  # a short conversation, and its text


@dataclass(frozen=True, slots=True)
class Rendered:
    """One tokenised conversation."""

    ids: Tensor  # int64[T]
    assistant_mask: Tensor  # bool[T], True where the assistant wrote the token, its end-of-turn token included
    spans: list[Span]  # the mask as half-open token ranges: one per assistant message, or generation block
    media: Media | None = None  # the tensors of its images; None without a processor


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The effects of a template on training, measured on short conversations."""

    trained_share: float  # the share of trained tokens in a question and its answer
    stop_token_trained: bool  # True if the model learns to end its turn
    prefix_preserving: bool  # True if a longer conversation begins with the shorter one
    reason: str  # description of the faults; empty if there are none


class Renderer:
    """Turns conversations into ids with one tokenizer and one template.

    Reads   tokenizer            a fast tokenizer of the Transformers library; or a processor, for messages with images
            chat_template        jinja text to use instead of the tokenizer's own
            chat_template_name   a registered template to use instead of the tokenizer's own
            include_end_of_turn  whether the end-of-turn token counts as written by the assistant; if not, a model is
                                 never taught to stop. False takes a template's generation blocks literally: the mask
                                 is that of the Transformers library, ``return_assistant_tokens_mask``
            template_kwargs      passed to the template by name, such as ``{"enable_thinking": False}``
    Raises  TemplateError for an unknown name, or a template that cannot render a question and an answer

    Special tokens spelled out inside a message are encoded as plain characters: no message can open a turn.

    >>> from llmrl.testing import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    >>> [row] = Renderer(tokenizer).render([chat])
    >>> tokenizer.decode(row.ids[row.assistant_mask])
    '4<|im_end|>'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        include_end_of_turn: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        own_tokenizer = text_tokenizer(tokenizer)
        self.vision = None if own_tokenizer is tokenizer else Vision(tokenizer)
        self.tokenizer = tokenizer = own_tokenizer
        self.template = find_template(tokenizer, chat_template_name, template=chat_template)
        self.codec = ChatCodec(
            tokenizer, self.template, include_end_of_turn=include_end_of_turn, template_kwargs=template_kwargs
        )
        self.end_of_turn_ids: list[int] = self.codec.end_of_turn_ids
        stops = [*self.end_of_turn_ids[-1:]] if self.codec.end_is_control else []
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stops:
            stops.append(tokenizer.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = tuple(stops)
        self._reads_contents = reads_contents(self.template.jinja)
        self._anchors: dict[Any, _Anchor | tuple[()]] = {}  # by shape; (): the shape has no anchor
        self.compared: set[Any] = set()  # `shape`s of conversations whose renderings a caller has compared

    @property
    def unused_keys(self) -> list[str]:
        """Names and ids of the messages so far, such as "tool_call_id", that the template does not read."""
        return list(self.codec.forms.unused)

    def render(
        self, chats: Sequence[Chat], *, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> list[Rendered]:
        """Returns ids and assistant masks of whole conversations, in one call of the tokenizer.

        Returns  one `Rendered` per conversation; the ids equal ``tokenizer.apply_chat_template``'s. An assistant's
                 message with ``"weight": 0``, or with ``"train"``, ``"trainable"`` or ``"training"`` false, is not in
                 the mask
        Raises   TemplateError that names the conversation and the message, for an assistant message that has no span,
                 no token to train, or an image; also for a conversation without any assistant message (unless a
                 generation prompt is added)
        """
        chats, images = self._take_images(chats)
        # Spans are found in the text and mapped to tokens by offsets: rendering and encoding happen once per batch.
        texts, spans = self.codec.render_with_spans(chats, add_generation_prompt=add_generation_prompt, tools=tools)
        ids, token_spans = self.codec.encode_with_spans(texts, spans)
        if self.vision is not None:
            pairs = [self.vision.expand(*row) for row in zip(ids, map(_joined, images), token_spans, strict=True)]
            ids, token_spans = [list(column) for column in zip(*pairs, strict=True)] if pairs else (ids, token_spans)
        for row, found in enumerate(token_spans):
            for index, (message, own) in enumerate(zip(chats[row], images[row], strict=True)):
                if own and message["role"] == "assistant":
                    raise TemplateError(
                        f"Renderer: an assistant message must have no image, as images cannot be trained: message "
                        f"{index} of conversation {row} has {len(own)}; put it in a user message."
                    )
            if not found and not add_generation_prompt:
                raise TemplateError(
                    f"Renderer: a conversation to train on must hold an assistant message: conversation {row} has the "
                    f"roles {[message['role'] for message in chats[row]]}."
                )
            answers = [index for index, message in enumerate(chats[row]) if message["role"] == "assistant"]
            for index, (start, end) in zip(answers, found, strict=False):
                if start >= end:
                    raise TemplateError(
                        f"Renderer: each assistant message must have a token to train: message {index} of conversation "
                        f"{row} has none; give it content, or drop it."
                    )
        trained = [self._trained(*row) for row in zip(chats, token_spans, itertools.count())]
        masks = spans_to_masks(trained, [len(row) for row in ids])
        rows = [Rendered(*row) for row in zip(rows_to_tensors(ids), masks, token_spans, strict=True)]
        if self.vision is None:
            return rows
        media = [self.media(_joined(own), row.ids, row.assistant_mask) for own, row in zip(images, rows, strict=True)]
        return [replace(row, media=own) for row, own in zip(rows, media, strict=True)]

    def _trained(self, chat: Chat, spans: list[Span], row: int) -> list[Span]:
        """The spans of the assistant's messages but for those that a flag of the message leaves out."""
        if all(len(message) == 2 for message in chat):
            return spans
        kept = [is_trained(message) for message in chat if message["role"] == "assistant"]
        if all(kept):
            return spans
        if not any(kept) or len(kept) != len(spans):
            reason = "each has several generation blocks" if any(kept) else "all are left out"
            raise TemplateError(
                f"Renderer: the assistant messages of conversation {row} must be trained or left out one by one: "
                f"{reason} ({', '.join(FLAGS)})."
            )
        return list(itertools.compress(spans, kept))

    def media(self, images: Sequence[Any], ids: Tensor, sampled: Tensor | None = None) -> Media:
        """The media of a row int64[T] with these images; ``sampled`` bool[S], S <= T, marks the policy's ids."""
        return {**self.vision.media(images), POSITIONS: self.vision.positions(ids, sampled)}

    def _take_images(
        self, chats: Sequence[Chat], shapes: Sequence[tuple[Any, ...]] | None = None
    ) -> tuple[Sequence[Chat], list[list[list[Any]]]]:
        """The conversations as the template needs them, and the images of each message of each conversation.

        Reads   shapes  of the messages before the new ones, see :meth:`extend`

        Raises  TemplateError for images without a processor
        """
        new = chats if shapes is None else map(_without_texts, chats, shapes)
        if all(map(_has_only_texts, new)):  # the usual case
            return chats, [[[]] * len(chat) for chat in chats]
        pairs = [take_images(chat) for chat in chats]
        images = [own for _, own in pairs]
        if self.vision is None and (row := next((row for row, own in enumerate(images) if any(own)), None)) is not None:
            raise TemplateError(
                f"Renderer: images need the model's processor: conversation {row} has some, but there is only a "
                "tokenizer; pass AutoProcessor.from_pretrained(...) in its place."
            )
        return [chat for chat, _ in pairs], images

    def prompt_texts(self, chats: Sequence[Chat], *, tools: Tools | None = None) -> list[str]:
        """The texts that :meth:`prompt_ids` encodes, escaped; each image appears as its placeholder."""
        heads, opened = _without_open(self._take_images(chats)[0])
        texts = self.codec.render(heads, add_generation_prompt=True, tools=tools)
        return [text + self.codec.open_answer(begun or "") for text, begun in zip(texts, opened, strict=True)]

    def prompt_ids(self, chats: Sequence[Chat], *, tools: Tools | None = None) -> list[Tensor]:
        """Ids of conversations that end with a generation prompt; equal conversations are rendered and encoded once.

        If a conversation ends with an unfinished assistant message (``"is_complete": False``), the text of that message
        follows the generation prompt, and the model continues it.

        Returns  one int64[T] per conversation, none sharing memory with another
        """
        chats, images = self._take_images(chats)
        heads, opened = _without_open(chats)
        keys = [_chat_key(chat) for chat in heads]
        unique = dict(zip(keys, heads, strict=True))
        texts = self.codec.render(list(unique.values()), add_generation_prompt=True, tools=tools)
        text_by_key = dict(zip(unique, texts, strict=True))
        rows = self._encode_once([text_by_key[key] for key in keys])
        if self.vision is not None:
            rows = [self.vision.expand(row, _joined(own))[0] for row, own in zip(rows, images, strict=True)]
        # Encoded separately, as when the answer was sampled: the joined text could tokenise differently.
        return rows_to_tensors([row + self._begun(text) for row, text in zip(rows, opened, strict=True)])

    def extend(
        self,
        ids: Sequence[Tensor],
        chats: Sequence[Chat],
        new: Sequence[int],
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        return_errors: bool = False,
        shapes: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Tensor | RewriteError]:
        """Returns the ids that the last ``new[i]`` messages of conversation i add to its stream.

        Reads    ids[i]  int64[T_i], the sampled stream of ``chats[i]`` without its last ``new[i]`` messages
                 tools   the tools that the prompt was rendered with
                 shapes  `conversation_shape` of ``chats[i]`` without its last messages, if known
        Returns  int64[D_i] per conversation: ``cat(ids[i], result[i])`` is the longer stream. If the stream ends with
                 an assistant turn that lacks its end-of-turn ids (it was cut off), the result begins with them
        Raises   RewriteError, a TemplateError, if the template writes the earlier messages differently once the new
                 ones follow, for example drops their thinking: such a conversation has to start a new stream with
                 :meth:`prompt_ids`; ``return_errors`` returns the error in place of its ids. TemplateError if the
                 stream and the messages do not fit

        An unfinished last assistant message (see :meth:`prompt_ids`) is left open; if the stream already holds it,
        nothing is added.
        """
        chats, images = self._take_images(chats, shapes)
        heads, opened = _without_open(chats) if add_generation_prompt else (chats, [None] * len(chats))
        extensions: list[_Extension | RewriteError | None] = []
        options, known = {"add_generation_prompt": add_generation_prompt, "tools": tools}, shapes or [None] * len(chats)
        for stream, chat, num_new, begun, shape in zip(ids, heads, new, opened, known, strict=True):
            num_new -= begun is not None
            try:
                extensions.append(self._extension(chat, num_new, len(stream), shape, options) if num_new >= 0 else None)
            except RewriteError as error:
                if not return_errors:
                    raise
                extensions.append(error.with_traceback(None))  # the traceback would keep the renderer's frames alive
        going_on = [row for row, extension in enumerate(extensions) if isinstance(extension, _Extension)]
        encoded = self._encode_once([extensions[row].text for row in going_on])
        rows: list[list[int]] = []
        for number, with_context in zip(going_on, encoded, strict=True):
            extension, stream = extensions[number], ids[number]
            row = with_context[extension.num_context_ids :]
            if self.vision is not None:
                row = self.vision.expand(row, _joined(images[number][len(images[number]) - new[number] :]))[0]
            if extension.after_assistant:
                row = (self._missing_end(stream) if extension.usual_end else []) + row
            elif (asked := self._generation_prompt_ids) and stream[-len(asked) :].tolist() == asked:
                raise TemplateError(
                    "Renderer.extend: a generation prompt must be answered before other messages follow: the stream of "
                    f"conversation {number} ends with an open one; add the assistant's message first."
                )
            rows.append(row + self._begun(opened[number]))
        result: list[Any] = [stream.new_zeros(0) if x is None else x for stream, x in zip(ids, extensions, strict=True)]
        for number, added in zip(going_on, rows_to_tensors(rows), strict=True):
            result[number] = added
        return result

    def answer(self, text: str, *, begins: bool = True, ended: bool) -> dict[str, Any]:
        """A sampled text as the assistant's message, which later turns render to that text.

        Reads   ``begins``: True if it follows the generation prompt; ``ended``: True if its end of turn was sampled
        """
        content = self.codec.content_of(text, begins=begins, ends=ended)
        read = self.template.answer if begins else None
        return {"role": "assistant", **({"content": content} if read is None else read(content))}

    def addition(self, chat: Chat, new: int) -> Any:
        """A key for the last ``new`` messages: equal keys mean that :meth:`extend` adds the same ids."""
        covered = len(chat) - new
        [chat], [opened] = _without_open(self._take_images([chat])[0])
        return self._after(chat[:covered], chat[covered:]), opened

    def shape(self, chat: Chat, *more: Any) -> Any:
        """A key for the conversation and ``more``: equal keys mean renderings that differ only in message texts."""
        return object() if self._reads_contents else (conversation_shape(chat), *more)

    def note_compared(self, shapes: Iterable[Any]) -> None:
        """Adds shapes to ``compared``."""
        if len(self.compared) >= _MAX_SHAPES or self._reads_contents:  # in the latter case every shape is unique
            self.compared.clear()
        self.compared.update(shapes)

    def check(self) -> TemplateReport:
        """Tests the template on short conversations; a recipe prints the result before it trains.

        >>> from llmrl.testing import tiny_tokenizer
        >>> Renderer(tiny_tokenizer()).check().prefix_preserving
        True
        """
        noted = dict(self.codec.forms.unused)
        question, answer = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}
        [row] = self.render([[question, answer]])
        stop_token_trained = not set(self.stop_token_ids).isdisjoint(row.ids[slice(*row.spans[-1])].tolist())
        reasons = (
            [] if stop_token_trained else ["the end-of-turn token is not trained, so the model will not learn to stop"]
        )
        thinking = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "4", "name": "add"}
        probes = {
            "when the user speaks again": ([question, answer], [question]),
            "when the user speaks after an answer with thinking": ([question, thinking], [question]),
            "when a tool answers": ([question, calling], [result]),
        }
        rewritten = []
        for case, (covered, added) in probes.items():
            try:
                self.codec.render([covered + added], add_generation_prompt=True)
            except TemplateError:
                continue  # the template does not support this kind of conversation
            try:
                self._after(covered, added)
            except TemplateError:
                rewritten.append(case)
        self.codec.forms.unused = noted  # no conversation of the caller's has the keys of these
        if rewritten:
            reasons.append(f"earlier messages are written differently {', '.join(rewritten)}")
            if self.template.rewrites:
                reasons.append(f"template {self.template.name!r} is known to do so: {self.template.rewrites}")
        share = row.assistant_mask.float().mean().item()
        return TemplateReport(share, stop_token_trained, not rewritten, "; ".join(reasons))

    def _encode_once(self, texts: Sequence[str]) -> list[list[int]]:
        unique = list(dict.fromkeys(texts))
        ids_by_text = dict(zip(unique, self.codec.encode(unique), strict=True))
        return [ids_by_text[text] for text in texts]

    def _begun(self, content: str | None) -> list[int]:
        """Ids of an unfinished assistant message, which follow the generation prompt."""
        return self.codec.encode([self.codec.open_answer(content)])[0] if content else []

    def _extension(
        self, chat: Chat, num_new: int, num_ids: int, known: tuple[Any, ...] | None, options: dict[str, Any]
    ) -> _Extension:
        """The text that the last messages add, after the assistant's end-of-turn text if one is due."""
        covered = len(chat) - num_new
        if covered <= 0:  # a new conversation
            if num_ids:
                raise TemplateError(
                    f"Renderer.extend: new must count fewer messages than the conversation has when its stream is not "
                    f"empty: got {num_new} of {len(chat)} messages and a stream of {num_ids} ids."
                )
            [text] = self.codec.render([chat], **options)
            return _Extension(text, 0, False)
        context, before = self._anchor(chat, covered, known, options) or (chat[:covered], None)
        return self._after(context, chat[covered:], before, **options)

    def _anchor(
        self, chat: Chat, covered: int, known: tuple[Any, ...] | None, options: dict[str, Any]
    ) -> _Anchor | None:
        """A short stand-in for the earlier messages: new messages render after it as after the whole conversation.

        Rendering then costs O(new messages). None if there is none. Tested once per conversation shape (its roles and
        their number), with a different text in each message. Not used for templates that read texts (for example to
        split off thinking): their output depends on more than the shape.
        """
        if self._reads_contents:
            return None
        shape = conversation_shape(chat) if known is None else known + conversation_shape(chat[covered:])
        key = shape, covered, options["add_generation_prompt"], repr(options["tools"])
        if (tested := self._anchors.get(key)) is not None:  # one look-up: another thread may clear the dict
            return tested or None
        # Stand-in texts, so that the result holds for every conversation of this shape.
        probe, anchor = stand_ins(chat), stand_ins(_shortened(chat, covered), first=len(chat))
        found = None
        try:
            whole, short = (self._after(past, probe[covered:], **options) for past in (probe[:covered], anchor))
            if whole == short:
                found = anchor, self.codec.render([anchor], tools=options["tools"])[0]
        except TemplateError:
            pass  # RewriteError too: it must name the conversation itself, not its stand-in
        if len(self._anchors) >= _MAX_SHAPES:
            self._anchors.clear()
        self._anchors[key] = found or ()
        return found

    def _after(
        self,
        context: Chat,
        new: Chat,
        before: str | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
    ) -> _Extension:
        """The text that ``new`` adds after ``context``. Raises RewriteError if it changes the text of ``context``.

        ``before`` is the text of ``context``, if known; without it the prompt of the last answer is checked as well.
        """
        chat, checked = [*context, *new], before is None
        if before is None:
            [before] = self.codec.render([context], checked_from=len(context), tools=tools)
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        [after] = self.codec.render([chat], checked_from=len(context), **options)
        after_assistant = context[-1]["role"] == "assistant"
        cut = self._cut(before, after_assistant)  # what follows the end of turn belongs to the next message
        prefixes = [before[:cut]]
        # The stream begins with the prompt of the last answer, which the template may now write differently.
        if checked and after_assistant and len(context) > 1:
            asked = {"checked_from": len(context), "add_generation_prompt": True}
            prefixes += self.codec.render([context[:-1]], tools=tools, **asked)
        for prefix in prefixes:
            if not after.startswith(prefix):
                raise RewriteError(self._rewrites(prefix, after, chat, len(context)))
        if after_assistant and self.codec.end_is_control:
            # The control token in front gives the tokenizer the same boundary as in the whole text.
            usual_end = before[:cut].endswith(self.codec.end_of_turn)
            return _Extension(self.codec.end_of_turn + after[cut:], len(self.end_of_turn_ids), True, usual_end)
        return _Extension(after[cut:], 0, after_assistant)

    def _cut(self, text: str, after_assistant: bool) -> int:
        """The end of the stream in a rendered conversation: after the end-of-turn text of a last assistant message."""
        if not after_assistant:
            return len(text)
        end = self.codec.end_of_turn_at(text)
        return end + len(self.codec.end_of_turn) * text.startswith(self.codec.end_of_turn, end)

    def _rewrites(self, prefix: str, text: str, chat: Chat, covered: int) -> str:
        same = common_prefix_length(prefix, text)
        return (
            "Renderer.extend: a longer conversation must begin with the shorter one: template "
            f"{self.template.name!r} rewrites the past when {[message['role'] for message in chat[covered:]]} follow: "
            f"{prefix[same : same + 40]!r} became {text[same : same + 40]!r}; start a new stream with prompt_ids."
        )

    def _missing_end(self, stream: Tensor) -> list[int]:
        """The end-of-turn ids that the stream does not end with."""
        end = self.end_of_turn_ids
        if self.codec.end_is_control and len(stream) and stream[-1].item() == end[-1]:
            return []  # the turn has its control token, with or without the text that the template puts before it
        # An answer cut off at its maximum length may hold the first of the end-of-turn ids.
        tail = stream[-len(end) :].tolist() if end else []
        for present in range(len(end), 0, -1):
            if tail[-present:] == end[:present]:
                return end[present:]
        return list(end)

    @cached_property
    def _generation_prompt_ids(self) -> list[int]:
        """The ids of a generation prompt; empty if they cannot be separated from the question."""
        question = [{"role": "user", "content": "question"}]
        before, after = self.codec.render([question])[0], self.codec.render([question], add_generation_prompt=True)[0]
        return self.codec.encode([after[len(before) :]])[0] if after.startswith(before) and after != before else []


@dataclass(frozen=True, slots=True)
class _Extension:
    text: str
    num_context_ids: int  # leading ids of the text, present only to give the tokenizer its boundary
    after_assistant: bool
    usual_end: bool = True  # False: the previous turn ends with another token, as tool calls of gpt-oss do


def _has_only_texts(chat: Chat) -> bool:
    if {*map(type, chat)} == {dict}:  # no step of Python per message
        return {*map(type, map(_CONTENT, chat))} == {str}
    return all(type(message.get("content")) is str for message in chat if isinstance(message, Mapping))


def _without_texts(chat: Chat, shape: tuple[Any, ...]) -> Chat:
    """The messages that ``shape`` does not say to be texts: it covers the first ones, and has the role of a text."""
    return chat[len(shape) :] if {*map(type, shape)} == {str} else chat


def _shortened(chat: Chat, covered: int) -> Chat:
    """A short conversation with the same end as the covered one: its first message, a question, its last turn."""
    last = next((index for index in range(covered - 1, -1, -1) if chat[index]["role"] == "assistant"), None)
    if last is None or last < 2:
        return chat[:covered]
    question = [] if chat[0]["role"] == "user" else [{"role": "user", "content": "question"}]
    return [chat[0], *question, *chat[last:covered]]


def _chat_key(chat: Chat) -> Any:
    """A key: equal only if conversations render to the same text. Messages with more than role, content and tools are
    compared by identity.
    """
    return tuple(
        (message["role"], message["content"], id(message.get("tools")))
        if len(message) == 2 + ("tools" in message) and isinstance(message.get("content"), str)
        else id(message)
        for message in chat
    )


def _without_open(chats: Sequence[Chat]) -> tuple[list[Chat], list[str | None]]:
    """The conversations without their unfinished last assistant message, and the text of that message or None."""
    opened = [chat[-1]["content"] if is_open(chat) else None for chat in chats]
    return [chat if text is None else chat[:-1] for chat, text in zip(chats, opened, strict=True)], opened


def text_tokenizer(tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a processor; a tokenizer is returned unchanged."""
    return tokenizer.tokenizer if hasattr(tokenizer, "image_processor") else tokenizer


def _joined(images: Sequence[Sequence[Any]]) -> list[Any]:
    return [image for own in images for image in own]


def is_open(chat: Chat) -> bool:
    """True if a conversation ends with an unfinished assistant message, which the model is to continue.

    >>> question, begun = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}
    >>> is_open([question, begun]), is_open([question, {**begun, "is_complete": False}])
    (False, True)
    """
    last = chat[-1] if len(chat) > 1 else {}
    return last.get("is_complete") is False and last["role"] == "assistant" and isinstance(last["content"], str)
