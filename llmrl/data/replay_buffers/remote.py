"""A replay buffer behind a torch RPC reference; the user starts the processes and calls ``init_rpc`` in each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmrl.data.replay_buffers.proxy import METHODS, Answer, BufferProxy, answer, check_arguments
from llmrl.data.replay_buffers.tensordict import TensorDictReplayBuffer
from llmrl.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from torch.distributed.rpc import RRef

__all__ = ["RemoteBuffer", "RemoteTensorDictReplayBuffer"]


def _at_owner(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method so that ``self`` may be an ``RRef``; the call must run in the process that owns the buffer."""

    @functools.wraps(method)
    def local(self: Any, *arguments: Any, **keywords: Any) -> Any:
        buffer = self if isinstance(self, TensorDictReplayBuffer) else self.local_value()
        return method(buffer, *arguments, **keywords)

    # RPC pickles functions by name, so this must be the name in the class below.
    local.__module__, local.__qualname__ = __name__, f"RemoteTensorDictReplayBuffer.{method.__name__}"
    return local


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A ``TensorDictReplayBuffer`` that other processes use by torch RPC.

    ``on(worker, **arguments)`` builds one in the process of that name and returns a `RemoteBuffer`, which has the
    methods of a buffer, with a timeout. Other RRefs to the buffer work too: ``rref.rpc_sync().sample(32)``, and
    ``rpc.rpc_sync(rref.owner(), RemoteTensorDictReplayBuffer.sample, args=(rref, 32))``.

    The arguments are those of ``TensorDictReplayBuffer``; give storage, sampler and writer as callables that build
    them in the remote process. Several processes may call at the same time.

    >>> buffer = RemoteTensorDictReplayBuffer(batch_size=2)  # here it is a buffer like any other
    >>> from tensordict import TensorDict
    >>> buffer.extend(TensorDict(a=[1, 2, 3], batch_size=[3])).tolist()
    [0, 1, 2]
    """

    @classmethod
    def on(cls, worker: str, *, timeout_s: float = 600.0, **arguments: Any) -> RemoteBuffer:
        """Builds the buffer in the RPC process named ``worker``; ``arguments`` are those of the class."""
        check_arguments(arguments.values())
        returned, result = _wait(worker, timeout_s, _build, cls, arguments)
        if not returned:
            raise result
        if (owner := result.owner().name) != worker:  # torch keeps the names of the process's first group
            raise WorkerError(
                f"{cls.__name__}: this process must not have had another group of torch.distributed.rpc before: got "
                f"{owner!r}, of a former group, for {worker!r}; use remote buffers in a process of their own."
            )
        return RemoteBuffer(result, timeout_s=timeout_s)


for _name in METHODS:
    setattr(RemoteTensorDictReplayBuffer, _name, _at_owner(getattr(TensorDictReplayBuffer, _name)))


class RemoteBuffer(BufferProxy):
    """A proxy for a buffer behind a remote reference; each call waits at most ``timeout_s`` for its answer.

    It may be passed to other processes as an argument of RPC calls. The buffer exists as long as references to it do.
    """

    def __init__(self, rref: RRef, *, timeout_s: float = 600.0) -> None:
        super().__init__(timeout_s)
        self.rref: RRef | None = rref

    def _ask(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Answer:
        if self.rref is None:
            raise RuntimeError("RemoteBuffer: the buffer must be open: it was closed; create a new one.")
        owner = self.rref.owner().name
        return _wait(owner, self.timeout_s, _answer_there, self.rref, function, arguments, keywords)

    def close(self) -> None:
        self.rref = None

    def __repr__(self) -> str:
        where = "closed" if self.rref is None else f"on {self.rref.owner().name!r}"
        return f"RemoteBuffer({where}, timeout_s={self.timeout_s:g})"


def _wait(worker: str, timeout_s: float, function: Callable[..., Answer], *arguments: Any) -> Answer:
    from torch.distributed import rpc  # not part of every build of torch

    try:
        to = rpc.get_worker_info(worker)
    except RuntimeError as error:
        raise WorkerError(
            f"RemoteBuffer: worker must be a process that has called init_rpc: got {worker!r} ({error})."
        ) from error
    future = rpc.rpc_async(to, function, args=arguments, timeout=timeout_s)
    try:
        return future.wait()
    except RuntimeError as error:  # a transport error: errors of the function itself are part of its answer
        if "timeout" in str(error).lower():
            raise DeadlineError(
                f"RemoteBuffer: the buffer on {worker!r} must answer within timeout_s={timeout_s:g}: it did not; the "
                "process is busy or has ended."
            ) from error
        raise WorkerError(
            f"RemoteBuffer: the process {worker!r}, which has the buffer, must answer: {error}"
        ) from error


def _build(cls: type[RemoteTensorDictReplayBuffer], arguments: dict[str, Any]) -> Answer:
    from torch.distributed import rpc

    returned, result = answer(cls, **arguments)
    return (True, rpc.RRef(result)) if returned else (False, result)


def _answer_there(
    rref: RRef, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Answer:
    return answer(function, rref.local_value(), *arguments, **keywords)
