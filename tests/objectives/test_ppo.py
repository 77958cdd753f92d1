"""PPO's advantages and the critic's loss: against loops over lists, worked numbers, and any cut into micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torch import nn

from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.containers import Masks, Tokens
from llmrl.objectives.llm.ppo import ValueLoss, conversation_advantages, gae, scored_rows, token_values, value_loss
from tests.support.losses import assert_same_step, conversation, run_step

number = st.floats(-3, 3, width=32)
token = st.tuples(st.booleans(), number, number)  # trained or observed, value, reward
tokens = st.lists(token, min_size=1, max_size=9)
share = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def by_hand(tokens, gamma, lam, last):
    """The recursion A_k = d_k + gamma lam A_{k+1} over the trained tokens of one row, from its last token on."""
    advantages, after, next_value = [], 0.0, last
    for trained, value, reward in reversed(tokens):
        if trained:
            after = reward + gamma * next_value - value + gamma * lam * after
            next_value = value
        advantages.append(after if trained else 0.0)
    return advantages[::-1]


def estimates(rows, gamma, lam, last=None):
    """`gae` of rows of one length or several; the padding has large numbers, which must not matter."""
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[(False, 1e30, 1e30)] * (longest - len(row))] for row in rows], dtype=torch.float64)
    mask, value, reward = padded.unbind(-1)
    value = value.masked_fill(mask == 0, torch.nan)
    last = None if last is None else torch.tensor(last)
    return gae(value, reward, mask.bool(), gamma=gamma, lam=lam, last_value_B=last)


@given(
    rows=st.lists(st.tuples(st.lists(token, min_size=1, max_size=9), number), min_size=1, max_size=4),
    gamma=share,
    lam=share,
)
def test_gae_is_the_recursion_over_the_trained_tokens_of_each_row(rows, gamma, lam):
    got = estimates([row for row, _ in rows], gamma, lam, [last for _, last in rows])
    for row, (given_row, last) in zip(got, rows, strict=True):
        assert row[: len(given_row)].tolist() == pytest.approx(
            by_hand(given_row, gamma, lam, last), rel=1e-12, abs=1e-12
        )
        assert not row[len(given_row) :].any()


@given(row=tokens, data=st.data(), gamma=share, lam=share)
def test_observations_anywhere_change_no_advantage(row, data, gamma, lam):
    longer = []
    for each in row:
        longer += [(False, *data.draw(st.tuples(number, number))) for _ in range(data.draw(st.integers(0, 3)))] + [each]
    trained = [each[0] for each in row], [each[0] for each in longer]
    few, many = estimates([row], gamma, lam)[0], estimates([longer], gamma, lam)[0]
    torch.testing.assert_close(few[torch.tensor(trained[0])], many[torch.tensor(trained[1])], rtol=0, atol=0)


def test_without_discount_the_advantage_is_the_return_minus_the_value():
    """Two turns of two tokens around a tool's result; each turn earns its own reward."""
    mask = torch.tensor([[False, True, True, False, False, True, True]])
    value = torch.tensor([[0.0, 1.0, 2.0, 9.0, 9.0, 3.0, 4.0]])
    reward = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0]])
    assert gae(value, reward, mask).tolist() == [[0, 1.5 - 1, 1.5 - 2, 0, 0, 1 - 3, 1 - 4]]
    # lam = 0 compares with the next token's value: the tool's result lies between 2 and 3, and does not count.
    assert gae(value, reward, mask, lam=0.0).tolist() == [[0, 2 - 1, 0.5 + 3 - 2, 0, 0, 4 - 3, 1 - 4]]
    # A conversation that was cut off goes on with the last value that is known, here 4.
    assert gae(value, reward, mask, lam=0.0, last_value_B=torch.tensor([4.0])).tolist()[0][-1] == 1 + 4 - 4


def rollouts(*rows):
    """Rows of (trained, value, reward) per token and done, cut off; each reward is also in the row's sum."""
    columns = [torch.tensor(tokens).unbind(-1) for tokens, _, _ in rows]
    masks, values, rewards = ([row[at].float() for row in columns] for at in range(3))
    reward = torch.stack([row.sum() for row in rewards]).view(-1, 1, 1)
    after = {"done": torch.tensor([[done] for _, done, _ in rows]), "reward": reward}
    batch = TensorDict(
        tokens=Tokens.from_rows({"full": [torch.arange(len(mask)) for mask in masks], "rewards": rewards}),
        masks=Masks.from_rows({"all_assistant_mask": [mask.bool() for mask in masks]}),
        stop_reason=torch.tensor([StopReason.LENGTH if cut else StopReason.EOS for _, _, cut in rows]),
        next=TensorDict(after, batch_size=[len(rows)]),
        batch_size=[len(rows)],
    )
    return batch, values


def test_a_conversation_is_one_sequence_of_trained_tokens_whatever_rows_hold_it():
    first = [(False, 9.0, 0.0), (True, 1.0, 0.0), (True, 2.0, 0.0), (False, 9.0, 0.5)]  # its reward is that of the 2
    second = [(False, 9.0, 0.0), (True, 3.0, 0.0), (True, 4.0, 1.0)]
    earned = [first[0], first[1], (True, 2.0, 0.5), (False, 9.0, 0.0)]
    for bootstrap in (False, True):
        expected = by_hand(earned + second, 0.9, 0.8, 4.0 * bootstrap)
        for rows in ([(first + second, True, True)], [(first, False, False), (second, True, True)]):
            batch, values = rollouts(([(False, 0.0, 0.0), (True, 0.5, 1.0)], True, False), *rows)
            batch = conversation_advantages(batch, values, gamma=0.9, lam=0.8, bootstrap=bootstrap)
            got = batch.get(("advantages", "full"), as_list=True)
            assert got[0].tolist() == [0, 0.5], "another conversation, before it"
            torch.testing.assert_close(torch.cat(got[1:]), torch.tensor(expected))
            returns = torch.cat(batch.get(("returns", "full"), as_list=True)[1:])
            trained = torch.tensor(expected) != 0
            torch.testing.assert_close(returns, (torch.tensor(expected) + torch.cat(values[1:])) * trained)


def test_a_failed_conversation_is_left_out_with_all_its_rows():
    row = [(True, 0.0, 0.0), (True, 0.0, 1.0)]
    batch, _ = rollouts((row, False, False), (row, True, False), (row, True, False))
    assert scored_rows(batch) is batch
    batch["next", "reward"][1] = torch.nan
    assert scored_rows(batch)["next", "done"].tolist() == [[True]]
    assert scored_rows(batch[:2]) is None


def definition(value, old, target, clip):
    plain = (value - target) ** 2
    if clip is None:
        return plain / 2
    held = torch.where(value > old + clip, old + clip, torch.where(value < old - clip, old - clip, value))
    return torch.where(held.sub(target) ** 2 > plain, held.sub(target) ** 2, plain) / 2


class Given(nn.Module):
    """A critic whose outputs are a parameter, one row per first token id."""

    def __init__(self, after_BT):
        super().__init__()
        self.after = nn.Parameter(after_BT)

    def forward(self, input_ids, attention_mask):
        return self.after[input_ids[:, 0], : input_ids.shape[1]]


def rows_for(critic_rows):
    rows = []
    for index in range(critic_rows):
        row = conversation(index, 2 + index % 2, 3 + index)
        length = len(row["tokens", "full"])
        row["tokens", "full"][0] = index
        drawn = torch.randn(2, length, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        row["values"], row["returns"] = TensorDict(full=drawn[0]), TensorDict(full=drawn[1])
        rows.append(row)
    return rows


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critics_loss_and_gradient_are_those_of_the_definition_for_any_split(clip):
    rows, after = rows_for(4), torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    loss = ValueLoss(Given(after.clone()), clip=clip)
    counts = loss.count_step(lazy_stack(rows))
    whole = run_step(loss, lazy_stack(rows))
    assert_same_step(run_step(loss, lazy_stack(rows[2:]), lazy_stack(rows[:2]), normalizer=counts), whole)

    after.requires_grad_()
    errors, moved, total = [], 0, 0
    for index, row in enumerate(rows):
        for t in row["masks", "all_assistant_mask"].nonzero().flatten().tolist():
            value, old, target = after[index, t - 1], row["values", "full"][t], row["returns", "full"][t]
            errors.append(definition(value, old, target, clip))
            moved += clip is not None and bool(errors[-1] > (value - target) ** 2 / 2)
            total += 1
    (gradient,) = torch.autograd.grad(sum(errors) / total, after)
    fields, gradients = whole
    torch.testing.assert_close(fields["loss_value"], (sum(errors) / total).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients["critic.after"], gradient, rtol=0, atol=1e-14)
    assert (fields["tokens"], counts.tokens) == (total, total)
    assert fields["clip_fraction"].item() == pytest.approx(moved / total)
    assert (moved > 0) == (clip is not None)


def test_the_value_of_a_token_is_the_critics_output_before_it():
    assert token_values(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0, 1, 2]]
    (row,) = rows_for(1)
    loss = ValueLoss(Given(torch.arange(9.0)[None]))
    assert loss.values(lazy_stack([row])).tolist() == [[0, 0, 1, 2, 3]]


def test_what_the_critics_loss_refuses():
    (row,) = rows_for(1)
    row["returns", "full"][2] = torch.nan  # the first token that is trained
    with pytest.raises(DataError, match="row 0"):
        ValueLoss(Given(torch.zeros(1, 9)))(lazy_stack([row]))
    with pytest.raises(ConfigError, match="clip"):
        ValueLoss(Given(torch.zeros(1, 9)), clip=0.0)
    assert value_loss(torch.tensor(2.0), torch.tensor(0.0), torch.tensor(1.0), clip=0.1) == 0.5
