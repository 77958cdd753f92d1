"""The port at which a collector's workers connect, authenticated by a secret key."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue

from llmrl.errors import ConfigError


@dataclass
class Address:
    """The address at which the owner listens; ``key`` is the secret by which both sides authenticate."""

    host: str
    port: int
    key: bytes = field(repr=False)


class Rendezvous:
    """Listens for workers; ``arrivals`` receives (index or None, process and host, connection) of each.

    host  the address for the workers; if ``is_local``, only processes of this machine can connect
    port  None: a free port
    """

    def __init__(self, host: str, port: int | None, *, is_local: bool, who: str):
        try:
            self._socket = socket.create_server((host if is_local else "", port or 0))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ConfigError(
                f"{who}: tcp_port={port} must be free on this machine: {error.strerror}; give another one, or none "
                "to use a free port."
            ) from error
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(32))
        self.arrivals: SimpleQueue[tuple[int | None, str, Connection]] = SimpleQueue()
        threading.Thread(target=self._accept, name="llmrl-rendezvous", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._socket.accept()
                # In a thread, so that a client that connects and sends nothing does not delay the workers.
                threading.Thread(target=self._greet, args=[Connection(client.detach())], daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        try:
            # Both sides prove that they have the key before any message is unpickled.
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            index, where = connection.recv()
        except (OSError, EOFError, multiprocessing.AuthenticationError):
            connection.close()  # not a worker of this collector
            return
        self.arrivals.put((index, where, connection))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


def connect(address: Address, index: int | None) -> Connection:
    """Worker's side: connects and authenticates; ``index`` None: the owner chooses it."""
    connection = Client((address.host, address.port), authkey=address.key)
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a machine that has failed
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.send((index, f"process {os.getpid()} on {socket.gethostname()}"))
    return connection
