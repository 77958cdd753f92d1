"""RewardLoss on worked numbers, against Transformers' own classifier and TRL, however pairs are cut into batches."""

import importlib.util
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tensordict import lazy_stack
from torch import nn
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.reward_scorer import RewardScorer
from llmrl.objectives import total_loss
from llmrl.objectives.llm import RewardLoss
from tests.objectives.test_dpo import answers, pair, random_pairs, sigmoid
from tests.support.causal_models import SMALL, assert_same_gradients, gradients, sharpened
from tests.support.losses import assert_same_step, run_step


class Given(nn.Module):
    """Rewards that are a parameter."""

    def __init__(self, reward_CT):
        super().__init__()
        self.reward = nn.Parameter(reward_CT)

    def forward(self, input_ids, attention_mask):
        return self.reward[:, : input_ids.shape[1]]


def worked(**settings):
    """Two pairs that part at their third and second token, of 4, 3 and 2, 4 tokens; 9 stands in the padding."""
    rewards = [[0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 9.0, 9.0], [0.0, 1.0, 1.0, 9.0], [0.0, 2.0, 2.5, 0.5]]
    rows = [
        pair([1, 2, 3, 4], [1, 2, 5], [0, 0, 1, 1], [0, 0, 1]),
        pair([1, 2], [1, 3, 4, 5], [0, 1], [0, 1, 1, 1]),
    ]
    return RewardLoss(Given(torch.tensor(rewards)), **settings), lazy_stack(rows)


def log_sigmoid(x):
    return -math.log(sigmoid(x))


# The last rewards are 4 and 1, and 1 and 0.5. By token the differences are 2 - 1 and 4 - 1 (the shorter one keeps its
# last), and 1 - 2, 1 - 2.5 and 1 - 0.5.
@pytest.mark.parametrize(
    ("level", "margins", "expected"),
    [
        ("sequence", None, (log_sigmoid(3) + log_sigmoid(0.5)) / 2),
        ("sequence", [1.0, -1.0], (log_sigmoid(2) + log_sigmoid(1.5)) / 2),
        (
            "token",
            None,
            ((log_sigmoid(1) + log_sigmoid(3)) / 2 + (log_sigmoid(-1) + log_sigmoid(-1.5) + log_sigmoid(0.5)) / 3) / 2,
        ),
        (
            "token",
            [1.0, 0.0],
            ((log_sigmoid(0) + log_sigmoid(2)) / 2 + (log_sigmoid(-1) + log_sigmoid(-1.5) + log_sigmoid(0.5)) / 3) / 2,
        ),
    ],
)
def test_worked_numbers(level, margins, expected):
    loss, batch = worked(level=level)
    if margins is not None:
        batch["margin"] = torch.tensor(margins)
    output = loss(batch)
    assert output.loss_reward.item() == pytest.approx(expected)
    assert (output.pairs_right.item(), output.margin.item()) == (1.0, 1.75)
    assert (output.chosen_reward.item(), output.rejected_reward.item(), output.tokens.item()) == (2.5, 0.75, 7)
    assert loss.pair_rewards(batch).tolist() == [[4.0, 1.0], [1.0, 0.5]]


def test_a_share_of_the_loss_is_that_of_the_first_token():
    first = (log_sigmoid(1) + log_sigmoid(-1)) / 2
    mean = ((log_sigmoid(1) + log_sigmoid(3)) / 2 + (log_sigmoid(-1) + log_sigmoid(-1.5) + log_sigmoid(0.5)) / 3) / 2
    loss, batch = worked(level="token", first_share=0.75)
    assert loss(batch).loss_reward.item() == pytest.approx(0.75 * first + 0.25 * mean)
    loss, batch = worked(level="token", first_share=1.0)
    total_loss(loss(batch)).backward()
    one, other = sigmoid(-1) / 2, sigmoid(1) / 2
    expected = [[0, 0, -one, 0], [0, -other, 0, 0], [0, 0, one, 0], [0, other, 0, 0]]
    assert loss.reward_network.reward.grad.tolist() == [pytest.approx(row) for row in expected]


def test_the_gradient_of_a_pair():
    loss, batch = worked()
    total_loss(loss(batch)).backward()
    first, second = sigmoid(-3) / 2, sigmoid(-0.5) / 2
    expected = [[0, 0, 0, -first], [0, -second, 0, 0], [0, 0, first, 0], [0, 0, 0, second]]
    assert loss.reward_network.reward.grad.tolist() == [pytest.approx(row) for row in expected]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return sharpened(Qwen2ForSequenceClassification(Qwen2Config(**SMALL, num_labels=1)))


def test_rewards_are_those_of_the_classifier_that_transformers_reads(model):
    batch = random_pairs(4)
    ours = RewardLoss(RewardScorer(model)).pair_rewards(batch)
    for row, rewards in zip(batch.unbind(0), ours, strict=True):
        alone = [model(input_ids=ids[None]).logits.item() for ids, _ in answers(row)]
        assert rewards.tolist() == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    "settings", [{"level": "sequence"}, {"level": "token"}, {"level": "token", "first_share": 0.5}]
)
def test_micro_batches_change_nothing(model, settings):
    batch = random_pairs(7)
    loss = RewardLoss(RewardScorer(model), **settings)
    whole = run_step(loss, batch)
    parts = run_step(loss, batch[:1], batch[1:5], batch[5:], normalizer=loss.count_step(batch))
    assert_same_step(parts, whole, atol=1e-6, rtol=1e-5, gradient=1e-6)


def test_what_cannot_be_compared_is_refused():
    loss, batch = worked()
    with pytest.raises(DataError, match="margin must be finite: got nan in row 1"):
        loss(batch.clone().set("margin", torch.tensor([0.0, math.nan])))
    with pytest.raises(ConfigError, match="sequence"):
        RewardLoss(nn.Identity(), level="sentence")
    for settings in ({"level": "token", "first_share": 1.5}, {"first_share": 0.5}):
        with pytest.raises(ConfigError, match="first_share must be within"):
            RewardLoss(nn.Identity(), **settings)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("margins", [None, [0.5, -0.25, 1.0, 0.0]])
def test_values_and_gradients_are_those_of_trl(model, margins):
    from trl import RewardTrainer

    batch = random_pairs(4)
    if margins is not None:
        batch["margin"] = torch.tensor(margins)
    ours = total_loss(RewardLoss(RewardScorer(model))(batch))
    expected = gradients(model, ours)
    halves = [answers(row)[side][0] for side in (0, 1) for row in batch.unbind(0)]
    inputs = {
        "input_ids": nn.utils.rnn.pad_sequence(halves, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in halves], batch_first=True),
    }
    inputs |= {} if margins is None else {"margin": torch.tensor(margins)}
    same = {"device": torch.device("cpu"), "gather": lambda x: x, "gather_for_metrics": lambda x: x}
    args = SimpleNamespace(center_rewards_coefficient=None)
    state = {"aux_loss_enabled": False, "_metrics": defaultdict(lambda: defaultdict(list))}
    state |= {"_total_train_tokens": 0, "_tp_size": 1}
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(**same), args=args, **state)
    theirs = RewardTrainer.compute_loss(trainer, model, inputs)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_same_gradients(expected, gradients(model, theirs))
