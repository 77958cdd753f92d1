"""Writing a directory so that a reader finds the old content or the new one, never half of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside ``path`` to fill; it takes the place of ``path`` when the block ends without error.

    A kill before that leaves the old directory as it was, and a temporary one that the next call removes.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("new", "old"))
    if old.exists() and not path.exists():
        old.rename(path)  # killed between the two renames below
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for file in new.rglob("*"):
        _sync(file)
    if path.exists():
        path.rename(old)
    new.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
