"""What DAPO adds to a run: other prompts in place of those that teach nothing, and a price for overlong answers."""

import pytest

SOURCE = """
def only_some_teach(completion, answer):
    number = sum(map(ord, completion)) % 97
    return number % 2 / 10 if int(answer) % 2 else number

def none_teaches(completion, answer):
    return 1.0
"""


@pytest.fixture
def run(place):
    place.module("teaching", SOURCE)

    def start(reward, **changes):
        place.train("grpo", "d", env={"reward": f"teaching:{reward}"}, algo="dapo", **changes)
        steps = place.steps("d")
        return steps, [row for step in steps for row in place.rollouts("d", step["step"])]

    return start


def by_step(rollouts):
    steps = {}
    for rollout in rollouts:
        steps.setdefault(rollout.step, []).append(rollout)
    return steps


def test_a_step_is_refilled_to_its_number_of_groups(run):
    settings = {"zero_variance": "refill", "refill_rounds": 8, "min_spread": 0.1, "updates_per_step": 2}
    steps, rollouts = run("only_some_teach", **settings)
    for number, rows in by_step(rollouts).items():
        trained = {row.group for row in rows if row.advantage is not None}
        assert len(trained) == 4
        assert all(int(row.columns["answer"]) % 2 == 0 for row in rows if row.advantage is not None)
        assert len(rows) % 16 == 0
        assert steps[number - 1]["group/kept_frac"] == pytest.approx(4 / (len(rows) / 4))
    assert len(rollouts) > 3 * 16


@pytest.mark.parametrize(
    ("settings", "rounds"), [({"zero_variance": "refill", "refill_rounds": 2}, 3), ({}, 1)], ids=["refilled", "not"]
)
def test_refilling_ends_after_its_rounds(run, settings, rounds):
    steps, rollouts = run("none_teaches", steps=1, **settings)
    assert len(rollouts) == rounds * 16
    assert steps[0]["group/kept_frac"] == 0
    assert steps[0]["tokens/trained"] == 0


def test_long_answers_cost_reward_and_cut_off_ones_are_not_trained(run):
    steps, rollouts = run("none_teaches", overlong_buffer=8, truncated="mask", zero_variance="keep", steps=2)
    for number, rows in by_step(rollouts).items():
        for row in rows:
            assert row.reward == pytest.approx(1.0 - row.tokens / 8)  # at most 8 tokens, all of them in the buffer
        whole = sum(row.tokens for row in rows if row.stop_reason != "length")
        assert steps[number - 1]["tokens/trained"] == whole
    assert any(row.stop_reason == "length" for row in rollouts)


def test_with_top_p_the_loss_sees_log_probs_before_the_cut(run):
    steps, _ = run("only_some_teach", sampling={"max_tokens": 8, "top_p": 0.5}, zero_variance="keep", steps=1)
    assert steps[0]["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert steps[0]["mismatch/logp_abs_max"] < 1e-4  # the cut distribution is off by log 0.5 and more
