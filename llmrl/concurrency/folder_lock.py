"""Locks on folders, so that writers wait for each other and keep what is being read; a killed process releases them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrl.errors import DeadlineError


@contextmanager
def locked(folder: Path, *, shared: bool = False, timeout_s: float = 600.0, required: bool = False) -> Iterator[None]:
    """Holds the folder's lock, alone or with others that hold it ``shared``.

    On file systems without locks it holds nothing, or raises OSError if the lock is ``required``.

    Raises  FileNotFoundError if the folder is removed meanwhile; DeadlineError if the lock does not become free in time
    """
    import fcntl  # POSIX only; imported here so that the package imports on other systems

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"{folder}: its lock must become free within {timeout_s:g} s: another process reads or writes "
                        "the folder."
                    ) from None
                time.sleep(0.002)
                continue
            except OSError:  # no locks on this file system
                if required:
                    raise
            break
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(f"{folder} was replaced")
        yield
    finally:
        os.close(descriptor)
