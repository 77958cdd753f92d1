"""Adapters reach an engine merged in copies, or alone; the trainer's model never changes."""

import json

import pytest
import torch

from llmrl.errors import UnsupportedError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import adapter_folder, merged_weights, weight_groups
from tests.support.vllm import scorer, stepped

peft = pytest.importorskip("peft")
IDS = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([70, 8, 9, 10, 400, 12])]


def adapted(architecture="qwen2", seed=0, **options):
    """A tiny model with adapters that do something."""
    model = tiny_model(tiny_tokenizer(), architecture=architecture, heads=2)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    return stepped(model, seed, size=0.1).eval()


def scores(model):
    return torch.cat(scorer(model)(IDS))


def merged_model(model, groups):
    """A plain model of the same kind with the weights of ``groups``."""
    plain = type(model.get_base_model())(model.get_base_model().config).eval()
    sent = {name: tensor for group in groups for name, tensor in group.items()}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in sent.items()} == groups.metadata
    assert groups.metadata == weight_groups(plain).metadata
    missing, unexpected = plain.load_state_dict(sent, strict=False)
    tied = plain.config.tie_word_embeddings
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    plain.tie_weights()
    return plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": "all-linear"},
        {"modules_to_save": ["norm"]},
        {"target_modules": ["q_proj"], "lora_bias": True},
    ],
    ids=str,
)
def test_merged_weights_are_what_the_model_computes_with_and_the_model_stays_as_it_was(options):
    model = adapted(**options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = scores(model)
    with model.disable_adapter():
        assert (scores(model) - expected).abs().max() > 0.01  # the adapters do something
    groups = merged_weights(model, max_bytes=1 << 14)
    plain = merged_model(model, groups)
    torch.testing.assert_close(scores(plain), expected, atol=1e-4, rtol=0)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(scores(model), expected)


def test_adapters_that_are_switched_off_or_merged_already_are_not_merged_again():
    model = adapted()
    expected = scores(model)
    with model.disable_adapter():
        base = scores(model)
        plain = merged_model(model, merged_weights(model))
    torch.testing.assert_close(scores(plain), base, atol=1e-5, rtol=0)
    model.merge_adapter()
    torch.testing.assert_close(scores(merged_model(model, merged_weights(model))), expected, atol=1e-4, rtol=0)


def test_an_adapter_on_one_place_of_a_tied_weight_is_refused():
    with pytest.warns(UserWarning, match="ensure_weight_tying"):
        model = adapted(architecture="gemma", target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedError, match=r"model.embed_tokens.weight and lm_head.weight are one tied weight"):
        merged_weights(model)


def test_a_folder_holds_the_adapter_alone_for_as_long_as_it_is_needed():
    model = adapted()
    with adapter_folder(model) as folder:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (4, 16)
        loaded = peft.PeftModel.from_pretrained(tiny_model(tiny_tokenizer(), heads=2), folder).eval()
        assert torch.equal(scores(loaded), scores(model))
    assert not folder.exists()
