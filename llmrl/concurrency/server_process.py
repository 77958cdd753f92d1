"""The process of an HTTP server: started with its output in a file, asked for its health, ended with all it started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from llmrl.concurrency.parent_watchdog import OWNER

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_SHOWN = 30  # lines of the output
_PR_SET_PDEATHSIG = 1  # of Linux


class ServerProcess:
    """A process group whose engine ends with this process; ``pid`` and ``exitcode`` as of a multiprocessing.Process.

    url      where it listens
    words    its command; ``variables``: added to this process's environment, without what torchrun put there
    output   a file open for appending and reading
    strictly  Linux kills it when the thread that started it ends, also by a signal: a front end outlives its engine
    """

    def __init__(
        self, url: str, words: Sequence[str], variables: Mapping[str, str], output: IO[bytes], *, strictly: bool = False
    ) -> None:
        self.url, self.output, self.starts = url, output, 0
        self._words, self._variables, self._strictly = words, variables, strictly

    def start(self) -> None:
        """Starts it, also again after its end."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}
        self._process = subprocess.Popen(
            self._words,
            env={**kept, **self._variables, OWNER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the run, which finishes a step with it
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
        """True if it is healthy."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def last_lines(self, heading: str) -> str:
        """The end of its output, below ``heading``."""
        written = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0)
        return "\n".join([heading, *(f"  {line}" for line in written.decode(errors="replace").splitlines()[-_SHOWN:])])

    def signal(self, number: int) -> bool:
        """Signals what is left of the group; False if nothing is."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return True
        return False

    def stop(self, timeout_s: float) -> None:
        """Asks it to end, and after ``timeout_s`` kills it, with what it started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.signal(signal.SIGKILL)  # also if it ended by itself: its children may live on


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
