"""However a step is cut into micro-batches, and whether they are padded or packed, gradients are the same to 1e-6."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack
from transformers import Qwen2ForCausalLM

from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives.llm import PRESETS, DistillLoss, DistillSettings, GRPOLoss, SFTLoss, count_step
from tests.support.losses import assert_same_step, conversation, run_step, tiny_qwen

KL = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05, "entropy_coeff": 0.01}
DISTILLATION = {  # weight_reward: both losses from one pass
    "full": {"divergence": "jsd", "weight_reward": 0.5},
    "topk": {"k": 3},
    "sample": {"weight_reward": 0.5},
}


def distill(actor, **options):
    """A teacher of another width, with more rows for the same vocabulary."""
    teacher = TokenScorer(tiny_qwen(vocab=31, hidden=24), packing=actor.packing)
    return DistillLoss(actor, options=DistillSettings(**options), teacher=teacher, temperature=1.0)


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
    **{f"distillation, {name}": (distill, {"estimator": name, **more}) for name, more in DISTILLATION.items()},
    "sft over conversations": (SFTLoss, {"reduction": "mean"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that are read from files, with untied and with tied embeddings."""
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        tiny_qwen(tied=tied).save_pretrained(folder / str(tied))
    return [Qwen2ForCausalLM.from_pretrained(folder / str(tied)).eval() for tied in (False, True)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_any_split_and_any_packing_gives_one_gradient(name, models, data):
    pairs = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=2, max_size=7)
    lengths = data.draw(pairs.filter(lambda pairs: any(response for _, response in pairs)))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1))))
    rows = [conversation(i, *pair, group=i // 3, dtype=torch.float32) for i, pair in enumerate(lengths)]
    ends = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    parts = [lazy_stack([rows[i] for i in order[start:end]]) for start, end in ends]
    loss_class, arguments = LOSSES[name]
    counts = count_step(lazy_stack(rows))
    for original in models:
        model = copy.deepcopy(original)
        for _ in range(3):
            expected = run_step(loss_class(TokenScorer(model, packing="off"), **arguments), lazy_stack(rows))
            for packing in ("off", "on"):
                loss = loss_class(TokenScorer(model, packing=packing), **arguments)
                got = run_step(loss, *parts, normalizer=counts)
                assert_same_step(got, expected, atol=1e-5, rtol=1e-5, gradient=2e-6)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
