"""However a step is cut into micro-batches, and whether they are padded or packed, the gradient is the same to 1e-6."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives import LossModule, merge_outputs, total_loss
from llmrl.objectives.base import output_fields
from llmrl.objectives.llm import PRESETS, GRPOLoss, SFTLoss, count_step

KL = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05, "entropy_coeff": 0.01}
LOSSES = {
    **{
        name: (GRPOLoss, {**preset.loss, **({"max_length": 12} if name == "dr_grpo" else {})})
        for name, preset in PRESETS.items()
    },
    "prompt-mean with KL": (GRPOLoss, {**KL, "aggregation": "prompt-mean", "kl_estimator": "k3-weighted"}),
    "seq-sum, two-sided mask and veto": (
        GRPOLoss,
        {
            **KL,
            "aggregation": "seq-sum",
            "proximal": "recomputed",
            "correction": "geo-mask",
            "correction_band": (0.8, 1.25),
            "correction_veto": (0.4, 2.5),
        },
    ),
    "sft": (SFTLoss, {"kl_to_ref_coeff": 0.1}),
    "minor_sft": (SFTLoss, {"loss_function": "minor_sft"}),
    "sft over conversations": (SFTLoss, {"reduction": "mean"}),
}


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=29, num_key_value_heads=2, **sizes)).eval()


def conversation(index: int, prompt: int, response: int) -> TensorDict:
    generator = torch.Generator().manual_seed(index)
    length = prompt + response
    log_prob = -3.4 + 0.3 * torch.randn(length, generator=generator)
    return TensorDict(
        tokens=TensorDict(full=torch.randint(0, 29, (length,), generator=generator)),
        masks=TensorDict(all_assistant_mask=torch.arange(length) >= prompt),
        log_probs=TensorDict(full=log_prob),
        proximal_log_probs=TensorDict(full=log_prob + 0.1 * torch.randn(length, generator=generator)),
        next=TensorDict(ref_log_probs=TensorDict(full=log_prob + 0.2 * torch.randn(length, generator=generator))),
        advantage=torch.randn(1, 1, generator=generator),
        group_id=torch.tensor(index // 3),
    )


def run(loss: LossModule, parts: list[TensorDictBase], normalizer=None):
    loss.zero_grad()
    outputs = []
    for part in parts:
        outputs.append(loss(part, normalizer))
        total_loss(outputs[-1]).backward()
    gradient = torch.cat([p.grad.flatten() for p in loss.parameters()])
    return output_fields(merge_outputs(outputs)), gradient


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_split_and_any_packing_gives_one_gradient(name, model, data):
    lengths = data.draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=2, max_size=7).filter(
            lambda pairs: any(response for _, response in pairs)
        )
    )
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1))))
    rows = [conversation(i, prompt, response) for i, (prompt, response) in enumerate(lengths)]
    parts = [
        lazy_stack([rows[i] for i in order[start:end]])
        for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    loss_class, arguments = LOSSES[name]
    whole = loss_class(TokenScorer(model, packing="off"), **arguments)
    expected, gradient = run(whole, [lazy_stack(rows)])
    for packing in ("off", "on"):
        loss = loss_class(TokenScorer(model, packing=packing), **arguments)
        fields, got = run(loss, parts, count_step(lazy_stack(rows)))
        torch.testing.assert_close(got, gradient, atol=1e-6, rtol=1e-5)
        for field, value in expected.items():
            torch.testing.assert_close(fields[field], value, atol=1e-5, rtol=1e-5, msg=lambda m, f=field: f"{f}: {m}")
