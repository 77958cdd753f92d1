"""Losses for language models: `GRPOLoss`, `DPOLoss`, `KTOLoss`, `RewardLoss`, `SFTLoss`, and their parts."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.objectives.llm.advantage import MCAdvantage
    from llmrl.objectives.llm.algorithm import Algorithm
    from llmrl.objectives.llm.batch import count_step
    from llmrl.objectives.llm.distill import DistillLoss
    from llmrl.objectives.llm.dpo import DPOLoss, DPOLossOutput
    from llmrl.objectives.llm.functional import StepCounts
    from llmrl.objectives.llm.groups import GroupQuota
    from llmrl.objectives.llm.grpo import GRPOLoss, GRPOLossOutput
    from llmrl.objectives.llm.kto import KTOLoss, KTOLossOutput
    from llmrl.objectives.llm.ppo import ValueLoss, ValueLossOutput, gae
    from llmrl.objectives.llm.presets import PRESETS, Preset
    from llmrl.objectives.llm.reward import RewardLoss, RewardLossOutput
    from llmrl.objectives.llm.settings import DEFAULTS, GRPOSettings
    from llmrl.objectives.llm.sft import SFTLoss, SFTLossOutput
    from llmrl.objectives.llm.teacher_settings import DistillSettings
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "DEFAULTS",
    "PRESETS",
    "Algorithm",
    "DPOLoss",
    "DPOLossOutput",
    "DistillLoss",
    "DistillSettings",
    "GRPOLoss",
    "GRPOLossOutput",
    "GRPOSettings",
    "GroupQuota",
    "KTOLoss",
    "KTOLossOutput",
    "MCAdvantage",
    "Preset",
    "RewardLoss",
    "RewardLossOutput",
    "SFTLoss",
    "SFTLossOutput",
    "StepCounts",
    "ValueLoss",
    "ValueLossOutput",
    "count_step",
    "gae",
]
