"""Wrappers for environments of other packages."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.libs.gym import GymEnv, GymWrapper
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["GymEnv", "GymWrapper"]
