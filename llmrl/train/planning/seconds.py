"""Estimated seconds of a step: good enough to say which of several settings costs less, not how long a run takes."""

from __future__ import annotations

import math

from llmrl.train.gpus import GPU
from llmrl.train.models.shape import ModelShape
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.model import ModelSource

_FLOPS, _REACHED, _SAMPLING = 3e14, 0.4, 0.1  # of a GPU that is not known; shares of the peak in updates and sampling
_NODE, _NETWORK, _HOST = 3e11, 5e10, 2.5e10  # bytes per second and GPU: between GPUs, between nodes, to host memory
_ADAMW_S = 1.1e-9  # of AdamW on the CPU, per parameter of this rank, where eight ranks share a machine's memory
_SMALL = 500  # tokens of a micro-batch at which half of the time is not arithmetic
_CHANGE = 0.005  # share of the time that a change of settings must save to be worth it


def step_seconds(
    config: ModelSource, shape: ModelShape, gpu: GPU, tokens: float, *, engines: int, changes: int
) -> float:
    """Seconds of a step of ``tokens`` tokens on all GPUs that train, with ``engines`` GPUs that sample, divided by its
    prompts. ``changes``: the number of settings that differ from the user's.
    """
    flops, parameters = gpu.flops or _FLOPS, shape.parameters
    here, active = tokens / gpu.count, shape.multiplied + shape.vocabulary * shape.hidden
    passes = math.ceil(here / config.tokens_per_microbatch)
    sharded = config.parallel.mode == "fsdp2" and gpu.count > 1
    own = parameters / gpu.count if sharded else parameters
    updates = config.updates_per_step if isinstance(config, GRPOConfig) else 1

    per_token = (4 if config.lora else 6) + (0 if config.memory.checkpointing == "off" else 2)
    arithmetic = here * per_token * active / (_REACHED * flops) * (1 + _SMALL / config.tokens_per_microbatch)
    if config.parallel.context > 1:
        arithmetic *= 1.05
    link = _NODE if gpu.nodes == 1 else _NETWORK
    # bfloat16 weights are gathered twice, and float32 gradients added up; adapters' are small
    moved = (0 if gpu.count == 1 else 4 if config.lora else 8) * parameters / link * (passes if sharded else updates)
    if config.lora and not sharded:
        moved = 0.0
    copied = passes * 12 * own / _HOST if config.memory.offload == "parameters" else 0.0
    # Transfers run beside the arithmetic, which they slow down a little; activations are waited for.
    total = max(arithmetic, moved, copied) + 0.1 * (moved + copied)
    if config.memory.offload == "activations":
        total += 2 * here * shape.num_blocks * (2 if sharded else 4) * shape.hidden / _HOST
    elif config.memory.offload == "parameters":
        total += updates * _ADAMW_S * own
    if config.optim.name == "adamw_offload" and not config.lora:
        total += updates * 8 * own / _HOST
    elif config.optim.name == "adamw_8bit":
        total *= 1.02
    prompts = 1
    if isinstance(config, GRPOConfig):
        prompts = config.prompts_per_step
        total += tokens * 2 * active / (_SAMPLING * flops * engines)
    return total / prompts * (1 + _CHANGE * changes)
