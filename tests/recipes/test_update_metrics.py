"""What a step measures: against the reference at the temperature that was sampled at, and over all of its updates."""

import pytest


def test_the_divergence_at_another_temperature_is_zero_before_the_first_update_and_not_after(place, grpo):
    recipe = place.recipe("kl", grpo, grpo={"kl": 0.01}, sampling={"max_tokens": 8, "temperature": 0.7})
    done = place.run("grpo", recipe, "--name", "kl")
    assert done.code == 0, done.err
    first, second, _ = (step["policy/kl_ref"] for step in place.steps("kl"))
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 1e-6


def test_the_metrics_of_a_step_are_those_of_all_its_updates(place, grpo):
    options = {"algo": "sapo", "updates_per_step": 4, "steps": 1, "zero_variance": "keep"}
    done = place.run("grpo", place.recipe("updates", grpo, **options), "--name", "updates")
    assert done.code == 0, done.err
    (step,) = place.steps("updates")
    assert step["policy/ratio_mean"] != 1, "of the updates after the first"
    assert step["mismatch/logp_abs_max"] < 1e-4, "engine against trainer while their weights were the same"
    assert step["mismatch/is_mean"] <= step["mismatch/is_max"]
