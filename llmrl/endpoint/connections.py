"""Connections of uvicorn that write the head of an answer together with its body."""

from __future__ import annotations

import asyncio
from typing import Any


def with_joined_writes(protocol: type[Any]) -> type[Any]:
    """uvicorn's ``protocol`` with one write for an answer: each is a system call, and wakes a client that then waits
    again.
    """

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        protocol.connection_made(self, _HeadWithBody(transport, self.loop))

    return type(protocol.__name__, (protocol,), {"connection_made": connection_made})


class _HeadWithBody:
    """A transport that keeps the head of an answer until something follows, or the loop's next turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/"):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._flush(data)

    def _flush(self, data: bytes = b"") -> None:
        if whole := self._head + data:
            self._head = b""
            self._transport.write(whole)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
