"""GRPOLoss reads ragged and padded batches alike, adds up over micro-batches, and refuses what it cannot mean."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.data.llm.chat import History
from llmrl.errors import ConfigError, DataError, MissingKeyError, ShapeError
from llmrl.modules.llm.log_probs import TokenScorer, TokenScores
from llmrl.modules.llm.policies import ChatHistory, TransformersWrapper
from llmrl.objectives import merge_outputs, total_loss
from llmrl.objectives.base import output_fields
from llmrl.objectives.llm import PRESETS, GRPOLoss, StepCounts, count_step
from llmrl.objectives.llm.group_advantage import Scale, group_advantage
from llmrl.testing import tiny_model, tiny_tokenizer

LENGTHS = [(3, 4), (5, 1), (2, 6), (4, 0), (1, 3), (6, 5)]  # (prompt, response); one response is empty
KL = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05}


def tiny_scorer(seed: int = 0) -> TokenScorer:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2)
    )  # fmt: skip
    return TokenScorer(model.double().eval())


def conversation(index: int, prompt: int, response: int, *, group: int = 0, per_token: bool = False) -> TensorDict:
    generator = torch.Generator().manual_seed(index)
    length = prompt + response
    mask = torch.arange(length) >= prompt

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_prob = (-3.4 + 0.3 * draw(length)) * mask
    ids = torch.randint(0, 29, (length,), generator=generator)
    return TensorDict(
        tokens=TensorDict(full=ids, prompt=ids[:prompt], response=ids[prompt:]),
        masks=TensorDict(all_assistant_mask=mask, all_attention_mask=torch.ones(length, dtype=torch.bool)),
        log_probs=TensorDict(full=log_prob),
        proximal_log_probs=TensorDict(full=log_prob + 0.1 * draw(length) * mask),
        next=TensorDict(ref_log_probs=TensorDict(full=log_prob + 0.2 * draw(length))),
        advantage=draw(length if per_token else 1, 1),
        group_id=torch.tensor(group),
    )


def ragged(lengths: list[tuple[int, int]] = LENGTHS, per_token: bool = False) -> TensorDictBase:
    return lazy_stack([conversation(i, p, r, group=i // 2, per_token=per_token) for i, (p, r) in enumerate(lengths)])


def padded(td: TensorDictBase) -> TensorDict:
    """The dense form: prompt padded on the left, response on the right, rubbish in the padding."""
    prompts = [row["tokens", "prompt"].shape[0] for row in td.unbind(0)]
    responses = [row["tokens", "response"].shape[0] for row in td.unbind(0)]
    width = max(prompts)
    total = width + max(responses)

    def place(key, fill):
        rows = []
        for value, prompt in zip(td.get(key, as_list=True), prompts, strict=True):
            row = torch.full((total, *value.shape[1:]), fill, dtype=value.dtype)
            row[width - prompt : width - prompt + value.shape[0]] = value
            rows.append(row)
        return torch.stack(rows)

    advantage = td.get("advantage", as_list=True)
    per_token = any(row.shape[0] > 1 for row in advantage)
    return TensorDict(
        tokens=TensorDict(full=place(("tokens", "full"), 7), batch_size=[len(prompts)]),
        masks=TensorDict(
            all_assistant_mask=place(("masks", "all_assistant_mask"), False),
            all_attention_mask=place(("masks", "all_attention_mask"), False),
            batch_size=[len(prompts)],
        ),
        log_probs=TensorDict(full=place(("log_probs", "full"), math.nan), batch_size=[len(prompts)]),
        proximal_log_probs=TensorDict(full=place(("proximal_log_probs", "full"), 9.0), batch_size=[len(prompts)]),
        next=TensorDict(
            ref_log_probs=TensorDict(
                full=place(("next", "ref_log_probs", "full"), math.nan), batch_size=[len(prompts)]
            ),
            batch_size=[len(prompts)],
        ),
        advantage=place("advantage", math.nan) if per_token else torch.stack(list(advantage)),
        group_id=torch.stack([row["group_id"] for row in td.unbind(0)]),
        batch_size=[len(prompts)],
    )


def run(loss: GRPOLoss, *batches: TensorDictBase, normalizer: StepCounts | None = None):
    """Output and gradients of a step over the given micro-batches."""
    loss.zero_grad()
    outputs = []
    for td in batches:
        output = loss(td, normalizer)
        total_loss(output).backward()
        outputs.append(output)
    gradients = {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}
    return merge_outputs(outputs), gradients


def assert_same(got, expected, tolerance: float = 1e-9) -> None:
    (output, gradients), (expected_output, expected_gradients) = got, expected
    fields, expected_fields = output_fields(output), output_fields(expected_output)
    assert fields.keys() == expected_fields.keys()
    for name, value in expected_fields.items():
        torch.testing.assert_close(
            fields[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, value in expected_gradients.items():
        torch.testing.assert_close(gradients[name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


SETTINGS = {
    "token": {**KL, "entropy_coeff": 0.01},
    "seq-mean": {**KL, "aggregation": "seq-mean", "proximal": "recomputed", "correction": "geo-mask",
                 "correction_band": (0.9, 1.1)},
    "dr_grpo": {"aggregation": "dr_grpo", "max_length": 8, "proximal": "detach"},
    "prompt-mean": {"aggregation": "prompt-mean", "surrogate": "cispo", "kl_mask_threshold": 0.3},
    "gspo": {"ratio_level": "sequence", "aggregation": "seq-sum", "dual_clip": 3.0, "proximal": "recomputed",
             "correction": "seq-tis", "correction_cap": 1.1},
    "sapo": {"surrogate": "sapo", "sapo_tau": (1.0, 2.0), "proximal": "recomputed", "correction": "none",
             "correction_veto": (0.8, 1.2)},
    "dppo": {**KL, "surrogate": "dppo", "clip_epsilon": 0.005, "kl_estimator": "k2"},
    "sum": {**KL, "aggregation": "sum", "kl_estimator": "k3-weighted", "surrogate": "reinforce"},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("split", [[3, 3], [1, 5], [3, 1, 2]])
def test_micro_batches_add_up_to_the_step_with_gradients(name, split):
    loss, td = GRPOLoss(tiny_scorer(), **SETTINGS[name]), ragged()
    whole = run(loss, td)
    assert sum(gradient.abs().sum() for gradient in whole[1].values()) > 0
    parts = run(loss, *td.split(split), normalizer=count_step(td))
    assert_same(parts, whole)


def test_each_row_alone_adds_up_to_the_ragged_batch():
    loss, td = GRPOLoss(tiny_scorer(), **SETTINGS["token"]), ragged(per_token=True)
    rows = [td[i : i + 1] for i in range(len(LENGTHS))]
    assert_same(run(loss, *rows, normalizer=count_step(td)), run(loss, td))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_padded_and_ragged_batches_are_one(name, per_token):
    loss, td = GRPOLoss(tiny_scorer(), **SETTINGS[name]), ragged(per_token=per_token)
    assert_same(run(loss, padded(td)), run(loss, td))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_more_pad_tokens_change_nothing(name):
    td = padded(ragged())
    loss, wide = GRPOLoss(tiny_scorer(), **SETTINGS[name]), td.clone()
    for key in td.keys(include_nested=True, leaves_only=True):
        if td[key].ndim == 2:
            wide[key] = torch.cat([td[key], td[key].new_zeros(len(td), 100)], 1)
    assert_same(run(loss, wide), run(loss, td))


def test_a_hundred_more_prompt_tokens_change_no_denominator():
    class LastTokens(nn.Module):
        """Log-probs that do not depend on the prompt."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

        def token_scores(self, input_ids, attention_mask, select, *, entropy=False):
            table = -3.4 + 0.02 * input_ids.double() + self.bias
            return TokenScores(table.masked_fill(~select, 0.0), table.abs().masked_fill(~select, 0.0))

    def longer(row: TensorDict) -> TensorDict:
        row = row.clone()
        for key in row.keys(include_nested=True, leaves_only=True):
            if row[key].ndim == 1 and key[-1] != "response":
                row[key] = torch.cat([torch.zeros(100, dtype=row[key].dtype), row[key]])
        row["masks", "all_attention_mask"][:] = True
        return row

    td = ragged()
    for name in ("token", "seq-mean", "prompt-mean"):
        loss = GRPOLoss(LastTokens(), **SETTINGS[name])
        assert_same(run(loss, lazy_stack([longer(row) for row in td.unbind(0)])), run(loss, td))


class Recorded(nn.Module):
    """An actor whose log-probs are a parameter."""

    def __init__(self, log_prob_BT: torch.Tensor) -> None:
        super().__init__()
        self.log_prob = nn.Parameter(log_prob_BT)

    def token_scores(self, input_ids, attention_mask, select, *, entropy=False):
        return TokenScores(self.log_prob.masked_fill(~select, 0.0), None)


@pytest.fixture
def golden() -> TensorDict:
    n = torch.tensor([6, 3, 5, 1, 2, 6, 4, 6])
    i, t = torch.arange(8)[:, None], torch.arange(6)[None]
    mask = t < n[:, None]
    lo = -0.30 - 0.05 * ((3 * i + 2 * t) % 7).double()
    reward = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64).view(2, 4)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)

    def per_token(**columns):
        return TensorDict(columns, batch_size=[8])

    return TensorDict(
        tokens=per_token(full=torch.zeros(8, 6, dtype=torch.int64)),
        masks=per_token(all_assistant_mask=mask, all_attention_mask=mask),
        current=lo + 0.10 * (((5 * i + 3 * t) % 9) - 4).double() + 0.16 * (1 - i % 4).double(),
        proximal_log_probs=per_token(full=lo),
        log_probs=per_token(full=lo + 0.06 * (((2 * i + 7 * t) % 11) - 5).double()),
        next=per_token(ref_log_probs=per_token(full=lo + 0.05 * (((7 * i + 5 * t) % 8) - 3).double())),
        advantage=advantage.view(8, 1, 1),
        group_id=torch.arange(8) // 4,
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
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    golden["advantage"] = group_advantage(rewards.view(2, 4), scale="none").view(8, 1, 1)
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


@pytest.mark.parametrize("dense", [False, True])
def test_the_ratio_reads_log_probs_from_before_the_cut_where_the_batch_has_them(dense):
    td = ragged()
    expected = run(GRPOLoss(tiny_scorer(), **SETTINGS["token"]), padded(td) if dense else td)
    for row in td.unbind(0):  # what a top-p of one half would have recorded
        row["log_probs", "plain"] = row["log_probs", "full"].clone()
        row["log_probs", "full"] = row["log_probs", "full"] + math.log(2.0) * row["masks", "all_assistant_mask"]
    changed = padded(td) if dense else td
    if dense:
        changed["log_probs", "plain"] = padded(ragged())["log_probs", "full"]
    assert_same(run(GRPOLoss(tiny_scorer(), **SETTINGS["token"]), changed), expected)
    elsewhere = GRPOLoss(tiny_scorer(), **SETTINGS["token"])
    elsewhere.set_keys(sample_log_prob=("proximal_log_probs", "full"))  # has no plain beside it
    assert elsewhere(changed).loss_objective != expected[0].loss_objective


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.95}])
def test_after_sampling_from_a_cut_distribution_every_ratio_is_one(cut):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_model(tokenizer), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "temperature": 0.8, **cut}
    )
    prompts = ChatHistory(
        prompt=History.from_chats([[{"role": "user", "content": c}] for c in ("1+2", "7")]), batch_size=[2]
    )
    td = policy(TensorDict(history=prompts, batch_size=[2]))
    td["advantage"] = torch.tensor([1.0, -1.0]).view(2, 1, 1)
    output = GRPOLoss(policy)(td)
    assert output.ratio_max.item() == pytest.approx(1, abs=1e-5)
    assert output.mismatch_max.item() == pytest.approx(0, abs=1e-5)
    kept = zip(td.get(("log_probs", "full"), as_list=True), td.get(("log_probs", "plain"), as_list=True), strict=True)
    assert any((full - plain).max() > 0.1 for full, plain in kept)  # the cut was a real one


def test_metrics_on_worked_numbers():
    ratio = torch.tensor([[0.5, 2.0, 1.0, 2.0]])
    td = TensorDict(
        tokens=TensorDict(full=torch.zeros(1, 4, dtype=torch.int64), batch_size=[1]),
        masks=TensorDict(
            all_assistant_mask=torch.tensor([[True, True, True, False]]),
            all_attention_mask=torch.ones(1, 4, dtype=torch.bool),
            batch_size=[1],
        ),
        log_probs=TensorDict(full=torch.zeros(1, 4), batch_size=[1]),
        advantage=torch.ones(1, 1, 1),
        batch_size=[1],
    )
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


def test_the_entropy_term_rewards_entropy():
    td = ragged()
    output = GRPOLoss(tiny_scorer(), entropy_coeff=0.1)(td)
    assert 0 < output.entropy < math.log(29)
    assert output.loss_entropy.item() == pytest.approx(-0.1 * output.entropy.item())
    measured_only = GRPOLoss(tiny_scorer())(td)
    assert measured_only.entropy == output.entropy
    assert measured_only.loss_entropy is None
    assert GRPOLoss(tiny_scorer(), entropy_bonus=False)(td).entropy is None


def test_right_after_sampling_every_ratio_is_one():
    scorer, td = tiny_scorer(), ragged()
    for row in td.unbind(0):
        ids = row["tokens", "full"][None]
        mask = row["masks", "all_assistant_mask"][None]
        row["log_probs", "full"] = scorer(ids, torch.ones_like(ids), mask).log_probs[0].detach()
    output = GRPOLoss(scorer)(td)
    assert output.ratio_mean.item() == pytest.approx(1, abs=1e-9)
    assert output.ESS.item() == pytest.approx(1, abs=1e-9)
    assert output.clip_fraction == 0
    assert output.mismatch_max.item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_a_policy_wrapper_samples_and_is_its_own_actor(temperature, pad_output):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_model(tokenizer),
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 6, "temperature": temperature},
        pad_output=pad_output,
    )
    chats = [[{"role": "user", "content": content}] for content in ("1+2", "say something longer", "3")]
    prompts = ChatHistory(prompt=History.from_chats(chats), batch_size=[3])
    td = policy(TensorDict(history=prompts, batch_size=[3]))
    td["advantage"] = torch.tensor([1.0, -1.0, 0.5]).view(3, 1, 1)
    loss = GRPOLoss(policy, proximal="detach")
    output = loss(td)
    assert output.tokens == count_step(td).tokens > 0
    assert output.mismatch_max.item() == pytest.approx(0, abs=1e-5)
    assert output.ratio_max.item() == pytest.approx(1, abs=1e-5)
    output.loss_objective.backward()
    assert sum(p.grad.abs().sum() for p in loss.parameters()) > 0


def test_an_empty_micro_batch_is_zero_and_anchors_the_graph():
    loss, td = GRPOLoss(tiny_scorer(), entropy_coeff=0.01, **KL), ragged()
    empty = td[3:4]  # its response is empty
    output = loss(empty, StepCounts(tokens=10, sequences=3))
    assert {name: value.item() for name, value in output_fields(output).items() if value != 0} == {}
    total_loss(output).backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in loss.parameters())
    with pytest.raises(DataError, match="at least one trained token"):
        loss(empty)


def test_masking_strategies():
    td = ragged()
    for row in td.unbind(0):
        row["masks", "all_assistant_mask"][-1:] = False  # the assistant mask is one token shorter than the response
        row["log_probs", "full"] = row["log_probs", "full"] - 1.0
    count = {
        name: GRPOLoss(nn.Identity(), masking_strategy=name).count_step(td).tokens
        for name in ("sft", "rlhf", "generic")
    }
    assert count == {"sft": 14, "rlhf": 14, "generic": 40}
    td = lazy_stack([row.exclude(("masks", "all_assistant_mask")) for row in td.unbind(0)])
    assert GRPOLoss(nn.Identity()).count_step(td) == StepCounts(19, 5, 3, {0: 5, 1: 6, 2: 8})
    assert GRPOLoss(nn.Identity()).count_step(ragged()) == count_step(ragged())
    with pytest.raises(MissingKeyError, match="all_assistant_mask"):
        GRPOLoss(nn.Identity(), masking_strategy="rlhf").count_step(td)
    dense = padded(ragged())
    dense["tokens", "response"] = dense["tokens", "full"][:, -6:]
    del dense["masks", "all_assistant_mask"]
    assert GRPOLoss(nn.Identity()).count_step(dense).tokens == 19


def test_any_module_that_writes_log_probs_is_an_actor():
    class Writes(nn.Module):
        def forward(self, td):
            rows = td.get(("log_probs", "full"), as_list=True)
            return lazy_stack([TensorDict(log_probs=TensorDict(full=row + 0.01)) for row in rows])

    td = ragged()
    before = [row.clone() for row in td.get(("log_probs", "full"), as_list=True)]
    output = GRPOLoss(Writes())(td)
    assert output.ratio_mean.item() == pytest.approx(math.exp(0.01))
    assert all(torch.equal(a, b) for a, b in zip(before, td.get(("log_probs", "full"), as_list=True), strict=True))


def test_unreduced_values_are_per_token():
    loss, td = GRPOLoss(tiny_scorer(), aggregation="none", kl_to_ref_coeff=1.0), ragged()
    output = loss(td)
    reduced = GRPOLoss(loss.actor_network, aggregation="sum", kl_to_ref_coeff=1.0)(td)
    assert output.loss_objective.shape == output.loss_kl_to_ref.shape == (6, 11)
    torch.testing.assert_close(output.loss_objective.sum(), reduced.loss_objective)


def test_keys_can_be_pointed_elsewhere():
    td = ragged()
    loss = GRPOLoss(tiny_scorer())
    expected = loss(td).loss_objective
    moved = lazy_stack([row.rename_key_("advantage", "mine") for row in td.unbind(0)])
    with pytest.raises(MissingKeyError, match="'advantage'"):
        loss(moved)
    loss.set_keys(advantage="mine")
    assert loss(moved).loss_objective == expected
    with pytest.raises(ConfigError, match="Did you mean 'advantage'"):
        loss.set_keys(advantages="mine")


def test_missing_log_probs_say_so():
    td = ragged()
    without = lazy_stack([row.exclude("log_probs") for row in td.unbind(0)])
    with pytest.raises(KeyError, match="Couldn't find the log-prob"):
        GRPOLoss(tiny_scorer())(without)
    without = lazy_stack([row.exclude("next") for row in td.unbind(0)])
    with pytest.raises(KeyError, match="Couldn't find the ref log-prob"):
        GRPOLoss(tiny_scorer(), kl_to_ref_coeff=0.1)(without)
    without = lazy_stack([row.exclude("proximal_log_probs") for row in td.unbind(0)])
    with pytest.raises(KeyError, match="Couldn't find the log-prob of the proximal policy"):
        GRPOLoss(tiny_scorer(), proximal="recomputed")(without)
    without = lazy_stack([row.exclude("group_id") for row in td.unbind(0)])
    with pytest.raises(KeyError, match="group_id"):
        GRPOLoss(tiny_scorer(), aggregation="prompt-mean")(without)


def test_columns_that_do_not_fit_the_tokens_are_refused():
    td = ragged()
    td[2]["log_probs", "full"] = torch.zeros(5)
    with pytest.raises(ShapeError, match=r"got 5 values in row 2, whose conversation has 8 tokens"):
        GRPOLoss(tiny_scorer())(td)
    td = ragged(per_token=True)
    td[2]["advantage"] = torch.zeros(6, 1)  # one per response token: not aligned with the conversation
    with pytest.raises(ShapeError, match="got 6 values in row 2"):
        GRPOLoss(tiny_scorer())(td)
    with pytest.raises(ShapeError, match="must have one dimension"):
        GRPOLoss(tiny_scorer())(td[0])


def test_nan_on_a_trained_token_is_an_error_and_elsewhere_is_not():
    td = ragged()
    td[0]["log_probs", "full"][0] = math.nan  # prompt
    assert GRPOLoss(tiny_scorer())(td).loss_objective.isfinite()
    td[2]["log_probs", "full"][-1] = math.nan
    with pytest.raises(DataError, match="NaN or inf in row 2"):
        GRPOLoss(tiny_scorer())(td)
    td = ragged()
    td[4]["advantage"][:] = math.nan
    with pytest.raises(DataError, match=r"'advantage' must be finite.*row 4"):
        GRPOLoss(tiny_scorer())(td)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"aggregation": "tokens"}, "Did you mean 'token'"),
        ({"clip_epsilon": (1.2, 0.2)}, "clip_epsilon"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "dual_clip belongs to"),
        ({"ratio_level": "sequence", "surrogate": "reinforce"}, "has no ratio"),
        ({"aggregation": "dr_grpo"}, "max_length"),
        ({"max_length": 8}, "max_length"),
        ({"correction": "tis"}, "proximal='behaviour'"),
        ({"proximal": "detach", "correction": "mask", "correction_cap": 2.0}, "correction_cap"),
        ({"proximal": "detach", "correction_band": (0.5, 2.0)}, "correction_band"),
        ({"entropy_bonus": False, "entropy_coeff": 0.1}, "entropy_bonus=True"),
        ({"proximal": "behavior"}, "Did you mean 'behaviour'"),
        ({"masking_strategy": "all"}, "masking_strategy"),
        ({"kl_mask_threshold": -1.0}, "kl_mask_threshold"),
        ({"surrogate": "dppo", "proximal": "detach"}, "proximal='behaviour'"),
        ({"surrogate": "dppo", "ratio_level": "sequence"}, "no ratio of a sequence"),
        ({"sapo_tau": (1.0, 1.0)}, "sapo_tau"),
        ({"surrogate": "sapo", "sapo_tau": (0.0, 1.0)}, "sapo_tau"),
        ({"correction_veto": (1e-4, 100.0)}, "correction_veto"),
        ({"proximal": "detach", "correction_veto": (2.0, 100.0)}, "correction_veto"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        GRPOLoss(nn.Identity(), **settings)


def test_an_argument_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="gamma"):
        GRPOLoss(nn.Identity(), gamma=0.9)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_a_loss_that_trains_and_says_what_it_is(name):
    preset = PRESETS[name]
    extra = {"max_length": 8} if name == "dr_grpo" else {}
    loss = GRPOLoss(tiny_scorer(), **preset.loss, **extra)
    words = preset.describe()
    assert list(words) == ["advantage", "ratio", "aggregation", "kl"]
    assert {key: words[key] for key in ("ratio", "aggregation", "kl")} == loss.describe()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)
    for _ in range(4):
        run(loss, ragged())
        optimizer.step()
    td = ragged()
    weighted = [  # the policy moved towards positive and away from negative advantages
        sum(
            (row["advantage"].item() * scores).sum().item()
            for row, scores in zip(td.unbind(0), token_log_probs(network, td), strict=True)
        )
        for network in (tiny_scorer(), loss.actor_network)
    ]
    assert weighted[1] > weighted[0]


def token_log_probs(scorer: TokenScorer, td: TensorDictBase) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            scorer(ids[None], torch.ones_like(ids)[None], mask[None]).log_probs[0]
            for ids, mask in zip(
                td.get(("tokens", "full"), as_list=True),
                td.get(("masks", "all_assistant_mask"), as_list=True),
                strict=True,
            )
        ]


def test_every_advantage_of_the_transform_has_words():
    for scale in get_args(Scale):
        words = PRESETS["grpo"].describe(advantage={"scale": scale})["advantage"]
        assert words == "R" if scale == "raw" else words.startswith(("(R - mean", "R - mean"))


def test_presets_differ_from_each_other():
    settings = [(dict(preset.advantage), dict(preset.loss)) for preset in PRESETS.values()]
    assert all(a != b for a, b in itertools.combinations(settings, 2))
    words = PRESETS["gspo"].describe(loss={"kl_to_ref_coeff": 0.01})
    assert words["ratio"] == "sequence, clip [0.9997, 1.0004]; engine correction: rho <= 2 (token)"
    assert words["kl"] == "0.01 x k3 to the reference"
