"""Transforms that do not depend on language models; those that do are in `llmrl.envs.llm.transforms`."""

from llmrl.envs.transforms.base import Compose, Transform
from llmrl.envs.transforms.crop import RandomCropTensorDict
from llmrl.envs.transforms.rb_transforms import MultiStepTransform, NextStateReconstructor
from llmrl.envs.transforms.step_counter import StepCounter
from llmrl.envs.transforms.transformed_env import TransformedEnv

__all__ = [
    "Compose",
    "MultiStepTransform",
    "NextStateReconstructor",
    "RandomCropTensorDict",
    "StepCounter",
    "Transform",
    "TransformedEnv",
]
