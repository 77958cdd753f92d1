"""The replay buffer: rows go in through transforms and a writer, batches come out by a sampler through transforms.

The parts do the work: a storage keeps rows (``storages``), a writer decides where they go (``writers``), a sampler
which ones come back (``samplers``). ``parts`` builds and exchanges them, ``cells`` says what an index means, ``saving``
what a directory holds. This file joins them under the storage's lock.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.grid_index import (
    coordinates,
    flat_cells,
    num_cells,
    select_cells,
    shape_cells,
    time_first,
)
from llmrl.data.replay_buffers.layout import set_entry
from llmrl.data.replay_buffers.parts import BufferParts
from llmrl.data.replay_buffers.pytree import tree_map
from llmrl.data.replay_buffers.samplers import SLICE_END, Sampler
from llmrl.data.replay_buffers.saving import dump_parts, load_parts, load_parts_state, part_names, parts_state
from llmrl.data.replay_buffers.storages.base import read_entry
from llmrl.errors import DataError

Index = int | slice | range | Sequence[int] | Tensor | tuple[Any, ...]


class ReplayBuffer(BufferParts):
    """Keeps rows and hands out batches of them.

    ``storage``, ``sampler`` and ``writer`` are instances, or callables without arguments that build one; the defaults
    are ``ListStorage(1000)``, ``RandomSampler()`` and ``RoundRobinWriter()``. With ``delayed_init`` callables are
    called at the first use, which may be in another process that was handed the buffer.

    ``transform`` (or ``transform_factory``, a callable that builds it) is any callable: it runs on every batch that is
    read. If it also has a method ``inv``, that runs on everything that is written, and may return ``None`` to keep it
    back, in which case nothing is written. A plain function runs on reads only; ``write_transform`` is a function that
    runs on what is written, before the others. ``collate_fn`` turns what the storage returns for several rows (a list
    of rows, for a list) into a batch; by default tensors and tensordicts that come in a list are stacked.
    ``pin_memory`` puts batches in memory that an accelerator copies from.

    What goes in is copied, what comes out is a copy, and objects that were passed in are not changed. ``add``,
    ``extend`` and ``sample`` may be called from several threads. ``prefetch`` is the number of batches that threads
    prepare ahead; it changes when a batch is made, never which: a write makes the batches that are waiting anew, and a
    batch that takes longer than ``prefetch_timeout_s`` raises ``DeadlineError``.

    A storage with ``ndim`` dimensions is written by batches whose time is dimension ``dim_extend``, the last of the
    grid by default: [E, T]. ``buffer[...]`` sees [E, T] too, ``buffer.storage[...]`` sees [T, E], and positions are
    coordinates int64[N, ndim], time first.

    ``share`` (or ``shared=True``) lets other processes that are handed the buffer write and read the same rows; with a
    ``LazyMemmapStorage`` they always may. Each process has its own sampler. ``generator`` is what the sampler draws
    from. ``state_dict`` holds everything including the generator's state and the place in the current pass: a buffer
    that loads it goes on with the same batches.

    ``add``, ``extend`` and ``sample`` run eagerly inside of compiled functions, whatever ``compilable`` says.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    >>> buffer.extend(TensorDict(obs=torch.arange(6), batch_size=[6]))
    tensor([0, 1, 2, 3, 4, 5])
    >>> [len(batch) for batch in buffer]
    [4, 2]
    """

    # --- writes ---

    def __len__(self) -> int:
        return len(self._storage)

    @torch.compiler.disable
    def add(self, data: Any) -> int | Tensor:
        """Writes one row; on a grid, one time step of all its streams.

        Returns its position; an empty int64 tensor if a transform kept it back, and the positions int64[N] if a
        transform made several rows of it.
        """
        with self._storage.lock:
            made = self._invert(data)
            if made is None:
                return torch.empty(0, dtype=torch.int64)
            if self._storage.ndim > 1:
                return self._extend(tree_map(lambda leaf: leaf.unsqueeze(self.dim_extend), made))
            if made is not data and _batch_dims(made) > _batch_dims(data):
                return self._extend(made)
            self._rewind()
            index = self._writer.add(made)
            if index is not None:
                self._sampler.add(index)
            return index

    @torch.compiler.disable
    def extend(self, data: Any) -> Tensor:
        """Writes a batch of rows: a list holds rows one by one, in anything else dimension ``dim_extend`` counts rows.

        Returns the positions, int64[N]; none if a transform kept everything back.
        """
        with self._storage.lock:
            if self._stages or self._write_transform is not None:
                if not self._storage.count(data):
                    raise RuntimeError("ReplayBuffer: a batch must have at least one row: got none.")
                data = self._invert(data)
                if data is None:
                    return torch.empty(0, dtype=torch.int64)
            return self._extend(data)

    def __setitem__(self, index: Index, data: Any) -> None:
        """Replaces rows in place; length and cursor stay as they are."""
        with self._storage.lock:
            where = self._select(index)
            data = self._invert(data)
            if data is None:
                return
            if isinstance(where, Tensor) and where.ndim > 1:
                dims = where.ndim - 1
                data, where = tree_map(lambda leaf: leaf.flatten(0, dims), data), where.reshape(-1)
            if not isinstance(where, int) and self._storage.count(data) != num_cells(where):
                raise DataError(
                    f"ReplayBuffer: one row per position is needed: got {self._storage.count(data)} rows for "
                    f"{num_cells(where)} positions."
                )
            positions = torch.arange(where.start, where.stop) if isinstance(where, slice) else where
            data = self._writer.as_stored(data, positions)
            self._rewind()
            self._storage.set(where, data, set_cursor=False)
            self._sampler.mark_update(positions)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all rows; what was allocated stays."""
        with self._storage.lock:
            self._rewind()
            self._writer.empty(empty_write_count)  # first: it may refuse
            self._storage.empty()
            self._sampler.empty()

    def update_priority(self, index: int | Tensor, priority: float | Tensor) -> None:
        """Tells the sampler how much the rows at ``index`` matter."""
        with self._storage.lock:
            self._rewind()
            self._sampler.update_priority(self._cells(index), priority)

    def mark_update(self, index: int | Tensor) -> None:
        """Tells the sampler that the rows at ``index`` were changed."""
        with self._storage.lock:
            self._rewind()
            self._sampler.mark_update(self._cells(index))

    def _extend(self, data: Any) -> Tensor:
        storage, dim = self._storage, self.dim_extend
        if storage.ndim > 1 or dim:
            data, trailing = time_first(data, dim, storage.ndim)
            storage.prepare(trailing)
        self._rewind()
        index = self._writer.extend(data)
        self._sampler.extend(index)
        return coordinates(index, storage.trailing) if storage.trailing else index

    def _invert(self, data: Any) -> Any:
        if self._write_transform is not None:
            data = self._write_transform(data)
            if data is None:
                return None
        for stage in reversed(self._stages):
            if stage.write is not None:
                data = stage.write(data)
                if data is None:
                    return None
        return data

    # --- reads ---

    @torch.compiler.disable
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """The next batch, or ``(batch, info)`` where ``info["index"]`` is the position of every row, int64[N].

        ``batch_size`` is needed if the constructor got none; if the two differ, the argument counts, with a warning.
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
            if isinstance(where, int):
                data = self._storage.get(where)
            else:
                data = self._collected(where if isinstance(where, slice) else where.reshape(-1))
        if not isinstance(where, int):
            data = self._collate(data)
            if isinstance(where, Tensor):
                data = shape_cells(data, where.shape)
        return self._transform(data)

    def __iter__(self) -> Iterator[Any]:
        """Batches until the sampler's pass ends; for ever, with a sampler that has no passes (see ``epoch``)."""
        if self._batch_size is None:
            raise RuntimeError("ReplayBuffer: iterating needs a batch_size at construction: got none.")
        ran_out = False
        while not ran_out:
            data, _, ran_out = self._next(self._batch_size)
            yield data

    def epoch(self) -> Iterator[Any]:
        """The batches of one pass; with a sampler that has no passes, as many as there would be in one.

        >>> buffer = ReplayBuffer(batch_size=4)
        >>> buffer.extend(torch.arange(10)).shape
        torch.Size([10])
        >>> [len(batch) for batch in buffer.epoch()]
        [4, 4, 4]
        """
        batches = iter(self)
        if type(self._sampler).ran_out is not Sampler.ran_out or self._batch_size is None:
            yield from batches
            return
        for _ in range(-(-len(self) // self._batch_size)):
            yield next(batches)

    def next(self) -> Any:
        """The next batch of the current pass, ``None`` when it has ended, then the first one of another pass."""
        if self._iterator is None:
            self._iterator = iter(self)
        data = next(self._iterator, None)
        if data is None:
            self._iterator = None
        return data

    def _next(self, size: int) -> tuple[Any, dict[str, Any], bool]:
        if self._prefetcher is None or size != self._batch_size:
            with self._storage.lock:
                self._rewind()
                raw, info, ran_out = self._draw(size)
            return self._finish(raw, info), info, ran_out
        with self._storage.lock:
            self._prefetcher.fill(lambda: self._draw(size), self._sampler.bookmark, self._finish)
            waiting = self._prefetcher.take()
        return self._prefetcher.wait(waiting)

    def _draw(self, size: int) -> tuple[Any, dict[str, Any], bool]:
        storage = self._storage
        index, info = self._sampler.sample(storage, size)
        info["index"] = coordinates(index, storage.trailing) if storage.trailing else index
        return self._collected(index), info, self._sampler.ran_out

    def _collected(self, index: slice | Tensor) -> Any:
        return self._storage.batch(index) if self._collate_fn is None else self._storage.get(index)

    def _collate(self, raw: Any) -> Any:
        data = raw if self._collate_fn is None else self._collate_fn(raw)
        return tree_map(lambda leaf: leaf.pin_memory(), data) if self._pin_memory else data

    def _finish(self, raw: Any, info: dict[str, Any]) -> Any:
        return self._transform(self._with_info(self._collate(raw), info))

    def _with_info(self, data: Any, info: dict[str, Any]) -> Any:
        """The batch with what the sampler says about its rows; here, only where slices end."""
        if SLICE_END in info and isinstance(data, TensorDictBase) and data.batch_size[:1] == info[SLICE_END].shape:
            set_entry(data, SLICE_END, info[SLICE_END])
        return data

    def _transform(self, data: Any) -> Any:
        for stage in self._stages:
            if stage.read is not None:
                data = stage.read(data)
        return data

    def _select(self, index: Any) -> int | slice | Tensor:
        storage = self._storage
        return select_cells(index, storage.shape, "ReplayBuffer", self.dim_extend if storage.ndim > 1 else 0)

    def _cells(self, index: int | Tensor) -> int | Tensor:
        on_grid = self._storage.trailing and isinstance(index, Tensor)
        return flat_cells(index, self._storage.trailing) if on_grid else index

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what the buffer does next, as copies."""
        with self._storage.lock:
            self._rewind()
            return parts_state(self._parts(), self._stages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state; the buffer must have been built with the same kinds of parts.

        Raises: CheckpointError, or DataError for rows that do not fit, with nothing changed.
        """
        with self._storage.lock:
            self._rewind()
            load_parts_state(state, self._parts(), self._stages)

    def dumps(self, path: str | Path) -> None:
        """Writes the buffer to the directory ``path``: completely, or not at all.

        An older dump there is replaced once the new one is whole.
        """
        with self._storage.lock:
            self._rewind()
            dump_parts(Path(path), self._parts(), self._stages)

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote into a buffer built with the same kinds of parts. Runs no code of it."""
        with self._storage.lock:
            self._rewind()
            load_parts(Path(path), self._parts(), self._stages)

    save = dump = dumps
    load = loads

    def register_save_hook(self, hook: Callable[[Any], Any]) -> None:
        """``hook`` changes the rows on their way to the disk."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[[Any], Any]) -> None:
        """``hook`` changes the rows on their way from the disk."""
        self._storage.register_load_hook(hook)

    def _parts(self) -> dict[str, Any]:
        return {"storage": self._storage, "sampler": self._sampler, "writer": self._writer}

    def __repr__(self) -> str:
        parts = ", ".join(part_names(self._parts()).values())
        return (
            f"{type(self).__name__}({parts}, {len(self)} rows, batch_size={self._batch_size}, "
            f"{len(self._stages)} transforms)"
        )


def _batch_dims(data: Any) -> int:
    return data.batch_dims if is_tensor_collection(data) else 0
