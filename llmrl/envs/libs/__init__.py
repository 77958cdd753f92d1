"""Wrappers for environments of other packages."""

from llmrl.envs.libs.gym import GymEnv, GymWrapper

__all__ = ["GymEnv", "GymWrapper"]
