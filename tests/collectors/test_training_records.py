"""A template that rewrites the past: each sampled token is trained once, with the advantage of its conversation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from llmrl.collectors.llm import LLMCollector
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.envs.llm import DatasetChatEnv
from llmrl.envs.llm.transforms import RewardFunction
from llmrl.modules.llm import LLMWrapperBase, TransformersWrapper
from llmrl.objectives.llm import GRPOLoss, MCAdvantage, SFTLoss, count_step
from llmrl.objectives.llm.groups import group_advantage
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.conversations import ROWS, AskAgain, Recorder

THINKING = "<think>\nhm\n</think>\n\n"
TOKENIZER = tiny_tokenizer(template="qwen3")


def dialogs(answers, *, reward=None, num_envs=2, repeats=None, pad_output=False, tokenizer=TOKENIZER, **options):
    env = DatasetChatEnv(
        dataset=ROWS, shuffle=False, num_envs=num_envs, repeats=repeats, group_repeats=repeats is not None, max_steps=3
    )
    env = env.append_transform(AskAgain())
    if reward is not None:
        env = env.append_transform(RewardFunction(reward, deadline_s=None))
    policy = LLMWrapperBase(Recorder(answers, tokenizer=tokenizer), tokenizer=tokenizer, pad_output=pad_output)
    return LLMCollector(env, policy=policy, **{"yield_only_last_steps": True, **options}), policy


def conversations(batch):
    """The rows of each conversation: up to and including the one that is done."""
    found, open_rows = [], []
    for row, done in enumerate(batch["next", "done"].flatten().tolist()):
        open_rows.append(row)
        if done:
            found.append(open_rows)
            open_rows = []
    assert not open_rows
    return found


def column(batch, *key):
    """Rows of a ragged or padded entry, without padding."""
    attention = batch.get(("masks", "all_attention_mask"), as_list=True)
    return [row[kept] for row, kept in zip(batch.get(key, as_list=True), attention, strict=True)]


def test_each_record_is_a_row_and_those_of_a_conversation_are_adjacent():
    answers = ["one", THINKING + "two", "stop", THINKING + "three", "four"]  # q0: one, stop; q1: two, three, four
    collector, policy = dialogs(answers, reward=lambda completion: float(len(completion)))
    batch = collector.next()
    assert batch.get("query").tolist() == ["q0", "q1", "q1", "q1"]
    assert batch["next", "done"].flatten().tolist() == [True, False, False, True]
    ids, masks = column(batch, "tokens", "full"), column(batch, "masks", "all_assistant_mask")
    assert TOKENIZER.batch_decode([row[mask] for row, mask in zip(ids, masks, strict=True)]) == [
        "one<|im_end|>stop<|im_end|>",
        f"{THINKING}two<|im_end|>",
        f"{THINKING}three<|im_end|>",
        "four<|im_end|>",
    ]
    returns = [len("one" + "stop"), 0, 0, len(THINKING + "two" + THINKING + "three" + "four")]
    assert batch["next", "reward"].flatten().tolist() == returns
    rewards, end = column(batch, "tokens", "rewards"), TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert [row[row != 0].tolist() for row in rewards] == [[3, 4], [len(THINKING) + 3], [len(THINKING) + 5], [4]]
    for row, row_ids, mask in zip(rewards, ids, masks, strict=True):
        assert torch.equal(row != 0, mask & (row_ids == end)), "what a turn earned is at its last token"
    assert collector.counters == {"produced": 5, "delivered": 5, "dropped": 0, "conversations": 2, "failed": 0}
    assert policy.counters == {"rewritten": 2}
    assert batch["new_record"].tolist() == [False, True, True, True]


def test_a_failed_turn_fails_every_record_of_its_conversation():
    answers = [THINKING + "one", "two", "three", "four", "stop", "stop"]
    collector, _ = dialogs(
        answers, reward=lambda completion: None if "one" in completion else 1.0, num_envs=1, repeats=2
    )
    advantage = MCAdvantage(2, trajectory_return="sum", min_group_size=2)
    batch = collector.next()
    assert [math.isnan(value) for value in batch["next", "reward"].flatten().tolist()] == [False, True, False]
    assert advantage.inv(batch) is None
    assert advantage.counters["failed"] == 1


PIECES = ["a", "é漢", "<think>", "</think>", "\n\n", "stop", "<|im_end|>", "12", "<|im_start|>"]


@pytest.mark.parametrize("pad_output", [False, True])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_sampled_token_is_in_exactly_one_record_as_the_engine_drew_it(pad_output, data):
    texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5)
    drawn = data.draw(st.lists(texts, min_size=9, max_size=9))
    # piece by piece, so that the ids are often not those of the text
    answers = [torch.tensor([i for p in pieces for i in TOKENIZER.encode(p)]) for pieces in drawn]
    collector, policy = dialogs(answers, num_envs=3, pad_output=pad_output)
    batch = collector.next()
    ids, masks = column(batch, "tokens", "full"), column(batch, "masks", "all_assistant_mask")
    log_probs = column(batch, "log_probs", "full")
    trained = [0] * len(batch)
    for prompt, response, _ in policy.engine.drawn:  # the queries differ, so that no two conversations share a prompt
        start, end = len(prompt), len(prompt) + len(response)
        seen = torch.cat([prompt, response])
        [row] = [
            row
            for row, (full, mask) in enumerate(zip(ids, masks, strict=True))
            if torch.equal(full[:end], seen) and mask[start:end].all()
        ]
        trained[row] += len(response)
    assert trained == [int(mask.sum()) for mask in masks]
    assert all(torch.equal(values != 0, mask) for values, mask in zip(log_probs, masks, strict=True))
    event(f"{len(batch)} records")


FORMS = {
    "turns": {"yield_only_last_steps": None, "dialog_turns_per_batch": 6},
    "flat turns": {"yield_only_last_steps": None, "dialog_turns_per_batch": 6, "flatten_data": True},
    "conversations": {"yield_only_last_steps": None, "yield_completed_trajectories": True},
    "each on its own": {"yield_only_last_steps": None, "yield_completed_trajectories": True, "concurrency": 2},
    "last turns": {},
}


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("answers", [["one", "two", "six"], [THINKING + "one", "two", THINKING + "six"]])
@pytest.mark.parametrize("form", FORMS)
def test_every_drawn_token_is_trained_once_whatever_the_form_of_the_rows(form, answers, pad_output):
    collector, policy = dialogs(answers, pad_output=pad_output, **FORMS[form])
    batch = collector.next().reshape(-1)
    drawn = sum(len(response) for _, response, _ in policy.engine.drawn)
    losses = [GRPOLoss(nn.Identity(), masking_strategy=name) for name in ("sft", "rlhf", "generic")]
    counts = [loss.count_step(batch).tokens for loss in [*losses, SFTLoss(nn.Identity())]]
    assert [*counts, count_step(batch).tokens] == [drawn] * 5


def tokens_of_rows(batch):
    return [count_step(row).tokens for row in batch.split(1)]


def test_the_last_turn_of_a_rollout_stands_for_every_turn():
    policy = LLMWrapperBase(Recorder(["one", "two", "six"], tokenizer=TOKENIZER), tokenizer=TOKENIZER)
    env = DatasetChatEnv(dataset=ROWS, shuffle=False, num_envs=2).append_transform(AskAgain())
    turns = env.rollout(3, policy)
    drawn = sum(len(response) for _, response, _ in policy.engine.drawn)
    assert GRPOLoss(nn.Identity()).count_step(turns[:, -1]).tokens == drawn


def test_moments_of_whitened_advantages_count_each_drawn_token_once():
    for form in ("conversations", "last turns"):
        collector, _ = dialogs(
            ["one", "two, and more", "stop", "three", "stop", "stop"],
            reward=lambda completion: float(len(completion)),
            num_envs=1,
            repeats=2,
            **FORMS[form],
        )
        out = MCAdvantage(2, scale="raw", whiten=True, trajectory_return="sum").inv(collector.next())
        tokens = torch.tensor(tokens_of_rows(out), dtype=torch.float64)
        advantages = out["advantage"].flatten().double()
        assert (tokens * advantages).sum() / tokens.sum() == pytest.approx(0, abs=1e-6)
        assert (tokens * advantages.square()).sum() / tokens.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("family", ["qwen", "llama3"])
def test_a_template_that_keeps_the_past_has_one_row_per_conversation(family):
    tokenizer = tiny_tokenizer(template=family)
    collector, policy = dialogs([THINKING + "one", "two", "three"], tokenizer=tokenizer)
    batch = collector.next()
    assert len(batch) == 2
    assert batch["next", "done"].all()
    assert policy.counters == {"rewritten": 0}


def test_records_get_the_advantage_of_their_conversation_and_gradients_reach_the_model():
    words = [THINKING + "a", "b", "stop", THINKING + "c", THINKING + "eee", "stop"]
    answers = iter(words * 8)
    num_prompts, group_size = 2, 3
    collector, policy = dialogs(
        lambda prompt: next(answers),
        reward=lambda completion: float(len(completion)),
        num_envs=num_prompts,
        repeats=group_size,
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(3 * num_prompts * group_size),
        sampler=SamplerWithoutReplacement(),
        transform=(advantage := MCAdvantage(group_size, trajectory_return="sum")),
    )
    batch = collector.next()
    rows = conversations(batch)
    assert len(rows) == num_prompts * group_size < len(batch)
    buffer.extend(batch)
    assert len(buffer) == len(batch)
    assert advantage.counters["trajectories"] == num_prompts * group_size
    assert advantage.counters["completed"] == advantage.counters["written"] == num_prompts
    returns = torch.tensor([batch["next", "reward"][conversation].sum() for conversation in rows])
    expected = group_advantage(returns.view(num_prompts, group_size)).flatten()
    assert expected.unique().numel() > 2
    wanted = {
        tuple(batch[row]["tokens"].full.tolist()): value
        for conversation, value in zip(rows, expected.tolist(), strict=True)
        for row in conversation
    }
    model = tiny_model(TOKENIZER, hidden_size=32, heads=2)
    loss = GRPOLoss(TransformersWrapper(model, tokenizer=TOKENIZER, generate=False), aggregation="token")
    kept = buffer[:]
    for row in kept.unbind(0):
        assert row["advantage"].item() == pytest.approx(wanted[tuple(row["tokens"].full.tolist())])
    counts = loss.count_step(kept)
    assert counts.tokens == sum(len(response) for _, response, _ in policy.engine.drawn)
    loss(kept, counts).loss_objective.backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(grad.isfinite().all() for grad in whole)
    assert any(grad.any() for grad in whole)
    model.zero_grad()
    seen = 0
    while seen < len(buffer):  # in parts, whatever conversations they cut through
        part = buffer.sample(min(5, len(buffer) - seen))
        seen += len(part)
        loss(part, counts).loss_objective.backward()
    for parameter, grad in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, grad, atol=1e-6, rtol=1e-4)
