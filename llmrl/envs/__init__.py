"""Environments: the `EnvBase` contract, its helpers and transforms. Language-model envs are in `llmrl.envs.llm`."""

from llmrl.envs.base import EnvBase
from llmrl.envs.batched import SerialEnv
from llmrl.envs.libs import GymEnv, GymWrapper
from llmrl.envs.parallel import ParallelEnv
from llmrl.envs.step import step_mdp
from llmrl.envs.transforms import (
    CatTensors,
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    InitTracker,
    MultiStepTransform,
    NextStateReconstructor,
    ObservationNorm,
    RandomCropTensorDict,
    RenameTransform,
    Resize,
    RewardSum,
    SelectTransform,
    StepCounter,
    TensorDictPrimer,
    ToTensorImage,
    Transform,
    TransformedEnv,
)
from llmrl.envs.utils import (
    ExplorationType,
    RandomPolicy,
    check_env_specs,
    make_composite_from_td,
    set_exploration_type,
)

__all__ = [
    "CatTensors",
    "Compose",
    "DoubleToFloat",
    "EnvBase",
    "ExcludeTransform",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "MultiStepTransform",
    "NextStateReconstructor",
    "ObservationNorm",
    "ParallelEnv",
    "RandomCropTensorDict",
    "RandomPolicy",
    "RenameTransform",
    "Resize",
    "RewardSum",
    "SelectTransform",
    "SerialEnv",
    "StepCounter",
    "TensorDictPrimer",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "check_env_specs",
    "make_composite_from_td",
    "set_exploration_type",
    "step_mdp",
]
