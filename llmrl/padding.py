"""Ragged rows and padded tensors, one into the other. Which key is padded on which side is the reader's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from llmrl.errors import ShapeError

__all__ = ["lengths_mask", "pad_rows", "unpad_rows"]

Side = Literal["left", "right"]


def pad_rows(rows: Sequence[Tensor], *, value: float = 0, side: Side = "right", length: int | None = None) -> Tensor:
    """One tensor[B, T, ...] from B tensors[T_i, ...] of one dtype; ``side`` is where the padding goes.

    T is the longest row, or ``length``. Gradients flow back into the rows.
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
    first = rows[0]
    tails = {row.shape[1:] for row in rows}
    if not first.ndim or len(tails) != 1 or len({row.dtype for row in rows}) != 1:
        raise ShapeError(
            "pad_rows: rows must be tensors[T_i, ...] that differ in nothing but T_i: got "
            f"{sorted({f'{row.dtype} {list(row.shape)}' for row in rows})[:8]}."
        )
    longest = max(row.shape[0] for row in rows)
    if length is not None:
        if longest > length:
            raise ShapeError(f"pad_rows: a row must fit into length={length}: got a row of {longest}.")
        longest = length
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
    missing = longest - padded.shape[1]
    if missing:
        filler = padded.new_full((len(rows), missing, *first.shape[1:]), value)
        padded = torch.cat([padded, filler] if side == "right" else [filler, padded], dim=1)
    return padded


def lengths_mask(lengths: Tensor | Sequence[int], T: int, side: Side = "right") -> Tensor:
    """bool[B, T]: True where a row of that many entries, padded on ``side``, has one.

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


def unpad_rows(x: Tensor, mask_or_lengths: Tensor | Sequence[int], *, side: Side = "right") -> list[Tensor]:
    """The rows of x[B, T, ...] without padding: where bool[B, T] is True, or the given number of entries per row.

    ``side`` says where the padding is when lengths are given. With a mask, entries need not be contiguous. Rows are
    parts of one new tensor; gradients flow back into ``x``.

    >>> [row.tolist() for row in unpad_rows(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1])]
    [[1, 2, 3], [4]]
    """
    given = mask_or_lengths if isinstance(mask_or_lengths, Tensor) else torch.tensor(mask_or_lengths, dtype=torch.int64)
    if given.dtype is torch.bool:
        mask_BT = given
        lengths = mask_BT.sum(-1).tolist() if mask_BT.ndim == 2 else []
    else:
        lengths = given.tolist()
        mask_BT = lengths_mask(given.to(x.device), x.shape[1], side)
    if mask_BT.shape != x.shape[:2]:
        raise ShapeError(
            f"unpad_rows: mask or lengths must describe x[B, T]: got {list(given.shape)} for x {list(x.shape)}."
        )
    return list(x[mask_BT.to(x.device)].split(lengths))


def _check_side(who: str, side: str) -> None:
    if side not in ("left", "right"):
        raise ValueError(f"{who}: side must be 'left' or 'right': got {side!r}.")
