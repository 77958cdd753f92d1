"""Which rows the next batch holds."""

from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.samplers.uniform import RandomSampler
from llmrl.data.replay_buffers.samplers.without_replacement import SamplerWithoutReplacement

__all__ = ["RandomSampler", "Sampler", "SamplerWithoutReplacement"]
