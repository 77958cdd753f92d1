"""Engines that die, stop, or are closed while somebody waits for them: whoever waits gets an error within seconds, and
nothing is left. Processes are really killed. Servers are in ``test_server``, an engine that dies while it is sent
weights in ``test_own_process``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import DeadlineError, RolloutError, WeightSyncError
from llmrl.modules.llm import vLLMWrapper
from llmrl.modules.llm.engines import AsyncVLLMEngine, SamplingParams, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.async_rollouts import RolloutsAhead

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]
LONG, SHORT = SamplingParams(max_new_tokens=1900), SamplingParams(max_new_tokens=5)
SOON_S = 10.0  # after which everything has to have ended


def process(engine):
    return engine.core._processes[0].pid


def lives(engine):
    try:
        return engine.core._processes[0].is_alive()
    except RolloutError:
        return False  # it was closed


def has_weights_of(engine, model, trainer_says):
    drawn = engine.generate(PROMPTS, SHORT)
    for said, right in zip(drawn.log_probs, trainer_says(model, PROMPTS, drawn), strict=True):
        torch.testing.assert_close(said, right, atol=1e-4, rtol=0)
    return True


def is_drawing(engine, count):
    return lambda: engine.core.llm.output_processor.get_num_unfinished_requests() == count


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, heads=2)


@pytest.fixture(scope="module")
def engine(model, tokenizer, system):
    """At its end nothing is left, whatever the tests did to it."""
    before, sockets = system.footprint(), open_sockets()
    engine = AsyncVLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, max_model_len=2048)
    used = system.shared_files()
    yield engine
    used |= system.shared_files()
    engine.close()
    system.wait_until(lambda: system.footprint() == before and not system.left_in_memory(used))
    assert open_sockets() == sockets


@pytest.fixture
def alive(engine, model):
    """The engine, and whatever became of it in the test before, it runs version 7 of the trainer's weights."""
    if not lives(engine):
        engine.restart(model.state_dict())
    engine.update_weights(model.state_dict(), version=7)
    assert len(engine.generate(PROMPTS, SHORT).ids) == 2
    return engine


# --- the process


def test_calls_end_when_the_process_dies_while_it_draws_and_a_new_one_has_the_weights(alive, model, trainer_says, ask):
    changed = tiny_model(tiny_tokenizer(), heads=2)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.3)
    alive.update_weights(changed.state_dict(), version=8)
    calls = [ask(lambda: alive.generate(PROMPTS, LONG)) for _ in range(8)]
    wait = threading.Event()
    while not is_drawing(alive, 16)():
        wait.wait(0.01)
    since, pid = time.monotonic(), process(alive)
    os.kill(pid, signal.SIGABRT)
    for error in ask.errors(calls, since):
        assert isinstance(error, RolloutError)
        assert f"while it is generating 2 rows: process {pid} (EngineCore) was killed by SIGABRT." in str(error)
        assert "Its last lines:" in str(error)
        assert "in run_engine_core" in str(error)  # the stack of the crash
    since = time.monotonic()
    with pytest.raises(RolloutError, match="was killed by SIGABRT"):
        alive.generate(PROMPTS, SHORT)
    with pytest.raises(WeightSyncError, match=r"was killed by SIGABRT(?s:.*)Nothing was updated"):
        alive.update_weights(model.state_dict(), version=9)
    with pytest.raises(WeightSyncError, match="restart needs the weights of version 8"):
        alive.restart()
    assert time.monotonic() - since < SOON_S
    alive.restart(changed.state_dict())
    assert alive.version == 8
    assert has_weights_of(alive, changed, trainer_says)
    assert alive.generate(PROMPTS, SHORT).version == 8


def test_a_process_that_stops_answering_is_left_at_the_deadline_and_taken_up_again(alive, model, trainer_says):
    alive.timeout_s = 1.0
    os.kill(process(alive), signal.SIGSTOP)
    try:
        since = time.monotonic() + 1.0
        for call in (
            lambda: alive.generate(PROMPTS, SHORT),
            lambda: alive.score(PROMPTS),
            lambda: alive.score(PROMPTS, temperature=0.5),
        ):
            with pytest.raises(DeadlineError, match=rf"before its deadline: process {process(alive)} .*is stopped"):
                call()
        assert time.monotonic() - since < SOON_S
        since = time.monotonic() + 1.0
        with pytest.raises(WeightSyncError, match="is stopped"):
            alive.update_weights(model.state_dict(), version=9)
        assert time.monotonic() - since < SOON_S
    finally:
        os.kill(process(alive), signal.SIGCONT)
        alive.timeout_s = None
    assert alive.generate(PROMPTS, SHORT).version == 7
    assert has_weights_of(
        alive, model, trainer_says
    )  # at temperature 1: the one that was asked for while it stood still is gone


def test_an_update_ends_when_the_process_dies_under_it(alive, model, system, ask):
    os.kill(process(alive), signal.SIGSTOP)  # so that it is surely under way
    call = ask(lambda: alive.update_weights(model.state_dict(), version=9))
    system.wait_until(lambda: alive.core._turns.num_inside == 1)
    since = time.monotonic()
    os.kill(process(alive), signal.SIGKILL)
    [error] = ask.errors([call], since)
    assert isinstance(error, WeightSyncError)
    assert "was killed by SIGKILL" in str(error)
    assert alive.version == 7


def test_rollouts_ahead_end_when_the_engine_is_closed_under_them(alive, tokenizer, system):
    """What Ctrl-C does to a run that samples ahead: the engine is closed, then the thread is joined."""
    policy = vLLMWrapper(alive, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 1900})
    env = DatasetChatEnv(dataset=[{"query": f"{n}?"} for n in range(6)], num_envs=6, max_steps=4)
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True, concurrency=6)
    ahead = RolloutsAhead(collector, SimpleNamespace(autocast=nullcontext))
    ahead.begin()
    system.wait_until(is_drawing(alive, 6))
    since = time.monotonic()
    collector.shutdown(close_env=False)
    alive.close()
    ahead.close()
    assert time.monotonic() - since < 2 * SOON_S
    with pytest.raises(RolloutError, match=r"close\(\) was called"):
        ahead.take()
    env.close()


def open_sockets():
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except OSError:
            continue  # of the listing itself
    return count


# --- this process


def test_an_engine_in_this_process_keeps_deadlines_and_closes_under_a_call(model, tokenizer, system, ask):
    before = system.footprint()
    engine = VLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, max_model_len=2048)
    engine.generate(PROMPTS, SHORT)
    engine.timeout_s = 0.5
    since = time.monotonic() + 0.5
    with pytest.raises(DeadlineError, match="generating must end before its deadline: the engine in this process"):
        engine.generate(PROMPTS, LONG)
    assert time.monotonic() - since < SOON_S
    engine.timeout_s = None
    assert len(engine.generate(PROMPTS, SHORT).ids) == 2  # nothing of the call that was given up is in its way
    call = ask(lambda: engine.generate(PROMPTS, LONG))
    system.wait_until(engine.core.llm.llm_engine.has_unfinished_requests)
    since = time.monotonic()
    engine.close()
    [error] = ask.errors([call], since)
    assert "close() was called while it was generating" in str(error)
    system.wait_until(lambda: system.footprint() == before)
