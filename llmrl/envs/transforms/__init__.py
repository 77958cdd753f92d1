"""Transforms that do not depend on language models; those that do are in `llmrl.envs.llm.transforms`."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.envs.transforms.base import Compose, Transform
    from llmrl.envs.transforms.crop import RandomCropTensorDict
    from llmrl.envs.transforms.entries import (
        CatTensors,
        DoubleToFloat,
        ExcludeTransform,
        ObservationNorm,
        RenameTransform,
        SelectTransform,
    )
    from llmrl.envs.transforms.images import Resize, ToTensorImage
    from llmrl.envs.transforms.rb_transforms import MultiStepTransform, NextStateReconstructor
    from llmrl.envs.transforms.trajectory import InitTracker, RewardSum, StepCounter, TensorDictPrimer
    from llmrl.envs.transforms.transformed_env import TransformedEnv
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "CatTensors",
    "Compose",
    "DoubleToFloat",
    "ExcludeTransform",
    "InitTracker",
    "MultiStepTransform",
    "NextStateReconstructor",
    "ObservationNorm",
    "RandomCropTensorDict",
    "RenameTransform",
    "Resize",
    "RewardSum",
    "SelectTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
]
