"""vLLM's core in a process of its own: the same answers, weights through a file in memory, and nothing left behind."""

from __future__ import annotations

import os

import pytest
import torch

from llmrl.errors import ConfigError, RolloutError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]


def parity(engine, model, temperature):
    params = SamplingParams(max_new_tokens=6, temperature=temperature, top_k=20)
    drawn = engine.generate(PROMPTS, params, seeds=[1, 2])
    full = [torch.cat(row) for row in zip(PROMPTS, drawn.ids, strict=True)]
    expected = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score(full, temperature=temperature)
    rows = zip(PROMPTS, drawn.plain_log_probs, engine.score(full, temperature=temperature), expected, strict=True)
    for prompt, plain, score, right in rows:
        torch.testing.assert_close(plain, right[len(prompt) :], atol=1e-4, rtol=0)
        torch.testing.assert_close(score, right, atol=1e-4, rtol=0)
    return drawn


def test_an_engine_in_its_own_process_lives_and_leaves_like_one_in_this(tmp_path, system):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, architecture="gemma", heads=2)  # tied
    model.save_pretrained(tmp_path)
    before = system.footprint()
    engine = VLLMEngine(str(tmp_path), own_process=True, eos_token_ids=(), max_model_len=128, skip_tokenizer_init=True)
    assert len(system.footprint()[0]) > len(before[0])
    used = system.shared_files()
    assert not torch.distributed.is_initialized()
    old = parity(engine, model, 0.7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    for version in (1, 2):
        engine.update_weights(model.state_dict(), version=version)
        new = parity(engine, model, 1.0)
        assert (old.version, new.version) == (0, version)
    parity(engine, model, 0.7)
    with pytest.raises(WeightSyncError, match="missing"):
        engine.update_weights({"model.norm.weight": model.model.norm.weight}, version=3)
    parity(engine, model, 1.3)
    with pytest.raises(ConfigError, match="stop_strings need tokenizer="):
        engine.generate(PROMPTS, SamplingParams(stop_strings=("x",)))
    engine.close()
    engine.close()  # nothing more happens
    with pytest.raises(RolloutError, match=r"close\(\) was called"):
        engine.generate(PROMPTS, SamplingParams())
    system.wait_until(lambda: system.footprint() == before and not system.left_in_memory(used))


def test_an_engine_in_this_process_leaves_it_as_it_was(system):
    environment, threads, generator = dict(os.environ), torch.set_num_threads, torch.get_rng_state()
    affinity, before = os.sched_getaffinity(0), system.footprint()
    model = tiny_model(tiny_tokenizer(), heads=2)
    engine = VLLMEngine(model, max_model_len=128)
    assert engine.eos_token_ids == (model.config.eos_token_id,)
    with pytest.raises(ConfigError, match="opens the default process group"):
        VLLMEngine(model)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert dict(os.environ) == environment
    assert torch.set_num_threads is threads
    assert torch.equal(torch.get_rng_state(), generator)
    assert os.sched_getaffinity(0) == affinity
    engine.close()
    assert not torch.distributed.is_initialized()
    system.wait_until(lambda: system.footprint() == before)
