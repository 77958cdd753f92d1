"""Samplers: select the rows of the next batch."""

from llmrl.data.replay_buffers.samplers.base import RandomSampler, Sampler
from llmrl.data.replay_buffers.samplers.ensemble import SamplerEnsemble
from llmrl.data.replay_buffers.samplers.epochs import SamplerWithoutReplacement
from llmrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from llmrl.data.replay_buffers.samplers.slice_samplers import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
]
