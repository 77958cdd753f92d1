"""Members of an ensemble, addressed by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import new_tensordict
from llmrl.errors import CheckpointError


class Members:
    """A part of an ensemble: one storage, sampler or writer per member. ``len`` counts members."""

    _held_in: ClassVar[str]  # the name of the attribute that stores the members

    @property
    def _members(self) -> tuple[Any, ...]:
        return getattr(self, self._held_in)

    def of(self, where: Sequence[int]) -> Self:
        """An ensemble of the members with these numbers."""
        return type(self)(*[self._members[number] for number in where])

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        where = members_at(index, len(self), type(self).__name__)
        if isinstance(where, int):
            return self._members[where]
        return self if len(where) == len(self) else self.of(where)

    def _checked(self, members: Sequence[Any], kind: type) -> tuple[Any, ...]:
        who = type(self).__name__
        if not members:
            raise ValueError(f"{who}: an ensemble has at least one member: got none.")
        for member in members:
            if not isinstance(member, kind) or isinstance(member, Members):
                raise TypeError(
                    f"{who}: members are of type {kind.__name__}, and not ensembles: got a {type(member).__name__}."
                )
        return tuple(members)

    def _pairs(self, states: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        if len(states) != len(self):
            raise CheckpointError(
                f"{type(self).__name__}: a state is loaded into as many members: got one of {len(states)}, expected "
                f"{len(self)}."
            )
        return zip(self._members, states, strict=True)


def refused(
    what: str, rule: str = "rows are written to a member", advice: str = "use ensemble[i]"
) -> Callable[..., NoReturn]:
    """A method that always raises RuntimeError; the default message is for ensembles."""

    def refuse(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: {rule}: got {what}; {advice}.")

    return refuse


def split_index(index: Any) -> tuple[Any, Any]:
    """Splits an index into the index of members and the index of their rows (None if absent)."""
    if not isinstance(index, tuple):
        return index, None
    return index[0], None if len(index) == 1 else index[1] if len(index) == 2 else index[1:]


def members_at(index: Any, count: int, who: str) -> int | list[int]:
    """The number of the member that an index selects, or the list of numbers if it selects several.

    Raises: IndexError if out of range or empty; RuntimeError for an index with several dimensions; TypeError for
    anything that is not an integer, such as a float.
    """
    where = index
    if index is not Ellipsis and not isinstance(index, slice):
        where = np.asarray(index)
        if where.ndim > 1:
            raise RuntimeError(f"{who}: an index of members must have one dimension: got shape {list(where.shape)}.")
        if where.size and where.dtype.kind not in ("iub" if where.ndim else "iu"):
            raise TypeError(f"{who}: members must be indexed by integers: got {index!r}.")
        where = where if where.size else slice(0)  # numpy makes a float array of an empty list
    try:
        found = np.arange(count)[where]
    except IndexError:
        raise IndexError(
            f"{who}: member indices must be below {count}, and a mask must have one entry per member: got {index}."
        ) from None
    if not found.size:
        raise IndexError(f"{who}: an ensemble has at least one member: got {index} of {count}.")
    return found.tolist()


def by_member(index: TensorDictBase, values: Tensor | None = None) -> Iterator[tuple[int, Tensor, Any]]:
    """Splits an ensemble's index by member; yields the member's number, its positions and its part of ``values``."""
    ids, positions = index["buffer_ids"], index["index"]
    for number in ids.unique().tolist():
        where = ids == number
        yield number, positions[where], None if values is None else values[where]


def index_of(number: int, trailing: Sequence[int], positions: Tensor, device: torch.device | None = None) -> TensorDict:
    """The ensemble index of one member's sampled positions."""
    shape = positions.shape[: positions.ndim - bool(trailing)]
    ids = torch.full(shape, number, dtype=torch.int64, device=positions.device)
    return new_tensordict({"buffer_ids": ids, "index": positions}, shape, device)
