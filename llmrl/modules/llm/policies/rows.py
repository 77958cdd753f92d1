"""Converts fields of a batch to flat lists of rows without padding, and such rows back to a padded layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from llmrl.data.ragged.padding import lengths_mask
from llmrl.data.ragged.tensordicts import inner, plain_value, present_keys
from llmrl.errors import MissingKeyError, ShapeError

Key = str | tuple[str, ...]


class MissingInputError(MissingKeyError, ValueError):
    """An entry that a wrapper reads is not in its input."""


def is_ragged(td: TensorDictBase) -> bool:
    """True for a lazy stack of rows, False for dense tensors."""
    return isinstance(td, LazyStackedTensorDict)


def field_rows(td: TensorDictBase, field: str) -> list[Any] | None:
    """The values of one entry, one per row of the batch, in order; None if it is missing. Strings become str."""
    if td.ndim > 1:
        parts = [field_rows(part, field) for part in td.unbind(0)]
        return None if any(part is None for part in parts) else [value for part in parts for value in part]
    values = td.get(field, None, as_list=True) if td.ndim and is_ragged(td) else td.get(field, None)
    if values is None or isinstance(values, list):
        return values
    if td.ndim == 0:
        return [plain_value(values)]
    return [plain_value(value) for value in (values.unbind(0) if hasattr(values, "unbind") else values)]


def unpadded_rows(holder: TensorDictBase, field: str, mask: Tensor | Sequence[Tensor] | None) -> list[Any]:
    """The rows of a field without padding: the mask applies to rows of its own length, others are unchanged."""
    rows = mask.reshape(-1, mask.shape[-1]) if isinstance(mask, Tensor) else mask
    return kept_parts(field_rows(holder, field), None if rows is None else [row.bool() for row in rows])


def kept_parts(values: Sequence[Any], kept: Sequence[Tensor] | None) -> list[Any]:
    """Each value where its mask in ``kept`` is True; unchanged if the mask has another length, or ``kept`` is None."""
    if kept is None:
        return list(values)
    pairs = zip(values, kept, strict=True)
    return [value[mask.to(value.device)] if value.shape[:1] == mask.shape else value for value, mask in pairs]


def num_real_ids(responses: Sequence[Tensor], kept: Sequence[Tensor] | None) -> list[int]:
    """The number of ids in each response without padding; ``kept`` are masks of whole rows, which end with it."""
    if kept is None:
        return [len(row) for row in responses]
    return [int(mask[len(mask) - len(row) :].sum()) for row, mask in zip(responses, kept, strict=True)]


def attention_rows(
    td: TensorDictBase, keys: Sequence[Key], rows: Sequence[Tensor], what: Key, *, dense: bool
) -> list[Tensor] | None:
    """bool[L_i] per row, True on real ids of ``rows``, from the mask under the first of ``keys`` that is present.

    what     the key of the rows, for the message
    Returns  None if there is no mask, or no padding. A mask of other lengths is skipped, as it is not for these rows
    Raises   ShapeError for such a mask if the rows are ``dense``: their padding is then unknown
    """
    for key in keys:
        holder, field = _found(td, key)
        masks = field_rows(holder, field) if isinstance(holder, TensorDictBase) else None
        if masks is None or not all(isinstance(mask, Tensor) for mask in masks):
            continue
        sizes, expected = ([tuple(row.shape) for row in values] for values in (masks, rows))
        if sizes == expected:
            kept = [mask.bool() for mask in masks]
            return None if bool(torch.cat(kept).all()) else kept
        if dense:
            raise ShapeError(
                f"LLM wrapper: {key!r} must have the shape of {what!r}: got {[len(sizes), *sizes[0]]} for "
                f"{[len(expected), *expected[0]]}."
            )
    return None


def find_holder(td: TensorDictBase, key: Key, expected: str) -> tuple[TensorDictBase, str]:
    """The tensordict that holds the last part of ``key``, and that part.

    Raises  MissingInputError; TypeError if another value is stored in place of the container
    """
    holder, field = _found(td, key)
    if not (holder is None or isinstance(holder, TensorDictBase)):
        raise TypeError(f"LLM wrapper: Expected {expected} under {key!r}: got {type(holder).__name__} in its place.")
    if holder is None or field not in holder.keys():
        raise MissingInputError(f"LLM wrapper: Expected '{key}' key in the input: keys present: {present_keys(td)}.")
    return holder, field


def _found(td: TensorDictBase, key: Key) -> tuple[Any, str]:
    """The container (or other value) at all but the last part of ``key``, or None; and that last part."""
    path = (key,) if isinstance(key, str) else tuple(key)
    holder: Any = td
    for part in path[:-1]:
        holder = holder.get(part, None) if isinstance(holder, TensorDictBase) else None
        if is_non_tensor(holder):
            return holder.tolist(), path[-1]
        if is_tensorclass(holder):
            holder = inner(holder)
    return holder, path[-1]


@dataclass(frozen=True)
class Padding:
    """The layout of padded rows; all padding in a wrapper's output is done here.

    mask          bool[B, L], True on real tokens
    prompt_width  number of leading columns for prompts; the others are for responses
    pad_token_id  padding of ids; other fields are padded with False or 0
    """

    mask: Tensor
    prompt_width: int
    pad_token_id: int

    @classmethod
    def around_turns(cls, prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_token_id: int) -> Padding:
        """Pads prompts on the left and responses on the right, so that all responses begin in the same column."""
        sizes = [[len(row) for row in rows] for rows in (prompts, responses)]
        parts = [lengths_mask(of, max(of), side) for of, side in zip(sizes, ("left", "right"), strict=True)]
        return cls(torch.cat(parts, 1), max(sizes[0]), pad_token_id)

    @classmethod
    def behind(cls, rows: Sequence[Tensor], pad_token_id: int) -> Padding:
        """Pads rows on the right."""
        lengths = [len(row) for row in rows]
        return cls(lengths_mask(lengths, max(lengths)), 0, pad_token_id)

    def padded(self, container: str, columns: Mapping[str, Any], batch_size: Sequence[int]) -> dict[str, Tensor]:
        """Pads a container's ragged columns to [*batch_size, ...]; prompt and response fields only to their width."""
        out: dict[str, Tensor] = {}
        for field, rows in columns.items():
            if isinstance(rows, Tensor):  # one number per row
                out[field] = rows.reshape(batch_size)
                continue
            start = self.prompt_width if field == "response" else 0
            mask = self.mask[:, start : self.prompt_width if field.startswith("prompt") else None]
            values = torch.cat(list(rows))
            fill = self.pad_token_id if container == "tokens" else 0
            mask = mask.to(values.device)
            # A mask selects row by row, in the order of the joined values, so one assignment places all of them.
            dense = values.new_full((*mask.shape, *values.shape[1:]), fill)
            dense[mask] = values
            out[field] = dense.reshape((*batch_size, *dense.shape[1:]))
        return out


def row_seeds(td: TensorDictBase, num_rows: int, *, who: str) -> list[int] | None:
    """The "seed" of each row of the batch; None if the batch has none."""
    seeds = td.get("seed", None)
    if not isinstance(seeds, Tensor):
        return None
    if seeds.numel() != num_rows or seeds.is_floating_point():
        raise ShapeError(
            f"{who}: 'seed' must be one integer per row: got {seeds.dtype} {list(seeds.shape)} for {num_rows} rows."
        )
    return seeds.flatten().tolist()
