"""The tokens of rollouts in the log: what engine and loss say of each agrees with the metrics of the step."""

import math
from itertools import groupby

import pytest

from llmrl.collectors.llm import LLMCollector
from llmrl.modules.llm.policies.base import LLMWrapperBase
from llmrl.testing import FakeEngine, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.rollouts.step import StepRollouts
from llmrl.train.rollouts.token_records import choose_conversations, token_texts
from llmrl.train.settings import EnvSettings, GRPOConfig
from llmrl.train.tasks import Task

ENDLESS = 10**6


def trained_values(rollouts, name):
    """The values of every trained token of a step."""
    records = [rollout.token_record for rollout in rollouts if rollout.token_record is not None]
    pairs = [zip(getattr(record, name), record.trained, strict=True) for record in records]
    return [value for record in pairs for value, trained in record if trained]


def check_step(metrics, rollouts):
    """The numbers of the tokens add up to the metrics."""
    trainer, engine = trained_values(rollouts, "trainer_logp"), trained_values(rollouts, "engine_logp")
    gaps = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    entropy, ratio = trained_values(rollouts, "entropy"), trained_values(rollouts, "ratio")
    assert len(gaps) == metrics["tokens/trained"] > 0
    assert sum(gaps) / len(gaps) == pytest.approx(metrics["mismatch/logp_abs_mean"], abs=1e-6)
    assert max(gaps) == pytest.approx(metrics["mismatch/logp_abs_max"], abs=1e-6)
    assert sum(entropy) / len(entropy) == pytest.approx(metrics["policy/entropy"], rel=1e-5)
    assert sum(ratio) / len(ratio) == pytest.approx(metrics["policy/ratio_mean"], rel=1e-5)
    for rollout in rollouts:
        record = rollout.token_record
        assert rollout.tokens == sum(value is not None for value in record.engine_logp)
        assert len(record.ids) == len(record.texts) == len(record.roles) == len(record.turns) == len(record.control)
        if rollout.advantage is None:
            assert not any(record.trained)
        else:
            values = [value for value in record.advantage if value is not None]
            assert values == pytest.approx([rollout.advantage] * len(values), abs=1e-6)


def test_numbers_of_tokens_agree_with_the_metrics_of_their_step(place):
    place.train("grpo", "run", token_records=ENDLESS, grpo={"proximal": "behaviour"})
    for metrics in place.steps("run"):
        rollouts = place.rollouts("run", metrics["step"])
        check_step(metrics, rollouts)
        for record in (rollout.token_record for rollout in rollouts):
            for ratio, trainer, engine in zip(record.ratio, record.trainer_logp, record.engine_logp, strict=True):
                assert ratio is None or ratio == pytest.approx(math.exp(trainer - engine), rel=1e-5)
        assert {frozenset(rollout.columns) for rollout in rollouts} == {frozenset({"answer"})}
        first = rollouts[0].token_record
        assert "".join(first.texts).startswith("<|im_start|>user\nSay")
        assert (first.roles[0], first.roles[-1], set(first.turns)) == ("user", "assistant", {0})
        assert (first.texts[0], first.control[:2]) == ("<|im_start|>", [True, False])


def test_a_bounded_number_of_conversations_keeps_tokens_the_same_prompts_at_each_step(place):
    place.rows("prompts.jsonl", [{"prompt": f"Say {number}", "answer": ""} for number in range(4)])
    place.train("grpo", "run", token_records=6)
    kept = []
    for step in (1, 2):
        rollouts = place.rollouts("run", step)
        assert sum(rollout.token_record is not None for rollout in rollouts) == 6
        kept.append({rollout.prompt_id for rollout in rollouts if rollout.token_record is not None})
        assert len({rollout.prompt_id for rollout in rollouts}) == 4
    assert kept[0] == kept[1] == set(sorted({rollout.prompt_id for rollout in rollouts})[:2])
    place.train("grpo", "none", token_records=0)
    assert all(rollout.token_record is None for rollout in place.rollouts("none", 1))


def test_a_conversation_with_a_tool_has_its_messages_by_role_and_turn_and_its_call(place):
    tokenizer = tiny_tokenizer()
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "40+2"}}</tool_call>'
    task = Task(EnvSettings(name="big_sums", tools=["calculator"], max_turns=2), tokenizer)
    env = task.make_env([{"question": "What is 40 + 2?", "answer": "42"}], num_envs=1, shuffle=False, seed=0)
    policy = LLMWrapperBase(FakeEngine([call, "42"], tokenizer=tokenizer), tokenizer=tokenizer)
    data = LLMCollector(env, policy=policy, yield_only_last_steps=True).rollout()
    with Session(GRPOConfig(model={}, env={"name": "sums"})) as session:
        (rollout,) = StepRollouts(session, data, None, tokenizer, keep_tokens=1).records_with_tokens()
    record = rollout.token_record
    tokens = list(zip(record.roles, record.turns, record.texts, strict=True))
    turns = groupby(tokens, key=lambda token: token[:2])
    messages = [(*turn, "".join(token[2] for token in same)) for turn, same in turns]
    assert [message[:2] for message in messages] == [("user", 0), ("assistant", 0), ("tool", 1), ("assistant", 1)]
    assert [messages[1][2], messages[3][2]] == [f"{call}<|im_end|>", "42<|im_end|>"]
    assert "42" in messages[2][2]
    assert not any(record.trained)  # it did not reach a buffer
    (made,) = rollout.tool_calls
    seen = (made.turn, made.name, made.arguments, made.result, made.outcome)
    assert seen == (0, "calculator", '{"expression": "40+2"}', "42", "ok")
    assert rollout.rewards == {"correct": rollout.reward}


@pytest.mark.slow
def test_rows_trained_on_another_rank_keep_their_numbers(place):
    changes = {"grpo": {"proximal": "recomputed"}, "updates_per_step": 2, "token_records": ENDLESS}
    place.ranks("grpo", place.recipe("two", "grpo", **changes), "--name", "two")
    for metrics in place.steps("two"):
        rollouts = place.rollouts("two", metrics["step"])
        trainer, engine = trained_values(rollouts, "trainer_logp"), trained_values(rollouts, "engine_logp")
        assert len(trainer) == metrics["tokens/trained"] > 0
        assert max(abs(a - b) for a, b in zip(trainer, engine, strict=True)) < 1e-5


def test_a_conversation_longer_than_what_a_step_may_keep_is_left_out():
    assert choose_conversations([0, 0, 1], ["a", "a", "b"], [10**6, 5, 7], 3) == {1, 2}


def test_ids_beyond_the_vocabulary_have_a_text():
    assert token_texts(tiny_tokenizer(), [10**6]) == ["<id 1000000>"]
