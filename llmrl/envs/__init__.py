"""Environments: the `EnvBase` contract, its helpers and transforms. Language-model envs are in `llmrl.envs.llm`."""

from llmrl.envs.base import EnvBase
from llmrl.envs.batched import SerialEnv
from llmrl.envs.libs import GymEnv, GymWrapper
from llmrl.envs.parallel import ParallelEnv
from llmrl.envs.step import step_mdp
from llmrl.envs.transforms import (
    Compose,
    MultiStepTransform,
    NextStateReconstructor,
    RandomCropTensorDict,
    StepCounter,
    Transform,
    TransformedEnv,
)
from llmrl.envs.utils import check_env_specs, make_composite_from_td

__all__ = [
    "Compose",
    "EnvBase",
    "GymEnv",
    "GymWrapper",
    "MultiStepTransform",
    "NextStateReconstructor",
    "ParallelEnv",
    "RandomCropTensorDict",
    "SerialEnv",
    "StepCounter",
    "Transform",
    "TransformedEnv",
    "check_env_specs",
    "make_composite_from_td",
    "step_mdp",
]
