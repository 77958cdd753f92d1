"""A replay buffer in a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from llmrl.data.replay_buffers.buffer import ReplayBuffer
from llmrl.data.replay_buffers.proxy import Answer, BufferProxy, answer, check_arguments
from llmrl.errors import DeadlineError, WorkerError
from llmrl.optional import require

__all__ = ["RayReplayBuffer"]


class RayReplayBuffer(BufferProxy):
    """A local proxy for a buffer in a Ray actor; see `BufferProxy` for timeouts and errors.

    ``replay_buffer_cls(*args, **kwargs)`` is built in the actor. Give storages, samplers and writers as callables that
    build them there (``storage=functools.partial(LazyTensorStorage, 1000)``), because rows are not sent along. Ray is
    started with ``ray_init_config`` if it is not running; ``remote_config`` are options of the actor (``num_cpus``,
    ``memory``, ``name``, ...). The constructor waits until Ray has placed the actor.

    The proxy may be passed to other actors and tasks, which then use the same buffer. ``close`` kills the actor, as
    does Ray once no reference is left: save rows that you want to keep before that, with ``dumps`` or ``state_dict``.
    """

    def __init__(
        self,
        *args: Any,
        replay_buffer_cls: type[ReplayBuffer] = ReplayBuffer,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | None = None,
        timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout_s)
        check_arguments([*args, *kwargs.values()])
        ray = _ray()
        # Pickled here, so that the error for arguments that cannot be pickled is raised unchanged.
        recipe = _ray("ray.cloudpickle").dumps((replay_buffer_cls, args, kwargs))
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        actor_class = ray.remote(_Host)
        self._actor = (actor_class.options(**remote_config) if remote_config else actor_class).remote()
        self._name = f"Ray actor {self._actor._actor_id.hex()[:8]}, which Ray has not placed yet"
        try:
            self._name = self._wait(self._actor.where.remote())
            # A separate call after the actor is placed, so that errors from building the buffer can name the actor.
            returned, result = self._wait(self._actor.build.remote(recipe))
            if not returned:
                raise result
        except BaseException:
            self.close()
            raise

    def _ask(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Answer:
        if self._actor is None:
            raise RuntimeError("RayReplayBuffer: the buffer must be open: it was closed; create a new one.")
        return self._wait(self._actor.answer.remote(function, *arguments, **keywords))

    def _wait(self, reference: Any) -> Any:
        ray = _ray()
        try:
            return ray.get(reference, timeout=self.timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"RayReplayBuffer: the buffer in {self._name} must answer within timeout_s={self.timeout_s:g}: it did "
                "not; it is busy, or no node has what remote_config asks for."
            ) from error
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"RayReplayBuffer: the buffer's {self._name} must run: it has ended. {error}") from error

    def close(self) -> None:
        """Kills the actor; its rows are lost."""
        ray = _ray()
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            ray.kill(actor)

    def __repr__(self) -> str:
        return f"RayReplayBuffer({'closed' if self._actor is None else self._name}, timeout_s={self.timeout_s:g})"


def _ray(module: str = "ray") -> Any:
    return require(module, extra="ray", used_by="RayReplayBuffer")


class _Host:
    def where(self) -> str:
        ray = _ray()
        name = ray.get_runtime_context().get_actor_id()[:8]
        return f"Ray actor {name} (process {os.getpid()} on {socket.gethostname()})"

    def build(self, recipe: bytes) -> Answer:
        returned, result = answer(_build, recipe)
        if returned:
            self._buffer, result = result, None
        return returned, result

    def answer(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Answer:
        return answer(function, self._buffer, *arguments, **keywords)


def _build(recipe: bytes) -> ReplayBuffer:
    cls, args, kwargs = _ray("ray.cloudpickle").loads(recipe)
    return cls(*args, **kwargs)
