"""History, text and tokens mode of a policy: reading a view of the conversation, encoding it, writing the answer.

A mode encodes whole conversations, or only the part appended since the last turn. Ids are the source of truth in all
three; sampled ids are never re-tokenised from text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from llmrl.data.llm.history import History
from llmrl.data.llm.images import take_images
from llmrl.data.ragged.tensordicts import inner
from llmrl.errors import ConfigError, RewriteError, RolloutError, ShapeError, did_you_mean
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.containers import decode_rows, history_chats
from llmrl.modules.llm.policies.rows import Key, attention_rows, field_rows, find_holder, is_ragged, kept_parts
from llmrl.modules.llm.rendering import is_open
from llmrl.modules.llm.token_stream import TokenStream
from llmrl.modules.llm.vision import POSITIONS, Media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.modules.llm.rendering import Renderer


@dataclass
class Prompts:
    """The input of a turn, one entry per row of the batch: as read, and as passed to the engine.

    rows       values of the mode's kind; ``source`` is their common object if there is one
    ids        int64[P]
    num_new    number of ids, at the end, that this turn adds: only those were encoded
    stream     the stream of earlier turns, with restarted rows emptied; None if there is none
    texts      text of the stream, if an environment carried it over
    media      media of each row, if the policy reads images
    """

    rows: list[Any]
    source: Any = None
    ids: list[Tensor] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    stream: TokenStream | None = None
    texts: list[str] | None = None
    media: list[Media] | None = None

    def cut(self, rows: Sequence[int], limit: int | None) -> None:
        """Leaves of these rows the turns before this one, or of a first prompt its first ``limit`` ids.

        A row whose new ids hold images keeps them all, because its images belong to them.
        """
        for row in rows:
            before = 0 if self.stream is None else len(self.stream.ids[row])
            length = before or limit
            if self.media is None or not (self.media[row][POSITIONS] >= length).any():
                self.ids[row] = self.ids[row][:length]
                self.num_new[row] = length - before

    def select(self, rows: Sequence[int]) -> Prompts:
        """The rows at these indices, which may repeat."""
        columns = {name: getattr(self, name) for name in ("rows", "ids", "num_new", "texts", "media")}
        taken = {name: None if values is None else [values[row] for row in rows] for name, values in columns.items()}
        source = None if self.source is None else self.source[list(rows)]
        return Prompts(source=source, stream=None if self.stream is None else self.stream.select(rows), **taken)


@dataclass
class Turn:
    """A finished turn, from which a mode writes its views."""

    prompts: Prompts
    response_ids: list[Tensor]
    stop_reasons: list[StopReason]
    stop_token_ids: frozenset[int]
    skip_special_tokens: bool


class Mode(ABC):
    """One kind of policy input.

    name      the ``input_mode`` that selects it, and the default key of its container
    expected  description of its input, for error messages
    written   the containers that :meth:`views` fills
    """

    name: ClassVar[str]
    expected: ClassVar[str]
    written: ClassVar[tuple[str, ...]]
    renderer: Renderer | None = None  # only in history mode

    def read(self, td: TensorDictBase, key: Key, *attention_keys: Key) -> Prompts:
        """Reads the view under ``key``, one value per row of the batch.

        attention_keys  possible keys of the attention mask of ids; the first one present is used
        Raises  MissingInputError, TypeError for a wrong type, ShapeError for a wrong number of rows
        """
        prompts = self._read(td, key, attention_keys)
        if len(prompts.rows) != td.batch_size.numel():
            raise ShapeError(
                f"LLM wrapper: {key!r} must hold one value per row of a batch of {list(td.batch_size)}: got "
                f"{len(prompts.rows)}; usually the batch_size of the TensorDict was left out."
            )
        return prompts

    def read_stream(self, td: TensorDictBase, keys: Mapping[str, str], prompts: Prompts) -> TokenStream | None:
        """The stream of earlier turns, stored beside the prompts; None if this turn begins a new one."""
        stream = TokenStream.read(td, keys=keys)
        if stream is None or stream.covered is None:
            return None
        if "response" not in inner(td.get(keys["tokens"])).keys():
            return stream
        view = inner(td.get(keys[self.name], None))
        if stream.assistant_mask is None or view is None or "full" not in view.keys():
            # Either this prompt was answered before and is rendered again, or the ids are left over from the previous
            # turn because this turn's ids were dropped: start a new record.
            return None
        stream.answered, stream.plain = True, None
        return stream

    def carried_texts(self, td: TensorDictBase, keys: Mapping[str, str], stream: TokenStream) -> list[str] | None:
        """The text of the stream, if an environment carried it over; empty for new conversations."""
        return None

    def encode_prompts(self, prompts: Prompts, stream: TokenStream | None) -> dict[int, RewriteError]:
        """Sets the ids of each row: its stream and the ids appended since, or the whole conversation, encoded again.

        Returns  row -> the reason that its stream could not be continued
        """
        if stream is None or stream.answered:
            prompts.ids, prompts.stream = self.encode(prompts.rows) if stream is None else stream.ids, stream
            prompts.num_new = [len(row) if stream is None else 0 for row in prompts.ids]
            return {}
        # 1. Rows that continue: encode only what the environment appended.
        prompt_ids: list[Tensor] = list(stream.ids)
        rewritten: dict[int, RewriteError] = {}
        if grown := [row for row, ids in enumerate(stream.ids) if len(ids)]:
            added = self.extend(stream.select(grown), [prompts.rows[row] for row in grown])
            for row, ids in zip(grown, added, strict=True):
                if isinstance(ids, RewriteError):
                    rewritten[row] = ids
                else:
                    prompt_ids[row] = torch.cat([stream.ids[row], ids])
        # 2. Rows that are new, or that the template rewrote: encode the whole conversation.
        if restarted := [row for row, ids in enumerate(stream.ids) if not len(ids) or row in rewritten]:
            for row, ids in zip(restarted, self.encode([prompts.rows[row] for row in restarted]), strict=True):
                prompt_ids[row] = ids
                before = stream.ids[row]
                if len(before) and torch.equal(ids[: len(before)], before):
                    del rewritten[row]  # the rewritten text is not in this row's stream: it can continue
            stream = stream.cut({row for row in restarted if not len(stream.ids[row]) or row in rewritten})
        prompts.ids, prompts.stream = prompt_ids, stream
        prompts.num_new = [len(ids) - len(before) for ids, before in zip(prompt_ids, stream.ids, strict=True)]
        return rewritten

    def media(
        self, rows: Sequence[Any], ids: Sequence[Tensor], stream: TokenStream | Sequence[Tensor] | None
    ) -> list[Media] | None:
        """The media of rows with these ids. A stream, or masks, mark the ids that the policy sampled.

        Returns  None if the rows are not messages, or if there is no processor
        """
        if self.renderer is None or self.renderer.vision is None:
            return None
        masks = stream.assistant_mask if isinstance(stream, TokenStream) else stream
        images = [[image for own in take_images(chat)[1] for image in own] for chat in rows]
        return [self.renderer.media(*row) for row in zip(images, ids, masks or [None] * len(ids), strict=True)]

    @abstractmethod
    def _read(self, td: TensorDictBase, key: Key, attention_keys: Sequence[Key]) -> Prompts: ...

    @abstractmethod
    def encode(self, rows: Sequence[Any]) -> list[Tensor]:
        """Ids of the prompts of new conversations."""

    @abstractmethod
    def extend(self, stream: TokenStream, rows: Sequence[Any]) -> Sequence[Tensor | RewriteError]:
        """The ids that each row adds to its stream, or the error if its stream cannot be continued."""

    @abstractmethod
    def encode_full(self, rows: Sequence[Any]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Ids of whole conversations that were not sampled here, and masks of the assistant's ids; None if unknown."""

    @abstractmethod
    def views(self, turn: Turn) -> tuple[dict[str, dict[str, Any]], list[int] | None]:
        """Columns per container ("text", "history") of a finished turn, and the part of the mode's view (messages or
        characters) that the ids now cover.
        """


class HistoryMode(Mode):
    """Messages, rendered by the chat template."""

    name = "history"
    expected = "History object"
    written = ("text", "history")

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer

    def _read(self, td: TensorDictBase, key: Key, attention_keys: Sequence[Key]) -> Prompts:
        holder, field = find_holder(td, key, self.expected)
        history = holder.get(field)
        history = history.tolist() if is_non_tensor(history) else history
        if not isinstance(history, History):
            raise TypeError(f"LLM wrapper: Expected {self.expected} under {key!r}: got {type(history).__name__}.")
        flat = _flat(history)
        return Prompts(history_chats(flat, 1, asks=True), flat)

    def carried_texts(self, td: TensorDictBase, keys: Mapping[str, str], stream: TokenStream) -> list[str] | None:
        text = inner(td.get(keys["text"], None))
        rows = None if text is None else field_rows(text, "prompt")
        return None if rows is None else [row if len(ids) else "" for row, ids in zip(rows, stream.ids, strict=True)]

    def encode(self, rows: Sequence[Any]) -> list[Tensor]:
        return self.renderer.prompt_ids(rows)

    def extend(self, stream: TokenStream, rows: Sequence[Any]) -> list[Tensor | RewriteError]:
        new = _num_new(rows, stream.covered, "messages")
        return self.renderer.extend(stream.ids, rows, new, return_errors=True)

    def encode_full(self, rows: Sequence[Any]) -> tuple[list[Tensor], list[Tensor] | None]:
        rendered = self.renderer.render(rows)
        return [row.ids for row in rendered], [row.assistant_mask for row in rendered]

    def views(self, turn: Turn) -> tuple[dict[str, dict[str, Any]], list[int] | None]:
        contents, text = _text_views(self.tokenizer, turn, None)
        prompt, chats = turn.prompts.source, turn.prompts.rows
        messages = [[self._message(*row)] for row in zip(contents, turn.stop_reasons, chats, strict=True)]
        response = History.from_chats(messages)
        full = prompt.extend(response, inplace=False, dim=-1)
        # A turn that continues an unfinished message is merged into it, row by row.
        if any(map(is_open, chats)):
            full = History.stack([_with_turn(*row) for row in zip(full.unbind(0), chats, messages, strict=True)])
        covered = [len(chat) + (not is_open(chat)) for chat in chats]
        return {"text": text, "history": {"prompt": prompt, "response": response, "full": full}}, covered

    def _message(self, content: str, reason: StopReason, chat: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer as a message, which the template renders in later turns to the text that was sampled."""
        message = self.renderer.answer(content, begins=not is_open(chat), ended=reason is StopReason.EOS)
        return message | ({} if reason.natural else {"is_complete": False})


class TextMode(Mode):
    """Strings, tokenised unchanged: no template, and no special tokens unless ``tokenizer_kwargs`` adds them."""

    name = "text"
    expected = "str"
    written = ("text",)

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokenizer_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_kwargs = {"add_special_tokens": False, **(tokenizer_kwargs or {})}

    def _read(self, td: TensorDictBase, key: Key, attention_keys: Sequence[Key]) -> Prompts:
        rows = field_rows(*find_holder(td, key, self.expected))
        if not all(isinstance(row, str) for row in rows):
            raise TypeError(
                f"LLM wrapper: Expected {self.expected} under {key!r}: got "
                f"{sorted({type(row).__name__ for row in rows})}."
            )
        return Prompts(rows)

    def encode(self, rows: Sequence[Any]) -> list[Tensor]:
        return _tokenise(self.tokenizer, rows, self.tokenizer_kwargs)

    def extend(self, stream: TokenStream, rows: Sequence[Any]) -> list[Tensor]:
        added_chars = _num_new(rows, stream.covered, "characters")
        added = [text[len(text) - num :] for text, num in zip(rows, added_chars, strict=True)]
        return _tokenise(self.tokenizer, added, {**self.tokenizer_kwargs, "add_special_tokens": False})

    def encode_full(self, rows: Sequence[Any]) -> tuple[list[Tensor], list[Tensor] | None]:
        return self.encode(rows), None

    def views(self, turn: Turn) -> tuple[dict[str, dict[str, Any]], list[int] | None]:
        _, text = _text_views(self.tokenizer, turn, turn.prompts.rows)
        return {"text": text}, [len(full) for full in text["full"]]


class TokensMode(Mode):
    """Ids, used unchanged. The prompt is always the whole stream, so ``covered`` is not needed."""

    name = "tokens"
    expected = "int64[P] per row"
    written = ()

    def _read(self, td: TensorDictBase, key: Key, attention_keys: Sequence[Key]) -> Prompts:
        holder, field = find_holder(td, key, self.expected)
        rows = field_rows(holder, field)
        for row in rows:
            if not isinstance(row, Tensor) or row.ndim != 1 or row.dtype not in (torch.int64, torch.int32):
                got = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
                raise TypeError(f"LLM wrapper: Expected {self.expected} under {key!r}: got {got}.")
        return Prompts(kept_parts(rows, attention_rows(td, attention_keys, rows, key, dense=not is_ragged(holder))))

    def read_stream(self, td: TensorDictBase, keys: Mapping[str, str], prompts: Prompts) -> TokenStream | None:
        stream = TokenStream.read(td, keys=keys)
        if stream is None or stream.assistant_mask is None:
            return None
        ids = [row[: len(mask)] for row, mask in zip(prompts.rows, stream.assistant_mask, strict=True)]
        return replace(stream, ids=ids, covered=None)

    def encode(self, rows: Sequence[Any]) -> list[Tensor]:
        return list(rows)

    def extend(self, stream: TokenStream, rows: Sequence[Any]) -> list[Tensor]:
        return [row[len(ids) :] for row, ids in zip(rows, stream.ids, strict=True)]

    def encode_full(self, rows: Sequence[Any]) -> tuple[list[Tensor], list[Tensor] | None]:
        return list(rows), None

    def views(self, turn: Turn) -> tuple[dict[str, dict[str, Any]], list[int] | None]:
        return {}, None


def make_mode(settings: Any, tokenizer: PreTrainedTokenizerBase | None, renderer: Renderer | None) -> Mode:
    """The mode named by ``input_mode``. Raises ConfigError for an unknown one, or one that lacks its tokenizer."""
    name, known = settings.input_mode, ("history", "text", "tokens")
    if name not in known:
        raise ConfigError(
            f"LLM wrapper: input_mode must be one of {', '.join(known)}: got {name!r}.{did_you_mean(name, known)}"
        )
    if name == "tokens":
        return TokensMode()
    if tokenizer is None:
        raise ConfigError(f"LLM wrapper: input_mode {name!r} needs a tokenizer: pass tokenizer=, or use 'tokens'.")
    return HistoryMode(renderer) if name == "history" else TextMode(tokenizer, settings.tokenizer_kwargs)


def _text_views(
    tokenizer: PreTrainedTokenizerBase, turn: Turn, prompt_texts: list[str] | None
) -> tuple[list[str], dict[str, list[str]]]:
    """The text of each response without its end-of-turn token, and the text container's columns."""
    # One call decodes all parts: answers without their end-of-turn token, new parts of prompts, and end tokens.
    bodies: list[list[int]] = []
    ends: list[int | None] = []
    for ids, reason in zip(turn.response_ids, turn.stop_reasons, strict=True):
        body = ids.tolist()
        ended = reason is StopReason.EOS and bool(body) and body[-1] in turn.stop_token_ids
        ends.append(body.pop() if ended else None)
        bodies.append(body)
    pending: dict[tuple[int, ...], int] = {}  # equal prompts, as in a group, are decoded once
    which: list[int] = []
    if prompt_texts is None:
        carried = turn.prompts.texts
        for ids, num_new in zip(turn.prompts.ids, turn.prompts.num_new, strict=True):
            key = tuple((ids if carried is None else ids[ids.numel() - num_new :]).tolist())
            which.append(pending.setdefault(key, len(pending)))
    end_ids = sorted({end for end in ends if end is not None})
    texts = decode_rows(tokenizer, [*bodies, *map(list, pending), *([end] for end in end_ids)])
    contents, added = texts[: len(bodies)], texts[len(bodies) : len(bodies) + len(pending)]
    end_texts = {None: "", **dict(zip(end_ids, texts[len(bodies) + len(pending) :], strict=True))}
    if prompt_texts is None:
        prompt_texts = [
            before + added[index] for before, index in zip(carried or [""] * len(which), which, strict=True)
        ]
    if turn.skip_special_tokens:
        responses = tokenizer.batch_decode(bodies, skip_special_tokens=True)
    else:
        responses = [content + end_texts[end] for content, end in zip(contents, ends, strict=True)]
    full = [prompt + response for prompt, response in zip(prompt_texts, responses, strict=True)]
    return contents, {"prompt": prompt_texts, "response": responses, "full": full}


def _tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], options: Mapping[str, Any]) -> list[Tensor]:
    unique = list(dict.fromkeys(texts))
    encoded = dict(zip(unique, tokenizer(unique, **options)["input_ids"], strict=True)) if unique else {}
    return [torch.tensor(encoded[text], dtype=torch.int64) for text in texts]


def _num_new(rows: Sequence[Any], covered: Sequence[int], unit: str) -> list[int]:
    """The number of messages or characters that each row's stream does not cover. Raises RolloutError if negative."""
    num_new = [len(value) - known for value, known in zip(rows, covered, strict=True)]
    if num_new and min(num_new) < 0:
        row = num_new.index(min(num_new))
        raise RolloutError(
            f"LLM wrapper: a conversation only grows: row {row} has {len(rows[row])} {unit}, but its tokens cover "
            f"{covered[row]}; a transform that rewrites the past must drop ('tokens', 'prompt') too."
        )
    return num_new


def _with_turn(full: History, chat: list[dict[str, Any]], messages: list[dict[str, Any]]) -> History:
    """One conversation with its turn; a turn that continues an unfinished message is merged into it."""
    if not is_open(chat):
        return full
    [said] = messages
    return History.from_messages([*chat[:-1], {**said, "content": chat[-1]["content"] + said["content"]}])


def _flat(history: History) -> History:
    """Flattens [M] or [*batch, M] to [B, M]."""
    if history.ndim == 1:
        return History.stack([history])
    while history.ndim > 2:
        history = History.stack([row for part in history.unbind(0) for row in part.unbind(0)])
    return history
