"""Ends of trajectories in rows in time order, and sums and counts that stop at them.

Plain functions on ``ends``, bool[..., T] with time last: True at the last row of a trajectory. The very last row is an
end even if it is not marked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor


def trajectory_ends(*, done: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
    """The ends, bool[..., T], from done flags, from trajectory ids (each change marks an end), or from both.

    >>> trajectory_ends(ids=torch.tensor([0, 0, 1, 1, 2])).tolist()
    [False, True, False, True, True]
    """
    if done is None and ids is None:
        raise TypeError("trajectory_ends: needs done, ids, or both: got neither.")
    ends = torch.zeros_like(done if ids is None else ids, dtype=torch.bool)
    if done is not None:
        ends |= done.to(torch.bool)
    if ids is not None:
        ends[..., :-1] |= ids[..., :-1] != ids[..., 1:]
    ends[..., -1:] = True
    return ends


def segment_ids(ends: Tensor) -> Tensor:
    """int64[..., T]: 0 for the rows of the first trajectory, 1 for those of the second one, and so on.

    >>> segment_ids(torch.tensor([False, True, False, False, True])).tolist()
    [0, 0, 1, 1, 1]
    """
    return ends.cumsum(-1) - ends.to(torch.int64)


def steps_left(ends: Tensor, dim: int = -1) -> Tensor:
    """The number of rows left in the trajectory along ``dim``, this one included; int64, shaped as ``ends``.

    >>> steps_left(torch.tensor([False, True, False, False, False])).tolist()
    [2, 1, 3, 2, 1]
    """
    # The nearest end at or after each row is the running minimum of the ends' positions, from the last row backwards.
    ends = ends.movedim(dim, -1)
    size = ends.shape[-1]
    position = torch.arange(size, device=ends.device).expand_as(ends)
    next_end = torch.where(ends, position, max(size - 1, 0)).flip(-1).cummin(-1).values.flip(-1)
    return (next_end - position + 1).movedim(-1, dim)


def sum_ahead(values: Tensor, left: Tensor, steps: int, discount: float, dim: int) -> Tensor:
    """``sum_{j < min(steps, left_t)} discount^j values_{t+j}`` for every t along ``dim``, in O(T log steps).

    Reads    values float[*S, *F], left int64[*S] from `steps_left`; ``dim`` is one of S
    Returns  float[*S, *F]

    Windows of 1, 2, 4, ... rows are each built from two of half the size, then combined into one of ``steps`` rows.

    >>> sum_ahead(torch.ones(4), torch.tensor([3, 2, 1, 1]), steps=2, discount=0.5, dim=0).tolist()
    [1.5, 1.5, 1.0, 1.0]
    """
    left = expand_right(left, values.ndim)
    size = values.shape[dim]

    def longer(window: Tensor, length: int, tail: Tensor) -> Tensor:
        """Extends a window of ``length`` rows by the ``tail`` of the row after it, if in the same trajectory."""
        ahead = torch.zeros_like(tail)
        if length < size:
            ahead.narrow(dim, 0, size - length).copy_(tail.narrow(dim, length, size - length))
        return torch.where(left > length, window + discount**length * ahead, window)

    steps = min(steps, max(size, 1))
    total, window, length = torch.zeros_like(values), values, 1
    covered = 0
    while covered < steps:  # over the binary digits of ``steps``, lowest first
        if steps & length:
            total = longer(window, length, total) if covered else window.clone()  # the window goes before the total
            covered += length
        if covered < steps:
            window = longer(window, length, window)
            length *= 2
    return total


def expand_right(tensor: Tensor, ndim: int) -> Tensor:
    """``tensor`` with size-1 dimensions added on the right until it has ``ndim``."""
    return tensor.reshape(*tensor.shape, *[1] * (ndim - tensor.ndim))


def reduce_right(flags: Tensor, shape: Sequence[int]) -> Tensor | None:
    """``flags`` in ``shape``, without trailing dimensions of size 1; None if that is not possible."""
    if flags.shape[: len(shape)] != tuple(shape) or flags.shape[len(shape) :].numel() != 1:
        return None
    return flags.reshape(tuple(shape))


def as_key(key: NestedKey) -> tuple[str, ...]:
    """The key as a tuple, also if it is a single string."""
    return (key,) if isinstance(key, str) else tuple(key)


def leaf_keys(td: TensorDictBase, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys of everything that is not a plain nested tensordict, as tuples, in alphabetical order."""
    keys = []
    for name, value in sorted(td.items()):
        keys += leaf_keys(value, (*path, name)) if isinstance(value, TensorDict) else [(*path, name)]
    return keys
