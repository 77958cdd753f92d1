"""Settings of GRPOLoss: refused combinations, one name per setting, presets in words."""

import itertools
import math
from typing import get_args

import pytest
from torch import nn

from llmrl.errors import ConfigError
from llmrl.objectives.llm import PRESETS, GRPOLoss, GRPOSettings
from llmrl.objectives.llm.settings import Scale
from llmrl.train.settings import GRPOConfig


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"aggregation": "tokens"}, "Did you mean 'token'"),
        ({"clip_epsilon": (1.2, 0.2)}, "clip_epsilon"),
        ({"clip_epsilon": (0.1, 0.2, 0.3)}, "a number or "),
        ({"clip_epsilon": "0.2"}, "got '0.2'"),
        ({"kl_to_ref_coeff": -0.1}, "kl_to_ref_coeff must be greater than or equal to 0: got -0.1"),
        ({"kl_to_inference_coeff": math.nan}, "kl_to_inference_coeff must be a finite number: got nan"),
        ({"dual_clip": 0.5}, "dual_clip must be greater than 1"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "dual_clip is not supported with surrogate='cispo'"),
        ({"ratio_level": "sequence", "surrogate": "reinforce"}, "not supported with surrogate='reinforce'"),
        ({"aggregation": "dr_grpo"}, "max_length"),
        ({"max_length": 8}, "max_length"),
        ({"correction": "tis"}, "proximal='behaviour'"),
        ({"proximal": "detach", "correction": "mask", "correction_cap": 2.0}, "correction_cap"),
        ({"proximal": "detach", "correction_band": (0.5, 2.0)}, "correction_band"),
        ({"entropy_bonus": False, "entropy_coeff": 0.1}, "entropy_bonus=True"),
        ({"proximal": "behavior"}, "Did you mean 'behaviour'"),
        ({"masking_strategy": "all"}, "masking_strategy"),
        ({"kl_mask_threshold": -1.0}, "kl_mask_threshold"),
        ({"surrogate": "dppo", "proximal": "detach"}, "proximal='behaviour'"),
        ({"surrogate": "dppo", "ratio_level": "sequence"}, "not supported with surrogate='dppo'"),
        ({"sapo_tau": (1.0, 1.0)}, "sapo_tau"),
        ({"surrogate": "sapo", "sapo_tau": (0.0, 1.0)}, "sapo_tau"),
        ({"correction_veto": (1e-4, 100.0)}, "correction_veto"),
        ({"proximal": "detach", "correction_veto": (2.0, 100.0)}, "correction_veto"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        GRPOLoss(nn.Identity(), **settings)


def test_an_argument_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="gamma"):
        GRPOLoss(nn.Identity(), gamma=0.9)


def test_every_advantage_of_the_transform_has_words():
    for scale in get_args(Scale):
        words = PRESETS["grpo"].describe(advantage={"scale": scale})["advantage"]
        assert words == "R" if scale == "raw" else words.startswith(("(R - mean", "R - mean"))


def test_presets_differ_from_each_other():
    settings = [(dict(preset.advantage), dict(preset.loss)) for preset in PRESETS.values()]
    assert all(a != b for a, b in itertools.combinations(settings, 2))
    words = PRESETS["gspo"].describe(settings=GRPOSettings(kl=0.01))
    assert words["ratio"] == "sequence, clip [0.9997, 1.0004]; engine correction: rho <= 2 (token)"
    assert words["kl"] == "0.01 x k3 to the reference"


def test_a_setting_has_one_name_from_the_recipe_to_the_loss():
    section = GRPOConfig.model_fields["grpo"].annotation
    assert section is GRPOSettings
    for preset in PRESETS.values():
        assert GRPOSettings.from_keywords(**preset.loss) == preset.settings
        preset.settings.complete()
    assert GRPOLoss(nn.Identity(), PRESETS["gspo"].settings, clip_epsilon=0.1).settings.clip == (0.1, 0.1)


def test_the_former_name_of_the_aggregation_is_read_from_files():
    assert GRPOSettings.model_validate({"loss": "seq-mean"}).aggregation == "seq-mean"
    with pytest.raises(ValueError, match="loss"):
        GRPOSettings.model_validate({"loss": "token", "aggregation": "seq-mean"})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({}, "needs env.rewards"),
        ({"rewards": [{"fn": "math:isfinite"}], "max_turns": 2}, "one turn"),
        ({"rewards": [{"fn": "math:isfinite"}], "scale": "batch"}, "a scale other than batch"),
    ],
)
def test_rewards_that_are_normalised_one_by_one_need_a_list_of_them_and_one_turn(changes, match):
    grpo = {"multi_objective_aggregation": "normalize_then_sum", "scale": changes.pop("scale", "group")}
    with pytest.raises(ValueError, match=match):
        GRPOConfig(model="tiny", env={"name": "sums", **changes}, grpo=grpo)
