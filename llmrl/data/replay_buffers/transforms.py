"""A transform as a buffer sees it: what it does on reads, what on writes, and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """One transform with its two directions; ``None`` where it does nothing."""

    transform: Any
    read: Callable[[Any], Any] | None
    write: Callable[[Any], Any] | None


def transform_state(transform: Any) -> Any:
    """The transform's ``state_dict()``, or ``None`` if it has none."""
    return transform.state_dict() if hasattr(transform, "state_dict") else None


def load_transform(transform: Any, state: Any) -> None:
    """Gives the transform what ``transform_state`` said of it."""
    if state is not None:
        transform.load_state_dict(state)


def as_stage(transform: Any, *, invert: bool = False) -> Stage:
    """Finds the two directions of a transform.

    Reads run ``forward`` where there is one (through the call, for an ``nn.Module``), else the callable itself; writes
    run ``inv`` where there is one.
    """
    if hasattr(transform, "eval") and hasattr(transform, "train"):
        transform.eval()
        read = transform
    else:
        read = getattr(transform, "forward", transform)
    if not callable(read):
        raise TypeError(f"ReplayBuffer: a transform must be callable: got {type(transform).__name__}.")
    write = getattr(transform, "inv", None)
    return Stage(transform, write, read) if invert else Stage(transform, read, write)
