"""What a replay buffer is made of: a storage, a sampler, a writer, transforms; built, replaced, shared.

What is done with them is ``buffer.py``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import torch

from llmrl.data.replay_buffers.arguments import near_names
from llmrl.data.replay_buffers.prefetch import Prefetcher
from llmrl.data.replay_buffers.samplers import RandomSampler, Sampler
from llmrl.data.replay_buffers.storages import ListStorage, Storage
from llmrl.data.replay_buffers.transforms import Stage, as_stage
from llmrl.data.replay_buffers.writers import RoundRobinWriter, Writer


class BufferParts:
    """The parts of a buffer and how they are exchanged; the arguments are those of ``ReplayBuffer``."""

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
        if prefetch and shared:
            raise ValueError("ReplayBuffer: prefetch belongs to one process: leave it out of a shared buffer.")
        if dim_extend is not None and dim_extend < 0:
            raise ValueError(f"ReplayBuffer: dim_extend counts from the first dimension: got {dim_extend}.")
        if pin_memory and not torch.accelerator.is_available():
            raise ValueError("ReplayBuffer: pin_memory prepares copies to an accelerator: this machine has none.")
        self._given = (storage, sampler, writer, checkpointer, generator, shared)
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._batch_size = batch_size
        self._dim_extend = dim_extend
        self._write_transform = write_transform
        self._stages: list[Stage] = []
        self._prefetcher = Prefetcher(prefetch, prefetch_timeout_s) if prefetch else None
        self._iterator: Iterator[Any] | None = None
        if transform_factory is not None:
            transform = transform_factory()
        if transform is not None:
            self._stages.append(as_stage(transform))
        if not delayed_init:
            self._build_parts()

    def _build_parts(self) -> None:
        storage, sampler, writer, checkpointer, generator, shared = self._given
        self._storage = _build("storage", storage, Storage, lambda: ListStorage(1000))
        self._sampler = _build("sampler", sampler, Sampler, RandomSampler)
        self._writer = _build("writer", writer, Writer, self._default_writer)
        if self._sampler.drop_last and self._batch_size is None:
            raise ValueError("ReplayBuffer: a sampler with drop_last needs batch_size at construction.")
        self._writer.register_storage(self._storage)
        if generator is not None:
            self._sampler.set_rng(generator)
        if checkpointer is not None:
            self._storage.checkpointer = checkpointer() if isinstance(checkpointer, type) else checkpointer
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
        """How many rows were ever written."""
        return self._writer.write_count

    @property
    def dim_extend(self) -> int:
        """The dimension of a batch that is time; set once, by default the last one that counts rows."""
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
        return tuple(stage.transform for stage in self._stages)

    def set_storage(self, storage: Storage) -> Storage:
        """Replaces the storage and returns the previous one; the sampler keeps its state, counters are the storage's.

        No other thread may use the buffer meanwhile.
        """
        with self._storage.lock:
            self._rewind()
            previous, self._storage = self._storage, _build("storage", storage, Storage, None)
            self._writer.register_storage(self._storage)
            return previous

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler and returns the previous one."""
        with self._storage.lock:
            self._rewind()
            previous, self._sampler = self._sampler, _build("sampler", sampler, Sampler, None)
            return previous

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer and returns the previous one."""
        with self._storage.lock:
            previous, self._writer = self._writer, _build("writer", writer, Writer, None)
            self._writer.register_storage(self._storage)
            return previous

    def set_rng(self, generator: torch.Generator) -> None:
        """What the sampler draws from, from now on."""
        with self._storage.lock:
            self._rewind()
            self._sampler.set_rng(generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform after the others; ``invert`` swaps what it does on reads and on writes."""
        return self.insert_transform(len(self._stages), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform before position ``index``."""
        with self._storage.lock:
            self._rewind()
            self._stages.insert(index, as_stage(transform, invert=invert))
        return self

    def share(self, shared: bool = True) -> None:
        """Lets other processes use the rows; call it before the buffer is handed to them.

        Raises: UnsupportedError if the storage or its rows cannot be shared; ValueError with ``prefetch``.
        """
        if shared and self._prefetcher is not None:
            raise ValueError("ReplayBuffer: prefetch belongs to one process: leave it out of a shared buffer.")
        if shared:
            with self._storage.lock:
                self._storage.share()
        elif self._storage.shared:
            raise RuntimeError("ReplayBuffer: rows that processes share stay shared: got share(False).")

    def __getstate__(self) -> dict[str, Any]:
        if self._prefetcher is not None:
            if get_spawning_popen() is not None:
                raise RuntimeError("ReplayBuffer: a buffer with prefetch stays in its process: got a hand-over.")
            with self._storage.lock:
                self._rewind()
        return {**self.__dict__, "_iterator": None}

    def _rewind(self) -> None:
        """Forgets the batches that are prepared ahead and puts the sampler back to where the caller is."""
        if self._prefetcher is not None:
            bookmark = self._prefetcher.clear()
            if bookmark is not None:
                self._sampler.go_back(bookmark)

    def close(self) -> None:
        """Ends the prefetching threads, if there are any."""
        if self._prefetcher is not None:
            with self._storage.lock:
                self._rewind()
            self._prefetcher.close()


def _build(what: str, part: Any, base: type, default: Callable[[], Any] | None) -> Any:
    if part is None and default is not None:
        return default()
    built = part() if not isinstance(part, base) and callable(part) else part
    if not isinstance(built, base):
        raise TypeError(
            f"ReplayBuffer: {what} must be a {base.__name__} or a callable that builds one: got {type(built).__name__}."
        )
    return built
