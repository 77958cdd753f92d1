"""Samplers: select the rows of the next batch."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.samplers.base import RandomSampler, Sampler
    from llmrl.data.replay_buffers.samplers.ensemble import SamplerEnsemble
    from llmrl.data.replay_buffers.samplers.epochs import SamplerWithoutReplacement
    from llmrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
    from llmrl.data.replay_buffers.samplers.slice_samplers import (
        PrioritizedSliceSampler,
        SliceSampler,
        SliceSamplerWithoutReplacement,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

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
