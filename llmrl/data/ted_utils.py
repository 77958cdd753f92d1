"""Trajectories that follow each other in time: where they end, sums and counts that stop there, one row for each.

Most are plain functions over ``ends``, bool[..., T] with time last: True at the last row of a trajectory. The last row
of all is an end whether marked or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.errors import MissingKeyError, ShapeError


def trajectory_ends(*, done: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
    """The ends, bool[..., T], from flags on the last rows, from trajectory ids (a change of the id ends one), or both.

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
    """int64, shaped as ``ends``: how many rows the trajectory has from this one on along ``dim``, this one included.

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

    Windows of 1, 2, 4, ... rows are made from two of half the size; ``steps`` is put together from them.

    >>> sum_ahead(torch.ones(4), torch.tensor([3, 2, 1, 1]), steps=2, discount=0.5, dim=0).tolist()
    [1.5, 1.5, 1.0, 1.0]
    """
    left = expand_right(left, values.ndim)
    size = values.shape[dim]

    def longer(window: Tensor, length: int, tail: Tensor) -> Tensor:
        """A window of ``length`` rows and behind it, in the same trajectory, the ``tail`` of the row that follows."""
        ahead = torch.zeros_like(tail)
        if length < size:
            ahead.narrow(dim, 0, size - length).copy_(tail.narrow(dim, length, size - length))
        return torch.where(left > length, window + discount**length * ahead, window)

    steps = min(steps, max(size, 1))
    total, window, length = torch.zeros_like(values), values, 1
    covered = 0
    while covered < steps:  # the binary digits of ``steps``, from the lowest on
        if steps & length:
            total = longer(window, length, total) if covered else window.clone()  # the new window goes in front
            covered += length
        if covered < steps:
            window = longer(window, length, window)
            length *= 2
    return total


def expand_right(tensor: Tensor, ndim: int) -> Tensor:
    """The same with size-1 dimensions added on the right until there are ``ndim``."""
    return tensor.reshape(*tensor.shape, *[1] * (ndim - tensor.ndim))


def reduce_right(flags: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Flags with trailing dimensions of size 1 removed so that they have ``shape``; None if they have more elements."""
    if flags.shape[: len(shape)] != tuple(shape) or flags.shape[len(shape) :].numel() != 1:
        return None
    return flags.reshape(tuple(shape))


def as_key(key: NestedKey) -> tuple[str, ...]:
    """The key as a tuple, even if it is one name."""
    return (key,) if isinstance(key, str) else tuple(key)


def leaf_keys(td: TensorDictBase, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys of everything that is not a plain nested tensordict, as tuples, in alphabetical order."""
    keys = []
    for name, value in sorted(td.items()):
        keys += leaf_keys(value, (*path, name)) if isinstance(value, TensorDict) else [(*path, name)]
    return keys


def split_trajectories(
    td: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """Trajectories that follow each other in a batch, as one row each.

    Reads    a batch [*B, T], time last: integers under ``trajectory_key`` whose change ends a trajectory, if they
             are there; else the flags ``("next", done_key)``. The last row of time is always an end
    Writes   the mask, bool[N, T_max], True on steps of the trajectory; if there were no ids, ids from 0 on
    Returns  a new batch [N, T_max]; tensors are 0 behind the end of a trajectory, other entries repeat the last one.
             With ``as_nested`` a batch [N] of jagged tensors, without a mask
    Raises   MissingKeyError without ids and flags; ShapeError if they, or entries, change their shape

    prefix          where ids and mask are: default "collector", or the root of a batch with "traj_ids" there
    trajectory_key  default ``(prefix, "traj_ids")``; the mask is beside it unless a prefix is given; done_key: "done"

    >>> from tensordict import TensorDict
    >>> batch = TensorDict(step=torch.tensor([0, 1, 0, 1, 2]), traj_ids=torch.tensor([7, 7, 8, 8, 8]), batch_size=[5])
    >>> out = split_trajectories(batch)
    >>> out["step"].tolist(), out["mask"].tolist()
    ([[0, 1, 0], [0, 1, 2]], [[True, True, False], [True, True, True]])
    """
    at_root = "traj_ids" in td.keys() and "collector" not in td.keys()
    path = as_key(prefix if prefix is not None else () if at_root else "collector")
    ids_key = (*path, "traj_ids") if trajectory_key is None else as_key(trajectory_key)
    mask_key = (*(ids_key[:-1] if prefix is None else path), "mask")
    flags_key = as_key("done" if done_key is None else done_key)
    flags_key = flags_key if flags_key[0] == "next" else ("next", *flags_key)

    ids, flags = _one_per_step(td, ids_key), _one_per_step(td, flags_key)
    if ids is None and flags is None:
        raise MissingKeyError(
            f"split_trajectories: reads {ids_key} or {flags_key}, and neither is there; keys present: "
            f"{sorted(map(str, td.keys(True, True)))}."
        )
    ends = trajectory_ends(ids=ids) if ids is not None else trajectory_ends(done=flags)
    rows = segment_ids(ends.reshape(-1))
    flat = td.reshape(-1)
    flat = flat if ids is not None else flat.copy().set(ids_key, rows)
    lengths = torch.bincount(rows)
    starts = lengths.cumsum(0) - lengths
    if as_nested:
        offsets = torch.cat([starts, lengths.sum().unsqueeze(0)])
        return flat.apply(
            lambda value: torch.nested.nested_tensor_from_jagged(value, offsets), batch_size=lengths.shape
        )
    step = torch.arange(int(lengths.max()) if len(lengths) else 0, device=rows.device)
    mask = step < lengths.unsqueeze(-1)
    # Behind its end a trajectory repeats its last row, so that any entry can be indexed; tensors are then set to 0.
    out = flat[starts.unsqueeze(-1) + torch.minimum(step, lengths.unsqueeze(-1) - 1)]
    try:
        out = out.apply(lambda value: value.masked_fill(~expand_right(mask, value.ndim), 0))
    except RuntimeError as error:  # a lazy stack of ragged steps
        raise ShapeError(f"split_trajectories: an entry must have one shape at every step: {error}") from error
    out.set(mask_key, mask)
    out.names = [None, "time"]
    return out


def _one_per_step(td: TensorDictBase, key: tuple[str, ...]) -> Tensor | None:
    value = td.get(key, None)
    if value is None:
        return None
    if (reduced := reduce_right(value, td.batch_size)) is None:
        raise ShapeError(
            f"split_trajectories: {key} must have one value per step, {list(td.batch_size)}: got {list(value.shape)}."
        )
    return reduced
