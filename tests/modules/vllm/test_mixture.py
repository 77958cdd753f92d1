"""A mixture of experts over vLLM: what it samples, and that weights which cannot be loaded are refused."""

from __future__ import annotations

import pytest
import torch

from llmrl.errors import UnsupportedError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]


def largest_difference(model, engine):
    drawn = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    full = [torch.cat(row) for row in zip(PROMPTS, drawn.ids, strict=True)]
    expected = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score(full)
    rows = zip(PROMPTS, drawn.log_probs, expected, strict=True)
    return max((said - right[len(prompt) :]).abs().max().item() for prompt, said, right in rows)


def test_a_mixture_is_never_served_with_experts_that_were_reloaded_wrongly():
    """vLLM 0.32 on a CPU: after a reload of the very same weights log-probs are off by 0.01 and more."""
    model = tiny_model(tiny_tokenizer(), architecture="qwen3_moe", heads=2)
    engine = VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128)
    try:
        assert largest_difference(model, engine) < 1e-4
        if torch.cuda.is_available():
            engine.update_weights(model.state_dict(), version=1)
        else:
            with pytest.raises(UnsupportedError, match="experts of a mixture wrongly on a CPU"):
                engine.update_weights(model.state_dict(), version=1)
            assert engine.version == 0
        assert largest_difference(model, engine) < 1e-4
    finally:
        engine.close()
