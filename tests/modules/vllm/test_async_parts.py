"""What an engine in its own process is put together from: who waits for whom, what a dead process said, silent servers.
Needs no vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from llmrl.concurrency.shared_exclusive_lock import Gate
from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.modules.llm.engines import AsyncVLLMEngine, SamplingParams, VLLMEngine
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.process_monitor import LogTail, fate

PATIENCE_S = 20.0  # a test that would wait for ever fails after so long


def later():
    return time.monotonic() + PATIENCE_S


def thread(target):
    started = threading.Thread(target=target, daemon=True)
    started.start()
    return started


def until(condition):
    end = later()
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.002)


# --- the gate


def test_requests_share_the_gate_and_an_update_has_it_alone():
    gate, both, order = Gate(), threading.Barrier(3), []

    def request():
        with gate.holding("request", later(), "generating"):
            both.wait(PATIENCE_S)  # passes only if two are inside at the same time
            both.wait(PATIENCE_S)
            order.append("request")

    def update():
        with gate.holding(object(), later(), "updating"):
            order.append(("update", gate.num_inside))

    threads = [thread(request), thread(request)]
    both.wait(PATIENCE_S)
    threads.append(thread(update))
    until(lambda: gate._waiting)
    both.wait(PATIENCE_S)
    for one in threads:
        one.join(PATIENCE_S)
    assert order == ["request", "request", ("update", 1)]
    assert gate.num_inside == 0


def test_requests_that_come_after_an_update_wait_behind_it():
    """Else a stream of requests would keep it out for ever."""
    gate, leave, order = Gate(), threading.Event(), []

    def enter(key, name):
        with gate.holding(key, later(), name):
            order.append(name)

    def first():
        with gate.holding("request", later(), "first"):
            leave.wait(PATIENCE_S)

    threads = [thread(first)]
    until(lambda: gate.num_inside)
    for number, (key, name) in enumerate([(object(), "update"), ("request", "second"), ("request", "third")]):
        threads.append(thread(lambda key=key, name=name: enter(key, name)))
        until(lambda number=number: len(gate._waiting) == number + 1)
    assert order == []
    leave.set()
    for one in threads:
        one.join(PATIENCE_S)
    assert order[0] == "update"
    assert sorted(order[1:]) == ["second", "third"]


def test_whoever_cannot_enter_by_the_deadline_says_so_and_is_gone():
    gate = Gate()
    with gate.holding("request", later(), "generating"):
        update = gate.holding(object(), time.monotonic() + 0.05, "loading version 3")
        with pytest.raises(DeadlineError, match="version 3 must begin before its deadline: 1 other calls"), update:
            pass

        def request():
            with gate.holding("request", later(), "generating"):
                entered.append(gate.num_inside)

        entered = []
        thread(request).join(PATIENCE_S)
        assert entered == [2]  # the one that gave up is in nobody's way
    assert gate.num_inside == 0


def test_what_is_done_about_those_inside_is_done_once_nobody_new_comes_in():
    gate, leave, seen = Gate(), threading.Event(), []

    def inside():
        with gate.holding("request", later(), "generating"):
            leave.wait(PATIENCE_S)

    def make_way():
        seen.append([ticket.key for ticket in gate._waiting])
        leave.set()

    running = thread(inside)
    until(lambda: gate.num_inside)
    mine = object()
    with gate.holding(mine, later(), "updating", make_way):
        running.join(PATIENCE_S)
    assert seen == [[mine]]
    with gate.holding(mine, later(), "updating", lambda: seen.append("nobody was inside")):
        assert len(seen) == 1


# --- what a process said


CHILD = """
import os, sys
print("ready", flush=True)
for line in range(40):
    print(f"line {line}", file=sys.stderr, flush=True)
sys.stdin.read(1)
os.abort()
"""


def test_the_last_lines_of_a_dead_process_are_kept_and_passed_on(capfd):
    async def run():
        log = LogTail(asyncio.get_running_loop())
        with log.inherited():
            child = subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", CHILD], stdin=subprocess.PIPE)
        child.stdin.write(b"x")
        child.stdin.close()
        await asyncio.to_thread(child.wait, PATIENCE_S)
        log.drain()
        text = log.lines()
        log.close()
        return text

    descriptors = len(os.listdir("/proc/self/fd"))
    text = asyncio.run(run())
    assert "Fatal Python error: Aborted" in text
    assert "line 39" in text
    assert "line 5\n" not in text  # there is an end to what is kept
    out, err = capfd.readouterr()
    assert out == "ready\n"
    assert "line 0\n" in err
    assert "Aborted" in err
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_this_process_prints_meanwhile_reaches_where_it_would_have_gone(capfd):
    async def run():
        log = LogTail(asyncio.get_running_loop())
        with log.inherited():
            os.write(1, b"on the way\n")
        log.drain()
        assert log.lines() == "Its last lines:\n  on the way"
        log.close()
        os.write(1, b"afterwards\n")

    asyncio.run(run())
    assert capfd.readouterr().out == "on the way\nafterwards\n"


def test_noise_is_neither_kept_nor_passed_on(capfd):
    async def run():
        log = LogTail(asyncio.get_running_loop(), adapter.NOISE)
        with log.inherited():
            os.write(2, b"before\nTriton is installed, but doesn't include CPU backend. Disabling Triton.\nafter\n")
        log.drain()
        assert log.lines() == "Its last lines:\n  before\n  after"
        log.close()

    asyncio.run(run())
    assert capfd.readouterr().err == "before\nafter\n"


def test_the_fate_of_a_process_is_named():
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=[60.0])
    process.start()
    assert fate(process) == "runs"
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: fate(process) == "is stopped")
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    assert fate(process) == "was killed by SIGKILL"
    process = context.Process(target=sys.exit, args=[3])
    process.start()
    process.join(PATIENCE_S)
    assert fate(process) == "ended with exit code 3"


# --- servers


class Completions(BaseHTTPRequestHandler):
    """Speaks as a vLLM server does; ``hang(path)`` may hold an answer back."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.hang(self.path)
        self.say({} if self.path == "/health" else {"data": [{"id": "m", "root": "m", "max_model_len": 64}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "allowed_token_ids" not in body:
            self.server.hang(self.path)
        count = body["max_tokens"]
        log_probs = {"token_logprobs": [0.0] * count}
        choice = {"token_ids": [7] * count, "logprobs": log_probs, "finish_reason": "length"}
        self.say({"choices": [choice | {"prompt_token_ids": body["prompt"]}]})

    def say(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(hang):
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        server.hang, server.daemon_threads, server.block_on_close = hang, True, False
        running = thread(server.serve_forever)
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            running.join(PATIENCE_S)


def pulses():
    return [one.name for one in threading.enumerate() if one.name == "llmrl-vllm-pulse"]


def test_a_server_that_falls_silent_is_noticed_long_before_the_deadline():
    silent, released = threading.Event(), threading.Event()

    def hang(path):
        if silent.is_set():
            released.wait(PATIENCE_S)

    with serving(hang) as (_, url):
        engine = VLLMEngine(url, eos_token_ids=(), silence_s=0.3)
        assert engine.generate([torch.tensor([1])], SamplingParams(max_new_tokens=3)).ids[0].tolist() == [7, 7, 7]
        silent.set()
        began = time.monotonic()
        with pytest.raises(RolloutError, match=r"must answer /health within 0\.3 s: it did not, so /v1/comp"):
            engine.generate([torch.tensor([1])] * 5, SamplingParams(max_new_tokens=3))
        assert time.monotonic() - began < 5.0
        silent.clear()
        released.set()
        assert len(engine.generate([torch.tensor([1])] * 2, SamplingParams(max_new_tokens=3)).ids) == 2
        engine.close()
    until(lambda: not pulses())


def test_a_slow_answer_of_a_server_that_lives_is_waited_for():
    def hang(path):
        if path == "/v1/completions":
            threading.Event().wait(1.6)  # longer than the period and the silence that is allowed

    with serving(hang) as (_, url):
        engine = VLLMEngine(url, eos_token_ids=(), silence_s=0.3)
        assert len(engine.generate([torch.tensor([1])] * 3, SamplingParams(max_new_tokens=2)).ids) == 3
        engine.close()


def test_a_request_to_a_server_ends_at_its_deadline():
    released = threading.Event()

    def hang(path):
        if path == "/v1/completions":
            released.wait(PATIENCE_S)

    with serving(hang) as (_, url):
        engine = VLLMEngine(url, eos_token_ids=(), timeout_s=0.4)
        with pytest.raises(DeadlineError, match=r"/v1/completions must answer within 0\.4 s"):
            engine.generate([torch.tensor([1])], SamplingParams(max_new_tokens=2))
        released.set()
        engine.close()


# --- arguments


def test_settings_that_cannot_be_run_are_refused():
    with pytest.raises(ConfigError, match="in_flight must be 'finish' or 'abort': got 'drop'"):
        AsyncVLLMEngine("model", in_flight="drop")
    with pytest.raises(ConfigError, match="timeout_s must be positive: got 0"):
        VLLMEngine("model", timeout_s=0)
    with pytest.raises(ConfigError, match="own_process can only be set where the engine is built"):
        AsyncVLLMEngine("http://localhost:1")
