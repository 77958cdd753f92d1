"""A reward model scores a batch as it scores each conversation alone."""

import re

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.rewards import RewardModelScorer
from llmrl.envs.llm.transforms import RewardFunction, make_rewards
from llmrl.errors import ConfigError, DataError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 256, "initializer_range": 0.3}
QUERIES = ["2 + 2?", "Why is the sky blue, and not green?", "Hi", [{"role": "user", "content": "A list."}]]
SAID = ["Four.", "Rayleigh scattering. " * 6, "", "Yes, it is one."]


def model(kind, config, tokenizer, **changes):
    torch.manual_seed(0)
    settings = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, **SIZES, **changes}
    return kind(config(vocab_size=len(tokenizer), **settings)).float()


@pytest.fixture(scope="module")
def qwen(tokenizer):
    return model(Qwen2ForSequenceClassification, Qwen2Config, tokenizer, num_key_value_heads=2)


@torch.no_grad()
def alone(model, scorer, queries, said):
    rows = scorer.ids([scorer.conversation(q, c) for q, c in zip(queries, said, strict=True)])
    return [model(input_ids=torch.tensor([ids])).logits[0].tolist() for ids in rows]


@pytest.mark.parametrize("tokens_per_batch", [1, 200, 100_000])
@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        (Qwen2ForSequenceClassification, Qwen2Config, {"num_key_value_heads": 2}),
        (LlamaForSequenceClassification, LlamaConfig, {"num_key_value_heads": 4}),
        (BertForSequenceClassification, BertConfig, {}),
    ],
)
def test_a_batch_scores_as_its_rows_do_alone(kind, config, changes, tokens_per_batch, tokenizer):
    reward_model = model(kind, config, tokenizer, **changes)
    scorer = RewardModelScorer(reward_model, tokenizer, tokens_per_batch=tokens_per_batch)
    scores = scorer(SAID, query=QUERIES)
    assert scores == pytest.approx([row[0] for row in alone(reward_model, scorer, QUERIES, SAID)], abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 4


def test_a_batch_has_at_most_as_many_tokens_as_asked_for(qwen, tokenizer):
    shapes = []
    handle = qwen.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    scorer = RewardModelScorer(qwen, tokenizer, tokens_per_batch=160)
    lengths = sorted(map(len, scorer.ids([scorer.conversation(q, c) for q, c in zip(QUERIES, SAID, strict=True)])))
    scorer(SAID, query=QUERIES)
    handle.remove()
    assert sum(rows for rows, _ in shapes) == 4
    assert all(rows * length <= 160 or rows == 1 for rows, length in shapes)
    assert len(shapes) < 4
    assert shapes[-1][1] == lengths[-1]  # from short to long


def test_the_label_that_is_the_reward_is_chosen_among_several(tokenizer):
    reward_model = model(Qwen2ForSequenceClassification, Qwen2Config, tokenizer, num_labels=3, num_key_value_heads=2)
    scorer = RewardModelScorer(reward_model, tokenizer, label=2)
    expected = [row[2] for row in alone(reward_model, scorer, QUERIES, SAID)]
    assert scorer(SAID, query=QUERIES) == pytest.approx(expected, abs=1e-5)
    for label, message in ((None, "a model with 3 labels needs label"), (3, r"within \[0, 3\): got 3")):
        with pytest.raises(ConfigError, match=message):
            RewardModelScorer(reward_model, tokenizer, label=label)


def test_a_conversation_that_is_too_long_has_no_score(qwen, tokenizer):
    scores = RewardModelScorer(qwen, tokenizer, max_tokens=60)(["a", "b " * 200], query=["q", "q"])
    assert scores[0] is not None
    assert scores[1] is None
    assert RewardModelScorer(qwen, tokenizer)(["b " * 400], query=["q"]) == [None]  # 256 positions
    assert RewardModelScorer(qwen, tokenizer)([], query=[]) == []


def test_as_a_reward_it_scores_the_prompt_and_the_response(qwen, tokenizer, answered):
    scorer = RewardModelScorer(qwen, tokenizer, system_prompt="Be brief.")
    env = ChatEnv(batch_size=[2]).append_transform(RewardFunction(scorer))
    td = answered(env, ["Yes", "Four."], query=["Hi", "2 + 2?"])
    expected = [row[0] for row in alone(qwen, scorer, ["Hi", "2 + 2?"], ["Yes", "Four."])]
    assert td["next", "reward_reward_model"].flatten().tolist() == pytest.approx(expected, abs=1e-5)
    chat = scorer.conversation("Hi", "Yes")
    assert [message["role"] for message in chat] == ["system", "user", "assistant"]
    env.close()


def test_a_folder_is_loaded_by_its_name(qwen, tokenizer, tmp_path):
    qwen.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (reward,) = make_rewards([{"reward_model": {"model": str(tmp_path), "dtype": "float32", "max_tokens": 100}}])
    assert reward.batched
    assert reward.fn.max_tokens == 100
    scores = reward.fn(SAID[:1], query=QUERIES[:1])
    assert scores == pytest.approx(RewardModelScorer(qwen, tokenizer)(SAID[:1], query=QUERIES[:1]), abs=1e-5)


def test_what_cannot_be_loaded_is_named_with_its_setting(qwen, tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    qwen.model.save_pretrained(tmp_path / "body")  # without the output that scores
    tokenizer.save_pretrained(tmp_path / "body")
    faults = dict.fromkeys([tmp_path / "absent", tmp_path / "empty", "no-such/model"], "")
    faults[tmp_path / "body"] = "1 of its weights are in none of its files, such as score.weight"
    for source, fault in faults.items():
        with pytest.raises(DataError, match=re.escape(f"reward_model.model {source}: cannot be loaded: ")) as caught:
            make_rewards([{"reward_model": {"model": str(source)}}])
        assert fault in str(caught.value)


def test_a_model_without_padding_and_a_tokenizer_without_template_are_refused(tokenizer):
    reward_model = model(
        Qwen2ForSequenceClassification, Qwen2Config, tokenizer, num_key_value_heads=2, pad_token_id=None
    )
    with pytest.raises(ConfigError, match="pad_token_id must be set"):
        RewardModelScorer(reward_model, tokenizer)
