"""For parts that keep something about every row in ordinary memory: they work in the process that made them, only."""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any


class OneProcess:
    """Refuses use in a forked process and the way to a spawned one, where changes would be lost without a word.

    A copy, and an object that is unpickled from elsewhere (an actor that was built with it), belongs to the process
    that it arrives in. ``_kept`` says what would be lost.
    """

    _kept = "its rows"

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{type(self).__name__}: {self._kept} are kept by the process that made them: got process "
                f"{os.getpid()}, expected {self._pid}; nobody else would see what a forked process changes here."
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
