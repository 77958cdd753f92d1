"""HTTP to one server: a keep-alive connection per thread, one deadline per whole request, and a health monitor."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from llmrl.errors import ConfigError, DeadlineError, RolloutError

_LARGEST_ANSWER = 1 << 28  # bytes; the log-probs of a prompt of a million tokens are 100 MB
_PERIOD_S = 1.0  # between two health checks


class Connections:
    """One keep-alive connection per calling thread."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"VLLMEngine: a server must be given as http://host:port: got {url!r}.")
        self.url = url
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._make = partial(make, parts.hostname, parts.port)
        self._mine = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._interrupted: tuple[float, str] = (0.0, "")  # time and reason
        self._closed = False

    def interrupt(self, why: str) -> None:
        """Interrupts the requests of all threads."""
        self._interrupted = (time.monotonic(), why)  # set first: interrupted threads read the reason at once
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):  # the connection may be closing, or not open yet
                connection.sock.shutdown(socket.SHUT_RDWR)

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        end: float,
        read: Callable[[bytes], Any] = json.loads,
        each: Callable[[dict[str, Any]], bool] | None = None,
    ) -> Any:
        """Sends a request and returns the answer, decoded by ``read``.

        ``each``  is called with each event of a stream, in place of an answer; False ends the connection

        Raises  DeadlineError at ``end``, ConfigError (the server refuses the request), RolloutError, ValueError (not
                JSON)
        """
        payload = None if body is None else json.dumps(body)
        began = time.monotonic()
        for attempt in (1, 2):
            kept = getattr(self._mine, "connection", None)
            if kept is None:
                self._mine.connection = self._make()
                self._open.append(self._mine.connection)
            try:
                status, text = self._exchange(self._mine.connection, method, path, payload, end=end, each=each)
                break
            except TimeoutError as error:
                self._drop()
                raise DeadlineError(
                    f"VLLMEngine: {self.url}{path} must answer within {round(end - began, 1):g} s: it did not."
                ) from error
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                when, why = self._interrupted  # the health monitor's reason is better than the socket error
                if when > began:
                    raise RolloutError(
                        f"VLLMEngine: gave up on {self.url}{path}: {why}; see the server's own log."
                    ) from error
                if attempt == 2 or kept is None:  # retry once: a server may close an idle connection
                    raise RolloutError(
                        f"VLLMEngine: {self.url}{path} must be reachable: {type(error).__name__}: {error}; see the "
                        "server's own log."
                    ) from error
        if status >= 400:
            kind = ConfigError if status < 500 else RolloutError
            raise kind(f"VLLMEngine: {self.url}{path} refused with {status}: {text[:500].decode(errors='replace')}")
        if len(text) > _LARGEST_ANSWER:
            self._drop()  # the rest of the answer is unread
            raise RolloutError(
                f"VLLMEngine: {self.url}{path} must answer in at most {_LARGEST_ANSWER} bytes: it sends more."
            )
        try:
            return read(text) if text.strip() else {}
        except RecursionError as error:
            raise RolloutError(f"VLLMEngine: {self.url}{path} answered with JSON that nests too deeply.") from error

    def check_health(self, seconds: float) -> None:
        """Requests ``/health`` over a separate connection; any answer is enough. Raises OSError, HTTPException."""
        connection = self._make(timeout=seconds)
        try:
            self._exchange(connection, "GET", "/health", end=time.monotonic() + seconds)
        finally:
            connection.close()

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        payload: str | None = None,
        *,
        end: float,
        each: Callable[[dict[str, Any]], bool] | None = None,
    ) -> tuple[int, bytes]:
        """Returns the status and the answer; reads at most one byte more than the largest answer.

        Raises  TimeoutError at ``end``, of `time.monotonic`, however much has arrived; OSError, HTTPException
        """
        connection.timeout = _left(end)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        headers = {} if payload is None else {"Content-Type": "application/json"}
        connection.request(method, self._prefix + path, body=payload, headers=headers)
        # `interrupt_for_good` may have run before this connection had a socket. Health checks are exempt: their error
        # would replace the reason of the interruption.
        if self._closed and connection in self._open:
            raise ConnectionAbortedError
        connection.response_class = partial(_Response, end)
        response = connection.getresponse()
        if each is not None and response.status < 400:
            for line in response:
                event = line.removeprefix(b"data:").strip()
                if event.startswith(b"{") and not each(json.loads(event)):
                    self._drop()
                    break
            return response.status, b""
        return response.status, response.read(_LARGEST_ANSWER + 1)

    def _drop(self) -> None:
        connection, self._mine.connection = getattr(self._mine, "connection", None), None
        if connection is not None:
            if connection.sock is not None:
                os.close(connection.sock.detach())  # an unread answer would keep the socket open
            connection.close()
            self._open.remove(connection)

    def interrupt_for_good(self) -> None:
        """Interrupts the requests of all threads, and all later ones."""
        self._closed = True
        self.interrupt("the engine was closed")

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Response(http.client.HTTPResponse):
    """A response with one deadline for all its reads: a socket's own timeout restarts with every byte."""

    def __init__(self, end: float, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Reader(sock, self.fp.detach(), end))


class _Reader(io.RawIOBase):
    def __init__(self, sock: socket.socket, raw: Any, end: float) -> None:
        self._sock, self._raw, self._end = sock, raw, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._end))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class HealthMonitor:
    """Interrupts requests to a server that has stopped answering ``/health``, long before their own deadlines.

    A request may legitimately take minutes without a byte. A thread therefore requests ``/health`` once a second while
    requests are in flight, and ends with the last one.

    silence_s  the longest that ``/health`` may take
    """

    def __init__(self, connections: Connections, silence_s: float) -> None:
        self._connections, self._silence_s = connections, silence_s
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._stop = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Marks a request as in flight."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._stop = threading.Event()
                threading.Thread(target=self._watch, args=[self._stop], name="llmrl-vllm-health", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._stop.set()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(_PERIOD_S):
            problem = ""
            try:
                self._connections.check_health(self._silence_s)
            except TimeoutError:
                problem = f"the server must answer /health within {self._silence_s:g} s: it did not"
            except (OSError, http.client.HTTPException) as error:
                problem = f"the server must be reachable: /health ended in {type(error).__name__}: {error}"
            if problem and not stop.is_set():  # a check that outlasts its requests must not interrupt later ones
                self._connections.interrupt(problem)
