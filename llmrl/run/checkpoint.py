"""Atomic checkpoints, and Ctrl-C as a flag.

The caller fills a checkpoint's folder. ``checksums.json`` beside its files holds the size and BLAKE2b hash of each; it
is verified before the checkpoint is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from llmrl.concurrency.folder_lock import locked
from llmrl.errors import CheckpointError, ConfigError, DataError, DeadlineError
from llmrl.run.files import free_space, read_text, share_files, writing

__all__ = ["CHECKSUMS", "CheckpointStore", "InterruptGuard", "cause_of", "check_files", "latest_checkpoint"]

CHECKSUMS = "checksums.json"
_DRAFT, _REPLACED, _PRUNED, _DAMAGED = ".draft-", ".replaced-", ".pruned-", "damaged-"


class CheckpointStore:
    """``<run>/checkpoints/stepN``, the last ``keep`` of them and those that another command reads.

    A checkpoint is written to a draft folder, flushed to disk and renamed; a checkpoint to be removed is renamed first.
    So a folder named ``stepN`` is always complete, even if the process was killed. Drafts and leftovers of an earlier
    process are removed when a writer opens the store; pass ``writer=False`` on ranks and in tools that only read.
    ``who`` names the writer in errors.
    """

    def __init__(self, run_dir: Path | str, *, keep: int = 2, writer: bool = True, who: str | None = None):
        if keep < 1:
            raise ConfigError(f"CheckpointStore: must keep at least one checkpoint: got keep={keep}.")
        self.folder = Path(run_dir) / "checkpoints"
        self.keep, self.who = keep, who
        # One thread, so that checkpoints are published one at a time and in the order of their steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._publishing: Future[None] | None = None
        if writer:
            self._clean()

    def draft(self, step: int) -> Path:
        """The folder where a checkpoint is written before it is published."""
        return self.folder / f"{_DRAFT}step{step}"

    def save(self, step: int, write: Callable[[Path], None], *, background: bool = False) -> Path:
        """Calls ``write(folder)`` with an empty folder and publishes the result as ``step<N>``.

        A checkpoint of the same step is replaced once the new one is complete. With ``background`` a thread computes
        the checksums, flushes and publishes; `check`, `close` or the next `save` raises its error.

        Returns  the published folder
        Raises   CheckpointError if anything fails; the draft is gone and earlier checkpoints are untouched
        """
        self.begin(step)
        with self.undoing(step):
            write(self.draft(step))
        self.publish(step, background=background)
        return self.folder / f"step{step}"

    def begin(self, step: int) -> None:
        """Waits until the last checkpoint is published, then makes an empty draft. The first part of `save`."""
        self.check(wait=True)
        with self.undoing(step):
            shutil.rmtree(self.draft(step), ignore_errors=True)
            self.folder.mkdir(exist_ok=True)  # without parents: a removed run folder must fail here
            self.draft(step).mkdir()

    def publish(self, step: int, *, background: bool = False) -> None:
        """Publishes the draft. The last part of `save`."""
        self._publishing = self._thread.submit(self._publish, step)
        self.check(wait=not background)

    def check(self, *, wait: bool = False) -> None:
        """Raises CheckpointError if publishing the last checkpoint has failed. ``wait`` waits until it has finished."""
        if self._publishing is not None and (wait or self._publishing.done()):
            publishing, self._publishing = self._publishing, None
            publishing.result()

    def close(self) -> None:
        """Waits until the last checkpoint is published, and raises CheckpointError if it could not be."""
        self.check(wait=True)
        self._thread.shutdown()

    def _publish(self, step: int) -> None:
        target = self.folder / f"step{step}"
        with self.undoing(step):
            _seal(self.draft(step))
            if target.exists():
                # A folder cannot be renamed over a non-empty one, so this takes two renames. If the process is killed
                # between them, `_clean` undoes the first.
                replaced = self.folder / f"{_REPLACED}step{step}"
                os.rename(target, replaced)
                os.rename(self.draft(step), target)
                shutil.rmtree(replaced)
            else:
                os.rename(self.draft(step), target)
            _flush_folder(self.folder)
        self._prune()

    @contextlib.contextmanager
    def undoing(self, step: int) -> Iterator[None]:
        """Removes the draft if the block fails.

        Raises  CheckpointError for any Exception in the block; KeyboardInterrupt and SystemExit pass unchanged
        """
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self.draft(step), ignore_errors=True)
            if not isinstance(error, Exception):  # a second Ctrl-C
                raise
            safe = f"{latest.name} is intact" if (latest := self.latest()) else "no earlier one exists"
            # A CheckpointError already names the ranks that could not write, and their free space.
            cause = error if isinstance(error, CheckpointError) else cause_of(error, self.folder, self.who)
            raise CheckpointError(
                f"CheckpointStore: step {step} could not be written to {self.folder}: {cause}; {safe}. Make room or "
                f"correct the cause, then run: llmrl resume {self.folder.parent}"
            ) from error

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step, or None."""
        return next((self.folder / f"step{step}" for step in reversed(self.steps())), None)

    def restore(self) -> tuple[Path, list[str]]:
        """The newest intact checkpoint; damaged newer ones are renamed to ``damaged-stepN``.

        Returns  its folder, and the fault of each checkpoint that was set aside
        Raises   DataError that names every fault if none is intact; nothing is renamed then
        """
        faults: dict[Path, str] = {}
        for step in reversed(self.steps()):
            folder = self.folder / f"step{step}"
            try:
                check_files(folder)
            except DataError as error:
                faults[folder] = str(error)
                continue
            # Damaged ones are set aside only once an intact one is found; otherwise all stay in place.
            for damaged in faults:
                aside = damaged.with_name(_DAMAGED + damaged.name)
                with writing(damaged):
                    shutil.rmtree(aside, ignore_errors=True)
                    os.rename(damaged, aside)
            return folder, list(faults.values())
        raise DataError(
            f"{self.folder}: must hold a complete checkpoint to resume: got {' '.join(faults.values()) or 'none.'} "
            "Start a new run."
        )

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return sorted(int(match[1]) for path in self._entries() if (match := re.fullmatch(r"step(\d+)", path.name)))

    def _entries(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            doomed = self.folder / f"{_PRUNED}step{step}"
            # A failure costs disk space, not the run. The next time tries again, also if a command reads it now.
            with contextlib.suppress(OSError, DeadlineError), locked(self.folder / f"step{step}", timeout_s=0):
                os.rename(self.folder / f"step{step}", doomed)
                shutil.rmtree(doomed)

    def _clean(self) -> None:
        for path in self._entries():
            if path.name.startswith(_REPLACED):
                target = self.folder / path.name.removeprefix(_REPLACED)
                if not target.exists():  # killed between the two renames: restore the old one
                    os.rename(path, target)
                    continue
            if path.name.startswith((_DRAFT, _REPLACED, _PRUNED)):
                shutil.rmtree(path, ignore_errors=True)


def cause_of(error: BaseException, folder: Path, who: str | None) -> str:
    """The error in words: who could not write, why, and the free space at ``folder``."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{f'{who}: ' if who else ''}{type(error).__name__}: {reason} ({free_space(folder)})"


def latest_checkpoint(run_dir: Path | str) -> Path | None:
    """The newest checkpoint of a run that may be running. Read-only: removes nothing, verifies no checksums."""
    return CheckpointStore(run_dir, writer=False).latest()


def check_files(folder: Path) -> list[str]:
    """Compares every file of a checkpoint with its recorded size and checksum; returns their names.

    Raises  DataError that names each missing or changed file, or the checksum list if that cannot be read
    """
    path = folder / CHECKSUMS
    try:
        listed = json.loads(read_text(path))
        faults = [fault for name, expected in listed.items() if (fault := _fault(folder, name, **expected))]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: must list the files of the checkpoint: it cannot be read: {error}.") from error
    # Libraries that load the folder open whatever has a known name; opening a pipe would never return.
    faults += [f"{entry.name!r} is not a file" for entry in folder.rglob("*") if _is_special(entry)]
    if faults:
        raise DataError(f"{folder}: must be as it was written: {', '.join(faults)}.")
    return list(listed)


def _fault(folder: Path, name: str, *, size: int, blake2b: str) -> str | None:
    path = folder / name
    if ".." in path.parts or not path.is_relative_to(folder):
        return f"{name!r} lies outside of it"
    if any(part.is_symlink() for part in (path, *path.parents) if part != folder and part.is_relative_to(folder)):
        return f"{name} is a link"
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} of {size} bytes"
    return None if _checksum(path) == blake2b else f"{name} has other content"


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


class InterruptGuard:
    """Ctrl-C, SIGTERM and SIGHUP set ``requested``; a loop reads it after each step, saves, and returns 130.

    A second Ctrl-C raises KeyboardInterrupt at once. A signal within ``debounce_s`` of the first counts as the same
    one, because torchrun sends its own after the terminal's. In a multi-process run the ranks see the flag at different
    times; reduce it over the ranks before acting on it. Outside the main thread no handlers are installed. SIGHUP (a
    closed terminal) stays ignored if it was ignored before, as ``nohup`` does.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, *, debounce_s: float = 0.3):
        self.requested = False
        self._debounce_s = debounce_s
        self._first = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested = True
            self._first = now
        # Only a second Ctrl-C ends the run at once: batch systems and torchrun repeat SIGTERM by themselves.
        elif number == signal.SIGINT and now - self._first > self._debounce_s:
            raise KeyboardInterrupt


def _seal(folder: Path) -> None:
    """Writes the checksum list and flushes every file below ``folder`` to disk, before the rename publishes it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "blake2b": _checksum(path)} for path in paths
    }
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    share_files(folder, like=folder / CHECKSUMS)
    # Contents first, then the folders that name them: the rename must not reach the disk before either.
    for root, _, names in os.walk(folder):
        for name in names:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(root))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
