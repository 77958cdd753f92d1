"""Environments: the `EnvBase` contract, its helpers and transforms. Language-model envs are in `llmrl.envs.llm`."""

from typing import TYPE_CHECKING

from llmrl.envs import transforms
from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.base import EnvBase
    from llmrl.envs.batched import SerialEnv
    from llmrl.envs.libs import GymEnv, GymWrapper
    from llmrl.envs.parallel import ParallelEnv
    from llmrl.envs.step import step_mdp
    from llmrl.envs.transforms import *  # noqa: F403
    from llmrl.envs.utils import (
        ExplorationType,
        RandomPolicy,
        check_env_specs,
        make_composite_from_td,
        set_exploration_type,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "EnvBase",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "ParallelEnv",
    "RandomPolicy",
    "SerialEnv",
    "check_env_specs",
    "make_composite_from_td",
    "set_exploration_type",
    "step_mdp",
]
__all__ += transforms.__all__
