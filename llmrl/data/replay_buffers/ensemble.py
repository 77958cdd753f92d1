"""Several buffers, sampled as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import new_tensordict
from llmrl.data.replay_buffers.buffer import ReplayBuffer
from llmrl.data.replay_buffers.members import Members, by_member, index_of, members_at, refused, split_index
from llmrl.data.replay_buffers.samplers import Sampler, SamplerEnsemble
from llmrl.data.replay_buffers.storages import StorageEnsemble
from llmrl.data.replay_buffers.storages.ensemble import join, same_schema
from llmrl.data.replay_buffers.tensordict import TensorDictReplayBuffer, with_info
from llmrl.data.replay_buffers.utils import near_names
from llmrl.data.replay_buffers.writers import WriterEnsemble

__all__ = ["ReplayBufferEnsemble"]


class ReplayBufferEnsemble(Members, ReplayBuffer):
    """Several buffers, sampled as one; batches have the shape [members drawn, rows of each].

    The members are ``rbs``, or are built from ``storages``, ``samplers`` and ``writers`` (all three required) and
    ``collate_fns``, one per member. ``p``, ``sample_from_all`` and ``num_buffer_sampled`` are those of
    `SamplerEnsemble`; every draw of a member gives ``batch_size / num_buffer_sampled`` rows. Each part passes through
    the transforms of its member, then ``collate_fn`` joins the list of parts, then the ensemble's own ``transform``
    runs. ``generator`` is used to draw members and the rows of all of them.

    Without a ``collate_fn`` the batch is dense if the rows of all members have the same fixed schema and pass through
    no transforms, and otherwise a lazy stack (a list of parts, for rows that are not tensordicts), whatever is drawn.
    ``info`` is a tensordict; ``info["index", "buffer_ids"]`` and ``info["index", "index"]`` are the member and the
    position of each row, as is the entry ``"index"`` of a batch of tensordicts. ``update_priority`` takes such an
    index. ``ensemble[i]`` is a member, ``ensemble[1:]`` an ensemble of some members, ``ensemble[:, :3]`` are rows of
    every member; ``len`` counts members. Rows are written to members, not to the ensemble.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage
    >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    >>> ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=10)
    >>> for number in range(2):
    ...     _ = ensemble[number].extend(TensorDict(obs=torch.arange(6) + 100 * number, batch_size=[6]))
    >>> batch = ensemble.sample()
    >>> (batch["obs"] // 100).tolist(), batch["index", "buffer_ids"].tolist()
    ([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    """

    _held_in = "_buffers"

    @near_names
    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
    ) -> None:
        parts = (storages, samplers, writers)
        if rbs:
            if collate_fns is not None or any(part is not None for part in parts):
                raise TypeError(
                    "ReplayBufferEnsemble: buffers have their own parts: got storages, samplers, writers or "
                    "collate_fns beside them."
                )
            self._buffers = self._checked(rbs, ReplayBuffer)
        else:
            if any(part is None for part in parts):
                raise TypeError("ReplayBufferEnsemble: give buffers, or all of storages, samplers and writers.")
            self._buffers = _build_members(storages, samplers, writers, collate_fns, batch_size)
        if samplers is None:
            chosen_by = {"p": p, "sample_from_all": sample_from_all, "num_buffer_sampled": num_buffer_sampled}
            samplers = SamplerEnsemble(*[member._sampler for member in self._members], **chosen_by)
        elif p is not None or sample_from_all or num_buffer_sampled is not None:
            raise TypeError(
                "ReplayBufferEnsemble: p, sample_from_all and num_buffer_sampled are arguments of the SamplerEnsemble "
                "that was given: got them here."
            )
        self._views = (
            StorageEnsemble(*self._member_parts("_storage"), transforms=self._member_parts("_transforms")),
            samplers,
            WriterEnsemble(*self._member_parts("_writer")),
        )
        super().__init__(transform=transform, batch_size=batch_size, collate_fn=collate_fn)
        if generator is not None:
            self.set_rng(generator)
        if shared:
            self.share()

    def _build_parts(self) -> None:
        self._given = ()  # the parts are the members'

    def _member_parts(self, name: str) -> tuple[Any, ...]:
        return tuple(getattr(member, name) for member in self._members)

    # The parts are looked up on every access, because a member's parts may have been replaced.

    @property
    def _storage(self) -> StorageEnsemble:
        self._views[0].storages = self._member_parts("_storage")
        return self._views[0]

    @property
    def _sampler(self) -> SamplerEnsemble:
        self._views[1].samplers = self._member_parts("_sampler")
        return self._views[1]

    @property
    def _writer(self) -> WriterEnsemble:
        self._views[2].writers = self._member_parts("_writer")
        return self._views[2]

    def __getitem__(self, index: Any) -> Any:
        """A member, an ensemble of members, or (with a second index) rows of members."""
        first, rest = split_index(index)
        where = members_at(first, len(self), "ReplayBufferEnsemble")
        if isinstance(where, int):
            return self._members[where] if rest is None else self._members[where][rest]
        if rest is not None:
            parts = [self._members[number][rest] for number in where]
            return self._transformed(self._joined(parts, self._dense()))
        return self if len(where) == len(self) else self.of(where)

    def of(self, where: Sequence[int]) -> ReplayBufferEnsemble:
        chosen = self._sampler.of(where)
        some = ReplayBufferEnsemble(
            *[self._members[number] for number in where],
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            p=None if chosen.sample_from_all else chosen.p,
            sample_from_all=chosen.sample_from_all,
        )
        some._transforms = copy.copy(self._transforms)
        return some

    # --- reads ---

    def epoch(self) -> Iterator[Any]:
        """Yields batches until a member's pass ends; without passes, as many as would cover all rows once."""
        if any(type(sampler).ran_out is not Sampler.ran_out for sampler in self._sampler.samplers):
            yield from self
            return
        batches, rows = iter(self), sum(map(len, self._members))
        for _ in range(-(-rows // (self._batch_size or rows))):
            yield next(batches)

    def _draw(self, size: int) -> tuple[Any, Any, bool]:
        storage, sampler = self._storage, self._sampler

        def draw(number: int, rows: int) -> tuple[Tensor, tuple[Any, dict[Any, Any]]]:
            raw, info, _ = self._members[number]._draw(rows)
            return info["index"], (raw, info)

        # Every member draws as it would alone, with its own grid and collate_fn.
        parts = sampler.draw(storage, size, draw)
        infos = []
        for number, (_, info) in parts:
            rows = info["index"].shape[:1]
            index = index_of(number, storage.storages[number].trailing, info["index"])
            infos.append(new_tensordict({"index": index}, rows))
            for key, value in info.items():
                if key != "index" and isinstance(value, Tensor) and value.shape[:1] == rows:
                    infos[-1].set(key, value)
        return parts, join(infos, self._equal_samplers()), sampler.ran_out

    def _finish(self, raw: list[tuple[int, Any]], info: Any) -> Any:
        parts = []
        for number, (rows, member_info) in raw:
            member = self._members[number]
            data = member._with_info(member._collate(rows), member_info)
            if isinstance(data, TensorDictBase):  # before the transforms, which may reorder or drop rows
                data = with_info(data, {"index": member_info["index"]})
            data = member._transformed(data)
            if isinstance(data, TensorDictBase) and isinstance(index := data.get("index", None), Tensor):
                data.set("index", index_of(number, member._storage.trailing, index, data.device))
            parts.append(data)
        return self._transformed(self._joined(parts, self._dense() and self._equal_samplers()))

    def _joined(self, parts: list[Any], dense: bool) -> Any:
        return join(parts, dense) if self._collate_fn is None else self._collate_fn(parts)

    def _dense(self) -> bool:
        """True if rows of all members are known to have the same schema; False if members have transforms."""
        plain = all(not member._transforms and member._collate_fn is None for member in self._members)
        kinds = {isinstance(member, TensorDictReplayBuffer) for member in self._members}
        return plain and len(kinds) == 1 and same_schema(self._storage.storages)

    def _equal_samplers(self) -> bool:
        """True if the samplers of all members return info with the same keys and shapes."""
        samplers, storages = self._sampler.samplers, self._storage.storages
        infos = {(type(sampler), str(getattr(sampler, "truncated_key", None))) for sampler in samplers}
        return len(infos) == 1 and len({storage.ndim for storage in storages}) == 1

    # --- members ---

    def update_priority(self, index: TensorDictBase, priority: Tensor) -> None:
        """Sets priorities in the members' samplers; ``index`` is that of a batch, or of its ``info``."""
        for number, positions, values in by_member(index, priority):
            self._members[number].update_priority(positions, values)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets new priorities for the rows of a sampled batch; all members must be ``TensorDictReplayBuffer``."""
        for part in data.unbind(0):  # each part belongs to one member
            part, index = part.copy(), part["index"]
            part.set("index", index["index"])
            self._members[int(index["buffer_ids"].flatten()[0])].update_tensordict_priority(part)

    def mark_update(self, index: TensorDictBase) -> None:
        """Notifies the members' samplers that rows were changed."""
        for number, positions, _ in by_member(index):
            self._members[number].mark_update(positions)

    add, extend, empty = refused("add"), refused("extend"), refused("empty")
    __setitem__ = refused("an assignment")
    set_storage, set_sampler, set_writer = map(refused, ("a new storage", "a new sampler", "a new writer"))

    def _rewind(self) -> None:
        for member in self._members:
            member._rewind()

    def __repr__(self) -> str:
        members = ", ".join(map(repr, self._members))
        return f"ReplayBufferEnsemble({members}, batch_size={self._batch_size}, {len(self._transforms)} transforms)"


def _build_members(
    storages: StorageEnsemble,
    samplers: SamplerEnsemble,
    writers: WriterEnsemble,
    collate_fns: Sequence[Callable[[Any], Any] | None] | None,
    batch_size: int | None,
) -> tuple[ReplayBuffer, ...]:
    collates = [None] * len(storages) if collate_fns is None else list(collate_fns)
    parts = {"storages": storages, "samplers": samplers, "writers": writers, "collate_fns": collates}
    sizes = {name: len(part) for name, part in parts.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"ReplayBufferEnsemble: every member has one part of each kind: got {sizes}.")
    size = None if batch_size is None else max(batch_size // samplers.num_buffer_sampled, 1)
    return tuple(
        ReplayBuffer(
            storage=storage, sampler=sampler, writer=writer, transform=transform, collate_fn=collate, batch_size=size
        )
        for storage, sampler, writer, transform, collate in zip(
            storages.storages, samplers.samplers, writers.writers, storages.transforms, collates, strict=True
        )
    )
