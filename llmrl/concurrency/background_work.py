"""Work in its own thread, in steps: other threads can pause it between two steps."""

from __future__ import annotations

import math
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock
from llmrl.errors import ConfigError, DeadlineError, WorkerError


class BackgroundWork:
    """The thread of a collector, and the lock that its steps hold. Several threads may take steps at the same time.

    who      the owner, for messages
    limit_s  longest that a step may take while others wait for its end
    stopped  set when the work is to end: a thread that takes steps checks it before each

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
        self._held = ExitStack()  # the lock, while there are pauses
        self._failure: BaseException | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """True while the thread works."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_elsewhere(self) -> bool:
        """True if the work was started, and this is another thread."""
        return self._thread is not None and threading.current_thread() is not self._thread

    def allow_pauses(self) -> None:
        """Makes steps hold the lock from here on, also without `start`: for an owner that several threads use."""
        self._lock = self._lock or SharedExclusiveLock(self._who)

    def start(self, work: Iterable[object]) -> None:
        """Iterates over ``work`` in a thread. Its error is a warning there, and is raised by `check` and `pause`."""
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
        """A block that no pause interrupts."""
        return nullcontext() if self._lock is None else self._lock.holding("step", math.inf, "a step")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block during which no step is taken. Pauses may overlap: steps go on when all have ended.

        Raises  DeadlineError if the step under way does not end in time; WorkerError if the work failed
        """
        self.check()
        if self._lock is None:
            yield
            return
        with self._pausing:
            # Only the first of several pauses takes the lock: another one, also of the same thread, would wait behind
            # steps that wait for the first.
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
        """Ends the work after the step under way. Raises DeadlineError if that takes longer than ``timeout``."""
        self.stopped.set()  # before the wait, or the thread would begin another step
        thread, self._thread = self._thread, None
        limit_s = self._limit_s if timeout is None else timeout
        if thread is not None:
            thread.join(limit_s)
            if thread.is_alive():
                raise DeadlineError(
                    f"{self._who}: the step under way must end within {limit_s:g} s: it did not, and its thread goes "
                    "on."
                )

    def check(self) -> None:
        """Raises WorkerError if the work failed."""
        if self._failure is not None:
            raise WorkerError(
                f"{self._who}: the collection in the background failed: {self._failure}"
            ) from self._failure
