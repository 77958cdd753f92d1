"""GRPOLoss gives the values that other implementations give, and metrics that are what they are called."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from llmrl.objectives import total_loss
from llmrl.objectives.base import output_fields
from llmrl.objectives.llm import PRESETS, GRPOLoss
from llmrl.objectives.llm.groups import group_advantage
from tests.support.losses import Recorded, golden_columns


def after_prompt(value_BT: torch.Tensor, prompt: float = 0) -> torch.Tensor:
    """One column more on the left, for the token that the others follow."""
    return torch.nn.functional.pad(value_BT, (1, 0), value=prompt)


@pytest.fixture
def golden() -> TensorDict:
    g = golden_columns()
    advantage = (g.reward - g.reward.mean(1, keepdim=True)) / (g.reward.std(1, keepdim=True) + 1e-6)

    def per_token(**columns):
        return TensorDict({name: after_prompt(value) for name, value in columns.items()}, batch_size=[8])

    return TensorDict(
        tokens=per_token(full=torch.zeros(8, 6, dtype=torch.int64)),
        masks=TensorDict(
            all_assistant_mask=after_prompt(g.mask), all_attention_mask=after_prompt(g.mask, True), batch_size=[8]
        ),
        current=after_prompt(g.lp),
        proximal_log_probs=per_token(full=g.lo),
        log_probs=per_token(full=g.lg),
        next=TensorDict(ref_log_probs=per_token(full=g.lr), batch_size=[8]),
        advantage=advantage.view(8, 1, 1),
        group_id=g.group,
        batch_size=[8],
    )


PPO = {"proximal": "recomputed", "correction": "none"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (PPO, -0.09713537),
        ({**PPO, "clip_epsilon": (0.2, 0.28), "dual_clip": 1.25}, -0.11284220),
        ({**PPO, "aggregation": "prompt_mean"}, -0.00458861),  # the documented name of seq-mean
        ({**PPO, "aggregation": "token_mean"}, -0.09713537),
        ({**PPO, "aggregation": "prompt-mean"}, -0.12051078),
        ({**PPO, "aggregation": "dr_grpo", "max_length": 8}, -0.05008542),
        ({**PPO, "clip_epsilon": 0.1, "ratio_level": "sequence", "aggregation": "seq-mean"}, -0.01383026),
        ({**PPO, "clip_epsilon": (1.0, 0.28), "surrogate": "cispo"}, 0.00724222),
        ({**PPO, "surrogate": "reinforce"}, -0.00640746),
        ({"proximal": "recomputed", "correction_cap": 1.2}, -0.10806713),
        ({"proximal": "recomputed", "correction": "mask", "correction_band": (0.8, 1.2)}, -0.04398819),
        ({"proximal": "recomputed", "correction": "seq-mask", "correction_cap": 3.0}, -0.20569665),
        ({}, -0.08405881),  # clip on exp(lp - lg)
        ({"proximal": "detach", "correction": "none"}, -0.09108099),  # ratio 1
        ({**PPO, "surrogate": "sapo", "aggregation": "seq-mean"}, -0.07244394),
        ({"proximal": "recomputed", "correction_cap": 1.2, "correction_veto": (1e-4, 100.0)}, -0.10806713),
    ],
)
def test_golden_values_through_the_keys_of_a_batch(settings, expected, golden):
    loss = GRPOLoss(Recorded(golden.pop("current")), **settings)
    assert loss(golden).loss_objective.item() == pytest.approx(expected, abs=1e-8)


def test_golden_kl_is_a_masked_mean_in_the_aggregation_of_the_loss(golden):
    current = golden.pop("current")
    output = GRPOLoss(Recorded(current), **PPO, kl_to_ref_coeff=0.1)(golden)
    assert output.kl_to_ref.item() == pytest.approx(0.06250835, abs=1e-8)
    assert (output.loss_objective + output.loss_kl_to_ref).item() == pytest.approx(-0.09088453, abs=1e-8)
    output = GRPOLoss(Recorded(current), **PPO, kl_to_ref_coeff=0.1, aggregation="seq-mean")(golden)
    assert output.loss_kl_to_ref.item() == pytest.approx(0.1 * 0.05454765, abs=1e-8)
    assert output.kl_to_ref.item() == pytest.approx(0.06250835, abs=1e-8)  # metrics are token means


def test_golden_dppo_through_its_preset(golden):
    current = golden.pop("current")
    golden["advantage"] = group_advantage(golden_columns().reward, scale="none").view(8, 1, 1)
    output = GRPOLoss(Recorded(current), **PRESETS["dppo"].loss)(golden)
    assert total_loss(output).item() == pytest.approx(-0.02163065, abs=1e-8)
    assert output.clip_fraction > 0
    narrow = GRPOLoss(Recorded(current), **{**PRESETS["dppo"].loss, "clip_epsilon": 0.1})(golden)
    assert total_loss(narrow).item() == pytest.approx(-0.06621141, abs=1e-8)
    assert narrow.clip_fraction > output.clip_fraction


def test_a_vetoed_sequence_counts_as_masked_and_not_in_the_loss(golden):
    current = golden.pop("current")
    rho = (golden["proximal_log_probs", "full"] - golden["log_probs", "full"]).exp()
    mask = golden["masks", "all_assistant_mask"]
    dropped = ((rho < 0.75) & mask).any(-1)
    assert 0 < dropped.sum() < 8
    output = GRPOLoss(Recorded(current), **PPO, correction_veto=(0.75, 2.0))(golden)
    assert output.masked_fraction.item() == pytest.approx((mask.sum(-1) * dropped).sum().item() / 33)
    per_token = GRPOLoss(Recorded(current), **PPO, correction_veto=(0.75, 2.0), aggregation="none")(golden)
    assert ((per_token.loss_objective != 0).any(-1) == ~dropped).all()


def one_row(mask: list[bool], log_probs: torch.Tensor) -> TensorDict:
    """A conversation with the advantage 1."""
    mask = torch.tensor([mask])
    return TensorDict(
        tokens=TensorDict(full=torch.zeros_like(mask, dtype=torch.int64), batch_size=[1]),
        masks=TensorDict(all_assistant_mask=mask, all_attention_mask=torch.ones_like(mask), batch_size=[1]),
        log_probs=TensorDict(full=log_probs, batch_size=[1]),
        advantage=torch.ones(1, 1, 1),
        batch_size=[1],
    )


def test_metrics_on_worked_numbers():
    ratio = torch.tensor([[1.0, 0.5, 2.0, 1.0, 2.0]])
    td = one_row([False, True, True, True, False], torch.zeros(1, 5))
    output = GRPOLoss(Recorded(ratio.log()))(td)
    assert output.tokens == 3
    assert output.clip_fraction_high.item() == pytest.approx(1 / 3)  # 2.0 with A > 0
    assert output.clip_fraction_low == 0  # 0.5 with A > 0 is not clipped: the minimum takes the unclipped value
    assert output.clip_fraction.item() == pytest.approx(1 / 3)
    assert output.ratio_mean.item() == pytest.approx(3.5 / 3)
    assert output.ratio_max.item() == pytest.approx(2.0)
    assert output.ESS.item() == pytest.approx(3.5**2 / (3 * 5.25))
    assert output.mismatch_mean.item() == pytest.approx(2 * math.log(2) / 3)
    assert output.mismatch_max.item() == pytest.approx(math.log(2))
    assert output.kl_approx.item() == pytest.approx((0.5 - 1 + math.log(2) + 2 - 1 - math.log(2)) / 3)
    dropped = GRPOLoss(Recorded(ratio.log()), kl_mask_threshold=0.1)(td)  # ln(2)^2 / 2 = 0.24
    assert dropped.masked_fraction.item() == pytest.approx(2 / 3)
    assert dropped.loss_objective.item() == pytest.approx(-1 / 3)
    assert output.entropy is None
    assert not any(v.requires_grad for k, v in output_fields(output).items() if not k.startswith("loss_"))


def test_mismatch_compares_the_trainer_before_the_update_with_the_engine(golden):
    current, mask = golden.pop("current"), golden["masks", "all_assistant_mask"]
    gap = (golden["proximal_log_probs", "full"] - golden["log_probs", "full"])[mask].abs()
    output = GRPOLoss(Recorded(current), proximal="recomputed")(golden)
    assert output.mismatch_mean.item() == pytest.approx(gap.mean().item())
    assert output.mismatch_max.item() == pytest.approx(gap.max().item())
    moved = (current - golden["log_probs", "full"])[mask].abs()
    assert GRPOLoss(Recorded(current))(golden).mismatch_mean.item() == pytest.approx(moved.mean().item())


def test_tokens_held_back_by_the_dual_clip_count_as_clipped_from_above(golden):
    current, mask = golden.pop("current"), golden["masks", "all_assistant_mask"]
    ratio = (current - golden["proximal_log_probs", "full"]).exp()
    loss = GRPOLoss(actor := Recorded(current), **PPO, dual_clip=1.25)
    output = loss(golden)
    negative = golden["advantage"].view(8, 1) < 0
    held = mask & torch.where(negative, ratio > 1.25, ratio > 1.2)
    assert (held & negative).any()
    assert output.clip_fraction_high.item() == pytest.approx(held.sum().item() / 33)
    output.loss_objective.backward()
    assert int((actor.log_prob.grad[mask] == 0).sum()) == round(output.clip_fraction.item() * 33)


def test_the_largest_weight_of_the_correction_is_that_of_a_trained_token(golden):
    rho = (golden["proximal_log_probs", "full"] - golden["log_probs", "full"]).exp()
    largest = rho[golden["masks", "all_assistant_mask"]].max()
    settings = {"proximal": "recomputed", "correction_cap": 9.0}
    output = GRPOLoss(Recorded(golden.pop("current")), **settings)(golden)
    assert output.correction_max.item() == pytest.approx(largest.item())


@pytest.mark.parametrize("how", ["scores", "written"])
def test_an_actor_in_bfloat16_is_compared_in_float32(how):
    class Writes(nn.Module):
        def forward(self, td):
            return td.set("log_probs", TensorDict(full=low, batch_size=td.batch_size))

    low = torch.tensor([[-1.0, -1.25]], dtype=torch.bfloat16)
    td = one_row([True, True], low.float() + 1e-3)  # nearer than bfloat16 can tell
    output = GRPOLoss(Recorded(low) if how == "scores" else Writes())(td)
    assert output.loss_objective.dtype == torch.float32
    assert output.mismatch_mean.item() == pytest.approx(1e-3, rel=1e-3)
