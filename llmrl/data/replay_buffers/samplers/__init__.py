"""Which rows the next batch holds."""

from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from llmrl.data.replay_buffers.samplers.slicer import SLICE_END
from llmrl.data.replay_buffers.samplers.slices import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from llmrl.data.replay_buffers.samplers.uniform import RandomSampler
from llmrl.data.replay_buffers.samplers.without_replacement import SamplerWithoutReplacement

__all__ = [
    "SLICE_END",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
]
