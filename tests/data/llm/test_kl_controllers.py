"""The weight of a KL penalty, constant and adaptive."""

import math
from types import SimpleNamespace

import pytest
import torch

from llmrl.data.llm import AdaptiveKLController, ConstantKLController
from llmrl.errors import ConfigError


def test_a_model_can_own_the_weight():
    model = SimpleNamespace(kl_coef=0.3)
    assert ConstantKLController(model=model).coef == 0.3
    ConstantKLController(kl_coef=0.5, model=model)
    assert model.kl_coef == 0.5
    adaptive = AdaptiveKLController(init_kl_coef=1.0, target=1.0, horizon=10, model=model)
    assert model.kl_coef == 1.0
    adaptive.update([-5.0] * 5)
    assert model.kl_coef == adaptive.coef == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(2.0, 0.5), (2.2, 0.5 * (1 + 0.1 * 4 / 8)), (9.0, 0.5 * (1 + 0.2 * 4 / 8)), (0.0, 0.5 * (1 - 0.2 * 4 / 8))],
)
def test_an_adaptive_weight_follows_the_divergence(kl, expected):
    controller = AdaptiveKLController(init_kl_coef=0.5, target=2.0, horizon=8)
    controller.update(torch.full((4,), -0.5 * kl))
    assert controller.coef == pytest.approx(expected)


def test_impossible_arguments_are_refused():
    controller = AdaptiveKLController(init_kl_coef=0.1, target=1, horizon=10)
    for match, call in (
        ("kl_coef, or a model", ConstantKLController),
        ("no attribute 'kl_coef'", lambda: ConstantKLController(kl_coef=0.1, model=SimpleNamespace())),
        (r"target .*above 0: got 0", lambda: AdaptiveKLController(init_kl_coef=0.1, target=0, horizon=10)),
        ("finite KL rewards", lambda: controller.update([])),
        ("finite KL rewards", lambda: controller.update([math.nan])),
    ):
        with pytest.raises(ConfigError, match=match):
            call()


def test_a_weight_continues_from_its_state():
    controller = AdaptiveKLController(init_kl_coef=0.5, target=2.0, horizon=8)
    controller.update([-9.0] * 4)
    model = SimpleNamespace(kl_coef=0.1)
    other = AdaptiveKLController(init_kl_coef=0.5, target=2.0, horizon=8, model=model)
    other.load_state_dict(controller.state_dict())
    assert model.kl_coef == other.coef == controller.coef != 0.5
    for one in (controller, other):
        one.update([-0.3] * 4)
    assert other.coef == controller.coef
