"""GRPO over several turns: in one record where the template keeps the past, in several where it does not."""

import json
import statistics

import pytest

# The model is asked twice in a row, and no longer shown its first answer then.
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or not add_generation_prompt %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = {"max_turns": 2}
SETTINGS = {"steps": 2, "zero_variance": "keep", "sampling": {"max_tokens": 8}, "updates_per_step": 2}


@pytest.mark.parametrize("mode", ["train", "mask"])
def test_records_of_a_conversation_are_trained_and_it_counts_once(place, mode):
    env = {**TALK, "on_rewrite": "new_record"}
    words = ["prefix-preserving NO: each turn is a record of its own"]
    place.train("grpo", "a", words=words, chat_template=FORGETFUL, env=env, **SETTINGS, truncated=mode)
    for number, step in enumerate(place.steps("a"), 1):
        rollouts = place.rollouts("a", number)
        assert len(rollouts) == 16, "conversations, not records"
        sampled = sum(rollout.tokens for rollout in rollouts)
        assert max(rollout.tokens for rollout in rollouts) > 8, "two answers"
        assert step["tokens/completion_mean"] == sampled / 16
        assert step["group/kept_frac"] == 1.0
        assert step["tokens/trained"] == sampled if mode == "train" else step["tokens/trained"] < sampled
        for group in {rollout.group for rollout in rollouts}:
            members = [rollout for rollout in rollouts if rollout.group == group]
            rewards = [rollout.reward for rollout in members]
            mean, std = statistics.mean(rewards), statistics.stdev(rewards)
            wanted = [(reward - mean) / (std + 1e-6) for reward in rewards]
            assert [rollout.advantage for rollout in members] == pytest.approx(wanted, abs=1e-5)
        assert step["reward/mean"] == pytest.approx(sum(rollout.reward for rollout in rollouts) / 16)


def test_a_template_that_keeps_the_past_trains_the_same_either_way(place):
    for choice in ("error", "new_record"):
        place.train("grpo", choice, env={**TALK, "on_rewrite": choice}, **SETTINGS)
    place.same("error", "new_record")


def test_a_measure_is_the_mean_over_conversations_not_records(place):
    place.module("constant", "def one(completion):\n    return 1.0\n")
    place.rows("exam.jsonl", [{"prompt": f"Say {i}", "answer": str(i)} for i in range(5)])
    env = {**TALK, "on_rewrite": "new_record", "reward": "constant:one"}
    exam = {"dataset": "exam.jsonl", "max_tokens": 8, "batch_size": 3}
    place.train("grpo", "a", chat_template=FORGETFUL, env=env, **SETTINGS | {"steps": 1}, eval=exam)
    assert place.steps("a")[-1]["eval/prompts/mean"] == 2.0, "two turns of one point each"
    assert json.loads(place.run("eval", "a", "--json").out)["mean"] == 2.0


def test_a_rewrite_that_the_plan_did_not_foresee_stops_the_run_too(place):
    sly = FORGETFUL.replace("not add_generation_prompt", "not add_generation_prompt or messages | length != 2")
    words = ["prefix-preserving yes", "rewrites the past", "env.on_rewrite=new_record"]
    # An answer that is cut off is continued, not rewritten: enough tokens that one of them ends by itself.
    longer = SETTINGS | {"steps": 10, "sampling": {"max_tokens": 64}}
    place.train("grpo", "a", code=3, words=words, chat_template=sly, env=TALK, **longer)
