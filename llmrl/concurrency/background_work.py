"""Work in a background thread, in steps: other threads can pause it between two steps."""

from __future__ import annotations

import math
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from llmrl.errors import ConfigError, DeadlineError, WorkerError

if TYPE_CHECKING:
    from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock


class BackgroundWork:
    """A collector's background thread, and the lock held during each step. Several threads may take steps at once.

    who      the owner, for messages
    limit_s  the longest that `pause` and `stop` wait for the current step to end
    stopped  set when the work must end: every thread that takes steps checks it before each step

    >>> work, count = BackgroundWork("Example", limit_s=10), []
    >>> def steps():
    ...     while not work.stopped.is_set():
    ...         with work.step():
    ...             yield count.append(1)
    >>> work.start(steps())
    >>> with work.pause():
    ...     before = len(count)
    ...     time.sleep(0.01)
    ...     len(count) == before
    True
    >>> work.stop()
    """

    def __init__(self, who: str, limit_s: float) -> None:
        self.stopped = threading.Event()
        self._who, self._limit_s = who, limit_s
        self._thread: threading.Thread | None = None
        self._lock: SharedExclusiveLock | None = None
        self._pausing, self._num_pauses = threading.Lock(), 0
        self._held = ExitStack()  # holds the lock while there are pauses
        self._failure: BaseException | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_elsewhere(self) -> bool:
        """True if the work was started and the caller is not its thread."""
        return self._thread is not None and threading.current_thread() is not self._thread

    def allow_pauses(self) -> None:
        """Makes steps hold the lock from now on, also without `start`: for an owner that several threads use."""
        from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock

        self._lock = self._lock or SharedExclusiveLock(self._who)

    def start(self, work: Iterable[object]) -> None:
        """Iterates over ``work`` in a thread. If it fails, the thread warns; `check` and `pause` raise WorkerError."""
        if self.is_started:
            raise ConfigError(f"{self._who}.start: was started already.")
        self.allow_pauses()

        def run() -> None:
            try:
                for _ in work:
                    pass
            except BaseException as error:
                self._failure = error
                text = "".join(traceback.format_exception(error))
                warnings.warn(f"{self._who}: the collection in the background failed:\n{text}", stacklevel=1)

        self._thread = threading.Thread(target=run, name="llmrl-collector", daemon=True)
        self._thread.start()

    def step(self) -> AbstractContextManager[None]:
        """A block that waits for pauses to end, and that pauses wait for."""
        return nullcontext() if self._lock is None else self._lock.holding("step", math.inf, "a step")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block during which no step runs. Pauses may overlap: steps continue when all have ended.

        Raises  DeadlineError if the current step does not end in time; WorkerError if the work failed
        """
        self.check()
        if self._lock is None:
            yield
            return
        with self._pausing:
            # Only the first of several pauses takes the lock. Another would queue behind steps that wait for the first
            # to end: in the same thread, a deadlock.
            if not self._num_pauses:
                end = time.monotonic() + self._limit_s
                self._held.enter_context(self._lock.holding(object(), end, "the pause"))
            self._num_pauses += 1
        try:
            yield
        finally:
            with self._pausing:
                self._num_pauses -= 1
                if not self._num_pauses:
                    self._held.close()

    def stop(self, timeout: float | None = None) -> None:
        """Ends the work after the current step. Raises DeadlineError if that takes longer than ``timeout``."""
        self.stopped.set()  # before the wait, or the thread would begin another step
        thread, self._thread = self._thread, None
        limit_s = self._limit_s if timeout is None else timeout
        if thread is not None:
            thread.join(limit_s)
            if thread.is_alive():
                raise DeadlineError(
                    f"{self._who}: the current step must end within {limit_s:g} s: it did not, and its thread is still "
                    "running."
                )

    def check(self) -> None:
        """Raises WorkerError if the work failed."""
        if self._failure is not None:
            raise WorkerError(
                f"{self._who}: the collection in the background failed: {self._failure}"
            ) from self._failure
