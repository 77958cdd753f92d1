"""A loss trains the tokens that have a log-prob and were sampled from something."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.errors import DataError
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives.llm import GRPOLoss, SFTLoss, StepCounts, count_step
from tests.support.losses import tiny_scorer

ROWS = [[3, 5, 8, 2, 9], [4, 4, 7]]
MASKS = [[1, 1, 1, 1, 1], [1, 0, 1]]  # both begin with a trained token, as a piece of a cut conversation does
TRAINED = [[0, 1, 1, 1, 1], [0, 0, 1]]
ADVANTAGES = [1.0, -2.0]
PADDINGS = [None, "left", "right", "left, stacked lazily", "right, stacked lazily"]


def scorer() -> TokenScorer:
    return tiny_scorer(vocab=11, hidden=8, layers=1)


def batch(padding: str | None) -> TensorDict:
    width = max(map(len, ROWS))

    def column(rows, dtype):
        if padding is None:
            return [torch.tensor(row, dtype=dtype) for row in rows]
        before = [(width - len(row)) * padding.startswith("left") for row in rows]
        wide = [[0] * at + row + [0] * (width - at - len(row)) for at, row in zip(before, rows, strict=True)]
        return list(torch.tensor(wide, dtype=dtype))

    attention = column([[1] * len(row) for row in ROWS], torch.bool)
    log_probs = column([[-1.5 * flag for flag in row] for row in MASKS], torch.float64)
    columns = zip(column(ROWS, torch.int64), column(MASKS, torch.bool), attention, log_probs, strict=True)
    rows = [
        TensorDict(
            tokens=TensorDict(full=ids),
            masks=TensorDict(all_assistant_mask=mask, all_attention_mask=attention),
            log_probs=TensorDict(full=log_probs),
            advantage=torch.tensor([[ADVANTAGES[row]]], dtype=torch.float64),
            group_id=torch.tensor(row),
        )
        for row, (ids, mask, attention, log_probs) in enumerate(columns)
    ]
    is_lazy = padding is None or padding.endswith("lazily")
    return lazy_stack(rows) if is_lazy else torch.stack([row.clone() for row in rows])


def worked_log_probs(model) -> list[list[torch.Tensor]]:
    """log p(token t | tokens before t) of the trained tokens, each row alone."""
    found = []
    for ids, trained in zip(ROWS, TRAINED, strict=True):
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append([log_p[t - 1, ids[t]] for t in range(len(ids)) if trained[t]])
    return found


def gradient(loss, model) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def check(loss, expected, model):
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert (gradient(loss, model) - gradient(expected, model)).abs().max() < 1e-12


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("settings", [{}, *({"reduction": name} for name in ("mean", "sum", "none"))], ids=str)
def test_the_first_token_of_a_row_is_in_no_sum_and_no_count_of_supervised_training(settings, padding):
    actor = scorer()
    first, second = worked_log_probs(actor.model)
    means = [-sum(first) / 4, -sum(second) / 1]
    expected = {"token": -(sum(first) + sum(second)) / 5, "mean": sum(means) / 2, "sum": sum(means), "none": means[0]}
    output = SFTLoss(actor, **settings)(batch(padding))
    loss = output.loss_sft[0] if settings.get("reduction") == "none" else output.loss_sft
    check(loss, expected[settings.get("reduction", "token")], actor.model)
    assert output.tokens == 5
    assert output.nll.item() == pytest.approx(expected["token"].item(), abs=1e-12)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
@pytest.mark.parametrize("aggregation", ["token", "seq-mean", "seq-sum", "prompt-mean", "sum"])
def test_the_first_token_of_a_row_is_in_no_sum_and_no_count_of_a_policy_gradient(aggregation, strategy, padding):
    actor, td = scorer(), batch(padding)
    ratios = [[(log_prob + 1.5).exp() for log_prob in row] for row in worked_log_probs(actor.model)]
    per_row = [[-advantage * ratio for ratio in row] for row, advantage in zip(ratios, ADVANTAGES, strict=True)]
    sums, means = [sum(row) for row in per_row], [sum(row) / len(row) for row in per_row]
    expected = {
        "token": sum(sums) / 5,
        "seq-mean": sum(means) / 2,
        "seq-sum": sum(sums) / 2,
        "prompt-mean": sum(means) / 2,
        "sum": sum(sums),
    }[aggregation]
    loss = GRPOLoss(actor, aggregation=aggregation, masking_strategy=strategy, clip_epsilon=(1.0, 1e9))
    output = loss(td)
    check(output.loss_objective, expected, actor.model)
    assert loss.count_step(td) == count_step(td) == StepCounts(5, 2, 2, {0: 4, 1: 1})
    assert output.ratio_mean.item() == pytest.approx(sum(sum(row).item() for row in ratios) / 5)


def test_rows_of_one_trained_token_each_are_nothing_to_train():
    rows = lazy_stack([batch(None)[1]])
    rows[0]["masks", "all_assistant_mask"] = torch.tensor([True, False, False])
    with pytest.raises(DataError, match="must have a token to train"):
        SFTLoss(scorer())(rows)
    with pytest.raises(DataError, match="at least one trained token"):
        GRPOLoss(scorer())(rows)


@pytest.mark.parametrize("known", ["mask", "response", "nothing"])
def test_generic_masking_leaves_out_what_was_never_sampled(known):
    actor, ids = scorer(), torch.tensor([3, 5, 8, 2, 9])
    row = TensorDict(
        tokens=TensorDict(full=ids),
        log_probs=TensorDict(full=torch.tensor([0.0, 0.0, 0.0, -1.0, -1.5], dtype=torch.float64)),
        advantage=torch.ones(1, 1, dtype=torch.float64),
    )
    if known == "mask":
        row["masks", "all_assistant_mask"] = torch.tensor([False, False, False, True, True])
    elif known == "response":
        row["tokens", "response"] = ids[3:]
    output = GRPOLoss(actor, masking_strategy="generic", clip_epsilon=(1.0, 1e9))(lazy_stack([row]))
    log_p = actor.model(ids[None]).logits[0].log_softmax(-1)
    ratios = [(log_p[2, 2] + 1.0).exp(), (log_p[3, 9] + 1.5).exp()]
    check(output.loss_objective, -sum(ratios) / 2, actor.model)
    assert output.tokens == 2


def test_generic_masking_trains_prompts_that_have_log_probs():
    row = TensorDict(
        tokens=TensorDict(full=torch.tensor([3, 5, 8, 2])),
        masks=TensorDict(all_assistant_mask=torch.tensor([False, False, True, True])),
        log_probs=TensorDict(full=torch.tensor([0.0, -2.0, -1.0, 0.0])),  # the last was certain: sampled all the same
        advantage=torch.ones(1, 1),
    )
    assert GRPOLoss(scorer(), masking_strategy="generic").count_step(lazy_stack([row])).tokens == 3
