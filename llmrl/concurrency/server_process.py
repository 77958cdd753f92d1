"""The process of an HTTP server: start with output to a file, health check, stop together with its child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import IO

from llmrl.concurrency.parent_watchdog import OWNER

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_SHOWN = 30  # lines of output in a message
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class ServerProcess:
    """A process group whose engine ends with this process; ``pid`` and ``exitcode`` as in multiprocessing.Process.

    url      address at which the server listens
    words    its command; ``variables``: added to this process's environment, from which torchrun's are removed
    output   a file open for appending and reading
    strictly  Linux kills it as soon as the thread that started it ends: a front end would outlive its engine
    """

    def __init__(
        self, url: str, words: Sequence[str], variables: Mapping[str, str], output: IO[bytes], *, strictly: bool = False
    ) -> None:
        self.url, self.output, self.starts = url, output, 0
        self._words, self._variables, self._strictly = words, variables, strictly

    def start(self) -> None:
        """Starts the server, or starts it again after it ended."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}
        self._process = subprocess.Popen(
            self._words,
            env={**kept, **self._variables, OWNER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must only reach the run, which still needs the server to finish its step
            preexec_fn=_end_with_parent if self._strictly else None,
        )
        self.starts += 1

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def answers(self) -> bool:
        """True if the server answers its health check."""
        # HTTPException: a client of a free ephemeral port may be given that very port, and reads its own request.
        with suppress(OSError, HTTPException), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def last_lines(self, heading: str) -> str:
        """The last lines of its output, below ``heading``."""
        written = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0)
        return "\n".join([heading, *(f"  {line}" for line in written.decode(errors="replace").splitlines()[-_SHOWN:])])

    def signal(self, number: int) -> bool:
        """Signals the remaining processes of the group; False if there are none."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return True
        return False

    def stop(self, timeout_s: float) -> None:
        """Terminates the server; after ``timeout_s`` seconds kills it. Also kills the processes that it started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.signal(signal.SIGKILL)  # even if it ended by itself: its children may still run
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)  # else the ended process stays in the system's table


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
