"""Health checks of an HTTP server."""

from __future__ import annotations

import socket
import threading

from llmrl.concurrency.server_process import ServerProcess


def test_a_port_that_repeats_what_it_reads_is_not_a_server():
    """As a connection does that a free ephemeral port makes to itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(connection.recv(4096))

        thread = threading.Thread(target=echo)
        thread.start()
        server = ServerProcess(f"http://127.0.0.1:{listener.getsockname()[1]}", [], {}, output=None)
        assert not server.answers()
        thread.join()
