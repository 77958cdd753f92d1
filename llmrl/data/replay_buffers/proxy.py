"""A proxy for a replay buffer in another process; the transports are ``remote`` and ``ray_buffer``.

A call sends a function to run on the buffer; the answer is its result, or the error that it raised with the other
process's traceback as a note.
"""

from __future__ import annotations

import functools
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from llmrl.data.replay_buffers.buffer import ReplayBuffer
from llmrl.data.replay_buffers.samplers import Sampler
from llmrl.data.replay_buffers.storages import Storage
from llmrl.data.replay_buffers.tensordict import TensorDictReplayBuffer
from llmrl.data.replay_buffers.writers import Writer

__all__ = ["BufferProxy"]

Answer = tuple[bool, Any]


def answer(make: Callable[..., Any], *arguments: Any, **keywords: Any) -> Answer:
    """``(True, result)`` of ``make(*arguments)``, or ``(False, error)``. Runs in the other process."""
    try:
        return True, make(*arguments, **keywords)
    except Exception as error:  # pickling an error keeps its notes but not its traceback
        error.add_note("In the other process:\n" + traceback.format_exc().rstrip())
        return False, error


def check_arguments(arguments: Iterable[Any]) -> None:
    """Raises RuntimeError for a storage that would be copied to the other process."""
    for argument in arguments:
        if isinstance(argument, Storage):
            argument.check_hand_over()


def call(buffer: ReplayBuffer, name: str, *arguments: Any, **keywords: Any) -> Any:
    """Calls a method of the buffer; returns None in place of a buffer or a part, which must not be sent back."""
    result = getattr(buffer, name)(*arguments, **keywords)
    return None if isinstance(result, ReplayBuffer | Storage | Sampler | Writer) else result


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forwarded(self: BufferProxy, *arguments: Any, **keywords: Any) -> Any:
        return self.apply(call, method.__name__, *arguments, **keywords)

    return forwarded


class BufferProxy(ABC):
    """Forwards the methods of ``ReplayBuffer``, and ``update_tensordict_priority``, to a buffer in another process.

    Every call waits at most ``timeout_s`` seconds for its answer. Errors of the buffer are raised here unchanged.
    Batches are copies, whatever the storage. ``set_sampler`` and the like take a callable that builds the part in the
    other process, as the constructor does, and return None, because the replaced part cannot be sent back.

    Raises: DeadlineError if there is no answer in time (the call may still be executed); WorkerError if the other
    process ended. Both messages name the process.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"{type(self).__name__}: timeout_s must be positive: got {timeout_s}.")
        self.timeout_s = timeout_s

    @abstractmethod
    def _ask(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Answer:
        """Runs ``answer(function, buffer, *arguments, **keywords)`` in the buffer's process."""

    @abstractmethod
    def close(self) -> None:
        """Releases the buffer; the proxy cannot be used afterwards."""

    def apply(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs ``function(buffer, *arguments, **keywords)`` in the buffer's process and returns the result.

        For operations without a method here: ``proxy.apply(set_version, 7)``, with a module-level function.
        """
        returned, result = self._ask(function, *arguments, **keywords)
        if not returned:
            raise result
        return result

    # Written out, not set in a loop, so that editors and type checkers see the methods.
    add = _forward(ReplayBuffer.add)
    extend = _forward(ReplayBuffer.extend)
    empty = _forward(ReplayBuffer.empty)
    sample = _forward(ReplayBuffer.sample)
    next = _forward(ReplayBuffer.next)
    update_priority = _forward(ReplayBuffer.update_priority)
    update_tensordict_priority = _forward(TensorDictReplayBuffer.update_tensordict_priority)
    mark_update = _forward(ReplayBuffer.mark_update)
    set_storage = _forward(ReplayBuffer.set_storage)
    set_sampler = _forward(ReplayBuffer.set_sampler)
    set_writer = _forward(ReplayBuffer.set_writer)
    state_dict = _forward(ReplayBuffer.state_dict)
    load_state_dict = _forward(ReplayBuffer.load_state_dict)
    dumps = save = dump = _forward(ReplayBuffer.dumps)
    loads = load = _forward(ReplayBuffer.loads)
    register_save_hook = _forward(ReplayBuffer.register_save_hook)
    register_load_hook = _forward(ReplayBuffer.register_load_hook)
    __getitem__ = _forward(ReplayBuffer.__getitem__)
    __setitem__ = _forward(ReplayBuffer.__setitem__)
    __len__ = _forward(ReplayBuffer.__len__)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform after the others, in the buffer's process."""
        self.apply(call, "append_transform", transform, invert=invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform before position ``index``, in the buffer's process."""
        self.apply(call, "insert_transform", index, transform, invert=invert)
        return self

    @property
    def batch_size(self) -> int | None:
        return self.apply(getattr, "batch_size")

    @property
    def write_count(self) -> int:
        """The number of rows ever written, by any process."""
        return self.apply(getattr, "write_count")

    def __iter__(self) -> Iterator[Any]:
        """Yields batches until the sampler's pass ends; all users of the buffer share the pass."""
        size = self.batch_size
        if size is None:
            raise RuntimeError(f"{type(self).__name__}: iterating needs a batch_size at construction: got none.")
        ran_out = False
        while not ran_out:
            data, _, ran_out = self.apply(call, "_next", size)
            yield data


# The methods that can be called from another process: their arguments and results can be pickled.
METHODS = tuple(name for name, value in vars(BufferProxy).items() if hasattr(value, "__wrapped__"))
