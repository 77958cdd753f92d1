"""Trajectories that are read from their files when they are sampled, and not stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.ragged.tensordicts import column as text_column
from llmrl.data.replay_buffers import Sampler, Storage
from llmrl.data.ted_utils import leaf_keys
from llmrl.errors import DataError, UnsupportedError

_WINDOW = 16  # size of the shuffle buffer, in trajectories


class TrajectoryStream(Storage):
    """Slices of one trajectory after the other; starts over after the last one.

    Reads    ``passes``: a function that starts a pass over the trajectories, TensorDicts [T] in TED; ``pad``: the fill
             value for trajectories shorter than a slice; None raises an error for them
    """

    max_size = torch.iinfo(torch.int64).max

    def __init__(
        self,
        who: str,
        passes: Callable[[], Iterator[TensorDict]],
        *,
        shuffle: bool,
        num_slices: int | None,
        slice_len: int | None,
        pad: float | None,
    ) -> None:
        super().__init__()
        self.who, self.pad, self.slice_len = who, pad, slice_len
        self._passes, self._shuffle, self._num_slices = passes, shuffle, num_slices
        self._current: Iterator[TensorDict] = iter(())
        self.notes: dict[str, Any] = {}

    def trajectories(self) -> Iterator[TensorDict]:
        """Yields the trajectories of one pass, each cut to a random slice if ``slice_len`` is given."""
        for rows in self._shuffled():
            yield rows if self.slice_len is None else cut(self.who, rows, self.slice_len, self.pad)

    def batch(self, index: slice | Tensor) -> TensorDict:
        """The next rows, as many as ``index`` has: ``num_slices`` slices, each from another trajectory."""
        count = len(index) if isinstance(index, Tensor) else index.stop - index.start
        parts = self._num_slices or (1 if self.slice_len is None else self.slice_len)
        if count % parts:
            name = "num_slices" if self.slice_len is None else "slice_len"
            raise RuntimeError(f"{self.who}: the batch size must be a multiple of {name}={parts}: got {count}.")
        length = count // parts if self.slice_len is None else self.slice_len
        slices = [cut(self.who, self._next(), length, self.pad) for _ in range(count // length)]
        return torch.cat(slices)

    def get(self, index: Any) -> NoReturn:
        raise UnsupportedError(f"{self.who}: a stream has no positions; sample it, or leave out streaming=True.")

    def set(self, index: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        raise UnsupportedError(f"{self.who}: a stream is read-only.")

    def __len__(self) -> int:
        raise UnsupportedError(f"{self.who}: a stream has no length; leave out streaming=True to store its rows.")

    def _next(self) -> TensorDict:
        for _ in range(2):  # the second time in a new pass; if that is empty too, the dataset is
            if (rows := next(self._current, None)) is not None:
                return rows
            self._current = self._shuffled()
        raise DataError(f"{self.who}: a dataset must have at least one trajectory: the files have none.")

    def _shuffled(self) -> Iterator[TensorDict]:
        window: list[TensorDict] = []
        for rows in self._passes():
            window.append(rows)  # shuffles in a window: a full permutation would have to read everything first
            if len(window) > (_WINDOW if self._shuffle else 0):
                yield window.pop(int(torch.randint(len(window), ())))
        while window:
            yield window.pop(int(torch.randint(len(window), ())))


class StreamSampler(Sampler):
    """Samples rows in the order of the stream."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        return torch.arange(batch_size), {}


def cut(who: str, rows: TensorDict, length: int, pad: float | None) -> TensorDict:
    """A random slice of a trajectory, marked as truncated at its end. Pads a short trajectory, or raises DataError."""
    missing = length - len(rows)
    if missing > 0 and pad is None:
        raise DataError(
            f"{who}: a trajectory must be as long as a slice: got {len(rows)} steps, expected {length}; take shorter "
            "slices, or give pad, the value that fills the rest."
        )
    start = int(torch.randint(max(-missing, 0) + 1, ()))
    rows = rows[start : start + length].clone()
    for name in ("truncated", "done"):  # so that returns are not summed past the slice
        rows["next", name][-1] = True
    if missing <= 0:
        return rows
    padded = TensorDict(batch_size=[length])
    for key in leaf_keys(rows):
        value = rows.get(key)
        if isinstance(value, Tensor):
            value = torch.cat([value, value.new_full((missing, *value.shape[1:]), pad)])
        else:
            value = text_column([*value.tolist(), *value.tolist()[-1:] * missing])
        padded.set(key, value)
    return padded
