"""However a step is cut into micro-batches, and whether they are padded or packed, the gradient is the same to 1e-6."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack

from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives.llm import PRESETS, GRPOLoss, SFTLoss, count_step
from tests.support.losses import assert_same_step, conversation, run_step, tiny_qwen

KL = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05, "entropy_coeff": 0.01}
LOSSES = {
    **{name: (GRPOLoss, {"max_length": 12 if name == "dr_grpo" else None, **PRESETS[name].loss}) for name in PRESETS},
    "prompt-mean with KL": (GRPOLoss, {**KL, "aggregation": "prompt-mean", "kl_estimator": "k3-weighted"}),
    "seq-sum, two-sided mask and veto": (
        GRPOLoss,
        KL
        | {"aggregation": "seq-sum", "proximal": "recomputed"}
        | {"correction": "geo-mask", "correction_band": (0.8, 1.25), "correction_veto": (0.4, 2.5)},
    ),
    "sft": (SFTLoss, {"kl_to_ref_coeff": 0.1}),
    "minor_sft": (SFTLoss, {"loss_function": "minor_sft"}),
    "sft over conversations": (SFTLoss, {"reduction": "mean"}),
}


@pytest.fixture(scope="module")
def model():
    return tiny_qwen()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_split_and_any_packing_gives_one_gradient(name, model, data):
    pairs = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=2, max_size=7)
    lengths = data.draw(pairs.filter(lambda pairs: any(response for _, response in pairs)))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1))))
    rows = [conversation(i, *pair, group=i // 3, dtype=torch.float32) for i, pair in enumerate(lengths)]
    ends = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    parts = [lazy_stack([rows[i] for i in order[start:end]]) for start, end in ends]
    loss_class, arguments = LOSSES[name]
    whole = loss_class(TokenScorer(model, packing="off"), **arguments)
    expected = run_step(whole, lazy_stack(rows))
    for packing in ("off", "on"):
        loss = loss_class(TokenScorer(model, packing=packing), **arguments)
        got = run_step(loss, *parts, normalizer=count_step(lazy_stack(rows)))
        assert_same_step(got, expected, atol=1e-5, rtol=1e-5, gradient=2e-6)
