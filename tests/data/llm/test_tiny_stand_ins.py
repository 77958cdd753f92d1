"""The tiny tokenizer and model behave like what they stand in for."""

import pytest
import torch
from transformers import AutoTokenizer

from llmrl.errors import ConfigError
from llmrl.testing import tiny_model, tiny_tokenizer

TEXT = "In 2026: 1+1=2, é ✓ 漢\n\n <think>x</think><|im_end|>"


def test_tokenizer_round_trips_text_and_is_the_same_each_time_and_after_saving(tmp_path):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert [tokenizer.decode([index]) for index in tokenizer("2026").input_ids] == ["2", "0", "2", "6"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer("<|im_start|><think></tool_call>").input_ids) == 3
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for other in (tiny_tokenizer(), loaded):
        assert other(TEXT).input_ids == tokenizer(TEXT).input_ids
        assert other.chat_template == tokenizer.chat_template
        assert other.all_special_tokens == tokenizer.all_special_tokens


def test_vocabulary_is_bounded_and_an_unknown_architecture_is_named():
    assert len(tiny_tokenizer(["aaa bbb aaa bbb"], vocab_size=270)) <= 270
    with pytest.raises(ConfigError, match="256 bytes and 9 added tokens: got 100"):
        tiny_tokenizer(vocab_size=100)
    with pytest.raises(ConfigError, match="Did you mean 'qwen"):
        tiny_model(architecture="qwen")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gpt2"])
def test_model_is_seeded_and_leaves_the_random_state_alone(architecture: str):
    state = torch.get_rng_state()
    first, second, other = (tiny_model(architecture=architecture, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits, same, different = (model(ids).logits for model in (first, second, other))
    assert logits.shape == (1, 3, len(tiny_tokenizer()))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, same)
    assert not torch.equal(logits, different)
