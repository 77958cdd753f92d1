"""The settings of recipes; no torch: config errors are reported before it is imported."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.train.settings.environment import AgentSettings, EnvSettings, EvalSettings, RewardSettings
    from llmrl.train.settings.grpo import GRPOConfig, SamplingSettings
    from llmrl.train.settings.machine import (
        CheckpointSettings,
        LoraSettings,
        MemorySettings,
        ModelOptions,
        OptimSettings,
        ParallelSettings,
        ProfileSettings,
    )
    from llmrl.train.settings.model import ModelSource, TinyModelSettings
    from llmrl.train.settings.rollout import RolloutSettings
    from llmrl.train.settings.sft import SFTConfig, SFTData, StopSettings
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "AgentSettings",
    "CheckpointSettings",
    "EnvSettings",
    "EvalSettings",
    "GRPOConfig",
    "LoraSettings",
    "MemorySettings",
    "ModelOptions",
    "ModelSource",
    "OptimSettings",
    "ParallelSettings",
    "ProfileSettings",
    "RewardSettings",
    "RolloutSettings",
    "SFTConfig",
    "SFTData",
    "SamplingSettings",
    "StopSettings",
    "TinyModelSettings",
]
