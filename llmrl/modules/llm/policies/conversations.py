"""The whole conversations of a batch as ids: what scoring and distributions start from.

``("tokens", "full")`` where it is there, because ids that were sampled are never made again from text; else the mode's
own view, encoded. This file also lays values per token out as those ids are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.errors import ConfigError, MissingKeyError, ShapeError, near
from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens, entries, is_ragged
from llmrl.modules.llm.policies.modes import Key, Mode, unpadded_rows
from llmrl.padding import lengths_mask, pad_rows

__all__ = ["Conversations"]

_STRATEGIES = ("generic", "sft", "rlhf")


@dataclass
class Conversations:
    """The ids of a batch of conversations, one row each, and the layout that the batch has them in.

    rows       int64[T_i] each, in order
    full       int64[*B, T] and ``kept`` bool[*B, T], which of them are real, where the batch is padded; else None
    assistant  bool[T_i] each, what the assistant wrote, where it is known; None
    given      False where the ids were encoded here
    """

    rows: list[Tensor]
    full: Tensor | None
    kept: Tensor | None
    assistant: list[Tensor] | None
    given: bool

    @classmethod
    def read(
        cls, td: TensorDictBase, mode: Mode, keys: Mapping[str, str], input_key: Key, attention_mask_key: Key
    ) -> Conversations:
        """Reads ("tokens", "full") with its masks, else ``input_key``. Raises MissingKeyError, TypeError."""
        tokens, masks = (entries(td.get(keys[name], None)) for name in ("tokens", "masks"))
        if tokens is None or "full" not in tokens.keys():
            ids, assistant = mode.encode_full(mode.read(td, input_key, attention_mask_key).rows)
            return cls(ids, None, None, assistant, given=False)
        attention = None if masks is None or is_ragged(masks) else masks.get("all_attention_mask", None)
        # one row alone is a plain tensor either way
        padded = not is_ragged(tokens) if td.ndim else attention is not None and not bool(attention.all())
        attention = attention if padded else None
        rows = unpadded_rows(tokens, "full", attention)
        assistant = None
        if masks is not None and "all_assistant_mask" in masks.keys():
            assistant = unpadded_rows(masks, "all_assistant_mask", attention)
        elif (responses := _responses(tokens, masks, padded)) is not None:
            assistant = [torch.arange(len(row)) >= len(row) - num for row, num in zip(rows, responses, strict=True)]
        if not padded:
            return cls(rows, None, None, assistant, given=True)
        full = tokens.get("full")
        kept = torch.ones_like(full, dtype=torch.bool) if attention is None else attention.bool()
        return cls(rows, full, kept, assistant, given=True)

    def padded(self, pad_token_id: int) -> tuple[Tensor, Tensor]:
        """int64[B, T] and bool[B, T]: the ids and which of them are real; rows are padded on the right."""
        if self.full is not None:
            return self.full.reshape(-1, self.full.shape[-1]), self.kept.reshape(-1, self.kept.shape[-1])
        ids_BT = pad_rows(self.rows, value=pad_token_id)
        return ids_BT, lengths_mask([len(row) for row in self.rows], ids_BT.shape[1]).to(ids_BT.device)

    def written(
        self, scores: Sequence[Tensor], batch_size: Sequence[int], pad_token_id: int | None
    ) -> dict[str, LogProbs | Masks | Tokens]:
        """The containers of a scoring call: log-probs laid out as the ids are; before them masks and ids, where they
        were made here: padded on the right with ``pad_token_id``, as rows where that is None.
        """
        if self.full is not None:
            values = torch.cat(list(scores))
            dense = values.new_zeros(self.kept.shape).masked_scatter(self.kept.to(values.device), values)
            return {"log_probs": LogProbs.from_padded({"full": dense}, batch_size)}
        if self.given:
            return {"log_probs": LogProbs.from_rows({"full": scores}, batch_size)}
        masks = {"all_attention_mask": [torch.ones(len(row), dtype=torch.bool) for row in self.rows]}
        if self.assistant is not None:
            masks["all_assistant_mask"] = self.assistant
        return {
            "masks": _laid_out(Masks, masks, batch_size, None if pad_token_id is None else 0),
            "tokens": _laid_out(Tokens, {"full": self.rows}, batch_size, pad_token_id),
            "log_probs": _laid_out(LogProbs, {"full": scores}, batch_size, None if pad_token_id is None else 0),
        }

    def selected(self, strategy: str, mask: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
        """bool[T_i] per row: the tokens that a strategy, or a mask of the tokens' layout, asks for."""
        if strategy not in _STRATEGIES:
            raise ConfigError(
                f"get_dist: masking_strategy must be one of {', '.join(_STRATEGIES)}: got {strategy!r}."
                f"{near(str(strategy), _STRATEGIES)}"
            )
        if mask is not None:
            return self._own_rows(mask)
        if strategy == "generic":
            return [torch.ones(len(row), dtype=torch.bool) for row in self.rows]
        if self.assistant is None:
            raise MissingKeyError(
                f"get_dist: masking_strategy {strategy!r} needs ('masks', 'all_assistant_mask') or ('tokens', "
                "'response'), to know what the assistant wrote: got neither; use 'generic', or pass mask=."
            )
        return [row.bool() for row in self.assistant]

    def _own_rows(self, mask: Tensor | Sequence[Tensor]) -> list[Tensor]:
        if isinstance(mask, Tensor) and self.full is not None and mask.shape == self.full.shape:
            kept_BT = self.kept.reshape(-1, self.kept.shape[-1])
            pairs = zip(mask.reshape(kept_BT.shape).bool(), kept_BT.to(mask.device), strict=True)
            return [row[kept] for row, kept in pairs]
        rows = [mask] if isinstance(mask, Tensor) and mask.ndim == 1 else [torch.as_tensor(row) for row in mask]
        got, expected = [tuple(row.shape) for row in rows], [tuple(row.shape) for row in self.rows]
        if got != expected:
            want = f"rows of {expected}" if self.full is None else f"{tuple(self.full.shape)}"
            have = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else f"rows of {got}"
            raise ShapeError(
                f"get_dist: mask must have one value per token of ('tokens', 'full'): got {have}, expected {want}; "
                "usually it was made from another tokenisation of the conversation, or from its response alone."
            )
        return [row.bool() for row in rows]


def _laid_out(container: Any, columns: dict[str, Any], batch_size: Sequence[int], fill: int | None) -> Any:
    if fill is None:
        return container.from_rows(columns, batch_size)
    dense = {name: pad_rows(rows, value=fill) for name, rows in columns.items()}
    shaped = {name: value.reshape((*batch_size, value.shape[-1])) for name, value in dense.items()}
    return container.from_padded(shaped, batch_size)


def _responses(tokens: TensorDictBase, masks: TensorDictBase | None, padded: bool) -> list[int] | None:
    """How many ids at the end of each row are its response; None where the batch does not say."""
    if "response" not in tokens.keys():
        return None
    if not padded:
        return [len(row) for row in unpadded_rows(tokens, "response", None)]
    width = tokens.get("response").shape[-1]
    attention = None if masks is None else masks.get("all_attention_mask", None)
    if attention is None:
        return [width] * tokens.batch_size.numel()
    return attention[..., -width:].reshape(-1, width).sum(-1).tolist()
