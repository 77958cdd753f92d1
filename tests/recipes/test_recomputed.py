"""Layers that compute a part of their values again in the backward pass keep less, and get the same bits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile

from llmrl.train.models.recomputed import keep_less
from llmrl.train.models.shape import model_shape
from tests.support.causal_models import SMALL, causal_lm

TOKENS = torch.arange(3, 27).view(2, 12) % SMALL["vocab_size"]


def kept_bytes(model: nn.Module) -> int:
    """What a forward pass leaves allocated for its backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = model(input_ids=TOKENS, use_cache=False).logits.sum()
    assert loss.requires_grad
    return sum(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")


def losses_and_weights(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(3):
        torch.manual_seed(step)  # of the dropout
        loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("lora", [None, ("q_proj",), ("gate_proj", "up_proj", "down_proj")])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_three_steps_have_the_same_bits(name: str, lora: tuple[str, ...] | None):
    found = []
    for less in (False, True):
        torch.manual_seed(0)
        model = causal_lm(name, **SMALL)
        if lora:
            model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.3, target_modules=list(lora))).train()
        assert not less or keep_less(model) >= 3 * SMALL["num_hidden_layers"]
        found.append(losses_and_weights(model))
    assert found[0][2] < found[0][0], "the weights have moved"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_kept_is_what_the_plan_counts():
    model = causal_lm("llama", **SMALL | {"hidden_size": 64, "intermediate_size": 256})
    whole, shape = kept_bytes(model), model_shape(model)
    keep_less(model)
    expected = TOKENS.numel() * SMALL["num_hidden_layers"] * 4 * (2 * 256 + 2 * 64)
    assert TOKENS.numel() * shape.recomputed["float32"] == expected
    assert whole - kept_bytes(model) == pytest.approx(expected, rel=0.02)


def test_an_mlp_that_computes_something_else_is_left_alone():
    model = causal_lm("llama", **SMALL)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda hidden: mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * (mlp.up_proj(hidden) + 1))
    changed = mlp.forward
    assert keep_less(model) == 3 * SMALL["num_hidden_layers"] - 1
    assert mlp.forward is changed
