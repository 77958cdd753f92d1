"""Codecs for steps in TED (root: time t, ``"next"``: t + 1), a layout that holds almost every observation twice.

*Flat* stores the root observations of a trajectory and, after its last row, its last ``"next"``. *Nested* does the same
with one row per trajectory, *h5* with one group per trajectory. Encoding and decoding restores any rows bit for bit: a
trajectory ends at a done flag, and also where the next root differs from ``"next"``; and an entry whose ``"next"``
mostly differs from the following root is stored twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from llmrl.data.ted_utils import as_key, expand_right, leaf_keys, reduce_right
from llmrl.errors import DataError

__all__ = ["Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"]

Key = tuple[str, ...]

DONE_KEYS = ("done", "terminated", "truncated")
REWARD_KEYS = ("reward",)
INFO, ROOT, ENDS = "_ted", "_root", "_ends"  # keys that a codec adds: notes, root done flags, ends without done


class _Encoder(ABC):
    """Base class of the codecs that encode TED.

    ``done_keys`` and ``reward_keys`` are entries of ``"next"`` that are stored once, at the root; a plain name matches
    every entry of that name (default: done, terminated, truncated; reward). ``done_key`` marks ends across which the
    observations continue; it is ignored if it has several flags per row.
    """

    takes_counters = True  # read by the checkpointer, which then passes ``shift`` and ``is_full`` to its save hook

    def __init__(
        self,
        done_key: NestedKey = ("next", "done"),
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        self.done_key = as_key(done_key)
        self.shift_key, self.is_full_key = shift_key, is_full_key
        self._moved = _names(done_keys, reward_keys)

    @abstractmethod
    def __call__(self, td: TensorDict, *, shift: int = 0, is_full: bool = False) -> TensorDict:
        """Encodes rows without redundant entries; ``shift`` is the position of the oldest row in a full ring."""

    def _encode(self, td: TensorDict, shift: int, is_full: bool) -> tuple[dict[Key, Tensor], Tensor, dict[str, Any]]:
        """Returns the entries in time order, one stream after another; the ends, bool[N]; and the notes.

        Entries listed in ``notes["shifted"]`` have N + (number of ends) rows, the others N.
        """
        # 1. Put every entry in time order, one stream after another.
        self._check(td)
        grid = _Grid(td.batch_size, shift if is_full else 0, td.get(leaf_keys(td)[0]).device)
        leaves = {key: grid.in_time(td.get(key)) for key in leaf_keys(td)}
        root = {key: value for key, value in leaves.items() if key[0] != "next"}
        following = {key[1:]: value for key, value in leaves.items() if key[0] == "next"}
        done = leaves.get(self.done_key)
        done = None if done is None else reduce_right(done, (grid.rows,))
        marked = grid.last() if done is None else grid.last() | done.to(torch.bool)

        # 2. Find the ends, and the observations: entries whose "next" is the root of the next row.
        ends, shifted, plain = self._observations(root, following, marked)
        # 3. Store observations once, with one more row per trajectory. Rewards and done of "next" move to the root.
        # The root's own are stored under ROOT, or only noted if all are False, as is usual for done flags.
        entries, zeros, moved = {}, [], []
        for key, value in root.items():
            if key in shifted:
                entries[key] = _with_last(value, following[key], ends)
            elif not _is_any(key, self._moved):
                entries[key] = value
            elif value.dtype is not torch.bool or value.any():
                entries[(ROOT, *key)] = value
            else:
                zeros.append([list(key), list(value.shape[1:])])
        for key, value in following.items():
            if _is_any(key, self._moved):
                entries[key] = value
                moved.append(list(key))
            elif key not in shifted:
                entries[("next", *key)] = value
        for key in entries:
            if any(key[:length] in entries for length in range(1, len(key))):
                raise DataError(f"{type(self).__name__}: {key} of 'next' and of the root would overlap; rename one.")
        unmarked = int((ends & ~marked).sum())
        has_ends = done is not None and not unmarked and list(self.done_key[1:]) in moved
        notes = {
            "shape": list(td.batch_size),
            "ends": list(self.done_key[1:]) if has_ends else [ENDS],  # the entry that marks them
            "shifted": [list(key) for key in shifted],
            "moved": moved,
            "zero_root": zeros,
            "containers": _containers(td, td.batch_dims),
            "kept_twice": [list(key) for key in plain],
            "trajectories": int(ends.sum()),
            "ends_without_done": unmarked,
        }
        return entries, ends, notes

    def _observations(
        self, root: dict[Key, Tensor], following: dict[Key, Tensor], marked: Tensor
    ) -> tuple[Tensor, list[Key], list[Key]]:
        """Returns all ends, bool[N] (``marked`` ones, and rows that the next row does not continue); the keys of
        observations; and the keys that are at the root and in "next" without being observations.
        """
        ends, shifted, plain = marked.clone(), [], []
        for key in sorted(root.keys() & following.keys()):
            now, then = root[key], following[key]
            if _is_any(key, self._moved):
                continue
            if now.dtype != then.dtype or now.shape != then.shape:
                plain.append(key)
                continue
            # Within a trajectory the next root must repeat "next"; where it does not, another trajectory begins.
            broken = ~marked
            broken[:-1] &= ~_same_bits(now[1:], then[:-1])
            if 2 * int(broken.sum()) > int((~marked).sum()):  # most rows do not match: not an observation
                plain.append(key)
            else:
                shifted.append(key)
                ends |= broken
        return ends, shifted, plain

    def _check(self, td: TensorDict) -> None:
        who = type(self).__name__
        if type(td) is not TensorDict or not td.batch_dims or not isinstance(td.get("next", None), TensorDict):
            got = f"{sorted(td.keys())} of size {list(td.batch_size)}" if type(td) is TensorDict else type(td).__name__
            raise DataError(
                f"{who}: rows in TED must be a TensorDict with a batch dimension and an entry 'next': got {got}."
            )
        if not td.batch_size.numel():
            raise DataError(f"{who}: there must be at least one row: got batch size {list(td.batch_size)}.")
        for key in leaf_keys(td):
            value = td.get(key)
            if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
                raise DataError(f"{who}: every entry must be a dense tensor: got {key} of type {type(value).__name__}.")
        own = {INFO, ROOT, ENDS, self.shift_key, self.is_full_key} & {*td.keys(), *td.get("next").keys()}
        if own:
            raise DataError(f"{who}: the codec uses these names itself: got rows with entries {sorted(own)}; rename.")

    def _notes_into(self, out: TensorDict, notes: dict[str, Any], shift: int, is_full: bool) -> TensorDict:
        for name, value in ((self.shift_key, int(shift)), (self.is_full_key, bool(is_full)), (INFO, notes)):
            out.set_non_tensor(name, value)
        return out


class TED2Flat(_Encoder):
    """Encodes TED as flat entries: one row per step, and in observations one more per trajectory.

    Reads    a TensorDict [T, *E] in TED, time first, as a storage keeps it
    Returns  a TensorDict [] with entries [T * E, ...], one stream after another; done flags and rewards at the root.
             ``shift_key`` and ``is_full_key`` hold the arguments
    Raises   DataError if the rows are not TED

    ``shift`` is the position of the oldest row in the ring of a full buffer (``is_full``); a checkpointer passes both
    when the codec is its save hook.

    >>> rows = TensorDict(
    ...     obs=torch.arange(3), next=TensorDict(obs=torch.arange(1, 4), reward=torch.ones(3, 1), batch_size=[3]),
    ...     batch_size=[3],
    ... )
    >>> flat = TED2Flat()(rows)
    >>> flat["obs"], flat["reward"].shape
    (tensor([0, 1, 2, 3]), torch.Size([3, 1]))
    >>> bool((Flat2TED()(flat) == rows).all())
    True
    """

    def __call__(self, td: TensorDict, *, shift: int = 0, is_full: bool = False) -> TensorDict:
        entries, ends, notes = self._encode(td, shift, is_full)
        if notes["ends"] == [ENDS]:
            entries[(ENDS,)] = ends
        out = TensorDict(batch_size=[], device=td.device)
        for key, value in entries.items():
            out.set(key, value)
        return self._notes_into(out, notes, shift, is_full)


class TED2Nested(_Encoder):
    """Encodes TED as nested tensors, one row per trajectory: L + 1 observations and L of every other entry.

    Reads    a TensorDict [T, *E] in TED, time first, as a storage keeps it
    Returns  a TensorDict [number of trajectories] of nested (jagged) tensors
    Raises   DataError if the rows are not TED

    >>> rows = TensorDict(
    ...     obs=torch.arange(3),
    ...     next=TensorDict(obs=torch.tensor([1, 9, 3]), done=torch.tensor([False, True, False]), batch_size=[3]),
    ...     batch_size=[3],
    ... )
    >>> nested = TED2Nested()(rows)
    >>> nested[0]["obs"], nested[1]["obs"]
    (tensor([0, 1, 9]), tensor([2, 3]))
    """

    def __init__(
        self,
        done_key: NestedKey = ("next", "done"),
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(done_key, done_keys=done_keys, reward_keys=reward_keys)

    def __call__(self, td: TensorDict, *, shift: int = 0, is_full: bool = False) -> TensorDict:
        entries, ends, notes = self._encode(td, shift, is_full)
        count = notes["trajectories"]
        stops = [0, *(ends.nonzero().squeeze(-1) + 1).tolist()]
        lengths = [stop - start for start, stop in pairwise(stops)]  # the last row of all is an end
        longer = [length + 1 for length in lengths]
        shifted = {tuple(key) for key in notes["shifted"]}
        out = TensorDict(batch_size=[count], device=td.device)
        for key, value in entries.items():
            out.set(key, _jagged(value.split(longer if key in shifted else lengths)))
        return self._notes_into(out, notes, shift, is_full)


class Flat2TED:
    """The inverse of `TED2Flat`; also decodes flat entries from other sources, in which ``done_key`` marks every end.

    Those lack the encoder's notes: entries with one more row per trajectory are taken as observations, ``done_keys``
    and ``reward_keys`` as entries of ``"next"``, and the rows as one stream in time order.

    Raises  DataError if the entries do not match in their numbers of rows
    """

    def __init__(
        self,
        done_key: NestedKey = "done",
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        self.done_key = as_key(done_key)
        self.shift_key, self.is_full_key = shift_key, is_full_key
        self._moved = _names(done_keys, reward_keys)

    def __call__(self, td: TensorDict) -> TensorDict:
        own = {INFO, self.shift_key, self.is_full_key}
        entries = {key: td.get(key) for key in leaf_keys(td) if key[0] not in own}
        notes = _note(td, INFO, None)
        ends = entries.pop((ENDS,), None)
        if ends is None:
            ends = self._ends_of(entries, notes)
        if notes is None:
            notes = self._guess(entries, ends)
        shift = int(_note(td, self.shift_key, 0)) if _note(td, self.is_full_key, False) else 0
        return _decode(entries, ends, notes, shift, td.device)

    def _ends_of(self, entries: dict[Key, Tensor], notes: dict[str, Any] | None) -> Tensor:
        key = tuple(notes["ends"]) if notes and "ends" in notes else self.done_key
        done = entries.get(key)
        if done is None:
            raise DataError(f"Flat2TED: {key} must mark the ends: got only {sorted(entries)}; set done_key.")
        done = done.to(torch.bool).reshape(-1)
        return done | _Grid(notes["shape"] if notes else [done.numel()], 0, done.device).last()

    def _guess(self, entries: dict[Key, Tensor], ends: Tensor) -> dict[str, Any]:
        rows, longer = ends.numel(), ends.numel() + int(ends.sum())
        for key, value in entries.items():
            if value.shape[:1] not in ((rows,), (longer,)):
                raise DataError(
                    f"Flat2TED: an entry must have {rows} rows (one per step) or {longer} (one more per trajectory): "
                    f"got {list(value.shape)} for {key}."
                )
        return {
            "shape": [rows],
            "shifted": [key for key, value in entries.items() if value.shape[0] == longer],
            "moved": [key for key in entries if _is_any(key, self._moved)],
            "zero_root": [],
            "containers": [],
        }


class Nested2TED:
    """The inverse of `TED2Nested`; arguments as for `Flat2TED`."""

    def __init__(
        self,
        done_key: NestedKey = "done",
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        self._flat = Flat2TED(done_key, done_keys=done_keys, reward_keys=reward_keys)

    def __call__(self, td: TensorDict) -> TensorDict:
        out = TensorDict(batch_size=[], device=td.device)
        lengths = {}
        for key in leaf_keys(td):
            value = td.get(key)
            if isinstance(value, Tensor):
                lengths[key] = value.offsets().diff()
                out.set(key, value.values())
            else:
                out.set_non_tensor(key, td.get_non_tensor(key))
        if not lengths:
            raise DataError(f"Nested2TED: needs nested tensors: got the entries {leaf_keys(td)}.")
        notes = _note(td, INFO, None)
        # Entries have L or L + 1 rows per trajectory: the shortest has L, unless all are observations (see the notes).
        shortest = min(lengths, key=lambda key: int(lengths[key].sum()))
        rows = lengths[shortest] - int(notes is not None and list(shortest) in notes["shifted"])
        ends = torch.zeros(int(rows.sum()), dtype=torch.bool, device=rows.device)
        ends[rows.cumsum(0) - 1] = True
        out.set(ENDS, ends)
        return self._flat(out)


class H5Split:
    """Splits nested tensors into one group per trajectory, ``traj_000``, ``traj_001``, ...; others stay at the root.

    >>> nested = TensorDict(obs=torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5])))
    >>> nested.batch_size = [2]
    >>> groups = H5Split()(nested)
    >>> sorted(groups.keys()), groups["traj_001", "obs"]
    (['traj_000', 'traj_001'], tensor([2, 3, 4]))
    """

    def __call__(self, td: TensorDict) -> TensorDict:
        out = TensorDict(batch_size=[], device=td.device)
        groups = [TensorDict(batch_size=[], device=td.device) for _ in range(td.batch_size[0])]
        for key in leaf_keys(td):
            value = td.get(key)
            if not isinstance(value, Tensor):
                out.set_non_tensor(key, td.get_non_tensor(key))
                continue
            for group, part in zip(groups, value.values().split(value.offsets().diff().tolist()), strict=True):
                group.set(key, part)
        for number, group in enumerate(groups):
            out.set(f"traj_{number:03d}", group)
        return out


class H5Combine:
    """The inverse of `H5Split`."""

    def __call__(self, td: TensorDict) -> TensorDict:
        # Sorted by number: as strings, traj_1000 would come before traj_101.
        names = sorted((name for name in td.keys() if name.startswith("traj_")), key=lambda name: int(name[5:]))
        if not names:
            raise DataError(f"H5Combine: needs groups traj_000, ...: got {sorted(td.keys())}.")
        out = TensorDict(batch_size=[len(names)], device=td.device)
        groups = [td.get(name) for name in names]
        for key in leaf_keys(groups[0]):
            out.set(key, _jagged([group.get(key) for group in groups]))
        for name in td.keys():
            if name not in names:
                out.set_non_tensor(name, td.get_non_tensor(name))
        return out


# --- the arithmetic ------------------------------------------------------------------------------------------------


class _Grid:
    """Converts rows of a storage [T, *E], oldest at ``shift``, to N = T * E rows, one stream after another."""

    def __init__(self, shape: Sequence[int], shift: int, device: torch.device | None) -> None:
        self.shape, self.shift, self.device = torch.Size(shape), shift, device
        self.rows = self.shape.numel()

    def in_time(self, value: Tensor) -> Tensor:
        value = value.roll(-self.shift, 0) if self.shift else value  # the oldest row first
        dims = len(self.shape)
        return value.movedim(0, dims - 1).reshape(self.rows, *value.shape[dims:])

    def back(self, value: Tensor) -> Tensor:
        value = value.reshape(*self.shape[1:], self.shape[0], *value.shape[1:]).movedim(len(self.shape) - 1, 0)
        return value.roll(self.shift, 0) if self.shift else value.contiguous()

    def last(self) -> Tensor:
        """bool[N], True at the newest row of each stream."""
        return torch.arange(1, self.rows + 1, device=self.device) % self.shape[0] == 0


def _decode(
    entries: dict[Key, Tensor], ends: Tensor, notes: dict[str, Any], shift: int, device: torch.device | None
) -> TensorDict:
    grid = _Grid(notes["shape"], shift, ends.device)
    shifted, moved = ({tuple(key) for key in notes[name]} for name in ("shifted", "moved"))
    out = TensorDict(batch_size=grid.shape, device=device)
    for path, extra in notes["containers"]:
        out.set(tuple(path), TensorDict(batch_size=[*grid.shape, *extra], device=device))
    at = _places(ends)  # observations have one more row per trajectory: at + 1 is "next", also at an end
    for key, value in entries.items():
        if key in shifted:
            out.set(key, grid.back(value[at]))
            out.set(("next", *key), grid.back(value[at + 1]))
        else:
            if value.shape[:1] != (grid.rows,):
                raise DataError(f"Flat2TED: {key} must have {grid.rows} rows: got {list(value.shape)}.")
            out.set(("next", *key) if key in moved else key[1:] if key[0] == ROOT else key, grid.back(value))
    for path, rest in notes["zero_root"]:
        out.set(tuple(path), torch.zeros(*grid.shape, *rest, dtype=torch.bool, device=ends.device))
    return out


def _places(ends: Tensor) -> Tensor:
    """int64[N]: the index of each row when every trajectory has one more row."""
    return torch.arange(len(ends), device=ends.device) + ends.cumsum(0) - ends.to(torch.int64)


def _with_last(now: Tensor, then: Tensor, ends: Tensor) -> Tensor:
    """The rows of ``now``, with the row of ``then`` inserted after each end."""
    at = _places(ends)
    out = now.new_empty(len(ends) + int(ends.sum()), *now.shape[1:])
    out[at] = now
    out[at[ends] + 1] = then[ends]
    return out


def _same_bits(left: Tensor, right: Tensor) -> Tensor:
    """bool[N]: rows that are equal bit for bit (a NaN equals itself, 0.0 is not -0.0)."""
    if left.dtype.is_complex:  # complex values cannot be viewed as integers
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    same = left.contiguous().view(kind) == right.contiguous().view(kind)
    return expand_right(same, 2).flatten(1).all(-1)


def _jagged(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _containers(td: TensorDict, row_dims: int, path: Key = ()) -> list[list[Any]]:
    """The key of every nested tensordict, outermost first, with the dims of its batch size after the row dims."""
    found = []
    for name, value in sorted(td.items()):
        if isinstance(value, TensorDict):
            inner = (*path, name)
            found += [[list(inner), list(value.batch_size[row_dims:])], *_containers(value, row_dims, inner)]
    return found


def _note(td: TensorDict, key: str, default: Any) -> Any:
    value = td.get(key, None)
    return default if value is None else value.item() if isinstance(value, Tensor) else td.get_non_tensor(key)


def _names(done_keys: Sequence[NestedKey] | None, reward_keys: Sequence[NestedKey] | None) -> set[Key]:
    return {as_key(key) for key in (*(done_keys or DONE_KEYS), *(reward_keys or REWARD_KEYS))}


def _is_any(key: Key, names: set[Key]) -> bool:
    return key in names or key[-1:] in names
