"""Servers that answer slowly, endlessly, wrongly or not at all: requests end at their deadline, answers are bounded,
silence is noticed. Needs no vLLM.
"""

import contextlib
import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.modules.llm.engines.vllm import http
from llmrl.modules.llm.engines.vllm.http import Connections, HealthMonitor
from llmrl.modules.llm.engines.vllm.server import served_model
from tests.support.vllm import wait_until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n"
PATIENCE_S = 60.0
PROMPT = torch.tensor([1])


@contextmanager
def answering(answer):
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
def connected(answer):
    with answering(answer) as url:
        connections = Connections(url)
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
    """Regression: every byte restarted the wait."""
    with connected(answer) as connections, pytest.raises(DeadlineError, match=r"/path must answer within 0\.2 s"):
        ask(connections, 0.2)


@pytest.mark.parametrize(
    "head", [HEAD, b"HTTP/1.0 200 OK\r\n\r\n", HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")]
)
def test_an_answer_in_pieces_is_read_whole(head, monkeypatch):
    monkeypatch.setattr(http, "_LARGEST_ANSWER", 14)  # exactly its size
    pieces = [head[:5], head[5:], b'{"found"', b": 42}\n"]

    def answer(send):
        for piece in pieces:
            send(piece)
        if head != HEAD:
            raise OSError  # closes

    with connected(answer) as connections:
        assert [ask(connections), ask(connections)] == [{"found": 42}] * 2


@pytest.mark.parametrize("head", [b"Content-Length: 100000000000", b"Transfer-Encoding: chunked", b"A: b"])
def test_an_answer_without_end_is_refused_once_it_is_too_large(head, monkeypatch):
    """Regression: it was read until memory ended."""
    monkeypatch.setattr(http, "_LARGEST_ANSWER", 10_000)

    def answer(send):
        send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        for _ in range(5000):
            send(b"400\r\n" + b"x" * 1024 + b"\r\n" if b"chunked" in head else b"x" * 1024)

    with connected(answer) as connections:
        for _ in range(2):  # the second time over a new connection
            with pytest.raises(RolloutError, match="at most 10000 bytes: it sends more"):
                ask(connections)


def test_an_answer_that_nests_without_end_is_refused():
    text = b"[" * 100_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text)
    with connected(lambda send: send(head + text)) as connections, pytest.raises(RolloutError, match="nests"):
        ask(connections)


def test_a_health_check_that_drips_interrupts_what_waits(monkeypatch):
    monkeypatch.setattr(http, "_PERIOD_S", 0.02)
    interrupted = pytest.raises(RolloutError, match=r"gave up on .*/path: the server must answer /health within 0\.1 s")
    with connected(drip(b"H")) as connections, HealthMonitor(connections, 0.1).watching(), interrupted:
        ask(connections)


def test_a_health_check_asks_about_the_server_also_when_the_engine_is_closed():
    """Regression: it failed, and its error took the place of the reason that the waits ended with."""
    with connected(lambda send: send(HEAD + b'{"found": 42}\n')) as connections:
        connections.interrupt_for_good()
        connections.check_health(PATIENCE_S)
        with pytest.raises(RolloutError, match="ConnectionAbortedError"):
            ask(connections)


def test_a_server_that_stays_silent_is_named_at_the_deadline_of_its_first_answer():
    """Regression: the deadline of the first tokens, 120 s, was that of the first answer."""
    with answering(lambda send: threading.Event().wait(PATIENCE_S)) as url:
        for call in (
            lambda: VLLMEngine(url, connect_s=0.2),
            lambda: VLLMEngine(url, timeout_s=0.2),
            lambda: served_model(url, timeout_s=0.2),
        ):
            with pytest.raises(DeadlineError, match=rf"{url}/v1/models must answer within 0\.2 s"):
                call()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmrl-vllm-server")]


def test_what_is_not_a_vllm_server_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RolloutError, match=f"{url}/v1/models must be reachable"):
            VLLMEngine(url)
    refused = pytest.raises(ConfigError, match="vllm serve: its answers lack 'data'")
    with answering(lambda send: send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) as url, refused:
        VLLMEngine(url)
    with pytest.raises(ConfigError, match="http://host:port"):
        VLLMEngine("http://")


class Completions(BaseHTTPRequestHandler):
    """Speaks as a vLLM server does; ``hang(path)`` may hold an answer back, or return another one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.hang(self.path)
        self.say({} if self.path == "/health" else {"data": [{"id": "m", "root": "m", "max_model_len": 64}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        other = None if "allowed_token_ids" in body else self.server.hang(self.path)
        count = body["max_tokens"]
        log_probs = {"token_logprobs": [0.0] * count}
        choice = {"token_ids": [7] * count, "logprobs": log_probs, "finish_reason": "length"}
        choices = {"choices": [choice | {"prompt_token_ids": body["prompt"]}]}
        self.say(other if isinstance(other, dict) else choices)

    def say(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@contextmanager
def completions(hang):
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        server.hang, server.daemon_threads, server.block_on_close = hang, True, False
        running = threading.Thread(target=server.serve_forever, daemon=True)
        running.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            running.join(PATIENCE_S)


def test_a_server_that_falls_silent_is_noticed_long_before_the_deadline():
    silent, released = threading.Event(), threading.Event()

    def hang(path):
        if silent.is_set():
            released.wait(PATIENCE_S)

    with completions(hang) as url:
        engine = VLLMEngine(url, eos_token_ids=(), silence_s=1.5)
        assert engine.generate([PROMPT], SamplingParams(max_new_tokens=3)).ids[0].tolist() == [7, 7, 7]
        silent.set()
        with pytest.raises(RolloutError, match=r"gave up on .*/v1/comp.*must answer /health within 1\.5 s"):
            engine.generate([PROMPT] * 5, SamplingParams(max_new_tokens=3))  # its own deadline is in 603 s
        assert not released.is_set()
        silent.clear()
        released.set()
        assert len(engine.generate([PROMPT] * 2, SamplingParams(max_new_tokens=3)).ids) == 2
        engine.close()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "llmrl-vllm-health"])


@pytest.mark.parametrize("answer", [{"error": {"message": "the engine is dead"}}, {"choices": []}])
def test_an_answer_without_a_completion_is_an_error_that_names_the_server(answer):
    """Regression: a KeyError."""
    with completions(lambda path: answer if path == "/v1/completions" else None) as url:
        engine = VLLMEngine(url, eos_token_ids=())
        with pytest.raises(
            RolloutError, match=rf"{url}/v1/completions must answer with choices: got .*{next(iter(answer))}"
        ):
            engine.generate([PROMPT], SamplingParams(max_new_tokens=2))
        engine.close()


def test_a_slow_answer_of_a_server_that_lives_is_waited_for():
    asked = threading.Semaphore(0)

    def hang(path):
        if path == "/health":
            asked.release()
        elif path == "/v1/completions":
            for _ in range(2):  # its health was asked for twice, a second apart: longer than the silence allowed
                assert asked.acquire(timeout=PATIENCE_S)

    with completions(hang) as url:
        engine = VLLMEngine(url, eos_token_ids=(), silence_s=1.5)
        assert len(engine.generate([PROMPT], SamplingParams(max_new_tokens=2)).ids) == 1
        engine.close()


def test_a_request_to_a_server_ends_at_its_deadline():
    released = threading.Event()
    with completions(lambda path: path == "/v1/completions" and released.wait(PATIENCE_S)) as url:
        engine = VLLMEngine(url, eos_token_ids=())
        engine.timeout_s = 0.4  # only now: building it may take longer
        with pytest.raises(DeadlineError, match=r"/v1/completions must answer within 0\.4 s"):
            engine.generate([PROMPT], SamplingParams(max_new_tokens=2))
        released.set()
        engine.close()
