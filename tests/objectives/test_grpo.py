"""GRPOLoss reads ragged and padded batches alike, adds up over micro-batches, and refuses what it cannot mean."""

import math
from typing import get_args

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn

from llmrl.errors import ConfigError, DataError, MissingKeyError, ShapeError
from llmrl.modules.llm.log_probs import TokenScorer, TokenScores
from llmrl.objectives import total_loss
from llmrl.objectives.base import output_fields
from llmrl.objectives.llm import PRESETS, GRPOLoss, StepCounts, count_step
from llmrl.objectives.llm.settings import Surrogate
from tests.support.losses import assert_same_step, conversation, run_step, tiny_scorer

LENGTHS = [(3, 4), (5, 1), (2, 6), (4, 0), (1, 3), (6, 5)]  # (prompt, response); one response is empty
KL = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05}


def ragged(lengths: list[tuple[int, int]] = LENGTHS, per_token: bool = False) -> TensorDictBase:
    return lazy_stack([conversation(i, p, r, group=i // 2, per_token=per_token) for i, (p, r) in enumerate(lengths)])


PER_TOKEN = {  # what the padding holds: nothing that a loss may look at
    ("tokens", "full"): 7,
    ("masks", "all_assistant_mask"): False,
    ("masks", "all_attention_mask"): False,
    ("log_probs", "full"): math.nan,
    ("proximal_log_probs", "full"): 9.0,
    ("next", "ref_log_probs", "full"): math.nan,
}


def padded(td: TensorDictBase) -> TensorDict:
    """The dense form: prompt padded on the left, response on the right."""
    prompts = [row["tokens", "prompt"].shape[0] for row in td.unbind(0)]
    width = max(prompts)
    total = width + max(row["tokens", "response"].shape[0] for row in td.unbind(0))

    def place(key, fill):
        rows = []
        for value, prompt in zip(td.get(key, as_list=True), prompts, strict=True):
            row = torch.full((total, *value.shape[1:]), fill, dtype=value.dtype)
            row[width - prompt : width - prompt + value.shape[0]] = value
            rows.append(row)
        return torch.stack(rows)

    advantage = td.get("advantage", as_list=True)
    per_token = any(row.shape[0] > 1 for row in advantage)
    out = TensorDict({key: place(key, fill) for key, fill in PER_TOKEN.items()}, batch_size=[len(prompts)])
    out["advantage"] = place("advantage", math.nan) if per_token else torch.stack(list(advantage))
    return out.set("group_id", torch.stack([row["group_id"] for row in td.unbind(0)]))


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
@pytest.mark.parametrize("split", [[3, 3], [1, 5], [1] * 6])
def test_micro_batches_add_up_to_the_step_with_gradients(name, split):
    loss, td = GRPOLoss(tiny_scorer(), **SETTINGS[name]), ragged(per_token=len(split) == 6)
    whole = run_step(loss, td)
    assert sum(gradient.abs().sum() for gradient in whole[1].values()) > 0
    parts = run_step(loss, *td.split(split), normalizer=count_step(td))
    assert_same_step(parts, whole)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_padded_and_ragged_batches_are_one_however_wide_the_padding(name, per_token):
    loss, td = GRPOLoss(tiny_scorer(), **SETTINGS[name]), ragged(per_token=per_token)
    dense, expected = padded(td), run_step(loss, td)
    assert_same_step(run_step(loss, dense), expected)
    for key in PER_TOKEN:
        dense[key] = torch.cat([dense[key], dense[key].new_zeros(len(dense), 100)], 1)
    if per_token:
        dense["advantage"] = torch.cat([dense["advantage"], torch.zeros(len(dense), 100, 1)], 1)
    assert_same_step(run_step(loss, dense), expected)


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
        assert_same_step(run_step(loss, lazy_stack([longer(row) for row in td.unbind(0)])), run_step(loss, td))


@pytest.mark.parametrize("dense", [False, True])
def test_the_ratio_reads_log_probs_from_before_the_cut_where_the_batch_has_them(dense):
    td = ragged()
    expected = run_step(GRPOLoss(tiny_scorer(), **SETTINGS["token"]), padded(td) if dense else td)
    for row in td.unbind(0):  # what a top-p of one half would have recorded
        row["log_probs", "plain"] = row["log_probs", "full"].clone()
        row["log_probs", "full"] = row["log_probs", "full"] + math.log(2.0) * row["masks", "all_assistant_mask"]
    changed = padded(td) if dense else td
    if dense:
        changed["log_probs", "plain"] = padded(ragged())["log_probs", "full"]
    assert_same_step(run_step(GRPOLoss(tiny_scorer(), **SETTINGS["token"]), changed), expected)
    elsewhere = GRPOLoss(tiny_scorer(), **SETTINGS["token"])
    elsewhere.set_keys(sample_log_prob=("proximal_log_probs", "full"))  # has no plain beside it
    assert elsewhere(changed).loss_objective != expected[0]["loss_objective"]


def test_the_entropy_term_rewards_entropy():
    td = ragged()
    output = GRPOLoss(tiny_scorer(), entropy_coeff=0.1)(td)
    assert 0 < output.entropy < math.log(29)
    assert output.loss_entropy.item() == pytest.approx(-0.1 * output.entropy.item())
    measured_only = GRPOLoss(tiny_scorer())(td)
    assert measured_only.entropy == output.entropy
    assert measured_only.loss_entropy is None
    assert GRPOLoss(tiny_scorer(), entropy_bonus=False)(td).entropy is None


def test_the_surrogate_trains_the_tokens_of_the_highest_entropy():
    loss, td, by_hand = GRPOLoss(tiny_scorer(), top_entropy_quantile=0.25), ragged(), ragged()
    lengths = [len(ids) for ids in td.get(("tokens", "full"), as_list=True)]
    entropies = [row[:length] for row, length in zip(loss.entropies(td), lengths, strict=True)]
    lowest = sorted(torch.cat([row[~row.isnan()] for row in entropies]).tolist())[-5]  # 5 of 19 tokens
    for row, entropy in zip(by_hand.unbind(0), entropies, strict=True):
        row["advantage"] = (row["advantage"].view(1) * (entropy >= lowest)).view(-1, 1)
    whole, (expected, gradients) = run_step(loss, td), run_step(GRPOLoss(tiny_scorer()), by_hand)
    torch.testing.assert_close(whole[0]["loss_objective"], expected["loss_objective"])
    torch.testing.assert_close(whole[1], gradients)
    with pytest.raises(MissingKeyError, match="before its first update"):
        loss(td, count_step(td))
    for row, entropy in zip(td.unbind(0), entropies, strict=True):
        row["top_entropy"] = TensorDict(full=(entropy >= lowest).double())
    assert_same_step(run_step(loss, *td.split([1, 5]), normalizer=count_step(td)), whole)
    with pytest.raises(ConfigError, match="entropy_bonus=True"):
        GRPOLoss(tiny_scorer(), top_entropy_quantile=0.25, entropy_bonus=False)(ragged())


@pytest.mark.parametrize("aggregation", ["token", "seq-mean", "prompt-mean"])
def test_observations_after_the_first_answer_are_learned_as_language(aggregation):
    settings, td, observed = {"aggregation": aggregation, "observation": 0.5}, ragged(), []
    for row, (prompt, response) in zip(td.unbind(0), LENGTHS, strict=True):
        row["masks", "all_assistant_mask"][prompt + 1 : prompt + 3] = False  # a tool's result after the first token
        observed.append(torch.arange(prompt + response)[prompt + 1 : prompt + 3])
    loss, counts = GRPOLoss(tiny_scorer(), **settings), count_step(td)
    output, gradients = run_step(loss, td)
    other = GRPOLoss(loss.actor_network, aggregation=aggregation)
    expected, sums = 0.0, 0.0
    for row, places in zip(td.unbind(0), observed, strict=True):
        ids = row["tokens", "full"]
        log_prob = loss.actor_network.model(ids[None]).logits[0].log_softmax(-1)
        each = log_prob.new_zeros(()) - sum(log_prob[place - 1, ids[place]] for place in places.tolist())
        share = {"token": counts.tokens, "seq-mean": counts.sequences * max(len(places), 1)}
        share["prompt-mean"] = counts.groups * counts.group_tokens.get(int(row["group_id"]), 1)
        expected, sums = expected + each / share[aggregation], sums + float(each.detach())
    loss.zero_grad()
    (other(td).loss_objective + 0.5 * expected).backward()
    assert output["loss_observation"].item() == pytest.approx(0.5 * expected.item())
    assert output["observation"].item() == pytest.approx(sums / counts.tokens)
    for name, parameter in loss.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    assert_same_step(run_step(loss, *td.split([2, 4]), normalizer=counts), (output, gradients))


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
    for name, count in (("sft", 14), ("rlhf", 14), ("generic", 40 - 6)):  # nothing precedes the first token of six rows
        assert GRPOLoss(nn.Identity(), masking_strategy=name).count_step(td).tokens == count
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


@pytest.mark.parametrize(
    ("missing", "settings", "match"),
    [
        ("log_probs", {}, "find the log-prob of the sampled"),
        ("next", {"kl_to_ref_coeff": 0.1}, "find the ref log-prob"),
        ("proximal_log_probs", {"proximal": "recomputed"}, "find the log-prob of the proximal policy"),
        ("group_id", {"aggregation": "prompt-mean"}, "group_id"),
    ],
)
def test_a_missing_column_is_named(missing, settings, match):
    td = lazy_stack([row.exclude(missing) for row in ragged().unbind(0)])
    with pytest.raises(KeyError, match=match):
        GRPOLoss(tiny_scorer(), **settings)(td)


def test_columns_that_do_not_fit_the_tokens_are_refused():
    td = ragged()
    td[2]["log_probs", "full"] = torch.zeros(5)
    with pytest.raises(ShapeError, match=r"got 5 values in row 2, .*8 tokens"):
        GRPOLoss(tiny_scorer())(td)
    td = ragged(per_token=True)
    td[2]["advantage"] = torch.zeros(6, 1)  # one per response token: not aligned with the conversation
    with pytest.raises(ShapeError, match="got 6 values in row 2"):
        GRPOLoss(tiny_scorer())(td)
    with pytest.raises(ShapeError, match="must have one dimension"):
        GRPOLoss(tiny_scorer())(td[0])


REREAD = {"proximal": "recomputed", "kl_to_ref_coeff": 0.1}


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        (("log_probs", "full"), {}),
        (("next", "ref_log_probs", "full"), REREAD),
        (("proximal_log_probs", "full"), REREAD),
        (("advantage",), {}),
    ],
)
def test_nan_on_a_trained_token_is_an_error_and_elsewhere_is_not(key, settings):
    loss, td = GRPOLoss(tiny_scorer(), **settings), ragged(per_token=True)
    td[1][key][0] = math.nan  # prompt
    assert total_loss(loss(td)).isfinite()
    td[1][key][-1] = math.nan
    with pytest.raises(DataError, match=f"{'.*'.join(key)}.* must be finite.*NaN or inf in row 1"):
        loss(td)


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
        run_step(loss, ragged())
        optimizer.step()
    td = ragged()
    before, after = (weighted_log_prob(scorer, td) for scorer in (tiny_scorer(), loss.actor_network))
    assert after > before  # the policy moved towards positive and away from negative advantages


@torch.no_grad()
def weighted_log_prob(scorer: TokenScorer, td: TensorDictBase) -> float:
    total = 0.0
    for row in td.unbind(0):
        ids, mask = row["tokens", "full"][None], row["masks", "all_assistant_mask"][None]
        total += row["advantage"].item() * scorer(ids, torch.ones_like(ids), mask).log_probs.sum().item()
    return total


@pytest.mark.parametrize("surrogate", get_args(Surrogate))
def test_nan_advantages_outside_the_mask_leave_the_gradient_alone(surrogate):
    class Everywhere(nn.Module):
        """Log-probs with a gradient at every position, asked for or not."""

        def __init__(self) -> None:
            super().__init__()
            self.log_prob = nn.Parameter(torch.full((6, 11), -3.4, dtype=torch.float64))

        def token_scores(self, input_ids, attention_mask, select, *, entropy=False):
            return TokenScores(self.log_prob * 1, None)

    td = ragged(per_token=True)
    for row in td.unbind(0):
        row["advantage"][~row["masks", "all_assistant_mask"]] = math.nan
    output, gradients = run_step(GRPOLoss(Everywhere(), surrogate=surrogate), td)
    assert output["loss_objective"].isfinite()
    assert gradients["actor_network.log_prob"].isfinite().all()
