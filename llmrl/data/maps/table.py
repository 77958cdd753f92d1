"""`TensorDictMap`: a map from tensordict rows, compared by value, to rows of a storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.base import is_tensor_collection
from torch import Tensor, nn

from llmrl.data.maps.hashes import HashToInt, SipHash, number, row_bytes
from llmrl.data.ragged.tensordicts import present_keys
from llmrl.data.replay_buffers.storages import LazyTensorStorage, Storage
from llmrl.errors import MissingKeyError, ShapeError

_MAX_KEY_BYTES = 64  # per row; a longer row is replaced by its 256-bit hash


class QueryModule(nn.Module):
    """Numbers rows by the values of ``in_keys``: 0, 1, 2 ... in the order in which they were first seen.

    Reads    ``in_keys``   tensors [*B, *F]; dtype and shape F must be those of the first call
    Writes   ``index_key`` int64[*B]  a new row gets the next number; with ``extend=False`` the count of known rows
             ``hash_key``  int64[*B]  its hash, unless ``write_hash=False``
    Returns  ``td``, or with ``clone`` a shallow copy of it
    Raises   MissingKeyError if one of ``in_keys`` is missing; ShapeError if its dtype or shape changed

    Rows are equal if all of their values are; hashes are compared only if ``hash_to_int`` is given.

    hash_module   hashes the values [*B, F] of one key; default `SipHash`
    hash_to_int   numbers the hashes instead of the rows: rows with equal hashes get the same number
    aggregator    combines the hashes [*B, K] of several keys; default `SipHash`

    >>> from tensordict import TensorDict
    >>> query = QueryModule(["x"])
    >>> query(TensorDict(x=torch.tensor([[5], [6], [5]]), batch_size=[3]))["_index"].tolist()
    [0, 1, 0]
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        index_key: NestedKey = "_index",
        hash_key: NestedKey = "_hash",
        *,
        hash_module: Callable[[Tensor], Tensor] | None = None,
        hash_to_int: HashToInt | None = None,
        aggregator: Callable[[Tensor], Tensor] | None = None,
        clone: bool = False,
    ) -> None:
        super().__init__()
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.index_key, self.hash_key, self.clone = unravel_key(index_key), unravel_key(hash_key), clone
        self.hash_module = SipHash() if hash_module is None else hash_module
        self.aggregator = SipHash() if aggregator is None else aggregator
        self.hash_to_int = hash_to_int
        self._numbers: dict[bytes, int] = {}
        self._kinds: dict[NestedKey, tuple[torch.dtype, torch.Size]] = {}

    def __len__(self) -> int:
        return len(self._numbers if self.hash_to_int is None else self.hash_to_int)

    def forward(
        self, td: TensorDictBase, *, extend: bool = True, write_hash: bool = True, clone: bool | None = None
    ) -> TensorDictBase:
        out = td.copy() if (self.clone if clone is None else clone) else td
        out.set(self.index_key, self.index(td, extend=extend))
        return out.set(self.hash_key, self.hash(td)) if write_hash else out

    def index(self, td: TensorDictBase, *, extend: bool = False) -> Tensor:
        """The index that `forward` writes under ``index_key``."""
        if self.hash_to_int is not None:
            return self.hash_to_int(self.hash(td), extend=extend)
        columns = [row_bytes(value.reshape(-1, value.shape[-1])) for value in self._values(td, keep=extend)]
        rows = columns[0] if len(columns) == 1 else [b"".join(row) for row in zip(*columns, strict=True)]
        if rows and len(rows[0]) > _MAX_KEY_BYTES:
            rows = [blake2b(row, digest_size=32).digest() for row in rows]
        numbers = number(self._numbers, rows, extend=extend)
        return torch.tensor(numbers, dtype=torch.int64, device=td.device).reshape(td.batch_size)

    def hash(self, td: TensorDictBase) -> Tensor:
        """The hash that `forward` writes under ``hash_key``."""
        hashes = [self.hash_module(value) for value in self._values(td)]
        return hashes[0] if len(hashes) == 1 else self.aggregator(torch.stack(hashes, -1))

    def forget(self, size: int = 0) -> None:
        """Forgets all but the first ``size`` rows."""
        numbers = self._numbers if self.hash_to_int is None else self.hash_to_int._numbers
        while len(numbers) > size:
            numbers.popitem()
        if not size:
            self._kinds = {}

    def _values(self, td: TensorDictBase, *, keep: bool = False) -> list[Tensor]:
        values = []
        for key in self.in_keys:
            value = td.get(key, None)
            if not isinstance(value, Tensor):
                raise MissingKeyError(
                    f"QueryModule: reads a tensor under {key!r}: got {type(value).__name__}; keys present: "
                    f"{present_keys(td)}."
                )
            kind = value.dtype, value.shape[td.batch_dims :]
            known = self._kinds.setdefault(key, kind) if keep else self._kinds.get(key, kind)
            if kind != known:
                raise ShapeError(
                    f"QueryModule: {key!r} must be {known[0]}{list(known[1])} in each row, as in the first ones: got "
                    f"{kind[0]}{list(kind[1])}."
                )
            values.append(value.reshape(*td.batch_size, kind[1].numel()))
        return values

    def get_extra_state(self) -> dict[str, Any]:
        rows = list(self._numbers)
        kinds = {key: (str(dtype).removeprefix("torch."), list(shape)) for key, (dtype, shape) in self._kinds.items()}
        content = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if any(rows) else torch.empty(0)
        return {"kinds": kinds, "rows": content.to(torch.uint8).reshape(len(rows), -1 if len(rows) else 0)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._numbers = {row: place for place, row in enumerate(row_bytes(state["rows"]))}
        self._kinds = {
            key: (getattr(torch, dtype), torch.Size(shape)) for key, (dtype, shape) in state["kinds"].items()
        }


class TensorMap(ABC):
    """A map from tensordicts to values."""

    @abstractmethod
    def clear(self) -> None:
        """Removes all keys and values."""

    @abstractmethod
    def __getitem__(self, item: Any) -> Any:
        """The value of each row. Raises MissingKeyError if a row has none."""

    @abstractmethod
    def __setitem__(self, item: Any, value: Any) -> None:
        """Writes a value for each row."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of keys."""

    @abstractmethod
    def contains(self, item: Any) -> Any:
        """True for each row that has a value."""

    def __contains__(self, item: Any) -> bool:
        return bool(torch.as_tensor(self.contains(item)).all())


class TensorDictMap(TensorMap):
    """A map from distinct rows of some keys to tensordicts of values.

    Reads    ``query_module.in_keys`` of the index, a tensordict [*B]; an integer index is a position in the storage
    Writes   rows of ``storage``: all of them, or none after an error; then ``query_module.index_key`` of the index that
             was written, int64[*B], the position of each row, unless it is locked
    Raises   MissingKeyError, naming the row, if a row that is read is missing; RuntimeError if the storage is full

    out_keys    value keys that are written and read, which may include ``query_module.index_key``; None: all
    write_fn    (stored rows, new rows) -> the rows to store; None: the new rows. If a key occurs several times in one
                write, its rows are merged one after the other
    collate_fn  applied to the rows that the storage returns

    >>> from tensordict import TensorDict
    >>> map_ = TensorDictMap(query_module=QueryModule(["x"]), storage=LazyTensorStorage(100))
    >>> keys = TensorDict(x=torch.tensor([[5], [6]]), batch_size=[2])
    >>> map_[keys] = TensorDict(y=torch.tensor([50, 60]), batch_size=[2])
    >>> map_[keys[1]]["y"], map_.contains(TensorDict(x=torch.tensor([7])))
    (tensor(60), tensor(False))
    """

    def __init__(
        self,
        *,
        query_module: QueryModule,
        storage: Storage,
        collate_fn: Callable[[Any], Any] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        write_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.query_module, self.storage = query_module, storage
        self.collate_fn, self.write_fn = collate_fn, write_fn
        self.out_keys = None if out_keys is None else [unravel_key(key) for key in out_keys]

    @classmethod
    def from_tensordict_pair(
        cls,
        source: TensorDictBase,
        dest: TensorDictBase,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] | None = None,
        max_size: int = 1000,
        storage_constructor: Callable[[int], Storage] | None = None,
        hash_module: Callable[[Tensor], Tensor] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        write_fn: Callable[[Any, Any], Any] | None = None,
        consolidated: bool | None = None,
    ) -> TensorDictMap:
        """An empty map for keys like ``in_keys`` of ``source`` and values like ``out_keys`` of ``dest``.

        Raises  MissingKeyError if the examples lack them. ``consolidated`` has no effect.
        """
        query = QueryModule(in_keys, hash_module=hash_module)
        query._values(source)
        if missing := [key for key in out_keys or () if key != query.index_key and dest.get(key, None) is None]:
            raise MissingKeyError(
                f"TensorDictMap: dest must have the out_keys: {missing[0]!r} is missing; keys present: "
                f"{present_keys(dest)}."
            )
        storage = (storage_constructor or LazyTensorStorage)(max_size)
        options = {"collate_fn": collate_fn, "out_keys": out_keys, "write_fn": write_fn}
        return cls(query_module=query, storage=storage, **options)

    def __len__(self) -> int:
        return len(self.query_module)

    def clear(self) -> None:
        self.query_module.forget()
        self.storage.empty()

    def contains(self, item: TensorDictBase) -> Tensor:
        """bool [*B]: True for each row that has a value."""
        return self.query_module.index(item) < len(self)

    def __getitem__(self, item: Any) -> Any:
        if not is_tensor_collection(item):
            return self._read(item)
        index = self.query_module.index(item)
        if len(missing := (index == len(self)).nonzero()):
            row = tuple(missing[0].tolist())
            key = item[row].select(*self.query_module.in_keys).to_dict()
            raise MissingKeyError(
                f"TensorDictMap: every row must have a value: {len(missing)} of {index.numel()} have none, first row "
                f"{list(row)} with {key!r:.200}."
            )
        return self._read(index)

    def __setitem__(self, item: TensorDictBase, value: TensorDictBase) -> None:
        if item.batch_size != value.batch_size:
            raise ShapeError(
                f"TensorDictMap: keys and values must have one batch size: got {list(item.batch_size)} and "
                f"{list(value.batch_size)}."
            )
        if not item.batch_size.numel():
            return
        keys, index_key = item, self.query_module.index_key
        before = len(self)  # for the rollback after an error: rows get their numbers before they are written
        if not item.batch_dims:
            item, value = item.unsqueeze(0), value.unsqueeze(0)
        if self.out_keys is not None:
            value = value.select(*(key for key in self.out_keys if key != index_key))
        index = self.query_module.index(item, extend=True).flatten()
        value = value.reshape(-1)
        if index_key in (self.out_keys or ()):
            value = value.copy().set(index_key, index)
        try:
            if len(self) > self.storage.max_size:
                raise RuntimeError(
                    f"TensorDictMap: at most {self.storage.max_size} keys fit: got {len(self) - before} new ones "
                    f"in addition to {before}; give the storage a larger max_size, or clear()."
                )
            self._write(index, value)
        except BaseException:
            self.query_module.forget(before)
            raise
        if not keys.is_locked:
            keys.set(index_key, index.reshape(keys.batch_size))

    def _read(self, index: Any) -> Any:
        rows = self.storage[index] if not isinstance(index, Tensor) or index.ndim else self.storage.get(int(index))
        rows = rows if self.collate_fn is None else self.collate_fn(rows)
        return rows if self.out_keys is None else rows.select(*self.out_keys)

    def _write(self, index: Tensor, value: TensorDictBase) -> None:
        """Writes to the storage once. Of several rows with one key the last one is stored, or ``write_fn`` of all."""
        places: dict[int, list[int]] = {}
        for place, position in enumerate(index.tolist()):
            places.setdefault(position, []).append(place)
        positions = sorted(places)  # new rows (the highest positions) must be appended in order
        if self.write_fn is None:
            rows = value[torch.tensor([places[position][-1] for position in positions], dtype=torch.int64)]
        else:
            rows = self._merged(value, positions, places)
        is_run = positions[-1] - positions[0] + 1 == len(positions)  # a slice is copied as a block
        self.storage.set(slice(positions[0], positions[-1] + 1) if is_run else torch.tensor(positions), rows)

    def _merged(self, value: TensorDictBase, positions: list[int], places: dict[int, list[int]]) -> TensorDictBase:
        rows = value[torch.tensor([places[position][0] for position in positions], dtype=torch.int64)]
        stored = torch.tensor([position < len(self.storage) for position in positions])
        if stored.any():
            old = self._read(torch.tensor(positions)[stored])
            rows[stored] = self.write_fn(old, rows[stored])
        # Repeated keys: each pass merges the next row of every key that has another one.
        for turn in range(1, max(map(len, places.values()))):
            again = torch.tensor([len(places[position]) > turn for position in positions])
            news = value[torch.tensor([where[turn] for _, where in sorted(places.items()) if len(where) > turn])]
            rows[again] = self.write_fn(rows[again], news)
        return rows
