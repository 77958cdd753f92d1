"""Storages, samplers and writers side by side: the parts of an ensemble, addressed by the number of their member.

What a batch of several members looks like is said here too (``join``, ``same_schema``); the buffer that reads, collates
and transforms it is in ``ensemble.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.layout import TensorLeaf, put_together, take_apart
from llmrl.data.replay_buffers.samplers import Sampler
from llmrl.data.replay_buffers.storages import Storage, TensorStorage
from llmrl.data.replay_buffers.transforms import load_transform, transform_state
from llmrl.data.replay_buffers.writers import Writer
from llmrl.errors import CheckpointError

__all__ = ["SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]

Drawn = TypeVar("Drawn")


def refused(what: str) -> Callable[..., NoReturn]:
    """A method that an ensemble does not have."""

    def refuse(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: rows are written to a member: got {what}; use ensemble[i].")

    return refuse


class StorageEnsemble(Storage):
    """Several storages; ``transforms`` (one per storage, None where there is none) are what belongs to their rows.

    ``ensemble[i]`` is a storage, ``ensemble[1:]`` and ``ensemble[[0, 2]]`` are ensembles, and ``ensemble[:, :3]`` are
    rows: those of every member at the second index, joined. ``len`` counts members. Rows are written to a member.

    >>> from llmrl.data.replay_buffers import TensorStorage
    >>> ensemble = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(10, 15)))
    >>> len(ensemble), len(ensemble[1])
    (2, 5)
    >>> ensemble[:, 1:3].tolist()
    [[1, 2], [11, 12]]
    """

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        self.storages = _checked("StorageEnsemble", storages, Storage)
        self.transforms = (None,) * len(storages) if transforms is None else tuple(transforms)
        if len(self.transforms) != len(storages):
            raise ValueError(
                f"StorageEnsemble: transforms must have an entry per storage: got {len(self.transforms)} for "
                f"{len(storages)} storages."
            )
        self._checkpointer = None

    def __len__(self) -> int:
        return len(self.storages)

    def __getitem__(self, index: Any) -> Any:
        first, rest = split_index(index)
        where = members_at(first, len(self), "StorageEnsemble")
        if isinstance(where, int):
            return self.storages[where] if rest is None else self.storages[where][rest]
        if rest is not None:
            return join([self.storages[number][rest] for number in where], same_schema(self.storages))
        if len(where) == len(self):
            return self
        transforms = [self.transforms[number] for number in where]
        return StorageEnsemble(*[self.storages[number] for number in where], transforms=transforms)

    def get(self, index: TensorDictBase) -> Any:
        """The rows that ``SamplerEnsemble.sample`` names, [members drawn, rows of each]."""
        parts = [
            self.storages[int(part["buffer_ids"][0])].batch(part["index"])
            for part in index.unbind(0)  # each row of the index is one member's
        ]
        return join(parts, same_schema(self.storages))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # the members have the locks

    set, count, empty = refused("set"), refused("count"), refused("empty")

    @property
    def lock(self) -> Any:
        """Excludes whoever uses one of the members; taken in one order, wherever they stand in the ensemble."""
        locks = {id(storage.lock): storage.lock for storage in self.storages}
        return _all_of(sorted(locks.values(), key=lambda lock: (str(getattr(lock, "path", "")), id(lock))))

    @property
    def shared(self) -> bool:
        return all(storage.shared for storage in self.storages)

    def share(self) -> None:
        for storage in self.storages:
            storage.share()

    def state_dict(self) -> dict[str, Any]:
        return {
            "storages": [storage.state_dict() for storage in self.storages],
            "transforms": [transform_state(transform) for transform in self.transforms],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restore_each(state["storages"], lambda storage, part: storage.load_state_dict(part))
        for transform, part in zip(self.transforms, state["transforms"], strict=True):
            load_transform(transform, part)

    def restore_each(self, states: Sequence[Any], restore: Callable[[Storage, Any], None]) -> None:
        """``restore(storage, state)`` for every member; if one raises, all of them are what they were."""
        before = []
        try:
            for storage, state in _pairs("StorageEnsemble", self.storages, states):
                before.append(storage.snapshot())
                restore(storage, state)
        except BaseException:
            for storage, (content, ring) in zip(self.storages, before, strict=False):
                storage.restore(content, ring)
            raise

    def _default_checkpointer(self) -> Any:
        from llmrl.data.replay_buffers.checkpointers import StorageEnsembleCheckpointer  # they import storages

        return StorageEnsembleCheckpointer()


class SamplerEnsemble(Sampler):
    """Several samplers, and which of them make up the next batch.

    A batch of N rows comes from ``num_buffer_sampled`` draws of a member (default: as many as there are members), with
    probabilities ``p`` (default: equal), and each gives ``N / num_buffer_sampled`` rows. With ``sample_from_all`` every
    member gives its part of every batch. A pass ends when that of a member that was drawn ends.

    Raises: ValueError if the batch cannot be divided; RuntimeError, with nothing drawn, if a member that may be drawn
    has no rows or has fewer left than its part.

    >>> from llmrl.data.replay_buffers import RandomSampler, TensorStorage
    >>> storage = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(10, 15)))
    >>> sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    >>> index, _ = sampler.sample(storage, 8)
    >>> index["buffer_ids"].tolist(), storage.get(index).shape
    ([[0, 0, 0, 0], [1, 1, 1, 1]], torch.Size([2, 4]))
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self.samplers = _checked("SamplerEnsemble", samplers, Sampler)
        count = len(samplers)
        if sample_from_all and p is not None:
            raise TypeError("SamplerEnsemble: p and sample_from_all exclude each other: got both.")
        if sample_from_all and num_buffer_sampled not in (None, count):
            raise ValueError(
                f"SamplerEnsemble: sample_from_all draws from every one of {count} members: got num_buffer_sampled="
                f"{num_buffer_sampled}."
            )
        if num_buffer_sampled is not None and num_buffer_sampled < 1:
            raise ValueError(f"SamplerEnsemble: num_buffer_sampled must be at least 1: got {num_buffer_sampled}.")
        self.sample_from_all = sample_from_all
        self.num_buffer_sampled = count if num_buffer_sampled is None else num_buffer_sampled
        self.p = _probabilities(p, count)
        self._ran_out = False

    def __len__(self) -> int:
        return len(self.samplers)

    def __getitem__(self, index: Any) -> Any:
        where = members_at(index, len(self), "SamplerEnsemble")
        if isinstance(where, int):
            return self.samplers[where]
        return self if len(where) == len(self) else self.of(where)

    def of(self, where: Sequence[int]) -> SamplerEnsemble:
        """The ensemble of some of the samplers, whose probabilities keep their proportions."""
        samplers = [self.samplers[number] for number in where]
        if self.sample_from_all:
            return SamplerEnsemble(*samplers, sample_from_all=True)
        return SamplerEnsemble(*samplers, p=self.p[list(where)])

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    def set_rng(self, generator: torch.Generator) -> None:
        """What the members are drawn from, and all of their rows."""
        super().set_rng(generator)
        for sampler in self.samplers:
            sampler.set_rng(generator)

    def sample(self, storage: StorageEnsemble, batch_size: int) -> tuple[TensorDict, dict[Any, Any]]:
        """``buffer_ids`` and ``index``, int64[members drawn, rows of each]; what members say besides is left out."""

        def draw(number: int, size: int) -> tuple[Tensor, Tensor]:
            index, _ = self.samplers[number].sample(storage.storages[number], size)
            return index, index

        parts = self.draw(storage, batch_size, draw)
        ids = [torch.full_like(index, number) for number, index in parts]
        stacked = torch.stack([index for _, index in parts])
        return TensorDict(buffer_ids=torch.stack(ids), index=stacked, batch_size=stacked.shape), {}

    def draw(
        self, storage: StorageEnsemble, batch_size: int, draw: Callable[[int, int], tuple[Tensor, Drawn]]
    ) -> list[tuple[int, Drawn]]:
        """Chooses members; ``draw(member, rows)`` gives the positions of its part, and what is returned for it."""
        size, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest or not size:
            raise ValueError(
                f"SamplerEnsemble: a batch is divided among the {self.num_buffer_sampled} members that are drawn for "
                f"it: got batch_size={batch_size}; give a multiple, or another num_buffer_sampled."
            )
        for number, member in enumerate(storage.storages):
            if self.p[number] and not len(member):
                raise RuntimeError(
                    f"SamplerEnsemble: every member that may be drawn must have rows: member {number} has none; write "
                    "to it, or give it the probability 0 by p."
                )
        before, marks = self.generator.get_state(), [sampler.bookmark() for sampler in self.samplers]
        try:
            parts, self._ran_out = [], False
            for number in self._choose():
                index, drawn = draw(number, size)
                if len(index) != size:
                    raise RuntimeError(
                        f"SamplerEnsemble: every member gives {size} rows of a batch of {batch_size}: got {len(index)} "
                        f"from member {number} ({type(self.samplers[number]).__name__}); draw whole batches there "
                        "(drop_last=True, strict_length=True), or choose a batch_size that divides its rows."
                    )
                self._ran_out |= self.samplers[number].ran_out
                parts.append((number, drawn))
        except BaseException:
            for sampler, mark in zip(self.samplers, marks, strict=True):
                sampler.go_back(mark)
            self.generator.set_state(before)  # last: it may be that of the samplers too
            raise
        return parts

    def _choose(self) -> list[int]:
        if self.sample_from_all:
            return list(range(len(self)))
        return torch.multinomial(self.p, self.num_buffer_sampled, True, generator=self.generator).tolist()

    def update_priority(self, index: TensorDictBase, priority: Tensor) -> None:
        for number, positions, values in by_member(index, priority):
            self.samplers[number].update_priority(positions, values)

    def state_dict(self) -> dict[str, Any]:
        samplers = [sampler.state_dict() for sampler in self.samplers]
        return {**super().state_dict(), "ran_out": self._ran_out, "samplers": samplers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for sampler, part in _pairs("SamplerEnsemble", self.samplers, state["samplers"]):
            sampler.load_state_dict(part)
        self._ran_out = state["ran_out"]
        super().load_state_dict(state)


class WriterEnsemble(Writer):
    """Several writers. ``ensemble[i].add(row)`` writes; the ensemble itself does not know where to: RuntimeError."""

    def __init__(self, *writers: Writer) -> None:
        self.writers = _checked("WriterEnsemble", writers, Writer)

    def __len__(self) -> int:
        return len(self.writers)

    def __getitem__(self, index: Any) -> Any:
        where = members_at(index, len(self), "WriterEnsemble")
        if isinstance(where, int):
            return self.writers[where]
        return self if len(where) == len(self) else WriterEnsemble(*[self.writers[number] for number in where])

    def register_storage(self, storage: StorageEnsemble) -> None:
        for writer, member in zip(self.writers, storage.storages, strict=True):
            writer.register_storage(member)

    @property
    def write_count(self) -> int:
        """How many rows were ever written, to all members."""
        return sum(writer.write_count for writer in self.writers)

    add, extend, empty, cursor = refused("add"), refused("extend"), refused("empty"), property(refused("cursor"))

    def state_dict(self) -> dict[str, Any]:
        return {"writers": [writer.state_dict() for writer in self.writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for writer, part in _pairs("WriterEnsemble", self.writers, state["writers"]):
            writer.load_state_dict(part)


# --- members ---


def split_index(index: Any) -> tuple[Any, Any]:
    """The index of members, and that of their rows (None if there is none)."""
    if not isinstance(index, tuple):
        return index, None
    return index[0], None if len(index) == 1 else index[1] if len(index) == 2 else index[1:]


def members_at(index: Any, count: int, who: str) -> int | list[int]:
    """The member (a number), or the members (a list of them), that an index means.

    Raises: IndexError outside of the members; RuntimeError for a tensor of several dimensions; TypeError for anything
    that is no integer, such as a float.
    """
    where = index
    if index is not Ellipsis and not isinstance(index, slice):
        where = np.asarray(index)
        if where.ndim > 1:
            raise RuntimeError(f"{who}: members are named by one dimension of numbers: got {list(where.shape)}.")
        if where.size and where.dtype.kind not in ("iub" if where.ndim else "iu"):
            raise TypeError(f"{who}: members are named by integers: got {index!r}.")
        where = where if where.size else slice(0)
    try:
        found = np.arange(count)[where]
    except IndexError:
        raise IndexError(
            f"{who}: numbers of members lie below {count}, and a mask has an entry for each: got {index}."
        ) from None
    if not found.size:
        raise IndexError(f"{who}: an ensemble has at least one member: got {index} of {count}.")
    return found.tolist()


class Chosen(NamedTuple):
    """Some rows of one member."""

    number: int
    positions: Tensor
    values: Any


def by_member(index: TensorDictBase, values: Tensor | None = None) -> Iterator[Chosen]:
    """What an index of an ensemble names, member by member."""
    ids, positions = index["buffer_ids"], index["index"]
    for number in ids.unique().tolist():
        where = ids == number
        yield Chosen(number, positions[where], None if values is None else values[where])


def index_of(number: int, storage: Storage, positions: Tensor, device: torch.device | None = None) -> TensorDict:
    """The rows of one member, as a sample names them, as part of an ensemble's index."""
    shape = positions.shape[: positions.ndim - bool(storage.trailing)]
    ids = torch.full(shape, number, dtype=torch.int64, device=positions.device)
    return TensorDict._new_unsafe({"buffer_ids": ids, "index": positions}, batch_size=shape, device=device)


# --- several members' rows as one batch ---


def same_schema(storages: Sequence[Storage]) -> bool:
    """True if rows of all storages have the same fixed keys, shapes and dtypes, whichever rows they are."""
    layouts = []
    for storage in storages:
        schema = storage._known_schema() if isinstance(storage, TensorStorage) else None
        if schema is None or not all(type(kind) is TensorLeaf for kind in schema.layout.kinds):
            return False
        layouts.append(schema.layout)
    return all(layout == layouts[0] for layout in layouts[1:])


def join(parts: Sequence[Any], dense: bool) -> Any:
    """The members' parts along a new first dimension.

    Stacked if ``dense`` and of one size; else a lazy stack of tensordicts, or the list of parts where they are none.
    """
    if dense:
        layouts, columns = zip(*[take_apart(part, stacked=False) for part in parts], strict=True)
        if all(layout == layouts[0] for layout in layouts[1:]):
            stacked = [torch.stack(entries) for entries in zip(*columns, strict=True)]
            return put_together(layouts[0], stacked, len(parts))
    if all(is_tensor_collection(part) for part in parts):
        if len({part.device for part in parts}) > 1:  # some say that they are on the CPU, others say nothing
            parts = [part.copy().clear_device_() for part in parts]
        return LazyStackedTensorDict.lazy_stack(list(parts))
    return list(parts)


def _checked(who: str, members: Sequence[Any], kind: type) -> tuple[Any, ...]:
    if not members:
        raise ValueError(f"{who}: an ensemble has at least one member: got none.")
    for member in members:
        if not isinstance(member, kind) or isinstance(member, StorageEnsemble | SamplerEnsemble | WriterEnsemble):
            raise TypeError(
                f"{who}: members are of type {kind.__name__}, and no ensembles: got a {type(member).__name__}."
            )
    return tuple(members)


def _pairs(who: str, members: Sequence[Any], states: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if len(states) != len(members):
        raise CheckpointError(
            f"{who}: a state is loaded into as many members: got one of {len(states)}, expected {len(members)}."
        )
    return zip(members, states, strict=True)


def _probabilities(p: Sequence[float] | Tensor | None, count: int) -> Tensor:
    if p is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    given = torch.as_tensor(p, dtype=torch.float64)
    if given.shape != (count,) or not bool((given >= 0).all()) or not isfinite(float(given.sum())) or not given.sum():
        raise ValueError(
            f"SamplerEnsemble: p must be one non-negative number per member, not all of them 0: got {given.tolist()} "
            f"for {count} members."
        )
    return given / given.sum()


@contextmanager
def _all_of(locks: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield
