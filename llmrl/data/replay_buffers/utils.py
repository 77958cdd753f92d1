"""Helpers shared by the replay buffer modules: keyword checks, states, transforms, reductions, process checks."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from llmrl.errors import CheckpointError, did_you_mean

Init = TypeVar("Init", bound=Callable[..., None])


# --- keywords of constructors ---


def near_names(init: Init) -> Init:
    """Decorates the last constructor of a ``super().__init__(**arguments)`` chain, which gets all unconsumed keywords.

    Raises: TypeError for an unknown keyword, with the most similar argument name of the chain.
    """
    own = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in own:
                who = type(self)
                raise TypeError(
                    f"{who.__name__}: an argument must be one of the constructor's: got {name!r}."
                    f"{did_you_mean(name, _known(who))}"
                )
        init(self, *arguments, **keywords)

    return checked  # type: ignore[return-value]


def _known(cls: type) -> Iterator[str]:
    """The argument names of a class and its bases, up to the first constructor without ``**`` keywords."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            _, *arguments = inspect.signature(base.__init__).parameters.values()
            yield from (each.name for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
            if not any(each.kind is each.VAR_KEYWORD for each in arguments):
                return


def build_part(what: str, part: Any, base: type) -> Any:
    """Returns a part of a buffer, given as an instance or as a callable that builds it. Raises: TypeError otherwise."""
    built = part() if not isinstance(part, base) and callable(part) else part
    if not isinstance(built, base):
        raise TypeError(
            f"ReplayBuffer: {what} must be a {base.__name__} or a callable that builds one: got {type(built).__name__}."
        )
    return built


# --- states ---


class StateFile:
    """``dumps`` and ``loads`` for parts of a buffer that have a small ``state_dict``."""

    def dumps(self, path: str | Path) -> None:
        """Writes the state to the directory ``path``."""
        from llmrl.data.replay_buffers.directory import write_object

        Path(path).mkdir(parents=True, exist_ok=True)
        write_object(self.state_dict(), Path(path) / "state.pt")

    def loads(self, path: str | Path) -> None:
        """Reads what ``dumps`` wrote."""
        from llmrl.data.replay_buffers.directory import read_object

        self.load_state_dict(read_object(Path(path) / "state.pt"))


# --- transforms ---


class _Stage(NamedTuple):
    """A transform with its functions for reads and for writes; ``None`` if it has none."""

    transform: Any
    read: Callable[[Any], Any] | None
    write: Callable[[Any], Any] | None


class Transforms:
    """The transforms of a buffer, in the order in which they run on reads.

    ``reads`` and ``writes`` are the functions to call on a batch, in order; a write may return None to drop it.
    """

    def __init__(self, *transforms: Any) -> None:
        # The tuples are replaced, never changed, so a shallow copy of this object is independent.
        self._stages: tuple[_Stage, ...] = ()
        self.reads: tuple[Callable[[Any], Any], ...] = ()
        self.writes: tuple[Callable[[Any], Any], ...] = ()
        for transform in transforms:
            self.insert(len(self), transform)

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[Any]:
        return (stage.transform for stage in self._stages)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform before position ``index``.

        Reads run ``forward`` if there is one (through the call, for an ``nn.Module``), else the callable itself; writes
        run ``inv`` if there is one. ``invert`` swaps the two.
        """
        if hasattr(transform, "eval") and hasattr(transform, "train"):
            transform.eval()
            read = transform
        else:
            read = getattr(transform, "forward", transform)
        if not callable(read):
            raise TypeError(f"ReplayBuffer: a transform must be callable: got {type(transform).__name__}.")
        write = getattr(transform, "inv", None)
        stage = _Stage(transform, write, read) if invert else _Stage(transform, read, write)
        self._stages = (*self._stages[:index], stage, *self._stages[index:])
        self.reads = tuple(stage.read for stage in self._stages if stage.read is not None)
        self.writes = tuple(stage.write for stage in reversed(self._stages) if stage.write is not None)

    def state_dict(self) -> list[Any]:
        return transform_states(self)

    def load_state_dict(self, states: Sequence[Any]) -> None:
        load_transforms(self, states)


def transform_states(transforms: Iterable[Any]) -> list[Any]:
    """The ``state_dict()`` of each transform, ``None`` for one that has none."""
    return [transform.state_dict() if hasattr(transform, "state_dict") else None for transform in transforms]


def load_transforms(transforms: Collection[Any], states: Sequence[Any]) -> None:
    if len(states) != len(transforms):
        raise CheckpointError(
            f"ReplayBuffer: a state is loaded into a buffer with the same transforms: got {len(states)}, expected "
            f"{len(transforms)}."
        )
    for transform, state in zip(transforms, states, strict=True):
        if state is not None:
            transform.load_state_dict(state)


# --- reductions of a row's values to one number ---

_REDUCTIONS = {
    "max": lambda values: values.amax(1),
    "min": lambda values: values.amin(1),
    "median": lambda values: values.median(1).values,
    "mean": lambda values: values.mean(1),
    "sum": lambda values: values.sum(1),
}


def check_reduction(who: str, name: str) -> str:
    """Returns ``name`` if it is the name of a reduction; otherwise raises ValueError."""
    if name not in _REDUCTIONS:
        raise ValueError(
            f"{who}: reduction must be one of {', '.join(_REDUCTIONS)}: got {name!r}."
            f"{did_you_mean(str(name), _REDUCTIONS)}"
        )
    return name


def reduced(values: Tensor, name: str) -> Tensor:
    """``values``, [N, ...], reduced to one number per row: [N]."""
    return _REDUCTIONS[name](values.reshape(len(values), -1))


# --- state of one process ---


class ProcessLocal:
    """Raises on use in a forked process and on pickling for a spawned one, where changes would be lost silently.

    A copy, or an object unpickled in another way (for example in a Ray actor), belongs to the process that unpickled
    it. ``_kept`` is the name of the state that would be lost.
    """

    _kept: str

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{type(self).__name__}: {self._kept} are kept by the process that made them: got process "
                f"{os.getpid()}, expected {self._pid}; changes made in a forked process would be lost."
            )

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                f"{type(self).__name__}: {self._kept} are kept by one process and cannot be handed to another: leave "
                "the buffer in one, behind RemoteTensorDictReplayBuffer or RayReplayBuffer."
            )
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pid=os.getpid())
