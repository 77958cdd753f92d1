"""The replay buffer: writes pass through transforms and a writer, reads through a sampler and transforms.

The parts do the work: a storage keeps rows (``storages``), a writer chooses their positions (``writers``), a sampler
selects the rows of a batch (``samplers``). This file combines them under the storage's lock.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.layout import tree_map
from llmrl.data.ragged.stack import not_compiled, set_entry
from llmrl.data.replay_buffers.grid_index import (
    cells_in_row,
    coordinates,
    flat_cells,
    select_cells,
    shape_cells,
    time_first,
)
from llmrl.data.replay_buffers.prefetch import Prefetcher
from llmrl.data.replay_buffers.samplers import RandomSampler, Sampler
from llmrl.data.replay_buffers.samplers.base import SLICE_END, PortableGenerator
from llmrl.data.replay_buffers.saving import dump_parts, load_parts, load_parts_state, part_names, parts_state
from llmrl.data.replay_buffers.storages import ListStorage, Storage
from llmrl.data.replay_buffers.storages.base import read_entry
from llmrl.data.replay_buffers.utils import Transforms, build_part, near_names
from llmrl.data.replay_buffers.writers import RoundRobinWriter, Writer
from llmrl.errors import DataError

Index = int | slice | range | Sequence[int] | Tensor | tuple[Any, ...]


class ReplayBuffer:
    """Stores rows and returns batches of them; rows are copied on writes and on reads.

    ``storage``, ``sampler`` and ``writer`` are instances, or callables without arguments that build one (on first use
    with ``delayed_init``). ``transform`` (or ``transform_factory``) is a callable that runs on every batch that is
    read; its method ``inv``, if any, runs on every batch that is written and may return None to drop it.
    ``write_transform`` runs on writes only, before the others. ``collate_fn`` builds a batch from what the storage
    returns for several rows.

    Threads prepare ``prefetch`` batches ahead, which does not change the batches; one that takes longer than
    ``prefetch_timeout_s`` raises ``DeadlineError``. On a storage with ``ndim`` dimensions, time is dimension
    ``dim_extend`` of a batch (default: the last of the grid), and positions are coordinates int64[N, ndim], time first.
    ``shared`` lets other processes write and read the rows; each process has its own sampler, which draws from
    ``generator``. A buffer that loads a ``state_dict`` continues with the same batches. ``compilable`` has no effect.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    >>> buffer.extend(TensorDict(obs=torch.arange(6), batch_size=[6]))
    tensor([0, 1, 2, 3, 4, 5])
    >>> [len(batch) for batch in buffer]
    [4, 2]
    """

    _default_writer: type[Writer] = RoundRobinWriter

    @near_names
    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        prefetch_timeout_s: float = 600.0,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        write_transform: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise TypeError("ReplayBuffer: transform and transform_factory exclude each other: got both.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"ReplayBuffer: batch_size must be at least 1: got {batch_size}.")
        if prefetch and batch_size is None:
            raise ValueError("ReplayBuffer: prefetch prepares batches of a known size: give batch_size too.")
        if pin_memory and not torch.accelerator.is_available():
            raise ValueError("ReplayBuffer: pin_memory prepares copies to an accelerator: this machine has none.")
        portable = None if generator is None else PortableGenerator(generator)
        self._given = (storage, sampler, writer, checkpointer, portable, shared)
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._batch_size = batch_size
        self._dim_extend: int | None = None
        if dim_extend is not None:
            self.dim_extend = dim_extend
        self._write_transform = write_transform
        transform = transform if transform_factory is None else transform_factory()
        self._transforms = Transforms() if transform is None else Transforms(transform)
        self._prefetcher = Prefetcher(prefetch, prefetch_timeout_s) if prefetch else None
        self._iterator: Iterator[Any] | None = None
        if not delayed_init:
            self._build_parts()

    def _build_parts(self) -> None:
        storage, sampler, writer, checkpointer, generator, shared = self._given
        self._storage = build_part("storage", ListStorage(1000) if storage is None else storage, Storage)
        self._sampler = build_part("sampler", RandomSampler if sampler is None else sampler, Sampler)
        self._writer = build_part("writer", self._default_writer if writer is None else writer, Writer)
        if self._sampler.drop_last and self._batch_size is None:
            raise ValueError("ReplayBuffer: a sampler with drop_last needs batch_size at construction.")
        if checkpointer is not None:
            self._storage.checkpointer = checkpointer() if isinstance(checkpointer, type) else checkpointer
        self._connect()
        if generator is not None:
            self._sampler.set_rng(generator)
        if shared:
            self.share()
        self._given = ()

    def __getattr__(self, name: str) -> Any:
        if name in ("_storage", "_sampler", "_writer") and self.__dict__.get("_given"):
            self._build_parts()  # delayed_init: this is the first use
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def sampler(self) -> Sampler:
        return self._sampler

    @property
    def writer(self) -> Writer:
        return self._writer

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    @property
    def write_count(self) -> int:
        """The number of rows ever written."""
        return self._writer.write_count

    @property
    def dim_extend(self) -> int:
        """The time dimension of a batch; can be set once, by default the last dimension that counts rows."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @dim_extend.setter
    def dim_extend(self, value: int) -> None:
        if self._dim_extend is not None:
            raise RuntimeError(f"ReplayBuffer: dim_extend is set once: it is {self._dim_extend}, got {value}.")
        if value < 0:
            raise ValueError(f"ReplayBuffer: dim_extend counts from the first dimension: got {value}.")
        self._dim_extend = value

    @property
    def transforms(self) -> tuple[Any, ...]:
        """The transforms in the order in which they run on reads."""
        return tuple(self._transforms)

    # --- writes ---

    def __len__(self) -> int:
        return len(self._storage)

    @not_compiled
    def add(self, data: Any) -> int | Tensor:
        """Writes one row; on a grid, one time step of all its streams.

        Returns its position; an empty int64 tensor if a transform dropped or held back the row; the positions int64[N]
        if a transform turned it into several rows.
        """
        with self._storage.lock:
            return self._write_row(data)

    @not_compiled
    def extend(self, data: Any) -> Tensor:
        """Writes a batch: a list of single rows, or data whose dimension ``dim_extend`` counts rows.

        Returns the positions, int64[N]; empty if a transform dropped or held back every row.
        """
        with self._storage.lock:
            return self._write_batch(data)

    def __setitem__(self, index: Index, data: Any) -> None:
        """Replaces rows in place; length and cursor do not change."""
        with self._storage.lock:
            where = self._select(index)
            if (data := self._invert(data)) is None:
                return
            where, data = cells_in_row(where, data)
            # The storage writes a slice in one copy; writer and sampler need positions.
            positions = torch.arange(where.start, where.stop) if isinstance(where, slice) else where
            if isinstance(positions, Tensor) and self._storage.count(data) != len(positions):
                raise DataError(
                    f"ReplayBuffer: one row per position is needed: got {self._storage.count(data)} rows for "
                    f"{len(positions)} positions."
                )
            data = self._writer.as_stored(data, positions)
            self._rewind()
            self._storage.set(where, data, set_cursor=False)
            self._sampler.mark_update(positions)

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes all rows; allocated memory is kept."""
        with self._storage.lock:
            self._rewind()
            self._writer.empty(empty_write_count)  # first, because a read-only writer raises
            self._storage.empty()
            self._sampler.empty()

    def update_priority(self, index: int | Tensor, priority: float | Tensor) -> None:
        """Sets the sampler's priorities of the rows at ``index``."""
        self._at_rest(lambda: self._sampler.update_priority(self._cells(index), priority))

    def mark_update(self, index: int | Tensor) -> None:
        """Notifies the sampler that the rows at ``index`` were changed."""
        self._at_rest(lambda: self._sampler.mark_update(self._cells(index)))

    def _write_row(self, data: Any) -> int | Tensor:
        made = self._invert(data)
        if made is None:
            return torch.empty(0, dtype=torch.int64)
        if self._storage.ndim > 1:
            return self._extend(tree_map(lambda leaf: leaf.unsqueeze(self.dim_extend), made))
        # If a transform turned the row into several, they are written as a batch.
        if made is not data and getattr(made, "batch_dims", 0) > getattr(data, "batch_dims", 0):
            return self._extend(made)
        self._rewind()  # prefetched batches were drawn before this write
        index = self._writer.add(made)
        if index is not None:
            self._sampler.add(index)
        return index

    def _write_batch(self, data: Any) -> Tensor:
        if self._transforms.writes or self._write_transform is not None:
            if not self._storage.count(data):
                raise RuntimeError("ReplayBuffer: a batch must have at least one row: got none.")
            if (data := self._invert(data)) is None:
                return torch.empty(0, dtype=torch.int64)
        return self._extend(data)

    def _extend(self, data: Any) -> Tensor:
        storage = self._storage
        if storage.ndim > 1 or self._dim_extend:
            data, trailing = time_first(data, self.dim_extend, storage.ndim)
            storage.prepare(trailing)
        self._rewind()
        index = self._writer.extend(data)
        self._sampler.extend(index)
        return coordinates(index, storage.trailing) if storage.ndim > 1 else index

    def _invert(self, data: Any) -> Any:
        if self._write_transform is not None and (data := self._write_transform(data)) is None:
            return None
        for write in self._transforms.writes:
            if (data := write(data)) is None:
                return None
        return data

    # --- reads ---

    @not_compiled
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """The next batch, or ``(batch, info)`` where ``info["index"]`` is the position of every row, int64[N].

        ``batch_size`` is required if the constructor got none; if the two differ, the argument wins, with a warning.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError("ReplayBuffer: sample needs a batch_size, here or at construction: got none.")
        if size < 1:
            raise ValueError(f"ReplayBuffer: batch_size must be at least 1: got {size}.")
        if self._batch_size is not None and size != self._batch_size:
            warnings.warn(
                f"ReplayBuffer: sample({size}) overrules the batch_size={self._batch_size} of the constructor.",
                stacklevel=3,
            )
        data, info, _ = self._next(size)
        return (data, info) if return_info else data

    def __getitem__(self, index: Index | str | tuple[str, ...]) -> Any:
        """Rows by position (transforms apply), or one entry of all rows by key."""
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            key = index[1:] if isinstance(index, tuple) and index[0] == "_data" and len(index) > 1 else index
            return read_entry(type(self).__name__, self[:], key)
        with self._storage.lock:
            where = self._select(index)
            flat = where.reshape(-1) if isinstance(where, Tensor) else where
            data = self._storage.get(flat) if isinstance(flat, int) else self._collected(flat)
        # Outside the lock: the data is a copy already, and collating may take long.
        if not isinstance(where, int):
            data = self._collate(data)
            if isinstance(where, Tensor):
                data = shape_cells(data, where.shape)
        return self._transformed(data)

    def __iter__(self) -> Iterator[Any]:
        """Yields batches until the sampler's pass ends; endless if the sampler has no passes (see ``epoch``)."""
        if self._batch_size is None:
            raise RuntimeError("ReplayBuffer: iterating needs a batch_size at construction: got none.")
        ran_out = False
        while not ran_out:
            data, _, ran_out = self._next(self._batch_size)
            yield data

    def epoch(self) -> Iterator[Any]:
        """Yields the batches of one pass; for a sampler without passes, as many as would cover all rows once."""
        batches = iter(self)
        # Without a batch_size the first ``next`` raises.
        if type(self._sampler).ran_out is not Sampler.ran_out or self._batch_size is None:
            yield from batches
            return
        for _ in range(-(-len(self) // self._batch_size)):
            yield next(batches)

    def next(self) -> Any:
        """The next batch of the current pass, or ``None`` at its end; the call after that starts a new pass."""
        if self._iterator is None:
            self._iterator = iter(self)
        data = next(self._iterator, None)
        if data is None:
            self._iterator = None
        return data

    def _next(self, size: int) -> tuple[Any, dict[str, Any], bool]:
        # Prefetched batches have the constructor's size; another size is drawn as if nothing had been prefetched.
        if self._prefetcher is None or size != self._batch_size:
            with self._storage.lock:
                self._rewind()
                raw, info, ran_out = self._draw(size)
            return self._finish(raw, info), info, ran_out
        with self._storage.lock:
            waiting = self._prefetcher.take(lambda: self._draw(size), self._sampler.bookmark, self._finish)
        return self._prefetcher.wait(waiting)  # outside the lock, so that a slow transform does not block writers

    def _draw(self, size: int) -> tuple[Any, dict[str, Any], bool]:
        storage = self._storage
        index, info = self._sampler.sample(storage, size)
        info["index"] = coordinates(index, storage.trailing) if storage.ndim > 1 else index
        return self._collected(index), info, self._sampler.ran_out

    def _collected(self, index: slice | Tensor) -> Any:
        # A collate_fn gets what ``get`` returns (single rows, for a ListStorage); else the storage builds the batch.
        return self._storage.batch(index) if self._collate_fn is None else self._storage.get(index)

    def _collate(self, raw: Any) -> Any:
        data = raw if self._collate_fn is None else self._collate_fn(raw)
        return tree_map(lambda leaf: leaf.pin_memory(), data) if self._pin_memory else data

    def _finish(self, raw: Any, info: dict[str, Any]) -> Any:
        return self._transformed(self._with_info(self._collate(raw), info))

    def _transformed(self, data: Any) -> Any:
        for read in self._transforms.reads:
            data = read(data)
        return data

    def _with_info(self, data: Any, info: dict[str, Any]) -> Any:
        """Adds the sampler's info to the batch as entries; in this class only the ends of slices."""
        if SLICE_END in info and isinstance(data, TensorDictBase) and data.batch_size[:1] == info[SLICE_END].shape:
            set_entry(data, SLICE_END, info[SLICE_END])
        return data

    def _select(self, index: Any) -> int | slice | Tensor:
        storage = self._storage
        return select_cells(index, storage.shape, "ReplayBuffer", self.dim_extend if storage.ndim > 1 else 0)

    def _cells(self, index: int | Tensor) -> int | Tensor:
        trailing = self._storage.trailing
        return flat_cells(index, trailing) if trailing and isinstance(index, Tensor) else index

    # --- parts ---

    def set_storage(self, storage: Storage) -> Storage:
        """Replaces the storage and its counters and returns the previous one; not safe while other threads use it."""
        return self._exchange("_storage", build_part("storage", storage, Storage))

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler and returns the previous one."""
        return self._exchange("_sampler", build_part("sampler", sampler, Sampler))

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer and returns the previous one."""
        return self._exchange("_writer", build_part("writer", writer, Writer))

    def _exchange(self, name: str, part: Any) -> Any:
        with self._storage.lock:
            self._rewind()
            previous = getattr(self, name)
            setattr(self, name, part)
            if name != "_sampler":
                self._connect()
            return previous

    def _connect(self) -> None:
        self._writer.register_storage(self._storage)

    def set_rng(self, generator: torch.Generator) -> None:
        """Sets the sampler's generator."""
        self._at_rest(self._sampler.set_rng, generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform after the others; ``invert`` swaps its read and write functions."""
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform before position ``index``."""
        self._at_rest(lambda: self._transforms.insert(index, transform, invert=invert))
        return self

    def share(self, shared: bool = True) -> None:
        """Shares the rows with other processes; call it before they receive the buffer. Raises: UnsupportedError."""
        if shared and self._prefetcher is not None:
            raise ValueError("ReplayBuffer: prefetch cannot be used in a shared buffer: leave it out.")
        if shared:
            with self._storage.lock:
                self._storage.share()
        elif self._storage.shared:
            raise RuntimeError("ReplayBuffer: shared rows cannot become private again: got share(False).")

    def __getstate__(self) -> dict[str, Any]:
        if self._prefetcher is not None:
            if get_spawning_popen() is not None:
                raise RuntimeError("ReplayBuffer: prefetch belongs to one process: leave it out to pass the buffer on.")
            with self._storage.lock:
                self._rewind()
        return {**self.__dict__, "_iterator": None}

    def _at_rest(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``change(*arguments)`` under the lock after dropping prefetched batches."""
        with self._storage.lock:
            self._rewind()
            return change(*arguments)

    def _rewind(self) -> None:
        """Drops prefetched batches and rewinds the sampler to the state after the last batch that was returned."""
        if self._prefetcher is not None and (bookmark := self._prefetcher.clear()) is not None:
            self._sampler.go_back(bookmark)

    def close(self) -> None:
        """Stops the prefetching threads, if any."""
        if self._prefetcher is not None:
            self._at_rest(self._prefetcher.close)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """The complete state of storage, sampler, writer and transforms, as copies."""
        return self._at_rest(parts_state, self._parts(), self._transforms)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of a buffer with parts of the same types, or raises with nothing changed."""
        self._at_rest(load_parts_state, state, self._parts(), self._transforms)

    def dumps(self, path: str | Path) -> None:
        """Writes the buffer to the directory ``path``, replacing an older dump atomically."""
        self._at_rest(dump_parts, Path(path), self._parts(), self._transforms)

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote, into a buffer built with the same types of parts. Executes no code from it."""
        self._at_rest(load_parts, Path(path), self._parts(), self._transforms)

    save = dump = dumps
    load = loads

    def register_save_hook(self, hook: Callable[[Any], Any]) -> None:
        """Registers ``hook``, which converts the rows before they are written to disk."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[[Any], Any]) -> None:
        """Registers ``hook``, which converts the rows after they are read from disk."""
        self._storage.register_load_hook(hook)

    def _parts(self) -> dict[str, Any]:
        return {"storage": self._storage, "sampler": self._sampler, "writer": self._writer}

    def __repr__(self) -> str:
        parts = [*part_names(self._parts()).values(), f"{len(self)} rows", f"batch_size={self._batch_size}"]
        return f"{type(self).__name__}({', '.join(parts)}, {len(self._transforms)} transforms)"
