"""Conversion of ragged rows to padded or nested tensors; callers choose the padding side and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from llmrl.errors import ShapeError

Side = Literal["left", "right"]


def pad_rows(rows: Sequence[Tensor], *, value: float = 0, side: Side = "right", length: int | None = None) -> Tensor:
    """One tensor[B, T, ...] from B tensors[T_i, ...] of one dtype; ``side`` is where the padding goes.

    T is ``length``, or the longest row's if None. Gradients flow back into the rows.
    Raises  ShapeError for a row longer than ``length``, rows that differ beyond the first dimension, or no rows

    >>> pad_rows([torch.tensor([1, 2, 3]), torch.tensor([4])], value=-1)
    tensor([[ 1,  2,  3],
            [ 4, -1, -1]])
    >>> pad_rows([torch.tensor([1, 2, 3]), torch.tensor([4])], side="left", length=4)
    tensor([[0, 1, 2, 3],
            [0, 0, 0, 4]])
    """
    _check_side("pad_rows", side)
    if not rows:
        raise ShapeError("pad_rows: there must be at least one row: got none.")
    _check_rows("pad_rows", rows)
    longest = max(row.shape[0] for row in rows)
    if length is not None:
        if longest > length:
            raise ShapeError(f"pad_rows: a row must fit into length={length}: got a row of {longest}.")
        longest = length
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
    missing = longest - padded.shape[1]
    if missing:  # pad_sequence can only pad to the longest row
        filler = padded.new_full((len(rows), missing, *rows[0].shape[1:]), value)
        padded = torch.cat([padded, filler] if side == "right" else [filler, padded], dim=1)
    return padded


def lengths_mask(lengths: Tensor | Sequence[int], T: int, side: Side = "right") -> Tensor:
    """bool[B, T]: True at the entries and False at the padding of rows with these lengths, padded on ``side``.

    >>> lengths_mask([3, 1], 4).int()
    tensor([[1, 1, 1, 0],
            [1, 0, 0, 0]], dtype=torch.int32)
    >>> lengths_mask([3, 1], 4, side="left").int()
    tensor([[0, 1, 1, 1],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    _check_side("lengths_mask", side)
    lengths_B = torch.as_tensor(lengths, dtype=torch.int64)
    if lengths_B.numel() and (int(lengths_B.max()) > T or int(lengths_B.min()) < 0):
        raise ShapeError(f"lengths_mask: lengths must lie between 0 and T={T}: got {lengths_B.tolist()}.")
    place_T = torch.arange(T, device=lengths_B.device)
    if side == "left":
        place_T = place_T.flip(0)
    return place_T < lengths_B.unsqueeze(-1)


def as_nested_tensor(rows: Sequence[Tensor] | Sequence[TensorDictBase]) -> Tensor | TensorDictBase:
    """Rows that differ in their first dimension as one jagged nested tensor; for tensordicts, one per entry.

    Usable as a ``stack_method``. Raises ShapeError for no rows, or rows that differ beyond the first dimension

    >>> as_nested_tensor([torch.ones(2), torch.ones(3)]).offsets().tolist()
    [0, 2, 5]
    """

    def nested(tensors: list[Tensor]) -> Tensor:
        _check_rows("as_nested_tensor", tensors)
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    return _by_entry("as_nested_tensor", rows, nested, batch_size=[len(rows)])


def as_padded_tensor(
    rows: Sequence[Tensor] | Sequence[TensorDictBase], dim: int = 0, stack_dim: int = 0
) -> Tensor | TensorDictBase:
    """Rows that differ in ``dim`` as one tensor, padded with 0 on the right; for tensordicts, one per entry.

    ``stack_dim`` is the index of the new row dimension. Usable as a ``stack_method``. Raises ShapeError as `pad_rows`

    >>> as_padded_tensor([torch.ones(2), torch.ones(3)]).tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def padded(tensors: list[Tensor]) -> Tensor:
        if not all(-tensor.ndim <= dim < tensor.ndim for tensor in tensors):
            raise ShapeError(
                f"as_padded_tensor: every row must have dim {dim}: got {[t.ndim for t in tensors][:8]} dims."
            )
        # pad_rows pads dimension 0, so the ragged dimension is moved there and moved back after padding.
        together = pad_rows([tensor.movedim(dim, 0) for tensor in tensors])  # [B, T, ...]
        return together.movedim(1, dim + 1 if dim >= 0 else dim).movedim(0, stack_dim)

    return _by_entry("as_padded_tensor", rows, padded, batch_size=[len(rows)] if stack_dim == 0 else [])


def _by_entry(
    who: str, rows: Sequence[Any], stack: Callable[[list[Tensor]], Tensor], batch_size: list[int]
) -> Tensor | TensorDictBase:
    if not rows:
        raise ShapeError(f"{who}: there must be at least one row: got none.")
    if not isinstance(rows[0], TensorDictBase):
        return stack(list(rows))
    if len({frozenset(row.keys()) for row in rows}) > 1:
        found = sorted({", ".join(sorted(row.keys())) for row in rows})
        raise ShapeError(f"{who}: all rows must have the same entries: got {' and '.join(found[:4])}.")
    stacked = {}
    for key in rows[0].keys():
        values = [row.get(key) for row in rows]
        is_data = is_non_tensor(values[0])
        stacked[key] = torch.stack(values) if is_data else _by_entry(who, values, stack, batch_size)
    return TensorDict(stacked, batch_size=batch_size)


def _check_rows(who: str, rows: Sequence[Tensor]) -> None:
    kinds = {(row.dtype, row.shape[1:]) for row in rows}
    if not all(row.ndim for row in rows) or len(kinds) != 1:
        raise ShapeError(
            f"{who}: rows must be tensors[T_i, ...] that differ in nothing but T_i: got "
            f"{sorted({f'{row.dtype} {list(row.shape)}' for row in rows})[:8]}."
        )


def _check_side(who: str, side: str) -> None:
    if side not in ("left", "right"):
        raise ValueError(f"{who}: side must be 'left' or 'right': got {side!r}.")
