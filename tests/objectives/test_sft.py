"""SFTLoss is a true token mean, leaves empty conversations out, and compares like with like in its KL."""

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn

from llmrl.data.llm.chat import History
from llmrl.data.ragged.padding import pad_rows
from llmrl.errors import ConfigError, DataError, MissingKeyError, ShapeError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.rendering import Renderer
from llmrl.objectives.llm import SFTLoss, StepCounts, count_step
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.conversations import history_td
from tests.support.losses import Recorded, conversation
from tests.support.refusals import refusals
from tests.support.rendering import CHATML

LOG_PROBS = [[-9.0, -1.0, -3.0], [-9.0, -2.0], [-9.0, -9.0, -9.0, -9.0]]  # the first is the prompt; row 3 is all prompt
MASKS = [[0, 1, 1], [0, 1], [0, 0, 0, 0]]


def recorded(rows: list[list[float]] = LOG_PROBS) -> Recorded:
    return Recorded(nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True))


def conversation_of(ids: torch.Tensor, mask: torch.Tensor) -> TensorDict:
    return TensorDict(tokens=TensorDict(full=ids), masks=TensorDict(all_assistant_mask=mask))


def batch(reference: list[list[float]] | None = None) -> TensorDictBase:
    rows = [conversation_of(torch.arange(len(mask)), torch.tensor(mask, dtype=torch.bool)) for mask in MASKS]
    for row, values in zip(rows, reference or [], strict=reference is not None):
        row["next", "ref_log_probs", "full"] = torch.tensor(values)
    return lazy_stack(rows)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (1 + 3 + 2) / 3),  # over tokens
        ({"reduction": "mean"}, (4 / 2 + 2) / 2),  # over the two conversations that have any
        ({"reduction": "mean", "normalize_by_seq_length": False}, (4 + 2) / 2),
        ({"reduction": "sum"}, 2 + 2),
        ({"reduction": "sum", "normalize_by_seq_length": False}, 6),
        ({"reduction": "none"}, [2, 2, 0]),
        ({"reduction": "none", "normalize_by_seq_length": False}, [4, 2, 0]),
    ],
)
def test_reductions_on_worked_numbers(settings, expected):
    output = SFTLoss(recorded(), **settings)(batch())
    assert output.loss_sft.tolist() == pytest.approx(expected)
    assert output.nll.item() == pytest.approx(2.0)
    assert output.accuracy.item() == pytest.approx(2 / 3)  # of the trained ids 1, 2 and 1
    assert (output.tokens, output.empty_rows) == (3, 1)
    assert output.loss_kl_to_ref is None


def test_minor_sft_on_worked_numbers_masks_both_sides():
    reference = [[-5.0, -2.0, -3.0], [-5.0, -2.5], [-5.0] * 4]
    settings = {"loss_function": "minor_sft", "beta": 0.5, "normalize_by_seq_length": False}
    output = SFTLoss(recorded(), **settings)(batch(reference))
    expected = [math.log1p(math.exp(-0.5 * margin)) for margin in (-4 + 5, -2 + 2.5)]
    assert output.loss_sft.item() == pytest.approx(sum(expected) / 2)


def test_kl_to_the_same_policy_is_exactly_zero_and_is_masked_on_both_sides():
    same = SFTLoss(recorded(), kl_to_ref_coeff=0.5)
    assert same(batch(LOG_PROBS)).kl_to_ref == 0
    elsewhere = [[-1.0, -1.0, -3.0], [math.nan, -2.0], [0.0] * 4]  # differs from the policy only outside the mask
    assert same(batch(elsewhere)).kl_to_ref == 0
    output = same(batch([[-9.0, -1.5, -3.0], [-9.0, -2.0], [0.0] * 4]))
    d = -0.5
    assert output.kl_to_ref.item() == pytest.approx((math.exp(d) - d - 1) / 3)
    assert output.loss_kl_to_ref.item() == pytest.approx(0.5 * (math.exp(d) - d - 1) / 3)


def real_batch() -> TensorDictBase:
    lengths = [(3, 4), (2, 1), (4, 0), (1, 6), (5, 2)]
    return lazy_stack([conversation(i, *pair).exclude("group_id") for i, pair in enumerate(lengths)])


def test_nothing_to_train_is_an_error_in_a_step_and_zero_in_a_micro_batch():
    loss = SFTLoss(recorded([[-1.0] * 4]))
    with pytest.raises(DataError, match="got none in 1 conversations"):
        loss(batch()[2:])
    output = loss(batch()[2:], StepCounts(tokens=5, sequences=2))
    output.loss_sft.backward()
    assert (output.loss_sft, output.empty_rows) == (0, 1)
    assert loss.actor_network.log_prob.grad.tolist() == [[0.0] * 4]


CHATS = [
    [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "user", "content": "say 4 twice"},
        {"role": "assistant", "content": "4 4"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "4 4 4"},
    ],
]


def history_batch() -> TensorDict:
    return TensorDict(history=TensorDict(full=History.from_chats(CHATS), batch_size=[2]), batch_size=[2])


def test_messages_are_rendered_and_give_the_loss_of_their_tokens():
    tokenizer = tiny_tokenizer()
    scorer = TokenScorer(tiny_model(tokenizer))
    rendered = Renderer(tokenizer).render(CHATS)
    tokens = lazy_stack([conversation_of(row.ids, row.assistant_mask) for row in rendered])
    from_messages = SFTLoss(scorer, tokenizer)(history_batch())
    assert from_messages.loss_sft == SFTLoss(scorer)(tokens).loss_sft
    assert from_messages.tokens == sum(int(row.assistant_mask.sum()) for row in rendered)
    without_end = SFTLoss(scorer, tokenizer, {"include_end_of_turn": False, "chat_template": CHATML})(history_batch())
    assert without_end.tokens == from_messages.tokens - 3  # three assistant messages
    scorer.renderer = Renderer(tokenizer)  # as a policy wrapper has
    assert SFTLoss(scorer)(history_batch()).loss_sft == from_messages.loss_sft


def test_after_overfitting_one_example_generation_says_it_and_stops():
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    loss, td = SFTLoss(TokenScorer(model), tokenizer), history_batch()[:1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss(td).loss_sft.backward()
        optimizer.step()
    assert loss(td).accuracy == 1
    row = Renderer(tokenizer).render(CHATS[:1])[0]
    end = int(row.assistant_mask.nonzero()[-1])  # the end of the turn is learned too
    assert row.ids[end] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model(input_ids=row.ids[None]).logits[0, end - 1].softmax(-1)[row.ids[end]] > 0.99
    options = {"max_new_tokens": 32, "temperature": 0.0}
    policy = TransformersWrapper(model.eval(), tokenizer=tokenizer, generate_kwargs=options)
    out = policy(history_td([CHATS[0][:1]]))
    assert out["stop_reason"].tolist() == [StopReason.EOS]
    assert out["history"].response.to_chats()[0][-1]["content"] == "4"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_to_a_reference_that_is_the_policy_is_exactly_zero_for_a_real_model(temperature):
    model = tiny_model(tiny_tokenizer())
    td = real_batch()
    scorer = TokenScorer(model, temperature=temperature)
    assert SFTLoss(scorer).count_step(td) == count_step(td)
    rows = td.get(("tokens", "full"), as_list=True)
    masks = td.get(("masks", "all_assistant_mask"), as_list=True)
    width = max(map(len, rows))
    with torch.no_grad():  # scored as one batch of the same shape, as the recipes do
        columns = rows, [torch.ones_like(mask) for mask in masks], masks
        scores = scorer.token_scores(*(pad_rows(column, length=width) for column in columns))
    for row, values in zip(td.unbind(0), scores.log_probs, strict=True):
        row["next", "ref_log_probs", "full"] = values[: len(row["tokens", "full"])].clone()
    for settings in ({}, {"reduction": "mean"}, {"loss_function": "minor_sft"}):
        loss = SFTLoss(scorer, kl_to_ref_coeff=1.0, **settings)
        output = loss(td)
        assert (output.kl_to_ref, output.loss_kl_to_ref) == (0, 0)
        loss.zero_grad()
        output.loss_kl_to_ref.backward()
        assert all((p.grad == 0).all() for p in loss.parameters() if p.grad is not None)


def test_what_is_missing_or_does_not_fit_is_named():
    loss = SFTLoss(recorded(), kl_to_ref_coeff=0.1)
    with pytest.raises(MissingKeyError, match="find the ref log-prob"):
        loss(batch())
    short = [row[:-1] for row in LOG_PROBS]
    with pytest.raises(ShapeError, match=r"got 2 values in row 0, .*3 tokens"):
        loss(batch(short))
    with pytest.raises(MissingKeyError, match="keys present: 'other'"):
        loss(TensorDict(other=torch.zeros(2), batch_size=[2]))
    with pytest.raises(ConfigError, match="pass tokenizer="):
        loss(history_batch())


test_settings_that_contradict_each_other_are_refused = refusals(
    (ConfigError, "reduction", lambda: SFTLoss(nn.Identity(), reduction="batchmean")),
    (ConfigError, "loss_function", lambda: SFTLoss(nn.Identity(), loss_function="dpo")),
    (ConfigError, "normalize_by_seq_length", lambda: SFTLoss(nn.Identity(), normalize_by_seq_length=True)),
    (
        ConfigError,
        "not supported with reduction=.token.",
        lambda: SFTLoss(nn.Identity(), reduction="token", loss_function="minor_sft"),
    ),
    (ConfigError, "minor_sft", lambda: SFTLoss(nn.Identity(), beta=0.2)),
    (ConfigError, "beta must be above 0", lambda: SFTLoss(nn.Identity(), loss_function="minor_sft", beta=-1.0)),
    (ConfigError, "need a tokenizer", lambda: SFTLoss(nn.Identity(), tokenizer_kwargs={})),
    (ConfigError, "must not be negative", lambda: SFTLoss(nn.Identity(), kl_to_ref_coeff=-0.1)),
)
