"""An environment variable with another value for a while, for processes and libraries that are started meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets the variable inside the block.

    >>> with environment("LLMRL_EXAMPLE", "1"):
    ...     os.environ["LLMRL_EXAMPLE"]
    '1'
    >>> "LLMRL_EXAMPLE" in os.environ
    False
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
