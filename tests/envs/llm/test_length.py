"""Long answers: their price, and the exclusion of answers that were cut off from the loss."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.envs.llm.transforms import LengthPenalty, MaskTruncated, OverlongShaping
from llmrl.errors import ConfigError, MissingKeyError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.containers import Masks, Tokens
from tests.support.refusals import refusals

LENGTHS = [3, 6, 0]


def turn(padded: bool = False) -> TensorDict:
    """Three answers of 3, 6 and no tokens, to prompts of 2."""
    response = [torch.arange(n) for n in LENGTHS]
    if not padded:
        return TensorDict(tokens=Tokens.from_rows({"response": response}), batch_size=[3])
    attention = torch.stack([torch.arange(8) < 2 + n for n in LENGTHS])
    tokens = Tokens.from_padded({"response": torch.zeros(3, 6, dtype=torch.int64)})
    return TensorDict(tokens=tokens, masks=Masks.from_padded({"all_attention_mask": attention}), batch_size=[3])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (LengthPenalty(budget=4, coef=0.25), [1.0, 0.5, 1.0]),
        (OverlongShaping(max_length=6, buffer=4), [0.75, 0.0, 1.0]),
        (OverlongShaping(max_length=6, buffer=6, penalty=2.0), [0.0, -1.0, 1.0]),
    ],
)
def test_a_long_answer_costs_reward(transform, expected, padded):
    next_td = TensorDict(reward=torch.ones(3, 1, 1), batch_size=[3])
    given = next_td["reward"]
    assert transform._step(turn(padded), next_td)["reward"].flatten().tolist() == pytest.approx(expected)
    assert next_td["reward"].shape == (3, 1, 1)
    assert given.flatten().tolist() == [1.0] * 3  # another's tensor is not changed


def test_with_rewards_per_token_the_last_one_pays():
    next_td = TensorDict(reward=torch.ones(3, 6, 1), batch_size=[3])
    LengthPenalty(budget=4, coef=0.25)._step(turn(), next_td)
    assert next_td["reward"][1].flatten().tolist() == [1.0] * 5 + [0.5]


@pytest.mark.parametrize("shape", [(0, 1, 1), (0, 6, 1), (0,)])
def test_a_batch_without_rows_stays_without_rows(shape):
    """Regression: a size that cannot be inferred was asked of it."""
    next_td = TensorDict(reward=torch.ones(shape), batch_size=[0])
    assert LengthPenalty(budget=4)._step(turn(padded=True)[:0], next_td)["reward"].shape == shape


def test_a_failed_reward_stays_failed():
    next_td = TensorDict(reward=torch.full((3, 1, 1), torch.nan), batch_size=[3])
    assert LengthPenalty(budget=1)._step(turn(), next_td)["reward"].isnan().all()


def penalised(td, next_td):
    return LengthPenalty(budget=1)._step(td, TensorDict(next_td, batch_size=[3]))


test_what_is_missing_and_what_cannot_be_is_named = refusals(
    (MissingKeyError, "append it after the transform", lambda: penalised(turn(), {})),
    (MissingKeyError, r"\('tokens', 'response'\)", lambda: penalised(TensorDict(), {"reward": torch.ones(3, 1, 1)})),
    (MissingKeyError, "stop_reason", lambda: MaskTruncated().inv(turn())),
    (ConfigError, "budget", lambda: LengthPenalty(budget=0)),
    (ConfigError, "coef", lambda: LengthPenalty(budget=1, coef=-1.0)),
    *(
        (ConfigError, "0 < buffer <= max_length", lambda wrong=wrong: OverlongShaping(max_length=10, **wrong))
        for wrong in ({"buffer": 0}, {"buffer": 11}, {"buffer": 2, "penalty": -1.0})
    ),
)


REASONS = torch.tensor([StopReason.EOS, StopReason.LENGTH, StopReason.ABORT, StopReason.STOP_STRING])


def masked(kind: str) -> TensorDict:
    rows = [torch.ones(n, dtype=torch.bool) for n in (2, 3, 4, 5)]
    if kind == "ragged":
        masks = Masks.from_rows({"all_assistant_mask": rows, "all_attention_mask": rows})
    elif kind == "padded":
        masks = Masks.from_padded({"all_assistant_mask": torch.ones(4, 5, dtype=torch.bool)})
    else:
        masks = lazy_stack([TensorDict(all_assistant_mask=row) for row in rows])
    return TensorDict(masks=masks, stop_reason=REASONS, batch_size=[4])


@pytest.mark.parametrize("kind", ["ragged", "padded", "plain"])
def test_answers_that_were_cut_off_lose_their_mask(kind):
    given = masked(kind)
    out = MaskTruncated().inv(given)
    trained = [bool(row.any()) for row in out.get(("masks", "all_assistant_mask"), as_list=True)]
    assert trained == [True, False, False, True]
    assert all(bool(row.all()) for row in given.get(("masks", "all_assistant_mask"), as_list=True))
    assert type(out["masks"]) is type(given["masks"])
    if kind == "ragged":
        assert all(bool(row.all()) for row in out.get(("masks", "all_attention_mask"), as_list=True))
        assert [len(row) for row in out[1:3].get(("masks", "all_assistant_mask"), as_list=True)] == [3, 4]


def test_where_nothing_was_cut_off_the_batch_is_the_same_object():
    td = masked("ragged")[:1]
    assert MaskTruncated().inv(td) is td
