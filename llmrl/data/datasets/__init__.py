"""Offline datasets: public files as replay buffers of memory-mapped rows in TED."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.datasets.atari_dqn import AtariDQNExperienceReplay
    from llmrl.data.datasets.base import BaseDatasetExperienceReplay
    from llmrl.data.datasets.d4rl import D4RLExperienceReplay
    from llmrl.data.datasets.gen_dgrl import GenDGRLExperienceReplay
    from llmrl.data.datasets.minari import MinariExperienceReplay
    from llmrl.data.datasets.openml import OpenMLExperienceReplay
    from llmrl.data.datasets.openx import OpenXExperienceReplay
    from llmrl.data.datasets.roboset import RobosetExperienceReplay
    from llmrl.data.datasets.vd4rl import VD4RLExperienceReplay
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "AtariDQNExperienceReplay",
    "BaseDatasetExperienceReplay",
    "D4RLExperienceReplay",
    "GenDGRLExperienceReplay",
    "MinariExperienceReplay",
    "OpenMLExperienceReplay",
    "OpenXExperienceReplay",
    "RobosetExperienceReplay",
    "VD4RLExperienceReplay",
]
