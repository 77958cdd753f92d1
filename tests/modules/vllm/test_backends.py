"""The documented names over vLLM: each of them is an engine, or a function of one, that really works."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest
import torch

from llmrl.errors import ConfigError, RolloutError, WeightSyncError
from llmrl.modules.llm import vLLMWrapper
from llmrl.modules.llm.backends.vllm import LLMOnDevice, make_vllm_worker, stateless_init_process_group, vLLMWorker
from llmrl.modules.llm.engines import Engine, SamplingParams, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm.factory import visible
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import weight_groups
from tests.support.processes import free_port
from tests.support.refusals import refusals
from tests.support.vllm import SameScores

PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]
PROBE = SameScores(PROMPTS, bound=1e-4)


@pytest.fixture
def folder(tmp_path):
    tiny_model(tiny_tokenizer(), heads=2).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def trainer(seed):
    model = tiny_model(tiny_tokenizer(), heads=2, seed=seed).eval()
    return model, TransformersEngine(model, eos_token_ids=(), pad_token_id=0)


def worker(**arguments):
    return lambda: make_vllm_worker(model_name="x", **arguments)


test_devices_and_ranks_that_cannot_be_are_refused_before_anything_starts = refusals(
    (ConfigError, "exclude each other", worker(devices=[0], num_devices=1)),
    (ConfigError, "num_devices .*at least 1: got 0", worker(num_devices=0)),
    (ConfigError, "a GPU with a number: got cpu", worker(devices=[torch.device("cpu")])),
    (ConfigError, r"different GPUs, at least one: got \[1, 1\]", worker(devices=[1, 1], make_ray_worker=False)),
    (ConfigError, "needs dtype float32: got 'bfloat16'", worker(enable_fp32_output=True, dtype="bfloat16")),
    (ConfigError, r"within 0..1: got 2", lambda: stateless_init_process_group("127.0.0.1", 1, 2, 2)),
)


def test_a_process_sees_the_chosen_devices_as_this_one_numbers_them(monkeypatch):
    variable = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(variable, raising=False)
    with visible([2, 0]):
        assert os.environ[variable] == "2,0"
    assert variable not in os.environ
    monkeypatch.setenv(variable, "4,5,7")
    with visible([2, 0]):
        assert os.environ[variable] == "7,4"
    with visible(None):
        assert os.environ[variable] == "4,5,7"
    assert os.environ[variable] == "4,5,7"


@pytest.mark.vllm
def test_a_local_worker_generates_takes_weights_and_takes_broadcasts(folder, monkeypatch):
    options = {"enforce_eager": True, "enable_fp32_output": True, "max_model_len": 128, "eos_token_ids": ()}
    with closing(make_vllm_worker(model_name=folder, make_ray_worker=False, **options)) as engine:
        assert isinstance(engine, LLMOnDevice)
        assert isinstance(engine, VLLMEngine)
        model, reference = trainer(seed=1)
        with pytest.raises(AssertionError, match="scores differ"):
            PROBE(engine.score, reference.score)
        engine.update_weights(weight_groups(model), version=3)
        PROBE(engine.score, reference.score)
        assert engine.generate(PROMPTS, SamplingParams(max_new_tokens=2)).version == 3

        call = engine.core.llm.collective_rpc
        with pytest.raises(WeightSyncError, match="init_weight_update_group must come before"):
            call(vLLMWorker.update_weight, args=("x", "float32", [1]))
        port, (model, reference) = free_port(), trainer(seed=2)
        with ThreadPoolExecutor(1) as pool:  # rank 0 is the trainer
            joining = pool.submit(stateless_init_process_group, "127.0.0.1", port, 0, 2, "cpu")
            call(vLLMWorker.init_weight_update_group, args=("127.0.0.1", port, 1, 2))
            group = joining.result(60)
        assert call(vLLMWorker.check_weights_changed) == [False]
        for name, tensor in model.state_dict().items():
            group.broadcast(tensor, src=0)
            call(vLLMWorker.update_weight, args=(name, str(tensor.dtype), list(tensor.shape)))
        assert call(vLLMWorker.check_weights_changed) == [False]  # they are kept until all are there
        runner, done = engine.core.llm.llm_engine.model_executor.driver_worker.worker.model_runner, []
        for name in ("reset_encoder_cache", "reset_lora_state"):
            monkeypatch.setattr(runner, name, partial(done.append, name), raising=False)
        call(vLLMWorker.apply_weights)
        assert done == ["reset_encoder_cache", "reset_lora_state"]
        assert call(vLLMWorker.check_weights_changed) == [True]
        engine.core.llm.reset_prefix_cache()
        PROBE(engine.score, reference.score)


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
def test_an_engine_in_a_ray_actor_is_a_policy_like_any_other(folder):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        engine = make_vllm_worker(model_name=folder, max_model_len=128, eos_token_ids=(), seed=0)
        assert isinstance(engine, Engine)
        model, reference = trainer(seed=1)
        engine.update_weights(weight_groups(model), version=5)
        assert PROBE(engine.score, reference.score) < 1e-5
        with pytest.raises(WeightSyncError, match=r"'model.norm.weight' is missing"):
            engine.update_weights({n: t for n, t in model.state_dict().items() if n != "model.norm.weight"}, version=6)
        assert engine.version == 5
        short, policy = SamplingParams(max_new_tokens=4), vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 4})
        drawn, again = (one.generate(PROMPTS, short, seeds=[1, 2]) for one in (engine, policy.engine))
        assert drawn.version == 5
        assert [ids.tolist() for ids in drawn.ids] == [ids.tolist() for ids in again.ids]
        ray.kill(engine._actor)
        with pytest.raises(RolloutError, match="the actor must be alive to answer generate"):
            engine.generate(PROMPTS, short)
        engine.close()
        engine.close()
        with pytest.raises(RolloutError, match=r"close\(\) was called"):
            engine.score(PROMPTS)
    finally:
        ray.shutdown()
