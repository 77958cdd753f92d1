"""HTTP to one server: a kept-alive connection per thread, errors that name the server, and a way to end every wait.

A request has one deadline for all of it: a socket's own timeout begins anew with every byte that comes. What is asked,
and what the answers mean, is ``server``'s part; whether the server lives is ``pulse``'s.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from llmrl.errors import ConfigError, DeadlineError, RolloutError

__all__ = ["Connections", "exchange"]

_LARGEST_ANSWER = 1 << 28  # bytes; the log-probs of a prompt of a million tokens are 100 MB


class Connections:
    """One kept-alive connection per thread that asks.

    max_bytes  the largest answer that is read
    """

    def __init__(self, url: str, *, max_bytes: int = _LARGEST_ANSWER) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"VLLMEngine: a server is given as http://host:port: got {url!r}.")
        self.url = url
        self._max_bytes = max_bytes
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._mine = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._interrupted: tuple[float, str] = (0.0, "")  # when, and why
        self._closed = False

    def connect(self, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is the caller's, and what paths begin with."""
        return self._make(self._host, self._port, timeout=timeout_s), self._prefix

    def interrupt(self, why: str) -> None:
        """Ends what every thread waits for."""
        self._interrupted = (time.monotonic(), why)
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):  # it may be closing, or not be open yet
                connection.sock.shutdown(socket.SHUT_RDWR)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, end: float) -> Any:
        """The decoded answer.

        Raises  DeadlineError at ``end``, ConfigError (what was asked is refused), RolloutError, ValueError (no JSON)
        """
        payload = None if body is None else json.dumps(body)
        began = time.monotonic()
        for attempt in (1, 2):
            fresh = getattr(self._mine, "connection", None) is None
            try:
                status, text = self._exchange(method, path, payload, end)
                break
            except TimeoutError as error:
                self._drop()
                raise DeadlineError(
                    f"VLLMEngine: {self.url}{path} must answer within {round(end - began, 1):g} s: it did not."
                ) from error
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                when, why = self._interrupted
                if when > began:
                    raise RolloutError(
                        f"VLLMEngine: {self.url} {why}, so {path} was given up; what it wrote is where it was started."
                    ) from error
                if attempt == 2 or fresh:  # a server may close a connection that was idle; that is asked again, once
                    raise RolloutError(
                        f"VLLMEngine: {self.url}{path} must be reachable: {type(error).__name__}: {error}; what it "
                        "wrote is where it was started."
                    ) from error
        if status >= 400:
            kind = ConfigError if status < 500 else RolloutError
            raise kind(f"VLLMEngine: {self.url}{path} refused with {status}: {text[:500].decode(errors='replace')}")
        if len(text) > self._max_bytes:
            self._drop()  # the rest is still to come
            raise RolloutError(
                f"VLLMEngine: {self.url}{path} must answer in at most {self._max_bytes} bytes: it sends more."
            )
        try:
            return json.loads(text) if text.strip() else {}
        except RecursionError as error:
            raise RolloutError(f"VLLMEngine: {self.url}{path} must answer in JSON of some depth: it nests.") from error

    def _exchange(self, method: str, path: str, payload: str | None, end: float) -> tuple[int, bytes]:
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = self._make(self._host, self._port)
            self._open.append(connection)
        return exchange(
            connection, method, self._prefix + path, payload, end=end, max_bytes=self._max_bytes, check=self._check_open
        )

    def _check_open(self) -> None:
        if self._closed:  # before there was a socket to be interrupted
            raise ConnectionAbortedError

    def _drop(self) -> None:
        connection, self._mine.connection = getattr(self._mine, "connection", None), None
        if connection is not None:
            if connection.sock is not None:
                os.close(connection.sock.detach())  # an answer that was never read would keep it open
            connection.close()
            self._open.remove(connection)

    def interrupt_for_good(self) -> None:
        """Ends what every thread waits for, now and later."""
        self._closed = True
        self.interrupt("must stay open: close() was called")

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    payload: str | None = None,
    *,
    end: float,
    max_bytes: int = _LARGEST_ANSWER,
    check: Callable[[], None] = lambda: None,
) -> tuple[int, bytes]:
    """The status and the answer, of which at most one byte more than ``max_bytes`` is read.

    check   called once the request was sent
    Raises  TimeoutError at ``end``, of `time.monotonic`, whatever has come by then; OSError, HTTPException
    """
    connection.timeout = _left(end)
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)
    headers = {} if payload is None else {"Content-Type": "application/json"}
    connection.request(method, path, body=payload, headers=headers)
    check()
    connection.response_class = partial(_response, end)
    response = connection.getresponse()
    return response.status, response.read(max_bytes + 1)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _response(end: float, sock: socket.socket, *arguments: Any, **options: Any) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_Readable(sock, end), *arguments, **options)


class _Readable:
    """What ``http.client`` asks of a socket to read an answer from."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._sock, self._sock.makefile(mode, buffering=0), self._end))


class _Reader(io.RawIOBase):
    """Reads of one socket that all end by one deadline."""

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
