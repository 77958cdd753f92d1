"""Several servers as one engine: rows shared out, a killed server's rows asked again elsewhere, its return noticed."""

import os
import signal
import threading
from contextlib import closing

import pytest
import torch

from llmrl.errors import ConfigError, RolloutError
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.modules.llm.engines.vllm.pool import PoolCore
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_tokenizer, meta_model
from llmrl.train.planning.engines import plan_engine
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.settings import GRPOConfig
from llmrl.train.tasks import Task
from llmrl.weight_update import publish
from tests.support.vllm import (
    BackgroundCall,
    assert_rows_close,
    serving_in_one_process,
    stepped,
    trainer_log_probs,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302], [5, 6])]
SHORT, LONG = SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=900)


@pytest.fixture(scope="module")
def second_server(served_folder):
    with serving_in_one_process(served_folder) as server:
        yield server


def check_weights(engine, model, version):
    drawn = engine.generate(PROMPTS, SHORT)
    assert drawn.version == version
    assert_rows_close(drawn.log_probs, trainer_log_probs(model, PROMPTS, drawn))


def run_settings(folder, model, url, **rollout):
    """The configuration of a run with ``model``, and its task."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    env = {"name": "sums", "max_prompt_tokens": 64}
    rollout = {"engine": "vllm", "servers": [url], **rollout}
    config = GRPOConfig(model=str(folder), env=env, rollout=rollout, sampling={"max_tokens": 8}, dtype="float32")
    return config, Task(config.env, load_tokenizer(config, runs=folder))


@pytest.mark.parametrize(
    ("sizes", "rollout", "message"),
    [
        ({"architecture": "gemma", "heads": 2, "hidden_size": 32}, {}, r"its hidden_size is 64, expected 32"),
        ({"architecture": "qwen2", "heads": 2}, {}, r"its model_type is gemma, expected qwen2"),
        ({"architecture": "gemma", "heads": 2, "vocab_size": 600}, {}, r"its vocab_size is \d+, expected 600"),
        ({"architecture": "gemma", "heads": 2}, {"sleep": True}, r"sleep is fixed when a server is started"),
    ],
    ids=["size", "kind", "vocabulary", "setting"],
)
def test_a_server_of_another_model_is_refused_in_the_plan(tmp_path, vllm_server, sizes, rollout, message):
    config, task = run_settings(tmp_path, tiny_model(tiny_tokenizer(), **sizes), vllm_server.url, **rollout)
    with Session(config) as session, pytest.raises(ConfigError, match=message):
        plan_engine(config, session, 0, meta_model(config, task.tokenizer, runs=tmp_path))


def test_a_run_gives_servers_its_weights_before_the_first_rollout(tmp_path, vllm_server):
    model = tiny_model(tiny_tokenizer(), architecture="gemma", heads=2, seed=7)
    config, task = run_settings(tmp_path, model, vllm_server.url)
    with Session(config) as session:
        plan = plan_engine(config, session, 0, meta_model(config, task.tokenizer, runs=tmp_path))
        assert plan.place == f"vLLM behind {vllm_server.url}"
        with closing(RolloutEngine(config, session, model, task.tokenizer, plan)) as rollouts:
            check_weights(rollouts.policy.engine, model, 0)


def test_answers_to_one_prompt_come_from_one_server_as_far_as_the_load_stays_even():
    core = PoolCore.__new__(PoolCore)
    core._lock, core._lost, core._in_flight = threading.Lock(), {}, {"a": 0, "b": 2}
    parts = core._assign(range(10), [[1]] * 4 + [[2]] * 4 + [[3]] * 2)
    assert parts == {"a": [0, 1, 2, 3, 8, 9], "b": [4, 5, 6, 7]}
    assert core._in_flight == {"a": 6, "b": 6}
    core._in_flight = {"a": 0, "b": 0}
    assert core._assign(range(5), [[1]] * 5) == {"a": [0, 1, 2], "b": [3, 4]}, "one prompt alone is shared out"


def test_servers_must_be_different_and_at_least_one():
    for urls in ([], ["http://localhost:1"] * 2):
        with pytest.raises(ConfigError, match="must be different, at least one"):
            VLLMEngine(urls)


def test_two_servers_share_rows_and_one_that_dies_is_done_without_until_it_is_back(vllm_server, second_server):
    model = tiny_model(tiny_tokenizer(), architecture="gemma", heads=2)
    engine = VLLMEngine([vllm_server.url, second_server.url], eos_token_ids=(), seed=0)
    first, second = engine.core._in_flight
    try:
        publish(stepped(model, 1, size=0.05), engine)
        check_weights(engine, model, 1)
        engine.update_weights(stepped(model, 9).state_dict(), version=1, backend="nccl")  # by a store, on a CPU
        for core in (first, second):
            engine.core._in_flight = {core: 0}
            check_weights(engine, model, 1)  # the workers of both servers were members of one group
        engine.core._in_flight = {first: 0, second: 0}

        # Another rank, which sends nothing.
        other = VLLMEngine([second_server.url, vllm_server.url], eos_token_ids=(), seed=0)
        other_second, other_first = other.core._in_flight
        assert other.address == engine.address, "by which ranks find the one that sends"
        publish(model, other, 1, sends=False)
        other.core.labels = engine.core.labels
        check_weights(other, model, 1)

        engine.take_gauges()
        engine.generate(PROMPTS, SHORT)
        assert engine.take_gauges()["prefix_queries"] == sum(map(len, PROMPTS)), "of both together"
        call = BackgroundCall(lambda: engine.generate(PROMPTS, LONG, seeds=[1, 2, 3, 4]))
        wait_until(lambda: vllm_server.is_drawing() and second_server.is_drawing())
        assert list(engine.core._in_flight.values()) == [2, 2], "least loaded first"
        second_server.kill()
        drawn = call.result()
        assert [len(ids) for ids in drawn.ids] == [900] * 4
        assert engine.take_gauges() == {}, "what the lost server counted is not known"
        again = engine.generate(PROMPTS, LONG, seeds=[1, 2, 3, 4])
        assert all(torch.equal(ids[:50], other[:50]) for ids, other in zip(drawn.ids, again.ids, strict=True))
        assert list(engine.core._in_flight) == [first], "nothing is asked of a lost server"
        publish(stepped(model, 2, size=0.05), engine)
        check_weights(engine, model, 2)

        second_server.start()  # with the weights of its files
        check_weights(engine, model, 2)
        other.core.labels = {**engine.core.labels, second_server.url: "of a version before"}
        other.version = 2
        check_weights(other, model, 2)
        assert list(other.core._in_flight) == [other_first], "it was asked, and said that it has other weights"
        publish(stepped(model, 3, size=0.05), engine)
        assert list(engine.core._in_flight) == [first, second], "back, with the weights of the others"
        check_weights(engine, model, 3)
        publish(model, other, 3, sends=False)
        other.core.labels = engine.core.labels
        assert set(other.core._in_flight) == {other_first, other_second}
        check_weights(other, model, 3)

        other.core._lose(other_first, "busy")
        other.core._lose(other_second, "busy")
        check_weights(other, model, 3)  # both still have the weights
        other.close()

        for server in (vllm_server, second_server):
            os.killpg(server.process.pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match="a server must be left: all are lost"):
            engine.generate(PROMPTS, SHORT)
    finally:
        engine.close()
        for server in (vllm_server, second_server):
            server._await_end()
