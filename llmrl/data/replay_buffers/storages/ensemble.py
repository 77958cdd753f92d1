"""Several storages as one, and the batches that hold rows of several of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.base import is_tensor_collection

from llmrl.data.ragged.layout import TensorLeaf, put_together, take_apart
from llmrl.data.replay_buffers.members import Members, members_at, refused, split_index
from llmrl.data.replay_buffers.storages.base import Storage
from llmrl.data.replay_buffers.storages.tensor import TensorStorage
from llmrl.data.replay_buffers.utils import load_transforms, transform_states


class StorageEnsemble(Members, Storage):
    """Several storages; ``transforms`` (one per storage, None if there is none) are what belongs to their rows.

    ``ensemble[i]`` is a storage, ``ensemble[1:]`` and ``ensemble[[0, 2]]`` are ensembles, and ``ensemble[:, :3]`` are
    rows: those of every member at the second index, joined. ``len`` counts members. Rows are written to a member.

    >>> from llmrl.data.replay_buffers import TensorStorage
    >>> ensemble = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(10, 15)))
    >>> len(ensemble), len(ensemble[1])
    (2, 5)
    >>> ensemble[:, 1:3].tolist()
    [[1, 2], [11, 12]]
    """

    _held_in = "storages"

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        self.storages = self._checked(storages, Storage)
        self.transforms = (None,) * len(storages) if transforms is None else tuple(transforms)
        if len(self.transforms) != len(storages):
            raise ValueError(
                f"StorageEnsemble: transforms must have an entry per storage: got {len(self.transforms)} for "
                f"{len(storages)} storages."
            )
        self.checkpointer = None  # the members have the counters and the locks

    def of(self, where: Sequence[int]) -> StorageEnsemble:
        transforms = [self.transforms[number] for number in where]
        return StorageEnsemble(*[self.storages[number] for number in where], transforms=transforms)

    def __getitem__(self, index: Any) -> Any:
        """A member, an ensemble of members, or (with a second index) rows of members."""
        first, rest = split_index(index)
        if rest is None:
            return super().__getitem__(first)
        where = members_at(first, len(self), "StorageEnsemble")
        if isinstance(where, int):
            return self.storages[where][rest]
        return join([self.storages[number][rest] for number in where], same_schema(self.storages))

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
        """All members' locks, taken in one order wherever they stand in the ensemble."""
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
            "transforms": transform_states(self.transforms),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restore_each(state["storages"], state["transforms"], lambda storage, part: storage.load_state_dict(part))

    def restore_each(
        self, states: Sequence[Any], transforms: Sequence[Any], restore: Callable[[Storage, Any], None]
    ) -> None:
        """``restore(storage, state)`` for every member, and the states of transforms; if one raises, all of them are
        what they were.
        """
        pairs, before, kept = self._pairs(states), [], copy.deepcopy(transform_states(self.transforms))
        try:
            load_transforms(self.transforms, transforms)
            for storage, state in pairs:
                before.append(storage.snapshot())
                restore(storage, state)
        except BaseException:
            load_transforms(self.transforms, kept)
            # Restores the members loaded so far; for the one that failed this has no effect, as its own load is atomic.
            for storage, (content, counters) in zip(self.storages, before, strict=False):
                storage.restore(content, counters)
            raise


def same_schema(storages: Sequence[Storage]) -> bool:
    """True if rows of all storages have the same fixed keys, shapes and dtypes."""
    layouts = []
    for storage in storages:
        schema = storage._known_schema() if isinstance(storage, TensorStorage) else None
        if schema is None or not all(type(kind) is TensorLeaf for kind in schema.layout.kinds):
            return False
        layouts.append(schema.layout)
    return all(layout == layouts[0] for layout in layouts[1:])


def join(parts: Sequence[Any], dense: bool) -> Any:
    """The members' parts along a new first dimension.

    Stacked if ``dense`` and of the same size; otherwise a lazy stack of tensordicts, or a list for other data.
    """
    if dense:
        layouts, columns = zip(*[take_apart(part, stacked=False) for part in parts], strict=True)
        if all(layout == layouts[0] for layout in layouts[1:]):
            stacked = [torch.stack(entries) for entries in zip(*columns, strict=True)]
            return put_together(layouts[0], stacked, len(parts))
    if all(is_tensor_collection(part) for part in parts):
        if len({part.device for part in parts}) > 1:  # some parts declare the CPU, others declare no device
            parts = [part.copy().clear_device_() for part in parts]
        return LazyStackedTensorDict.lazy_stack(list(parts))
    return list(parts)


@contextmanager
def _all_of(locks: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield
