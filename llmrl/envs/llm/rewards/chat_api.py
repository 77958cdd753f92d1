"""One question to a chat-completions server, with deadlines and retries: what `judge` needs of the OpenAI protocol."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.strict_json import parse_json

__all__ = ["ChatAPI"]

MAX_REPLY = 16 << 20  # bytes
_WORTH_ANOTHER_TRY = {408, 409, 425, 429, 500, 502, 503, 504}


class ChatAPI:
    """Asks ``<url>/chat/completions``; any thread may ask.

    Raises  ConfigError at once for a request that the server refuses (a 4xx: wrong model, wrong key); RolloutError,
            DeadlineError after ``retries`` more tries for a server that is down, too busy, too slow, or not understood
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float, retries: int, backoff_s: float):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"ChatAPI: url must begin with http:// or https://, as http://host:8000/v1: got {url!r}.")
        if timeout_s <= 0 or retries < 0 or backoff_s < 0:
            raise ConfigError(
                f"ChatAPI: timeout_s must be positive, retries and backoff_s not negative: got {timeout_s}, {retries} "
                f"and {backoff_s}."
            )
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.counters = {"requests": 0, "retries": 0}
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def ask(self, messages: Sequence[Mapping[str, str]], **body: Any) -> str:
        """The text of the answer; ``body`` is the rest of the request: model, temperature and so on."""
        request = json.dumps({"messages": list(messages), **body}).encode()
        for attempt in range(self.retries + 1):
            wait_s = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)  # not all rows at the same moment
            with self._lock:
                self.counters["requests"] += 1
                self.counters["retries"] += attempt > 0
            try:
                return self._once(request)
            except _Refused as refused:
                if refused.status not in _WORTH_ANOTHER_TRY:
                    raise ConfigError(str(refused)) from None
                failure: Exception = RolloutError(str(refused))
                wait_s = refused.after_s or wait_s
            except (DeadlineError, RolloutError) as error:
                failure = error
            if attempt == self.retries or self._closed.wait(min(wait_s, self.timeout_s)):
                raise failure
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        """Ends waiting between tries: what is being asked fails at its next failure."""
        self._closed.set()

    def _once(self, request: bytes) -> str:
        end = time.monotonic() + self.timeout_s
        call = urllib.request.Request(self.url, data=request, headers=self._headers, method="POST")
        try:
            with urllib.request.urlopen(call, timeout=self.timeout_s) as response:
                data = self._read(response, end)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except TimeoutError:
            raise self._late() from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise self._late() from None
            raise RolloutError(f"ChatAPI: {self.url} must answer: {getattr(error, 'reason', None) or error}.") from None
        return self._text(data)

    def _read(self, response: http.client.HTTPResponse, end: float) -> bytes:
        data = bytearray()
        while chunk := response.read1(1 << 16):  # a socket's own timeout starts anew with every byte
            data += chunk
            if time.monotonic() > end:
                raise self._late()
            if len(data) > MAX_REPLY:
                raise RolloutError(f"ChatAPI: {self.url} must answer with at most {MAX_REPLY >> 20} MiB.")
        return bytes(data)

    def _text(self, data: bytes) -> str:
        try:
            text = parse_json(data.decode())["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            got = data[:120].decode(errors="replace")
            raise RolloutError(f"ChatAPI: {self.url} must answer with choices[0].message.content: got {got!r}.")
        return text

    def _late(self) -> DeadlineError:
        return DeadlineError(f"ChatAPI: {self.url} must answer within timeout_s = {self.timeout_s}: it did not.")

    def _refused(self, error: urllib.error.HTTPError) -> _Refused:
        with error:
            try:
                said = error.read(500).decode(errors="replace")
            except (OSError, http.client.HTTPException):
                said = ""
        after = error.headers.get("Retry-After") or ""
        return _Refused(
            f"ChatAPI: {self.url} must accept the request: got status {error.code} {error.reason}: {said!r:.300}",
            error.code,
            float(after) if after.isdigit() else None,
        )


class _Refused(Exception):
    """An HTTP status of failure."""

    def __init__(self, message: str, status: int, after_s: float | None):
        super().__init__(message)
        self.status = status
        self.after_s = after_s
