"""HTTP to servers that answer slowly, endlessly or not at all: a request ends at its deadline, an answer is bounded."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.engines.vllm.connections import Connections
from llmrl.modules.llm.engines.vllm.health_monitor import Pulse
from llmrl.modules.llm.engines.vllm.server import served_model

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n"
PATIENCE_S = 20.0


@contextmanager
def serving(answer):
    """A server that reads a request and then does ``answer(send)``, for every connection; its URL."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def one(peer):
            with peer, contextlib.suppress(OSError):
                while not ended.is_set() and peer.recv(1 << 16):
                    answer(lambda data: None if ended.wait(0.002) else peer.sendall(data))

        def run():
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listening.accept()
                    threading.Thread(target=one, args=[peer], daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def connected(answer, **options):
    with serving(answer) as url:
        connections = Connections(url, **options)
        try:
            yield connections
        finally:
            connections.close()


def ask(connections, seconds=PATIENCE_S):
    return connections.ask("GET", "/path", end=time.monotonic() + seconds)


def drip(*pieces):
    """Sends the pieces, and then the last one again and again, a byte at a time."""

    def answer(send):
        for piece in pieces[:-1]:
            send(piece)
        for _ in range(5000):
            send(pieces[-1])

    return answer


@pytest.mark.parametrize(
    "answer",
    [drip(b"H"), drip(b"HTTP/1.1 200 OK\r\nA: ", b"b"), drip(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b" ")],
    ids=["status", "header", "body"],
)
def test_a_server_that_drips_bytes_ends_at_the_deadline_of_the_request(answer):
    """Regression: every byte began the wait anew."""
    with connected(answer) as connections, pytest.raises(DeadlineError, match=r"/path must answer within 0\.2 s"):
        ask(connections, 0.2)


@pytest.mark.parametrize(
    "head", [HEAD, b"HTTP/1.0 200 OK\r\n\r\n", HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")]
)
def test_an_answer_in_pieces_is_read_whole(head):
    pieces = [head[:5], head[5:], b'{"found"', b": 42}\n"]

    def answer(send):
        for piece in pieces:
            send(piece)
        if head != HEAD:
            raise OSError  # closes

    with connected(answer) as connections:
        assert [ask(connections), ask(connections)] == [{"found": 42}] * 2


@pytest.mark.parametrize("head", [b"Content-Length: 100000000000", b"Transfer-Encoding: chunked", b"A: b"])
def test_an_answer_without_end_is_refused_once_it_is_too_large(head):
    """Regression: it was read until memory ended."""

    def answer(send):
        send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        for _ in range(5000):
            send(b"400\r\n" + b"x" * 1024 + b"\r\n" if b"chunked" in head else b"x" * 1024)

    with connected(answer, max_bytes=10_000) as connections:
        for _ in range(2):  # the second time over a new connection
            with pytest.raises(RolloutError, match="/path must answer in at most 10000 bytes: it sends more"):
                ask(connections)


def test_an_answer_of_the_largest_size_is_read():
    with connected(lambda send: send(HEAD + b'{"found": 42}\n'), max_bytes=14) as connections:
        assert ask(connections) == {"found": 42}


def test_an_answer_that_nests_without_end_is_refused():
    text = b"[" * 100_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text)
    with connected(lambda send: send(head + text)) as connections, pytest.raises(RolloutError, match="it nests"):
        ask(connections)


def test_a_server_that_accepts_and_stays_silent_is_named_at_the_deadline_of_its_first_answer():
    """Regression: the deadline of the first tokens, 120 s, was that of the first answer."""
    with serving(lambda send: threading.Event().wait(PATIENCE_S)) as url:
        with pytest.raises(DeadlineError, match=rf"{url}/v1/models must answer within 0\.2 s"):
            VLLMEngine(url, connect_s=0.2)
        with pytest.raises(DeadlineError, match=rf"{url}/v1/models must answer within 0\.2 s"):
            served_model(url, timeout_s=0.2)
    with pytest.raises(ConfigError, match="connect_s must be positive: got 0"):
        VLLMEngine("http://localhost:1", connect_s=0)


def test_a_health_check_that_drips_is_silence(monkeypatch):
    monkeypatch.setattr("llmrl.modules.llm.engines.vllm.health_monitor._PERIOD_S", 0.02)
    said, heard = [], threading.Event()

    def on_silence(why):
        said.append(why)
        heard.set()

    with connected(drip(b"H")) as connections, Pulse(connections.connect, 0.1, on_silence).beating():
        assert heard.wait(PATIENCE_S)
    assert said[0] == "must answer /health within 0.1 s: it did not"
