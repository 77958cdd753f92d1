"""What the tests of data share: a disk that is nearly full."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which files may grow to so many bytes only."""
    return _largest_file
