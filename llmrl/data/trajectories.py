"""Splitting of batches that hold consecutive trajectories into one row per trajectory."""

from __future__ import annotations

import warnings

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ted_utils import as_key, expand_right, reduce_right, segment_ids, trajectory_ends
from llmrl.errors import MissingKeyError, ShapeError


def split_trajectories(
    td: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Splits the consecutive trajectories of a batch into one row each.

    Reads    a batch [*B, T], time last: integer ids under ``trajectory_key`` (each change ends a trajectory) if
             present; else the flags ``("next", done_key)``. The last time step is always an end
    Writes   the mask, bool[N, T_max], True on steps of the trajectory; if there were no ids, also ids, counted from 0
    Returns  a new batch [N, T_max]; tensors are 0 after the end of a trajectory, other entries repeat the last one.
             With ``as_nested`` a batch [N, -1] of nested tensors, without a mask, whose
             ``to_padded_tensor(mask_key=...)`` is the dense result; with ``as_nested=torch.jagged`` a batch [N],
             because a jagged tensor does not have a size -1. Both without entries that are not tensors
    Raises   MissingKeyError without ids and flags; ShapeError if they are not one per step, or if an entry is ragged

    prefix          parent key of ids and mask; default: "collector", or the root if "traj_ids" is there
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
            f"split_trajectories: needs {ids_key} or {flags_key}, found neither; keys present: "
            f"{sorted(map(str, td.keys(True, True)))}."
        )
    ends = trajectory_ends(ids=ids) if ids is not None else trajectory_ends(done=flags)
    rows = segment_ids(ends.reshape(-1))
    flat = td.reshape(-1)
    flat = flat if ids is not None else flat.copy().set(ids_key, rows)
    lengths = torch.bincount(rows)
    starts = lengths.cumsum(0) - lengths
    if as_nested is torch.jagged:
        offsets = torch.cat([starts, lengths.sum().unsqueeze(0)])
        return flat.apply(
            lambda value: torch.nested.nested_tensor_from_jagged(value, offsets), batch_size=lengths.shape
        )
    if as_nested:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
            return flat.apply(
                lambda value: torch.nested.as_nested_tensor(value.split(lengths.tolist()), layout=torch.strided),
                batch_size=[len(lengths), -1],
            )
    step = torch.arange(int(lengths.max()) if len(lengths) else 0, device=rows.device)
    mask = step < lengths.unsqueeze(-1)
    # After its end a trajectory repeats its last row, so that one index works for any entry; tensors are then zeroed.
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
