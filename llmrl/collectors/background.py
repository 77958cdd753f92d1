"""`HasBackground`: collecting into a replay buffer in a thread of the process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from llmrl.concurrency.background_work import BackgroundWork
from llmrl.errors import ConfigError


def check_not_started(collector: Any, is_started: bool) -> None:
    """Raises ConfigError for a caller that iterates over a collector which collects in the background."""
    if is_started:
        raise ConfigError(f"{type(collector).__name__}: collects in the background already: read the replay buffer.")


class HasBackground:
    """Methods of a collector that can fill its replay buffer in a background thread, ``background``."""

    background: BackgroundWork
    replay_buffer: Any

    def start(self) -> None:
        """Fills the replay buffer in a thread, until ``total_frames``, the end of the data or `async_shutdown`. The
        next call raises an error of the thread.
        """
        if self.replay_buffer is None:
            raise ConfigError(f"{type(self).__name__}.start: collects into a replay_buffer: give one.")
        self.background.start(iter(self))

    def pause(self) -> AbstractContextManager[None]:
        """A block during which no step is taken and no row is written; waits for the current step to end."""
        return self.background.pause()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends a collection that was started, after the current step. Raises WorkerError if it failed."""
        self.shutdown(timeout=timeout, close_env=close_env)
        self.background.check()
