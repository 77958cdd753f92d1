"""Several storages as one, and batches that combine rows of several storages."""

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
    """Several storages; ``transforms`` are those of each storage's rows (one per storage, or None).

    ``ensemble[i]`` is a storage, ``ensemble[1:]`` and ``ensemble[[0, 2]]`` are ensembles, and ``ensemble[:, :3]`` are
    the joined rows of every member at the second index. ``len`` counts members. Rows are written to a member.

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
        self.checkpointer = None  # no super().__init__(): counters and locks are the members'

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
        """The rows at an index from ``SamplerEnsemble.sample``, [members drawn, rows of each]."""
        parts = [
            self.storages[int(part["buffer_ids"][0])].batch(part["index"])
            for part in index.unbind(0)  # each part of the index belongs to one member
        ]
        return join(parts, same_schema(self.storages))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # no lock to rebuild: the locks are the members'

    set, count, empty = refused("set"), refused("count"), refused("empty")

    @property
    def lock(self) -> Any:
        """All members' locks, acquired in the same order in every ensemble, which avoids deadlocks."""
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
        """Calls ``restore(storage, state)`` for every member and loads the states of transforms; if one raises, all
        are left unchanged.
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
