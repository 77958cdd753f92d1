"""An algorithm of the user's own: its advantages, its loss, its metrics, and what is wrong with one before it runs."""

import math
import sys
import types
from typing import ClassVar

import pytest
import torch
from pydantic import Field
from tensordict import lazy_stack as lazy

from llmrl.errors import ConfigError, ShapeError
from llmrl.objectives import LossModule, Metric, merge_outputs
from llmrl.objectives.llm import Algorithm, GRPOLoss, GRPOSettings, MCAdvantage
from llmrl.objectives.llm.groups import group_advantage
from llmrl.objectives.llm.ppo import PPO
from llmrl.objectives.llm.rejection import RejectionSampling
from llmrl.objectives.llm.settings import RejectionSettings
from llmrl.settings import Settings
from llmrl.train.algorithms import check_columns, load_algorithm
from llmrl.train.settings import GRPOConfig
from tests.support.losses import Recorded, conversation


class Doubled(GRPOLoss):
    """Twice REINFORCE, which also reports the share of tokens with a positive advantage."""

    metrics: ClassVar = {**GRPOLoss.metrics, "positive": Metric("policy/positive_frac", "share of tokens", label="pos")}

    def surrogate(self, log_ratio_BT, log_prob_BT, behaviour_BT, mask_BT, advantage_BT):
        nowhere_BT = torch.zeros_like(mask_BT)
        return -2 * advantage_BT * log_prob_BT, (nowhere_BT, nowhere_BT)

    def measure(self, log_ratio_BT, log_prob_BT, behaviour_BT, advantage_BT):
        return {"positive": (advantage_BT > 0).to(log_prob_BT)}


class Options(Settings):
    offset: float = Field(0.0, ge=0)


class Best(Algorithm):
    """1 for the best answer of a group, 0 for the others, plus an offset."""

    settings, loss = Options, Doubled

    def group_advantages(self, rewards_NG):
        return (rewards_NG == rewards_NG.nan_to_num(-math.inf).amax(1, keepdim=True)).double() + self.options.offset


def best(offset=0.0, **grpo):
    settings = GRPOSettings(surrogate="reinforce", **grpo).complete()
    return Best(Options(offset=offset), group_size=2, advantage={"scale": "none"}, grpo=settings)


def test_rejection_sampling_keeps_the_best_answers_above_the_median():
    rewards = [0.0, 1.0, 0.5, 1.0, 1.0, 1.0, math.nan, 0.0, 2.0]
    rows = [conversation(number, 2, 3, group=number // 3) for number in range(9)]
    for row, reward in zip(rows, rewards, strict=True):
        row["next", "reward"], row["next", "done"] = torch.tensor([[reward]]), torch.ones(1, dtype=torch.bool)
    algorithm = RejectionSampling(RejectionSettings(keep=1), group_size=3, advantage={}, grpo=GRPOSettings())
    assert algorithm.advantages(lazy(rows[:2])) is None, "it waits for the whole group"
    chosen = algorithm.advantages(lazy(rows[2:]))
    assert chosen["next", "reward"].flatten().tolist() == [1.0, 2.0]
    assert chosen["advantage"].tolist() == [[[1.0]]] * 2
    loss = algorithm.make_loss(Recorded(torch.full((2, 5), -2.0)))
    assert loss(chosen).loss_sft.item() == 2.0


def test_the_base_class_is_grpo():
    algorithm = Algorithm(None, group_size=4, advantage={"scale": "loo"}, grpo=GRPOSettings(clip=0.1).complete())
    rewards = torch.tensor([[1.0, 0.0, math.nan, 0.5]])
    torch.testing.assert_close(
        algorithm.group_advantages(rewards), group_advantage(rewards, scale="loo"), equal_nan=True, rtol=0, atol=0
    )
    assert algorithm.make_advantage().scale == "loo"
    loss = algorithm.make_loss(Recorded(torch.zeros(1, 4)))
    assert (type(loss), loss.settings.clip) == (GRPOLoss, (0.1, 0.1))


def test_own_advantages_are_those_of_the_transform_and_failed_completions_have_none():
    transform = best(0.5).make_advantage()
    assert isinstance(transform, MCAdvantage)
    rewards = torch.tensor([[0.2, 0.9], [math.nan, 0.4]])
    assert group_advantage(rewards, scale=transform.scale).nan_to_num(-1).tolist() == [[0.5, 1.5], [-1.0, 1.5]]
    with pytest.raises(ShapeError, match=r"the shape of the rewards, \[1, 2\]: got \[1\]"):
        group_advantage(rewards[:1], scale=lambda rewards_NG: rewards_NG.sum(1))


def test_an_own_surrogate_and_metric_equal_the_values_by_hand_for_any_split():
    rows = [conversation(i, 3, 4 + i, group=i // 2) for i in range(4)]
    current = torch.randn(4, 10, dtype=torch.float64) - 3
    loss = best().make_loss(Recorded(current))
    whole = lazy(rows)
    counts = loss.count_step(whole)
    masks = [row["masks", "all_assistant_mask"] for row in rows]
    tokens = sum(int(mask.sum()) for mask in masks)
    advantages = [row["advantage"].flatten() for row in rows]
    by_hand = sum(
        -2 * float((a.expand(len(m)) * current[i, : len(m)])[m].sum())
        for i, (a, m) in enumerate(zip(advantages, masks, strict=True))
    )
    output = loss(whole)
    assert output["loss_objective"].item() == pytest.approx(by_hand / tokens, rel=1e-6)
    positive = sum(int(((a > 0).expand(len(m)) & m).sum()) for a, m in zip(advantages, masks, strict=True))
    assert output["positive"].item() == pytest.approx(positive / tokens)

    parts = []
    for i in range(4):
        part = best().make_loss(Recorded(current[i : i + 1, : len(rows[i]["tokens", "full"])]))
        parts.append(part(lazy(rows[i : i + 1]), normalizer=counts))
    merged = merge_outputs(parts)
    merged |= loss.derived(merged)
    for name in ("loss_objective", "positive", "ESS", "mismatch_max"):
        torch.testing.assert_close(merged[name], output[name].detach())


def recipe(algorithm):
    return GRPOConfig(model={}, env={"name": "sums"}, algorithm=algorithm)


@pytest.fixture
def module(monkeypatch):
    found = types.ModuleType("own_algorithms")
    monkeypatch.setitem(sys.modules, "own_algorithms", found)
    return found


def test_a_recipe_names_a_class_and_gives_its_settings(module):
    module.Best = Best
    found, options = load_algorithm(recipe({"own_algorithms:Best": {"offset": 2}}).algorithm)
    assert (found, options) == (Best, Options(offset=2))
    assert load_algorithm(recipe("own_algorithms:Best").algorithm)[1] == Options()


class Twice(LossModule):
    metrics: ClassVar = {"a": Metric("policy/mine", "one"), "b": Metric("policy/mine", "other")}


class Nameless(LossModule):
    metrics: ClassVar = {"a": Metric("policy/mine")}


class Alone(Algorithm):
    """Whole rewards, without groups."""

    compares_groups, reads = False, ("level", ("log_probs", "full"))

    def advantages(self, rows):
        return rows.set("advantage", rows["next", "reward"])


def test_columns_that_nobody_writes_are_refused_with_a_near_name():
    check_columns(Alone, [{"query": "q", "level": 1}])
    with pytest.raises(ConfigError, match=r"Alone reads the column 'level'.*the data has levels, query. Did you mean"):
        check_columns(Alone, [{"query": "q", "levels": 1}])


def test_one_completion_per_prompt_is_for_algorithms_without_groups(module):
    module.Alone, module.Best = Alone, Best
    settings = {"model": {}, "env": {"name": "sums"}, "group_size": 1}
    assert GRPOConfig(**settings, algorithm="own_algorithms:Alone").group_size == 1
    for algorithm in (None, "own_algorithms:Best"):
        with pytest.raises(ValueError, match="a group of 1 has no baseline"):
            GRPOConfig(**settings, algorithm=algorithm)


class Taken(LossModule):
    metrics: ClassVar = {"a": Metric("policy/entropy", "another entropy")}


@pytest.mark.parametrize(
    ("named", "value", "match"),
    [
        ("Absent", None, "has no 'Absent'"),
        ("best", Best, "must be 'package.module:name'"),
        ("Loss", Doubled, "must be a subclass of llmrl.objectives.llm.Algorithm"),
        ({"offsett": 1}, Best, "no setting 'offsett'; its settings: offset. Did you mean 'offset'"),
        ({"offset": -1}, Best, "offset: .* greater than or equal to 0: got -1"),
        ("Own", type("Own", (Algorithm,), {"loss": Twice}), "'policy/mine' must be declared once"),
        ("Own", type("Own", (Algorithm,), {"loss": Nameless}), "must be 'family/name' with a meaning"),
        ("Own", type("Own", (Algorithm,), {"metrics": Twice.metrics}), "'policy/mine' must be declared once"),
        ("Own", type("Own", (Algorithm,), {"loss": Taken}), "one of llmrl's own metrics"),
        (
            "Own",
            type("Own", (Algorithm,), {"without": ["grpo.scal"]}),
            "no setting 'grpo.scal' can be left out. Did you mean 'grpo.scale'",
        ),
        (
            "Own",
            type("Own", (Algorithm,), {"without": [*PPO.without, *RejectionSampling.without, "x"]}),
            "no setting 'x'",
        ),
    ],
)
def test_what_is_wrong_with_an_algorithm_is_said_with_the_settings(module, named, value, match):
    name = "Best" if isinstance(named, dict) else named
    setattr(module, name, value) if value is not None else None
    text = f"own_algorithms{'.' if name == 'best' else ':'}{name}"
    with pytest.raises((ConfigError, ValueError), match=match):
        recipe({text: named} if isinstance(named, dict) else text)
