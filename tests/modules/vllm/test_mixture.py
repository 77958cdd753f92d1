"""Mixtures of experts over vLLM: what they sample, and that new weights reach the experts as they reach the rest."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.vllm import stepped, trainer_log_probs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]


def mixture(architecture, **settings):
    model = tiny_model(tiny_tokenizer(), architecture=architecture, heads=2)
    if settings:
        model.config.update(settings)
        model = AutoModelForCausalLM.from_config(model.config)
    return model.eval()


def difference(model, engine):
    """The largest between what an engine and a trainer's model say of what the engine draws."""
    drawn = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    rows = zip(drawn.log_probs, trainer_log_probs(model, PROMPTS, drawn), strict=True)
    return max((said - right).abs().max().item() for said, right in rows)


# vLLM 0.32 on a CPU packs experts once, and fills those of 48 up to 64: a reload by itself would leave them unpacked.
@pytest.mark.parametrize("own_process", [False, True], ids=["here", "own process"])
@pytest.mark.parametrize(
    ("architecture", "settings"), [("mixtral", {}), ("qwen3_moe", {"moe_intermediate_size": 48})], ids=str
)
def test_new_weights_reach_the_experts(architecture, settings, own_process):
    torch.manual_seed(0)
    model = mixture(architecture, **settings)
    engine = VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128, own_process=own_process)
    try:
        assert difference(model, engine) < 1e-4
        for version in (1, 2):
            assert difference(stepped(model, version, size=0.05), engine) > 0.1, "it has the old weights"
            engine.update_weights(model.state_dict(), version=version)
            assert difference(model, engine) < 1e-4
    finally:
        engine.close()


def test_an_update_that_broke_off_leaves_experts_that_a_whole_one_can_replace():
    model = mixture("mixtral")
    engine = VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128)
    try:
        weights = stepped(model, size=0.05).state_dict()

        def broken():
            yield from list(weights.items())[:5]
            raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="the trainer died"):
            engine.core.call_workers("llmrl_load_weights", float("inf"), weights=broken())
        engine.update_weights(weights, version=1)
        assert difference(model, engine) < 1e-4
    finally:
        engine.close()
