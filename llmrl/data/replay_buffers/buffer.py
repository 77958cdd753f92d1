"""The replay buffer: rows go in through transforms and a writer, batches come out by a sampler through transforms.

The parts do the work: a storage keeps rows (``storages``), a writer decides where they go (``writers``), a sampler
which ones come back (``samplers``). This file joins them under one lock and saves them as one state.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.replay_buffers.directory import replace_directory
from llmrl.data.replay_buffers.prefetch import Prefetcher
from llmrl.data.replay_buffers.samplers import RandomSampler, Sampler
from llmrl.data.replay_buffers.stages import Stage, as_stage
from llmrl.data.replay_buffers.storages import ListStorage, Storage
from llmrl.data.replay_buffers.writers import RoundRobinWriter, Writer
from llmrl.errors import CheckpointError, DataError

_FORMAT = 1


class ReplayBuffer:
    """Keeps rows and hands out batches of them.

    ``storage``, ``sampler`` and ``writer`` are instances, or callables without arguments that build one; the defaults
    are ``ListStorage(1000)``, ``RandomSampler()`` and ``RoundRobinWriter()``.

    ``transform`` (or ``transform_factory``, a callable that builds it) is any callable: it runs on every batch that is
    read. If it also has a method ``inv``, that runs on everything that is written, and may return ``None`` to keep it
    back, in which case nothing is written. A plain function runs on reads only. ``collate_fn`` turns what the storage
    returns for several rows into a batch; by default tensors and tensordicts that come in a list are stacked.

    What goes in is copied, what comes out is a copy, and objects that were passed in are not changed. ``add``,
    ``extend`` and ``sample`` may be called from several threads. ``prefetch`` is the number of batches that threads
    prepare ahead; it changes when a batch is made, never which: a write makes the batches that are waiting anew, and a
    batch that takes longer than ``prefetch_timeout_s`` raises ``DeadlineError``.

    ``generator`` is what the sampler draws from. ``state_dict`` holds everything including the generator's state and
    the place in the current pass: a buffer that loads it goes on with the same batches.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    >>> buffer.extend(TensorDict(obs=torch.arange(6), batch_size=[6]))
    tensor([0, 1, 2, 3, 4, 5])
    >>> [len(batch) for batch in buffer]
    [4, 2]
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch: int | None = None,
        prefetch_timeout_s: float = 600.0,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise TypeError("ReplayBuffer: transform and transform_factory exclude each other: got both.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"ReplayBuffer: batch_size must be at least 1: got {batch_size}.")
        if prefetch and batch_size is None:
            raise ValueError("ReplayBuffer: prefetch prepares batches of a known size: give batch_size too.")
        self._storage = _build("storage", storage, Storage, lambda: ListStorage(1000))
        self._sampler = _build("sampler", sampler, Sampler, RandomSampler)
        self._writer = _build("writer", writer, Writer, RoundRobinWriter)
        if self._sampler.drop_last and batch_size is None:
            raise ValueError("ReplayBuffer: a sampler with drop_last needs batch_size at construction.")
        self._writer.register_storage(self._storage)
        if generator is not None:
            self._sampler.set_rng(generator)
        self._collate_fn = collate_fn if collate_fn is not None else _collate
        self._batch_size = batch_size
        self._lock = threading.RLock()
        self._stages: list[Stage] = []
        self._prefetcher = Prefetcher(prefetch, prefetch_timeout_s) if prefetch else None
        self._iterator: Iterator[Any] | None = None
        if transform_factory is not None:
            transform = transform_factory()
        if transform is not None:
            self.append_transform(transform)

    # --- parts ---

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
        """How many rows were ever written."""
        return self._writer.write_count

    @property
    def transforms(self) -> tuple[Any, ...]:
        """The transforms in the order in which they run on reads."""
        return tuple(stage.transform for stage in self._stages)

    def set_storage(self, storage: Storage) -> Storage:
        """Replaces the storage and returns the previous one; sampler and writer keep their state."""
        with self._lock:
            self._rewind()
            previous, self._storage = self._storage, _build("storage", storage, Storage, None)
            self._writer.register_storage(self._storage)
            return previous

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler and returns the previous one."""
        with self._lock:
            self._rewind()
            previous, self._sampler = self._sampler, _build("sampler", sampler, Sampler, None)
            return previous

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer and returns the previous one."""
        with self._lock:
            previous, self._writer = self._writer, _build("writer", writer, Writer, None)
            self._writer.register_storage(self._storage)
            return previous

    def set_rng(self, generator: torch.Generator) -> None:
        """What the sampler draws from, from now on."""
        with self._lock:
            self._rewind()
            self._sampler.set_rng(generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """Adds a transform after the others; ``invert`` swaps what it does on reads and on writes."""
        return self.insert_transform(len(self._stages), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """Adds a transform before position ``index``."""
        with self._lock:
            self._rewind()
            self._stages.insert(index, as_stage(transform, invert=invert))
        return self

    # --- writes ---

    def __len__(self) -> int:
        return len(self._storage)

    def add(self, data: Any) -> int | Tensor:
        """Writes one row.

        Returns its position; an empty int64 tensor if a transform kept it back, and the positions int64[N] if a
        transform made several rows of it.
        """
        with self._lock:
            made = self._invert(data)
            if made is None:
                return torch.empty(0, dtype=torch.int64)
            if made is not data and _batch_dims(made) > _batch_dims(data):
                return self._extend(made)
            self._rewind()
            index = self._writer.add(made)
            self._sampler.add(index)
            return index

    def extend(self, data: Any) -> Tensor:
        """Writes a batch of rows: a list holds rows one by one, in anything else the leading dimension counts rows.

        Returns the positions, int64[N]; none if a transform kept everything back.
        """
        with self._lock:
            if self._stages:
                if not self._storage.count(data):
                    raise RuntimeError("ReplayBuffer: a batch must have at least one row: got none.")
                data = self._invert(data)
                if data is None:
                    return torch.empty(0, dtype=torch.int64)
            return self._extend(data)

    def __setitem__(self, index: int | slice | range | Sequence[int] | Tensor, data: Any) -> None:
        """Replaces rows in place; length and cursor stay as they are."""
        with self._lock:
            where = self._index(index)
            data = self._invert(data)
            if data is None:
                return
            if not isinstance(where, int) and self._storage.count(data) != where.numel():
                raise DataError(
                    f"ReplayBuffer: one row per position is needed: got {self._storage.count(data)} rows for "
                    f"{where.numel()} positions."
                )
            self._rewind()
            self._storage.set(where, data)
            self._sampler.mark_update(where)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all rows; what was allocated stays."""
        with self._lock:
            self._rewind()
            self._storage.empty()
            self._writer.empty(empty_write_count)
            self._sampler.empty()

    def update_priority(self, index: int | Tensor, priority: float | Tensor) -> None:
        """Tells the sampler how much the rows at ``index`` matter."""
        with self._lock:
            self._rewind()
            self._sampler.update_priority(index, priority)

    def mark_update(self, index: int | Tensor) -> None:
        """Tells the sampler that the rows at ``index`` were changed."""
        with self._lock:
            self._rewind()
            self._sampler.mark_update(index)

    def _extend(self, data: Any) -> Tensor:
        self._rewind()
        index = self._writer.extend(data)
        self._sampler.extend(index)
        return index

    def _invert(self, data: Any) -> Any:
        for stage in reversed(self._stages):
            if stage.write is not None:
                data = stage.write(data)
                if data is None:
                    return None
        return data

    # --- reads ---

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """The next batch, or ``(batch, info)`` where ``info["index"]`` is the position of every row, int64[N].

        ``batch_size`` is needed if the constructor got none; if the two differ, the argument counts, with a warning.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError("ReplayBuffer: sample needs a batch_size, here or at construction: got none.")
        if self._batch_size is not None and size != self._batch_size:
            warnings.warn(
                f"ReplayBuffer: sample({size}) overrules the batch_size={self._batch_size} of the constructor.",
                stacklevel=2,
            )
        data, info, _ = self._next(size)
        return (data, info) if return_info else data

    def __getitem__(self, index: int | slice | range | Sequence[int] | Tensor | str | tuple[str, ...]) -> Any:
        """Rows by position (transforms apply), or one entry of all rows by key."""
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            return self[:][index]
        with self._lock:
            where = self._index(index)
            data = self._storage.get(where)
        if not isinstance(where, int):
            data = self._collate_fn(data)
        return self._transform(data)

    def __iter__(self) -> Iterator[Any]:
        """Batches until the sampler's pass ends; with a sampler that has no passes, for ever."""
        if self._batch_size is None:
            raise RuntimeError("ReplayBuffer: iterating needs a batch_size at construction: got none.")
        ran_out = False
        while not ran_out:
            data, _, ran_out = self._next(self._batch_size)
            yield data

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
            with self._lock:
                self._rewind()
                raw, info, ran_out = self._draw(size)
            return self._finish(raw), info, ran_out
        with self._lock:
            self._prefetcher.fill(lambda: self._draw(size), self._sampler.state_dict, self._finish)
            waiting = self._prefetcher.take()
        return self._prefetcher.wait(waiting)

    def _draw(self, size: int) -> tuple[Any, dict[str, Any], bool]:
        index, info = self._sampler.sample(self._storage, size)
        info["index"] = index
        return self._storage.get(index), info, self._sampler.ran_out

    def _finish(self, raw: Any) -> Any:
        return self._transform(self._collate_fn(raw))

    def _transform(self, data: Any) -> Any:
        for stage in self._stages:
            if stage.read is not None:
                data = stage.read(data)
        return data

    def _index(self, index: Any) -> int | Tensor:
        length = len(self._storage)
        if isinstance(index, Tensor) and index.dtype is torch.bool:
            if index.shape != (length,):
                raise IndexError(
                    f"ReplayBuffer: a mask must have one entry per row: got {list(index.shape)}, {length} rows."
                )
            return index.nonzero().squeeze(-1)
        if isinstance(index, slice):
            return torch.arange(length)[index] if (index.step or 1) > 0 else torch.tensor(range(length)[index])
        if isinstance(index, int) or (isinstance(index, Tensor) and not index.ndim):
            where: Any = int(index)
            inside = -length <= where < length
            where = where % length if inside else where
        else:
            where = torch.as_tensor(index if isinstance(index, Tensor) else list(index), dtype=torch.int64)
            inside = bool(((where >= -length) & (where < length)).all())
            where = where % length if inside and where.numel() else where
        if not inside:
            raise IndexError(f"ReplayBuffer: positions must lie in the {length} rows: got {index}.")
        return where

    def _rewind(self) -> None:
        """Forgets the batches that are prepared ahead and puts the sampler back to where the caller is."""
        if self._prefetcher is not None:
            state = self._prefetcher.clear()
            if state is not None:
                self._sampler.load_state_dict(state)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what the buffer does next, as copies."""
        with self._lock:
            self._rewind()
            return {
                "storage": self._storage.state_dict(),
                "sampler": self._sampler.state_dict(),
                "writer": self._writer.state_dict(),
                "transforms": [stage.state() for stage in self._stages],
                "batch_size": self._batch_size,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state; the buffer must have been built with the same kinds of parts."""
        with self._lock:
            self._check_transforms(len(state["transforms"]))
            self._rewind()
            self._storage.load_state_dict(state["storage"])
            self._sampler.load_state_dict(state["sampler"])
            self._writer.load_state_dict(state["writer"])
            for stage, stage_state in zip(self._stages, state["transforms"], strict=True):
                stage.load(stage_state)

    def dumps(self, path: str | Path) -> None:
        """Writes the buffer to the directory ``path``: completely, or not at all.

        An older dump there is replaced once the new one is whole.
        """
        with self._lock:
            self._rewind()
            with replace_directory(Path(path)) as folder:
                self._storage.dumps(folder / "storage")
                self._sampler.dumps(folder / "sampler")
                self._writer.dumps(folder / "writer")
                torch.save([stage.state() for stage in self._stages], folder / "transform.t")
                metadata = {"format": _FORMAT, "parts": self._part_names(), "transforms": len(self._stages)}
                (folder / "buffer_metadata.json").write_text(json.dumps(metadata, indent=1))

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote into a buffer built with the same kinds of parts.

        The rows are pickled Python objects: load only what you trust.
        """
        path = Path(path)
        try:
            metadata = json.loads((path / "buffer_metadata.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"ReplayBuffer: {path} must be a directory that dumps wrote: {error}.") from error
        if metadata["format"] != _FORMAT or metadata["parts"] != self._part_names():
            raise CheckpointError(
                f"ReplayBuffer: a dump is loaded into the same parts: got {metadata['parts']} (format "
                f"{metadata['format']}), expected {self._part_names()} (format {_FORMAT})."
            )
        with self._lock:
            self._check_transforms(metadata["transforms"])
            self._rewind()
            self._storage.loads(path / "storage")
            self._sampler.loads(path / "sampler")
            self._writer.loads(path / "writer")
            states = torch.load(path / "transform.t", weights_only=False)
            for stage, state in zip(self._stages, states, strict=True):
                stage.load(state)

    save = dumps
    load = loads

    def _part_names(self) -> dict[str, str]:
        return {
            "storage": type(self._storage).__name__,
            "sampler": type(self._sampler).__name__,
            "writer": type(self._writer).__name__,
        }

    def _check_transforms(self, saved: int) -> None:
        if saved != len(self._stages):
            raise CheckpointError(
                f"ReplayBuffer: a state is loaded into a buffer with the same transforms: got {saved}, expected "
                f"{len(self._stages)}."
            )

    def close(self) -> None:
        """Ends the prefetching threads, if there are any."""
        if self._prefetcher is not None:
            with self._lock:
                self._rewind()
            self._prefetcher.close()

    def __repr__(self) -> str:
        parts = self._part_names()
        return (
            f"ReplayBuffer({parts['storage']}, {parts['sampler']}, {parts['writer']}, {len(self)} rows, "
            f"batch_size={self._batch_size}, {len(self._stages)} transforms)"
        )


def _build(what: str, part: Any, base: type, default: Callable[[], Any] | None) -> Any:
    if part is None and default is not None:
        return default()
    built = part() if not isinstance(part, base) and callable(part) else part
    if not isinstance(built, base):
        raise TypeError(
            f"ReplayBuffer: {what} must be a {base.__name__} or a callable that builds one: got {type(built).__name__}."
        )
    return built


def _collate(rows: Any) -> Any:
    """Stacks a list of tensors of one shape, or of tensordicts (lazily if they differ); leaves the rest alone."""
    if not isinstance(rows, list) or not rows:
        return rows
    if all(isinstance(row, Tensor) for row in rows):
        return torch.stack(rows)
    if all(is_tensor_collection(row) for row in rows):
        return LazyStackedTensorDict.maybe_dense_stack(rows)
    return rows


def _batch_dims(data: Any) -> int:
    return data.batch_dims if is_tensor_collection(data) else 0
