"""``Pulse``: notices that a server has stopped answering, long before a request's own deadline would.

A request says nothing until it is answered, which may rightly take minutes. Whether the server lives is asked beside
it.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmrl.modules.llm.engines.vllm.connections import exchange

__all__ = ["Pulse"]

_PERIOD_S = 1.0


class Pulse:
    """Asks for ``/health`` once a second while somebody waits for answers of the server, in a thread that ends then.

    connect    a new connection, with its prefix of paths
    silence_s  the longest that an answer may take; any answer will do
    on_silence called again and again while there is none, in that thread
    """

    def __init__(
        self,
        connect: Callable[[float], tuple[http.client.HTTPConnection, str]],
        silence_s: float,
        on_silence: Callable[[str], None],
    ) -> None:
        self._connect, self._silence_s, self._on_silence = connect, silence_s, on_silence
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._stop = threading.Event()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Inside the block somebody waits."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._stop = threading.Event()
                thread = threading.Thread(target=self._beat, args=[self._stop], name="llmrl-vllm-pulse", daemon=True)
                thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._stop.set()

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(_PERIOD_S):
            connection, prefix = self._connect(self._silence_s)
            try:
                exchange(connection, "GET", f"{prefix}/health", end=time.monotonic() + self._silence_s)
            except TimeoutError:
                self._tell(stop, f"must answer /health within {self._silence_s:g} s: it did not")
            except (OSError, http.client.HTTPException) as error:
                self._tell(stop, f"must be reachable: /health ended in {type(error).__name__}: {error}")
            finally:
                connection.close()

    def _tell(self, stop: threading.Event, what: str) -> None:
        if not stop.is_set():
            self._on_silence(what)
