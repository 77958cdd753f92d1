"""DPOLoss compares whole answers, KTOLoss one with a reference point, however rows are cut into batches; values and
gradients by hand, by plain logits and by TRL."""

import importlib.util
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn

from llmrl.errors import ConfigError, DataError, MissingKeyError
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives import total_loss
from llmrl.objectives.base import output_fields
from llmrl.objectives.llm import DPOLoss, KTOLoss
from llmrl.objectives.llm.functional import preference
from tests.support.causal_models import SMALL, assert_same_gradients, causal_lm, gradients, naive_scores
from tests.support.losses import Recorded, assert_same_step, run_step
from tests.support.refusals import refusals


def pair(chosen, rejected, chosen_mask, rejected_mask, reference=None):
    row = TensorDict(
        tokens=TensorDict(full=torch.tensor([*chosen, *rejected])),
        masks=TensorDict(all_assistant_mask=torch.tensor([*chosen_mask, *rejected_mask], dtype=torch.bool)),
        num_chosen=torch.tensor(len(chosen)),
    )
    return row if reference is None else row.set("reference_log_probs", torch.tensor(reference))


def answers(row):
    """Ids and mask of the chosen answer, and of the rejected one."""
    ids, mask, cut = row["tokens", "full"], row["masks", "all_assistant_mask"], int(row["num_chosen"])
    return (ids[:cut], mask[:cut]), (ids[cut:], mask[cut:])


def worked(**settings):
    """Log-probs of the answers: -1 - 2 and -4, then -3 and -1 - 0.5; references -2, -2 and -4, -1."""
    log_probs = [[-9.0, -1.0, -2.0], [-9.0, -9.0, -3.0], [-9.0, -4.0, 0.0], [-9.0, -1.0, -0.5]]
    rows = [
        pair([1, 2, 3], [1, 4], [0, 1, 1], [0, 1], [-2.0, -2.0]),
        pair([1, 5, 6], [1, 7, 8], [0, 0, 1], [0, 1, 1], [-4.0, -1.0]),
    ]
    return DPOLoss(Recorded(torch.tensor(log_probs)), **settings), lazy_stack(rows)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_odds(chosen, rejected):
    p, q = math.exp(chosen), math.exp(rejected)
    return math.log(p / (1 - p)) - math.log(q / (1 - q))


# The margins of the pairs: (-3 + 2) - (-4 + 2) = 1 and (-3 + 4) - (-1.5 + 1) = 1.5; of means
# (-1.5 + 2) - (-4 + 2) = 2.5 and (-3 + 4) - (-0.75 + 1) = 0.75; without a reference -3 + 4 = 1 and -3 + 1.5 = -1.5.
@pytest.mark.parametrize(
    ("settings", "expected", "right"),
    [
        ({"beta": 0.5}, (-math.log(sigmoid(0.5)) - math.log(sigmoid(0.75))) / 2, 1.0),
        (
            {"beta": 0.5, "label_smoothing": 0.1},
            sum(-0.9 * math.log(sigmoid(x)) - 0.1 * math.log(sigmoid(-x)) for x in (0.5, 0.75)) / 2,
            1.0,
        ),
        ({"beta": 0.5, "normalize_by_seq_length": True}, -sum(math.log(sigmoid(x)) for x in (1.25, 0.375)) / 2, 1.0),
        ({"beta": 0.5, "kind": "hinge"}, (0.5 + 0.25) / 2, 1.0),
        ({"beta": 0.5, "kind": "ipo"}, ((2.5 - 1) ** 2 + (0.75 - 1) ** 2) / 2, 1.0),
        ({"beta": 0.5, "kind": "ipo", "normalize_by_seq_length": False}, (0 + 0.25) / 2, 1.0),
        # means without a reference: -1.5 + 4 = 2.5 and -3 + 0.75 = -2.25
        ({"kind": "simpo", "beta": 0.4, "gamma": 0.5}, -sum(math.log(sigmoid(x)) for x in (0.5, -1.4)) / 2, 0.5),
        (
            {"kind": "orpo", "beta": 0.2},
            (1.5 + 3 - 0.2 * sum(math.log(sigmoid(log_odds(*x))) for x in ((-1.5, -4), (-3, -0.75)))) / 2,
            0.5,
        ),
        ({"beta": 0.5, "reference_free": True}, -sum(math.log(sigmoid(x)) for x in (0.5, -0.75)) / 2, 0.5),
    ],
)
def test_worked_numbers(settings, expected, right):
    loss, batch = worked(**settings)
    output = loss(batch)
    assert output.loss_dpo.item() == pytest.approx(expected)
    assert output.pairs_right.item() == right
    assert output.tokens.item() == 6
    if "normalize" not in str(settings) and settings.get("kind") not in ("ipo", "simpo", "orpo"):
        assert (output.chosen_log_prob.item(), output.rejected_log_prob.item()) == (-3.0, -2.75)


def random_pairs(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        prompt, one, other = (torch.randint(3, 37, (int(n),), generator=draw).tolist() for n in (3, 4, 2))
        one = one[: 1 + len(rows) % 4]
        rows.append(pair([*prompt, *one], [*prompt, *other], [0] * 3 + [1] * len(one), [0] * 3 + [1] * 2, [-7.0, -5.0]))
    return lazy_stack(rows)


@pytest.fixture
def model():
    return causal_lm("qwen2", **SMALL)


@pytest.mark.parametrize("packing", ["off", "on"])
def test_log_probs_and_gradients_are_those_of_plain_logits(model, packing):
    batch = random_pairs(5)
    loss = DPOLoss(TokenScorer(model, packing=packing), beta=0.3)
    ours = gradients(model, total_loss(loss(batch)))

    def log_prob(ids, mask):
        return naive_scores(model, ids[None], torch.ones(1, len(ids), dtype=torch.bool), mask[None])[0].sum()

    sums = torch.stack([torch.stack([log_prob(*answer) for answer in answers(row)]) for row in batch.unbind(0)])
    margins = sums[:, 0] + 7.0 - sums[:, 1] - 5.0
    expected = gradients(model, -nn.functional.logsigmoid(0.3 * margins).mean())
    torch.testing.assert_close(loss.sequence_log_probs(batch), sums.detach(), atol=1e-4, rtol=1e-5)
    assert_same_gradients(ours, expected)


def test_micro_batches_change_nothing(model):
    batch = random_pairs(7)
    loss = DPOLoss(TokenScorer(model), kind="ipo", beta=0.3)
    whole, counts = run_step(loss, batch), loss.count_step(batch)
    assert (counts.sequences, counts.tokens) == (7, whole[0]["tokens"])
    parts = run_step(loss, batch[:1], batch[1:5], batch[5:], normalizer=counts)
    assert_same_step(parts, whole, rtol=1e-5, gradient=1e-6)


def test_a_row_without_trained_tokens_changes_nothing():
    loss, batch = worked()
    empty = pair([1, 2], [1], [0, 0], [0], [float("nan"), 0.0])
    longer = Recorded(torch.cat([loss.actor_network.log_prob.detach()[:2], torch.full((1, 3), -9.0)] * 2))
    longer.log_prob.data[3:5] = loss.actor_network.log_prob.data[2:]
    output = DPOLoss(longer)(lazy_stack([*batch.unbind(0), empty]))
    assert output.loss_dpo.item() == pytest.approx(loss(batch).loss_dpo.item())


def labelled(batch, *desirable):
    rows = zip(batch.unbind(0), desirable, strict=True)
    return lazy_stack([row.set("desirable", torch.tensor(label)) for row, label in rows])


def test_the_reference_point_of_kto_is_that_of_the_whole_step(model):
    batch = labelled(random_pairs(7), *[True, False, False, True, True, False, True])
    with torch.no_grad():  # of the mismatched answers: near what the model says, so that the estimate is above 0
        for number, row in enumerate(batch.unbind(0)):
            row["reference_log_probs"] = KTOLoss(TokenScorer(model)).sequence_log_probs(batch)[number] - 0.5 * number
    loss = KTOLoss(TokenScorer(model), beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    whole, counts = run_step(loss, batch), loss.count_step(batch)
    assert whole[0]["kl"].item() == pytest.approx(sum(0.5 * n for n in range(7)) / 7, abs=1e-4)
    assert (counts.sequences, counts.tokens) == (7, whole[0]["tokens"]), "mismatched answers are not trained"
    parts = (batch[:1], batch[1:5], batch[5:])
    ratios = [float(loss.mismatched_log_ratios(part).sum()) for part in parts]
    step = sum(replace(loss.count_step(part), log_ratios=ratio) for part, ratio in zip(parts, ratios, strict=True))
    assert_same_step(run_step(loss, *parts, normalizer=step), whole, rtol=1e-5, gradient=1e-6)
    empty = pair([1, 2], [1], [0, 0], [0], [float("nan"), 0.0])
    assert loss(labelled(lazy_stack([*batch.unbind(0), empty]), *[True] * 8), step).tokens == whole[0]["tokens"]
    only = loss(labelled(batch[:2], True, True))
    assert "margin" not in loss.derived(output_fields(only)), "answers of one kind alone"


test_settings_that_contradict_each_other = refusals(
    (ConfigError, "desirable_weight", lambda: KTOLoss(nn.Identity(), undesirable_weight=0.0)),
    (ConfigError, "sigmoid", lambda: DPOLoss(nn.Identity(), kind="sigmoyd")),
    (ConfigError, "sigmoid", lambda: preference(torch.zeros(1), kind="sigmod", beta=1.0)),
    (ConfigError, "beta", lambda: DPOLoss(nn.Identity(), beta=0.0)),
    (ConfigError, r"\[0, 0.5\)", lambda: DPOLoss(nn.Identity(), label_smoothing=0.5)),
    (ConfigError, "label_smoothing", lambda: DPOLoss(nn.Identity(), label_smoothing=0.1, kind="ipo")),
)


def test_pairs_that_cannot_be_compared():
    loss, batch = worked()
    with pytest.raises(DataError, match="row 1"):
        loss(lazy_stack([batch[0], pair([1, 5, 6], [1, 7, 8], [0, 0, 1], [0, 0, 0], [-4.0, -1.0])]))
    with pytest.raises(DataError, match="num_chosen"):
        loss(lazy_stack([batch[0], batch[1].clone().set("num_chosen", torch.tensor(6))]))
    with pytest.raises(DataError, match="NaN"):
        loss(lazy_stack([batch[0], batch[1].clone().set("reference_log_probs", torch.tensor([math.nan, 0.0]))]))
    with pytest.raises(MissingKeyError, match="reference_log_probs"):
        loss(batch.exclude("reference_log_probs"))


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_values_and_gradients_are_those_of_trl(kind):
    from trl import DPOTrainer

    loss, batch = worked(kind=kind, beta=0.3)
    ours = total_loss(loss(batch))
    (ours_gradient,) = torch.autograd.grad(ours, loss.actor_network.log_prob)
    log_probs = loss.actor_network.log_prob.detach().clone().requires_grad_()
    mask = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    shifted = log_probs[:, 1:] * mask[:, 1:]
    zeros = torch.zeros(4, 2)
    same = SimpleNamespace(log_probs=shifted, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    alone = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=alone,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(4, 3, dtype=torch.int64),
        "attention_mask": torch.ones(4, 3),
        "completion_mask": mask,
        "ref_chosen_logps": torch.tensor([-2.0, -4.0]),
        "ref_rejected_logps": torch.tensor([-2.0, -1.0]),
    }
    if kind == "ipo":  # TRL divides sums by lengths, ours compares means: the same with a reference that is a mean
        inputs |= {"ref_chosen_logps": torch.tensor([-4.0, -4.0]), "ref_rejected_logps": torch.tensor([-2.0, -2.0])}
    theirs = DPOTrainer._compute_loss(trainer, lambda **_: same, inputs, return_outputs=False)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    (theirs_gradient,) = torch.autograd.grad(theirs, log_probs)
    torch.testing.assert_close(ours_gradient, theirs_gradient)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_losses_without_a_reference_are_those_of_trl(kind):
    loss, batch = worked(kind=kind, beta=0.3, **({"gamma": 0.7} if kind == "simpo" else {}))
    ours = total_loss(loss(batch))
    (ours_gradient,) = torch.autograd.grad(ours, loss.actor_network.log_prob)
    log_probs = loss.actor_network.log_prob.detach().clone().requires_grad_()
    mask = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    means = (log_probs * mask).sum(1) / mask.sum(1)
    chosen, rejected = means[:2], means[2:]
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    if kind == "simpo":
        from trl.experimental.cpo import CPOTrainer

        trainer = SimpleNamespace(
            loss_type="simpo", simpo_gamma=0.7, beta=0.3, label_smoothing=0.0, alpha=0.0, accelerator=accelerator
        )
        theirs = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
    else:
        from trl.experimental.orpo import ORPOTrainer

        trainer = SimpleNamespace(beta=0.3, accelerator=accelerator)
        # Its loss is the mean of -log p of the chosen answers minus the mean of what this function returns.
        theirs = -chosen.mean() - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()
    (gradient,) = torch.autograd.grad(theirs, log_probs)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(ours_gradient * mask, gradient, atol=1e-6, rtol=0)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shift", [0.0, 3.0])  # of the reference: the estimate of the KL is below 0, and above
def test_the_loss_of_single_answers_is_that_of_trl(shift):
    from trl import KTOTrainer

    loss, batch = worked()
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.8}
    loss = KTOLoss(loss.actor_network, beta=0.3, **weights)
    rows = [batch[0], batch[1]]
    for row in rows:
        row["reference_log_probs"][1] -= shift
    batch = labelled(lazy_stack(rows), True, False)
    all_log_probs = loss.actor_network.log_prob.detach().clone()
    halves = {}

    class Half(nn.Module):  # the rows of `worked` hold the log-probs of both halves; the loss asks for each alone
        def token_scores(self, ids, attention, select, *, entropy):
            number = 0 if torch.is_grad_enabled() else 1
            halves[number] = all_log_probs.chunk(2)[number][:, : ids.shape[1]].clone().requires_grad_(number == 0)
            return SimpleNamespace(log_probs=halves[number])

    loss.actor_network = Half()
    output = loss(batch)
    ours = total_loss(output)
    (ours_gradient,) = torch.autograd.grad(ours, halves[0])
    log_probs = all_log_probs[:2].clone().requires_grad_()
    masks = torch.tensor([[0, 1, 1], [0, 0, 1]]), torch.tensor([[0, 1, 0], [0, 1, 1]])
    zeros = torch.zeros(2, 2)
    same = SimpleNamespace(log_probs=log_probs[:, 1:] * masks[0][:, 1:], entropy=zeros, mean_logits=zeros)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda *_: (all_log_probs[2:] * masks[1]).sum(-1),
        **weights,
    )
    reference = batch["reference_log_probs"]
    inputs = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 3),
        "completion_mask": masks[0],
        "label": torch.tensor([True, False]),
        "ref_logps": reference[:, 0],
        "ref_KL_logps": reference[:, 1],
    }
    theirs = KTOTrainer._compute_loss(trainer, lambda **_: same, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(theirs, log_probs)
    assert trainer._metrics["train"]["kl"] == [pytest.approx(output.kl.item(), abs=1e-6)]
    assert (output.kl.item() > 0) == (shift > 0)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(ours_gradient * masks[0], gradient, atol=1e-6, rtol=0)
