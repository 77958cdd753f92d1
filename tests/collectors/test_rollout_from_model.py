"""Answers to the prompts of a dataset as episodes: their numbers, worked out by hand and by the plain model."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from transformers import AutoModelForSequenceClassification

from llmrl.data import AdaptiveKLController, PromptData, RolloutFromModel
from llmrl.errors import ConfigError
from llmrl.modules.llm.engines import SamplingParams
from llmrl.modules.llm.reward_scorer import RewardScorer
from llmrl.testing import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
R = 4


def prompts() -> PromptData:
    """Two prompts of 3 and 2 tokens; the label of the first one ends, and has a token behind its end."""
    return PromptData(
        input_ids=torch.tensor([[5, 6, 7, 8, EOS, 9], [5, 6, 7, PAD, PAD, PAD]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
        prompt_rindex=torch.tensor([2, 1]),
        batch_size=[2],
    )


class LastIds(nn.Module):
    """The end score of a row is the sum of its real ids over 100; the reward after each token is 0."""

    def forward(self, input_ids, attention_mask):
        assert attention_mask.sum(-1).gt(0).all()
        return torch.zeros_like(input_ids, dtype=torch.float32), (input_ids * attention_mask).sum(-1) / 100


def rollout(reward_model: nn.Module | None = None, *, pad_token_id: int = PAD, **options) -> RolloutFromModel:
    models = [tiny_model(TOKENIZER, seed=seed) for seed in (0, 1)]
    options = {"max_new_tokens": R, "eos_token_id": EOS, "pad_token_id": pad_token_id, "seed": 0} | options
    return RolloutFromModel(*models, reward_model or LastIds(), **options)


def generated(pad: int = PAD) -> torch.Tensor:
    """The first answer ends after two tokens, the second one is cut off."""
    return torch.tensor([[5, 6, 7, 11, EOS, pad, pad, pad, pad, pad], [5, 6, 11, 12, 13, 14, pad, pad, pad, pad]])


def _is(found: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found.squeeze(-1), torch.tensor(expected), atol=1e-6, rtol=1e-4)


LOG_RATIO = torch.tensor([[0.5, -1.0, 0.0, 0.0], [1.0, 2.0, -3.0, 4.0]])


@pytest.mark.parametrize("pad", [PAD, EOS])  # masks do not come from padding
def test_the_steps_of_an_episode_are_those_worked_out_by_hand(pad):
    td = rollout(pad_token_id=pad).create_rollout_td(prompts(), generated(pad), torch.zeros(2, R, 1), LOG_RATIO)
    assert td.shape == (2, R)
    assert td["action"].tolist() == [[11, EOS, pad, pad], [11, 12, 13, 14]]
    assert td["mask"].tolist() == [[True, True, False, False], [True] * 4]
    ends = {name: td["next", name].squeeze(-1).int().tolist() for name in ("done", "terminated", "truncated")}
    assert ends == {
        "done": [[0, 1, 0, 0], [0, 0, 0, 1]],
        "terminated": [[0, 1, 0, 0], [0] * 4],
        "truncated": [[0] * 4, [0, 0, 0, 1]],
    }
    assert td["input_ids"][1, 2].tolist() == [5, 6, 11, 12, *[pad] * 6]
    assert td["next", "input_ids"][1, 2].tolist() == [5, 6, 11, 12, 13, *[pad] * 5]
    assert td["attention_mask"][0].sum(-1).tolist() == [3, 4, 5, 5]
    assert td["next", "attention_mask"][0].sum(-1).tolist() == [4, 5, 5, 5]

    # The first answer is scored as its label is, with the token behind the end: (11 + eos + 9) - (8 + eos + 9) = 3; the
    # second one was cut off: (11 + 12 + 13 + 14) - 7 = 43, hundredths both.
    _is(td["next", "reward_raw"], [[0, 0.03, 0, 0], [0, 0, 0, 0.43]])
    _is(td["next", "reward_kl"], [[-0.05, 0.1, 0, 0], [-0.1, -0.2, 0.3, -0.4]])
    assert torch.equal(td["next", "reward"], td["next", "reward_raw"] + td["next", "reward_kl"])
    clipped = rollout(score_clip=0.1).create_rollout_td(
        prompts(), generated(), torch.zeros(2, R, 1), LOG_RATIO, kl_coef=0.0
    )
    _is(clipped["next", "reward"], [[0, 0.03, 0, 0], [0, 0, 0, 0.1]])


def test_generated_tokens_have_the_log_probs_of_the_models():
    sampler, batch = rollout(), prompts()
    tokens, log_probs, log_ratio = sampler.generate(batch)
    assert (tokens.shape, log_probs.shape, log_ratio.shape) == ((2, 10), (2, R, 1), (2, R))
    for row, start in enumerate((3, 2)):
        assert tokens[row, :start].tolist() == batch.input_ids[row, :start].tolist()
        answer = tokens[row, start : start + R]
        places = torch.arange(start - 1, start + R - 1)
        ours, reference = (
            sampler.logits_to_logprobs(model(tokens[row : row + 1]).logits[0, places], answer)
            for model in (sampler.model, sampler.ref_model)
        )
        count = R if EOS not in answer.tolist() else answer.tolist().index(EOS) + 1
        torch.testing.assert_close(log_probs[row, :count, 0], ours[:count], atol=1e-5, rtol=0)
        torch.testing.assert_close(log_ratio[row, :count], (ours - reference)[:count], atol=1e-5, rtol=0)
        assert not log_ratio[row, count:].any()
    assert torch.equal(rollout().generate(batch)[0], tokens)  # the same seed
    sampler.ref_model = sampler.model
    assert not sampler.generate(batch)[2].any()  # exactly 0
    td = sampler.rollout_from_data(batch)
    assert set(td.keys(True, True)) == {
        *("action", "mask", "sample_log_prob", "input_ids", "attention_mask"),
        *(("next", name) for name in ("input_ids", "attention_mask", "done", "terminated", "truncated")),
        *(("next", name) for name in ("reward", "reward_raw", "reward_kl")),
    }
    assert td["next", "done"].sum(1).tolist() == [[1], [1]]


def test_reward_models_of_three_kinds_give_the_same_scores():
    config = tiny_model(TOKENIZER).config
    config.num_labels, config.pad_token_id = 1, PAD
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    scorer = RewardScorer(model)

    def end_scores(input_ids, attention_mask):
        return model(input_ids=input_ids, attention_mask=attention_mask).logits

    module = TensorDictModule(end_scores, in_keys=["input_ids", "attention_mask"], out_keys=["end_scores"])
    rewards = [
        rollout(kind).create_rollout_td(prompts(), generated(), torch.zeros(2, R, 1), LOG_RATIO)["next", "reward_raw"]
        for kind in (model, scorer, module)
    ]
    assert rewards[0].ne(0).sum() == 2
    torch.testing.assert_close(rewards[0], rewards[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(rewards[0], rewards[2], atol=1e-6, rtol=0)


def test_the_scheduler_moves_the_weight_by_the_kl_of_whole_answers():
    scheduler = AdaptiveKLController(init_kl_coef=0.2, target=1.0, horizon=10)
    sampler = rollout(kl_scheduler=scheduler, num_steps=1)
    assert sampler.kl_coef == 0.2
    for ratio in (LOG_RATIO * 100, LOG_RATIO):  # of the last one alone: -0.5 and 4, whose mean is 1.75 times the target
        sampler.create_rollout_td(prompts(), generated(), torch.zeros(2, R, 1), ratio)
    sampler.step_scheduler()
    assert sampler.kl_coef == pytest.approx(0.2 * (1 + 0.2 * 2 / 10))  # the excess is clipped at 0.2
    sampler.step_scheduler()  # nothing new
    assert sampler.kl_coef == pytest.approx(0.208)


def test_what_cannot_be_an_episode_is_refused():
    with pytest.raises(ConfigError, match=r"max_new_tokens=4: got max_new_tokens=256"):
        rollout().generate(prompts(), SamplingParams())
    with pytest.raises(ConfigError, match=r"must be above 0: got 0"):
        rollout(max_new_tokens=0)
    model = tiny_model(TOKENIZER)
    model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="pass eos_token_id"):
        RolloutFromModel(model, model, LastIds())
