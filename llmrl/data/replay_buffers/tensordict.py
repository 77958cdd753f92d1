"""A replay buffer of tensordicts whose batches contain the sampler's info as entries."""

from __future__ import annotations

import warnings
from typing import Any, Literal, overload

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.stack import not_compiled, set_entry
from llmrl.data.replay_buffers.buffer import ReplayBuffer
from llmrl.data.replay_buffers.samplers import Sampler
from llmrl.data.replay_buffers.storages.base import read_entry
from llmrl.data.replay_buffers.writers import TensorDictRoundRobinWriter, Writer
from llmrl.errors import DataError


class TensorDictReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` of tensordicts. The other arguments are those of ``ReplayBuffer``.

    *Writes* into every sampled batch, before the transforms: ``"index"``, the position of each row, int64[N] (int64[N,
    ndim] on a grid), and every entry of the sampler's info (``"priority_weight"``, ``("next", "truncated")``, ...),
    each expanded to the batch size. *Reads* ``priority_key`` on ``extend`` and ``update_tensordict_priority``, for
    samplers that have priorities. The default writer is ``TensorDictRoundRobinWriter``.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    >>> buffer.extend(TensorDict(a=torch.arange(5) * 10, batch_size=[5])).tolist()
    [0, 1, 2, 3, 4]
    >>> batch = buffer.sample()
    >>> torch.equal(batch["a"], batch["index"] * 10)
    True
    """

    _default_writer: type[Writer] = TensorDictRoundRobinWriter

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **arguments: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**arguments)

    @not_compiled
    def add(self, data: TensorDictBase) -> int | Tensor:
        """Writes one row, and its priority if it has one; see ``ReplayBuffer.add``."""
        _check(data)
        with self._storage.lock:
            priority = self._priorities(data, single=True)  # before the write: a bad priority must not leave a row
            index = self._write_row(data)
            if priority is not None and index is not None:
                self._set_priorities(torch.tensor([index]) if isinstance(index, int) else index, priority)
            return index

    @not_compiled
    def extend(self, data: TensorDictBase, *, update_priority: bool = True) -> Tensor:
        """Writes a batch, or a list of rows; with ``update_priority`` also their priorities, if they have them."""
        for part in data if isinstance(data, list) else [data]:
            _check(part)
        with self._storage.lock:
            priority = self._priorities(data) if update_priority else None
            index = self._write_batch(data)
            if priority is not None:
                self._set_priorities(index, priority)
            return index

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, include_info: bool | None = None
    ) -> TensorDictBase: ...

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], include_info: bool | None = None
    ) -> tuple[TensorDictBase, dict[Any, Any]]: ...

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
    ) -> TensorDictBase | tuple[TensorDictBase, dict[Any, Any]]:
        """The next batch, always with the info (``include_info`` is deprecated); see ``ReplayBuffer.sample``."""
        if include_info is not None:
            warnings.warn(
                "TensorDictReplayBuffer: include_info is deprecated: the info is always in the batch; leave it out.",
                DeprecationWarning,
                stacklevel=3,
            )
        return super().sample(batch_size, return_info)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets new priorities for the rows of a sampled batch.

        *Reads* ``priority_key`` and ``"index"``, which may have been reshaped together. The sampler reduces further
        dimensions of the priorities. Raises: MissingKeyError.
        """
        priority, index = (read_entry(type(self).__name__, data, key) for key in (self.priority_key, "index"))
        size = len(self._storage.trailing) + 1
        rows = index.unsqueeze(-1) if size == 1 else index  # [*batch, coordinates]
        # If positions are constant along all inner dimensions, each row has several priorities, which the sampler
        # reduces; otherwise each priority belongs to its own row.
        if rows.ndim > 2 and bool((rows == rows.flatten(1, -2)[:, :1].view(-1, *[1] * (rows.ndim - 2), size)).all()):
            rows = rows.flatten(1, -2)[:, 0]  # one position per row, expanded to its steps
        elif rows.ndim > 2:
            priority = priority.reshape(-1, *priority.shape[rows.ndim - 1 :])
            rows = rows.flatten(0, -2)
        self.update_priority(rows if size > 1 else rows.squeeze(-1), priority)

    def _priorities(self, data: Any, *, single: bool = False) -> Tensor | None:
        """The priorities in the rows, [N, ...] in the order of positions; None without, or if the sampler has none.

        Raises the sampler's errors for bad priorities before the rows are written.
        """
        if type(self._sampler).update_priority is Sampler.update_priority:
            return None
        parts = [row.get(self.priority_key, None) for row in (data if isinstance(data, list) else [data])]
        if any(part is None for part in parts):
            return None
        ndim, time = self._storage.ndim, self.dim_extend
        if isinstance(data, list) or (single and ndim == 1):
            priority = torch.stack(parts)
        elif data.batch_dims + single < max(ndim, time + 1):
            return None  # the write raises a better error
        else:
            priority = (parts[0].unsqueeze(time) if single else parts[0]).movedim(time, 0).flatten(0, ndim - 1)
        self._sampler.check_priority(priority)
        return priority

    def _set_priorities(self, index: Tensor, priority: Tensor) -> None:
        if len(index) and len(priority) == len(index):
            self.update_priority(index, priority)  # lengths differ if a transform dropped, held back or split rows

    def _with_info(self, data: Any, info: dict[str, Any]) -> Any:
        _check(data)
        return with_info(data, info)


def with_info(data: TensorDictBase, info: dict[Any, Any]) -> TensorDictBase:
    """Adds every tensor [N, ...] of the info to the batch, expanded to the inner dimensions of rows."""
    count, dims = data.batch_size[0], data.batch_dims
    for key, value in info.items():
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != count:
            continue
        if dims > 1:
            after = value.shape[1:] if key == "index" else value.shape[dims:]
            between = [1] * (dims - 1) if key == "index" else [*value.shape[1:dims], *[1] * (dims - value.ndim)]
            value = value.reshape(count, *between, *after).expand(*data.batch_size, *after)
            value = value.clone()  # an expanded tensor cannot be written to in place
        set_entry(data, key, value)
    return data


def _check(data: Any) -> None:
    if not isinstance(data, TensorDictBase):
        raise DataError(
            f"TensorDictReplayBuffer: rows are tensordicts: got a {type(data).__name__}; ReplayBuffer takes other data."
        )
