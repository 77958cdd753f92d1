"""Whole conversations of a batch as ids, and a model's log-probs and distributions of their tokens.

The ids are ``("tokens", "full")`` if present, because sampled ids are never re-tokenised from text; else the mode's own
view, encoded. Losses call ``token_scores`` instead of using a distribution, whose memory is vocabulary times tokens.

Shapes: B sequences, T tokens, N chosen positions, V vocabulary, S samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Distribution

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.data.ragged.tensordicts import inner
from llmrl.errors import ConfigError, MissingKeyError, ShapeError, did_you_mean
from llmrl.modules.llm.engines.transformers import model_device
from llmrl.modules.llm.log_probs import hidden_before, with_predecessor
from llmrl.modules.llm.packing import accepted, evaluating, find_head_path, map_logits, padded_inputs
from llmrl.modules.llm.policies.containers import decode_rows, make_containers
from llmrl.modules.llm.policies.modes import Mode
from llmrl.modules.llm.policies.rows import (
    Key,
    Padding,
    attention_rows,
    field_rows,
    is_ragged,
    kept_parts,
    num_real_ids,
)
from llmrl.modules.llm.vision import Media, has_images, media_inputs, only_given_images, read_media

_STRATEGIES = ("generic", "sft", "rlhf")


@dataclass
class Conversations:
    """The ids of a batch of conversations, one row each, and their layout in the batch.

    laid_out   int64[L_i] each, as stored in the batch
    kept       bool[L_i] each, True on real ids; None if there is no padding
    dense      True if the batch stores them as one tensor, [*B, L]
    assistant  bool[T_i] each, True on real ids that the assistant wrote; None if unknown
    given      False if the ids were encoded here
    media      media of each row; None if neither the batch nor its messages have any
    rows       int64[T_i] each: the real ids
    """

    laid_out: list[Tensor]
    kept: list[Tensor] | None
    dense: bool
    assistant: list[Tensor] | None
    given: bool
    media: list[Media] | None = None

    def __post_init__(self) -> None:
        self.rows: list[Tensor] = kept_parts(self.laid_out, self.kept)

    @classmethod
    def read(
        cls, td: TensorDictBase, mode: Mode, keys: Mapping[str, str], input_key: Key, attention_mask_key: Key
    ) -> Conversations:
        """Reads ("tokens", "full") with its masks, else ``input_key``; in tokens mode always that.

        Raises  MissingInputError, TypeError, ShapeError
        """
        tokens, masks = (inner(td.get(keys[name], None)) for name in ("tokens", "masks"))
        full_key = (keys["tokens"], "full")
        # Sampled ids are scored unchanged, even if the mode's own view is present too.
        elsewhere = mode.name == "tokens" and input_key not in (full_key, list(full_key))
        if elsewhere or tokens is None or "full" not in tokens.keys():
            rows = mode.read(td, input_key, attention_mask_key).rows
            ids, assistant = mode.encode_full(rows)
            return cls(
                ids, None, False, assistant, given=False, media=mode.media(rows, ids, assistant) or read_media(td)
            )
        laid_out = field_rows(tokens, "full")
        dense = bool(td.ndim) and not is_ragged(tokens)
        attention_keys = ((keys["masks"], "all_attention_mask"), attention_mask_key)
        kept = attention_rows(td, attention_keys, laid_out, full_key, dense=dense)
        assistant = None
        if masks is not None and "all_assistant_mask" in masks.keys():
            assistant = kept_parts(field_rows(masks, "all_assistant_mask"), kept)
        elif "response" in tokens.keys():
            real = [len(row) for row in kept_parts(laid_out, kept)]
            responses = num_real_ids(field_rows(tokens, "response"), kept)
            assistant = [torch.arange(size) >= size - num for size, num in zip(real, responses, strict=True)]
        return cls(laid_out, kept, dense, assistant, given=True, media=read_media(td))

    def padded(self, pad_token_id: int) -> tuple[Tensor, Tensor]:
        """The ids int64[B, L] and the mask of real ids bool[B, L]; rows are padded on the right."""
        ids_BL = pad_rows(self.laid_out, value=pad_token_id)
        if self.kept is not None:
            return ids_BL, pad_rows(self.kept).to(ids_BL.device)
        return ids_BL, lengths_mask([len(row) for row in self.rows], ids_BL.shape[1]).to(ids_BL.device)

    def containers(
        self, scores: Sequence[Tensor], batch_size: Sequence[int], pad_token_id: int | None
    ) -> dict[str, Any]:
        """The containers "masks", "tokens" and "log_probs" for ``scores`` float32[T_i], in the layout of the ids.

        pad_token_id  padding on the right for ids that were encoded here; None: they stay ragged
        """
        masks = {"all_attention_mask": [torch.ones(len(row), dtype=torch.bool) for row in self.rows]}
        if self.assistant is not None:
            masks["all_assistant_mask"] = self.assistant
        columns: dict[str, dict[str, Any]] = {
            "masks": masks,
            "tokens": {"full": self.rows},
            "log_probs": {"full": list(scores)},
        }
        padding = None
        if self.dense:
            kept = self.kept or [torch.ones(len(row), dtype=torch.bool) for row in self.laid_out]
            padding = Padding(torch.stack(kept), 0, 0)
        elif not self.given and pad_token_id is not None:
            padding = Padding.behind(self.rows, pad_token_id)
        elif self.kept is not None:  # rows of a padded batch keep their padding
            for fields in columns.values():
                for field, rows in fields.items():
                    fields[field] = [_spread(*pair) for pair in zip(rows, self.kept, strict=True)]
        return make_containers(columns, batch_size, padding)

    def views(self, td: TensorDictBase, mode: Mode, keys: Mapping[str, str], input_key: Key) -> dict[str, Any]:
        """The containers of ``td`` for these conversations; missing views of the mode are added with only "full"."""
        names = (*mode.written, "tokens", "masks") if self.given else mode.written
        views = {name: td.get(keys[name], None) for name in names}
        views = {
            name: view
            for name, view in views.items()
            if view is not None and (name in ("tokens", "masks") or "full" in inner(view).keys())
        }
        columns: dict[str, dict[str, Any]] = {}
        read = None if self.given else mode.read(td, input_key)
        if "text" in mode.written and "text" not in views:
            as_read = read is not None and mode.name == "text"
            texts = read.rows if as_read else decode_rows(mode.tokenizer, [row.tolist() for row in self.rows])
            columns["text"] = {"full": texts}
        if "history" in mode.written and "history" not in views and read is not None:
            columns["history"] = {"full": read.source}
        return views | make_containers(columns, td.batch_size)

    def selected(self, strategy: str, mask: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
        """bool[T_i] per row: the tokens selected by a strategy, or by a mask in the layout of the tokens."""
        if strategy not in _STRATEGIES:
            raise ConfigError(
                f"get_dist: masking_strategy must be one of {', '.join(_STRATEGIES)}: got {strategy!r}."
                f"{did_you_mean(str(strategy), _STRATEGIES)}"
            )
        if mask is not None:
            return self._own_rows(mask)
        if strategy == "generic":
            return [torch.ones(len(row), dtype=torch.bool) for row in self.rows]
        if self.assistant is None:
            raise MissingKeyError(
                f"get_dist: masking_strategy {strategy!r} needs ('masks', 'all_assistant_mask') or ('tokens', "
                "'response') to find the assistant's tokens: got neither; use 'generic', or pass mask=."
            )
        return [row.bool() for row in self.assistant]

    def _own_rows(self, mask: Tensor | Sequence[Tensor]) -> list[Tensor]:
        if isinstance(mask, Tensor):
            rows = list(mask.reshape(-1, mask.shape[-1])) if mask.ndim else [mask]
        else:
            rows = [torch.as_tensor(row) for row in mask]
        got = [tuple(row.shape) for row in rows]
        if got == [tuple(row.shape) for row in self.laid_out]:
            return kept_parts([row.bool() for row in rows], self.kept)
        expected = [tuple(row.shape) for row in self.rows]
        if got != expected:
            want = f"{(len(self.laid_out), *self.laid_out[0].shape)}" if self.dense else f"rows of {expected}"
            have = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else f"rows of {got}"
            raise ShapeError(
                f"get_dist: mask must have one value per token of ('tokens', 'full'): got {have}, expected {want}; "
                "usually it was made from another tokenisation of the conversation, or from its response alone."
            )
        return [row.bool() for row in rows]


def _spread(values: Tensor, kept: Tensor) -> Tensor:
    """Expands [T_i] to [L_i], with 0 on padding."""
    kept = kept.to(values.device)
    return values.new_zeros(kept.shape).masked_scatter(kept, values)


_ROWS_AT_A_TIME = 256  # rows of temporaries of vocabulary width


class TokenCategorical(Distribution):
    """A categorical distribution over the vocabulary for every chosen token.

    logits  float32[N, V]    only of the chosen positions, in the order of ``mask``
    tokens  int64[*B, T]     the conversations
    mask    bool[*B, T]      positions with a distribution: those chosen that have a preceding token
    Raises  ShapeError       if values do not have the shape of the tokens

    Results have the shape of the tokens. Where the mask is False, ``log_prob`` and ``entropy`` are 0, and ``sample``
    and ``mode`` return the given token. Memory: 4 N V bytes, and about five times that for a backward pass.

    >>> mask = torch.tensor([[False, True, True]])
    >>> dist = TokenCategorical(torch.zeros(2, 4), torch.tensor([[3, 1, 2]]), mask)
    >>> dist.log_prob(dist.tokens).exp().tolist(), dist.mode.tolist()
    ([[1.0, 0.25, 0.25]], [[3, 0, 0]])
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (how torch declares that there are none)
    has_rsample = False

    def __init__(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
        if mask.shape != tokens.shape or logits.ndim != 2 or len(logits) != int(mask.sum()):
            raise ShapeError(
                "TokenCategorical: logits must have one row per True of a mask that is shaped like the tokens: got "
                f"{tuple(logits.shape)} for {int(mask.sum())} in {tuple(mask.shape)}, tokens {tuple(tokens.shape)}."
            )
        super().__init__(batch_shape=mask.shape, validate_args=False)
        self.logits = logits
        self.tokens = tokens
        self.mask = mask
        # In parts, like all sums over the vocabulary: the temporaries of a sum are as large as its logits.
        self._log_total_N = torch.cat([part_CV.logsumexp(-1) for part_CV in logits.split(_ROWS_AT_A_TIME)])

    def log_prob(self, value: Tensor) -> Tensor:
        """float32[*S, *B, T] of ids int64[*S, *B, T]; ``dist.log_prob(dist.tokens)`` equals ``token_scores``."""
        if value.shape[-self.mask.ndim :] != self.mask.shape:
            raise ShapeError(
                f"TokenCategorical.log_prob: ids must end in the shape of the tokens: got {tuple(value.shape)}, "
                f"expected {tuple(self.mask.shape)}."
            )
        ids_SN = value[..., self.mask].to(self.logits.device)
        rows_SN = torch.arange(len(self.logits), device=self.logits.device).expand(ids_SN.shape)
        return self._spread(self.logits[rows_SN, ids_SN] - self._log_total_N)

    def entropy(self) -> Tensor:
        """float32[*B, T], in nats."""
        entropies = []
        for log_p_CV in self._log_p():
            finite_CV = log_p_CV.clamp(min=torch.finfo(log_p_CV.dtype).min)  # avoids 0 * -inf for a probability of 0
            entropies.append(-(log_p_CV.exp() * finite_CV).sum(-1))
        return self._spread(torch.cat(entropies))

    @property
    def mode(self) -> Tensor:
        """int64[*B, T]: the most likely token."""
        return self._spread(self.logits.argmax(-1), self.tokens)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Samples int64[*sample_shape, *B, T] with torch's global generator."""
        shape = torch.Size(sample_shape)
        if not len(self.logits):
            return self.tokens.expand(*shape, *self.mask.shape).clone()
        drawn = [torch.multinomial(log_p_CV.exp(), shape.numel(), replacement=True) for log_p_CV in self._log_p()]
        ids_SN = torch.cat(drawn).T.reshape(*shape, -1)
        return self._spread(ids_SN, self.tokens)

    def _log_p(self) -> Iterator[Tensor]:
        """Yields log-probs of all ids, float32[C, V], for a few positions at a time."""
        parts = zip(self.logits.split(_ROWS_AT_A_TIME), self._log_total_N.split(_ROWS_AT_A_TIME), strict=True)
        return (logits_CV - log_total_C[:, None] for logits_CV, log_total_C in parts)

    def _spread(self, values_SN: Tensor, elsewhere: Tensor | None = None) -> Tensor:
        """Scatters [*S, N] to [*S, *B, T]; ``elsewhere`` (default 0) fills the rest."""
        shape, device = (*values_SN.shape[:-1], *self.mask.shape), values_SN.device
        out = values_SN.new_zeros(shape) if elsewhere is None else elsewhere.to(device).expand(shape)
        return out.masked_scatter(self.mask.to(device).expand(shape), values_SN)


def token_categorical(
    model: nn.Module,
    conversations: Conversations,
    masking_strategy: str,
    mask: Tensor | Sequence[Tensor] | None,
    *,
    pad_token_id: int,
    temperature: float,
    batch_size: torch.Size,
) -> TokenCategorical:
    """The distributions of the chosen tokens, [*batch_size, T]. Uses evaluation mode if gradients are off."""
    chosen = conversations.selected(masking_strategy, mask)
    device = model_device(model)
    ids_BT, attention_BT = (value.to(device) for value in conversations.padded(pad_token_id))
    select_BT = attention_BT.masked_scatter(attention_BT, torch.cat(chosen).to(device))
    mask_BT = with_predecessor(select_BT, attention_BT)
    with nullcontext() if torch.is_grad_enabled() else evaluating(model):
        if has_images(media := conversations.media):
            inputs = {"input_ids": ids_BT, "attention_mask": attention_BT, **media_inputs(attention_BT, media)}
            with only_given_images(model, inputs) as inputs:
                logits_NV = _chosen_logits(model, inputs, mask_BT, temperature)
        else:
            logits_NV = _chosen_logits(model, padded_inputs(ids_BT, attention_BT), mask_BT, temperature)
    shape = (*batch_size, ids_BT.shape[-1])
    return TokenCategorical(logits_NV, ids_BT.reshape(shape), mask_BT.reshape(shape))


def _chosen_logits(model: nn.Module, inputs: dict[str, Tensor], mask_BT: Tensor, temperature: float) -> Tensor:
    """float32[N, V]: the logits that predict the tokens under the mask, divided by the temperature.

    Calls  the body once and the head on the N positions; or the whole model, if it does not compute head(body)
    """
    path = find_head_path(model)
    if path is None:
        output = model(**accepted(model, inputs))
        return map_logits(getattr(output, "logits", output)[:, :-1][mask_BT[:, 1:]], None, temperature)
    hidden_NH = hidden_before(path, inputs, mask_BT)
    if len(hidden_NH) <= _ROWS_AT_A_TIME or torch.is_grad_enabled():
        return map_logits(path.head(hidden_NH), path, temperature)
    # In parts, to avoid a second tensor of the size of all logits.
    start, logits_NV = 0, None
    for part_CH in hidden_NH.split(_ROWS_AT_A_TIME):
        part_CV = map_logits(path.head(part_CH), path, temperature)
        if logits_NV is None:
            logits_NV = part_CV.new_empty(len(hidden_NH), part_CV.shape[-1])
        logits_NV[start : start + len(part_CV)] = part_CV
        start += len(part_CV)
    return logits_NV
