"""Conversations as ids, masks and dicts: everything `History.apply_chat_template` returns except text.

Text is tokenised by `llmrl.data.llm.codec`. Images, audio and video go through a processor of the Transformers library,
which loads them, writes as many placeholder ids as they need, and so also tokenises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor

from llmrl.data.llm.codec import ChatCodec, codec_for
from llmrl.data.llm.message_forms import render_text
from llmrl.data.llm.spans import rows_to_tensors, spans_to_masks
from llmrl.data.llm.templates import Chat, ChatTemplate, Tools, find_template
from llmrl.data.ragged.padding import pad_rows
from llmrl.data.ragged.tensordicts import new_tensordict
from llmrl.errors import ConfigError, ShapeError, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_WHO = "History.apply_chat_template"


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The keywords of `History.apply_chat_template`; any other one is a variable of the template.

    Raises  ConfigError for keywords that exclude each other, or that would have no effect
    """

    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None  # not needed for text; a processor for media
    add_generation_prompt: bool = True
    chat_template: str | None = None  # text, instead of the tokenizer's own template
    chat_template_name: str | None = None  # a registered template, likewise
    continue_final_message: bool = False  # leave the last message open, for a model to continue
    tokenize: bool | None = None  # ids instead of text; None: if masks, return_tensors or dicts are requested
    padding: bool = False  # to the longest row, on the tokenizer's side
    truncation: bool = False  # at ``tokenizer.model_max_length``
    return_tensors: str | None = None  # "pt"; ids are tensors anyway
    return_dict: bool | None = None  # None: if a mask is requested
    return_assistant_tokens_mask: bool = False
    include_end_of_turn: bool = True  # in the mask; False: generation blocks are taken literally
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Encoding:
        """Splits the keywords of one call into fields and template variables."""
        known = {name: value for name, value in options.items() if name in cls.__dataclass_fields__}
        return cls(**known, template_kwargs={n: value for n, value in options.items() if n not in known})

    def __post_init__(self) -> None:
        if self.continue_final_message and (self.add_generation_prompt or self.return_assistant_tokens_mask):
            raise ConfigError(
                f"{_WHO}: continue_final_message must come without a generation prompt and without a mask: got one; "
                "pass add_generation_prompt=False."
            )
        if self.return_tensors not in (None, "pt"):
            raise ConfigError(f"{_WHO}: return_tensors must be 'pt' or None: got {self.return_tensors!r}.")
        if self.return_assistant_tokens_mask and self.return_dict is False:
            raise ConfigError(f"{_WHO}: a mask is returned in a dict: got return_dict=False.")
        for name in ("padding", "truncation"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{_WHO}: {name} must be True or False: got {getattr(self, name)!r}; True pads to the longest row, "
                    "or cuts at the tokenizer's model_max_length."
                )
        of_ids = ("return_assistant_tokens_mask", "return_dict", "return_tensors", "padding", "truncation")
        asked = [name for name in of_ids if getattr(self, name)]
        if asked and not self.wants_ids:
            raise ConfigError(f"{_WHO}: {asked[0]} requires tokenize=True: got tokenize={self.tokenize}.")
        if self.wants_ids and self.tokenizer is None:
            raise ConfigError(f"{_WHO}: ids need a tokenizer: got tokenizer=None; pass one, or ask for text.")
        partial_text = self.continue_final_message or self.truncation
        if self.wants_ids and self._has_processor and (partial_text or not self._as_dict):
            raise ConfigError(
                f"{_WHO}: a processor makes dicts of whole messages: got continue_final_message, truncation, or no "
                "return_dict; pass return_dict=True, or its tokenizer."
            )

    @property
    def _as_dict(self) -> bool:
        return self.return_assistant_tokens_mask if self.return_dict is None else self.return_dict

    @property
    def wants_ids(self) -> bool:
        return bool(self._as_dict or self.return_tensors) if self.tokenize is None else self.tokenize

    @cached_property
    def _template(self) -> ChatTemplate:
        return find_template(self.tokenizer, self.chat_template_name, template=self.chat_template)

    def encode(self, chats: Sequence[Chat]) -> Any:
        """One result per conversation: texts, rows of ids, or a batch of dicts."""
        options = {"add_generation_prompt": self.add_generation_prompt, "tools": self.tools}
        if not self.wants_ids:
            options |= {"continue_final_message": self.continue_final_message, "template_kwargs": self.template_kwargs}
            return render_text(self._template, chats, self.tokenizer, **options)
        rows = self._process(chats) if self._has_processor else self._tokenize(chats, options)
        if self._as_dict:
            return self._as_batch(rows)
        ids = [row["input_ids"] for row in rows]
        return self._padded(ids, self._pad_token_id) if self.padding else ids

    @property
    def _has_processor(self) -> bool:
        return hasattr(self.tokenizer, "tokenizer") and hasattr(self.tokenizer, "apply_chat_template")

    @property
    def _text_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer.tokenizer if self._has_processor else self.tokenizer

    @property
    def _codec(self) -> ChatCodec:
        make = partial(ChatCodec, template_kwargs=self.template_kwargs) if self.template_kwargs else codec_for
        return make(self._text_tokenizer, self._template, include_end_of_turn=self.include_end_of_turn)

    def _tokenize(self, chats: Sequence[Chat], options: dict[str, Any]) -> list[dict[str, Tensor]]:
        codec, spans = self._codec, None
        if self.return_assistant_tokens_mask:
            texts, spans = codec.render_with_spans(chats, **options)
        else:
            texts = codec.render(chats, continue_final_message=self.continue_final_message, **options)
        ids, token_spans = codec.encode_with_spans(texts, spans)
        cut = slice(self.tokenizer.model_max_length if self.truncation else None)
        masks = [None] * len(ids) if spans is None else spans_to_masks(token_spans, list(map(len, ids)))
        rows = []
        for row, mask in zip(rows_to_tensors(ids), masks, strict=True):
            columns = {"input_ids": row[cut], "attention_mask": torch.ones(len(row[cut]), dtype=torch.bool)}
            rows.append(columns if mask is None else {**columns, "assistant_masks": mask[cut]})
        return rows

    def _process(self, chats: Sequence[Chat]) -> list[dict[str, Tensor]]:
        """Ids and masks of each conversation, and the processor's own entries, such as "pixel_values"."""
        codec = self._codec
        if self.return_assistant_tokens_mask and not self._template.marks_generation:
            raise TemplateError(
                f"{_WHO}: a mask of a conversation with media needs generation blocks: template "
                f"{self._template.name!r} has none; put {{% generation %}}...{{% endgeneration %}} around the answers."
            )
        codec.refuse_markers(chats)  # the processor would read a quoted marker as a real one
        chats = codec.forms.fit(chats)
        rows = []
        for chat in chats:  # one by one: a processor does not say which media belong to which conversation
            made = self.tokenizer.apply_chat_template(
                [chat],
                chat_template=self._template.jinja,
                tools=self.tools,
                add_generation_prompt=self.add_generation_prompt,
                return_assistant_tokens_mask=self.return_assistant_tokens_mask,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **self.template_kwargs,
            )
            ids = made["input_ids"][0]
            columns = {**made, "input_ids": ids, "attention_mask": torch.ones(len(ids), dtype=torch.bool)}
            if self.return_assistant_tokens_mask:
                columns["assistant_masks"] = _with_end(torch.as_tensor(made["assistant_masks"]).view(-1), ids, codec)
            rows.append(columns)
        return rows

    def _as_batch(self, rows: Sequence[dict[str, Tensor]]) -> Any:
        if not rows:
            raise ShapeError(f"{_WHO}: a dict must hold at least one conversation: got an empty batch.")
        if not self.padding:
            return LazyStackedTensorDict(*[new_tensordict(row) for row in rows])
        batch = TensorDict({}, batch_size=[len(rows)])
        for name in rows[0]:
            values = [row[name] for row in rows]
            # One value per token: ids, masks, and per-token entries of a processor, which have shape [1, T].
            if all(row[name].shape in ((len(row["input_ids"]),), (1, len(row["input_ids"]))) for row in rows):
                flat = [value.view(-1) for value in values]
                batch[name] = self._padded(flat, self._pad_token_id if name == "input_ids" else 0)
            elif len({value.shape for value in values}) == 1:
                batch[name] = torch.stack(values)
            else:
                raise ShapeError(
                    f"{_WHO}: entries of a processor must have one shape to be padded: {name!r} has "
                    f"{sorted({tuple(value.shape) for value in values})}; leave padding=False."
                )
        return batch

    def _padded(self, rows: Sequence[Tensor], value: int) -> Tensor:
        return pad_rows(rows, value=value, side=self._text_tokenizer.padding_side)

    @property
    def _pad_token_id(self) -> int:
        if self._text_tokenizer.pad_token_id is None:
            raise ConfigError(
                f"{_WHO}: padding needs a tokenizer with a pad token: got none; set tokenizer.pad_token = "
                "tokenizer.eos_token (masks come from lengths), or leave padding=False."
            )
        return self._text_tokenizer.pad_token_id


def _with_end(mask: Tensor, ids: Tensor, codec: ChatCodec) -> Tensor:
    """The mask with the end-of-turn ids that close each run; as it is if the codec does not include them."""
    mask, end = mask.bool().clone(), codec.end_of_turn_ids
    if not end or not codec.include_end_of_turn:
        return mask
    # -1 where a run ends; the zero after the row closes a run that reaches its end.
    edges = torch.diff(mask.int(), append=torch.zeros(1, dtype=torch.int32))
    for last in (edges == -1).nonzero().flatten().tolist():
        after = last + 1
        # Templates close the generation block before the end of turn, or after it: both give the same mask.
        if ids[after : after + len(end)].tolist() == end:
            mask[after : after + len(end)] = True
    return mask
