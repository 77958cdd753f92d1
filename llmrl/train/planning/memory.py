"""The bytes that a run needs on each GPU, by cause, and whether they fit.

Depends only on the model's shape, the settings, the data's lengths and the GPUs, so it also plans for other machines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmrl.errors import ConfigError
from llmrl.modules.llm.head_scores import chunk_rows
from llmrl.modules.llm.model_files import loaded
from llmrl.modules.llm.vision import model_class
from llmrl.train.adapter_files import start_adapter
from llmrl.train.data.lengths import RowLengths, tokens_at_once
from llmrl.train.gpus import GPU, find_gpu
from llmrl.train.models.lora import num_trained, saved_modules
from llmrl.train.models.recomputed import keeps_less
from llmrl.train.models.shape import Arithmetic, ModelShape, model_shape
from llmrl.train.settings.algorithms import PPOConfig
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.machine import OptimSettings
from llmrl.train.settings.model import ModelSource
from llmrl.train.settings.rollout import RolloutSettings
from llmrl.train.settings.sft import SFTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmrl.train.distributed import Session

GIB = 2**30
_RESERVE_GIB, _RESERVE_SHARE = 1.0, 0.04  # the driver, NCCL and libraries; what the allocator cannot use
_CPU_SHARE = 0.3  # of activations: what the C library's allocator holds beyond them
_CACHE_SHARE = 0.8  # of the free memory, for the KV cache of `TransformersEngine`: the rest is for logits and copies
_ENGINE_GIB = 1.5  # vLLM's workspace, besides weights and cache
_CONTEXT_GIB = 0.5  # of CUDA, in a process besides the trainer's
_BUFFER = 2**28  # least bytes of the buffer through which weights go to an engine in another process
_HOST_SHARE = 0.9  # of a machine's memory: the rest is the system's


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU by cause.

    ``training``   at the peak of a backward pass
    ``resident``   the part of ``training`` that stays while the engine samples
    ``sampling``   of the engine; added to ``training``, unless the engine ``sleeps`` during updates
    ``reserve``    driver, libraries, and what the allocator cannot use
    ``host``       in host memory per GPU: what is offloaded
    """

    training: dict[str, float]
    resident: float
    sampling: dict[str, float]
    sleeps: bool
    reserve: float
    checkpointing: bool
    host: float = 0.0

    @property
    def peak(self) -> float:
        trained, sampled = sum(self.training.values()), sum(self.sampling.values())
        return self.reserve + (max(trained, self.resident + sampled) if self.sleeps else trained + sampled)

    def fits(self, gpu: GPU) -> bool:
        return self.peak <= gpu.bytes and self.host <= _HOST_SHARE * gpu.host_bytes


def plan_memory(
    config: ModelSource,
    shape: ModelShape,
    *,
    num_gpus: int,
    low_precision: bool,
    capacity: float | None = None,
    lengths: RowLengths | None = None,
    checkpointing: bool | None = None,
) -> MemoryPlan:
    """The plan of a run on ``num_gpus`` of ``capacity`` bytes. ``capacity`` None: a CPU, where the reserve is what this
    process holds.

    ``lengths``        None: the longest that the settings allow
    ``checkpointing``  None: by the settings, where "auto" means only if the run does not fit without it
    """
    lengths, on_gpu = lengths or row_bound(config), capacity is not None
    given = {"num_gpus": num_gpus, "low_precision": low_precision, "capacity": capacity, "lengths": lengths}
    if checkpointing is None:
        checkpointing = config.memory.checkpointing == "on" or config.memory.offload == "activations"
        if config.memory.checkpointing == "auto" and not checkpointing and capacity is not None:
            # Checkpointing costs a second forward pass, so it is used only if the run does not fit without it.
            checkpointing = plan_memory(config, shape, **given, checkpointing=False).peak > capacity
        return plan_memory(config, shape, **given, checkpointing=checkpointing)
    sharded = config.parallel.mode == "fsdp2" and num_gpus > 1
    arithmetic: Arithmetic = "float32" if not low_precision else "bfloat16" if sharded else "autocast"
    if config.lora and low_precision:  # bfloat16 weights, and autocast's copies of adapter inputs
        # Trained embeddings are float32, so values between the layers are too.
        arithmetic = "bfloat16" if checkpointing and not config.lora.modules_to_save else "autocast"
    ranks = num_gpus // config.parallel.replicas if sharded else 1
    share = shape.on_a_rank(ranks)  # of what is sharded
    # Master weights, gradients and moments are float32 in every precision of arithmetic: 4 bytes each.
    whole = 4.0 * shape.parameters
    trained, part = 4.0 * num_trained(config, shape), 1.0 if config.lora else share  # each rank has all adapters
    held = trained + _frozen(config, shape, low_precision) * share if config.lora else whole * share
    grpo = config if isinstance(config, GRPOConfig) else None
    muon = 2.0 - shape.matrices / shape.parameters  # one moment for each matrix
    moved = 2.0 if capacity is None else 0.0
    moments = {"adamw": 2.0, "adamw_8bit": 0.5, "adamw_offload": moved, "muon": muon}  # per byte of a weight
    stays = {"weights": held, "optimizer": moments[config.optim.name] * trained * part}
    if isinstance(config, PPOConfig):  # counted as large as the policy; they are never trained at the same time
        stays["critic"] = held + moments[config.ppo.critic_optim.name] * trained * part
    if grpo and grpo.grpo.kl and not config.lora:  # with lora the reference is the model without its adapters
        stays["reference"] = whole * share
    elif grpo and grpo.grpo.kl and start_adapter(config.model):  # those it began with, and a copy of its own
        stays["reference"] = 2 * trained
    if grpo and grpo.teacher and grpo.teacher.is_loaded:
        stays["teacher"] = (2.0 if low_precision else 4.0) * _num_weights(grpo.teacher.source) / ranks
    rollout = grpo.rollout if grpo else RolloutSettings()
    apart = num_gpus > 1 or rollout.own_process or rollout.overlaps or rollout.tensor_parallel > 1
    apart = apart and not rollout.over_ranks
    if capacity is not None and rollout.engine == "vllm" and not rollout.elsewhere and apart:
        buffer = max(_BUFFER, (2.0 if low_precision else 4.0) * shape.largest_weight)
        stays["engine's process"] = _CONTEXT_GIB * GIB + buffer
    gradients = trained * part
    on_host = [optim for optim in _optimizers(config) if optim.name == "adamw_offload"] if capacity is not None else []
    host = 2 * trained * part * len(on_host)
    if sharded and config.memory.offload == "parameters" and capacity is not None:
        device = {name: size for name, size in stays.items() if name == "engine's process"}
        host += sum(stays.values()) - sum(device.values()) + gradients
        gradients, stays = 0.0, dict.fromkeys(stays, 0.0) | device
    if num_gpus > 1 and not sharded:
        stays["DDP's buckets"] = trained * (2 if isinstance(config, PPOConfig) else 1)
    # Transformers samples with the trainer's weights, and frees its cache after each batch.
    sleeps = rollout.engine != "vllm" or (rollout.sleep is not False and not rollout.max_staleness)
    if config.memory.offload == "activations" and capacity is not None:
        host += _offloaded(config, shape, arithmetic, num_gpus, lengths)
    training = stays | {
        "gradients": gradients,
        "weights in use": _weights_in_use(config, shape, arithmetic, sharded),
        "activations": _activations(config, shape, arithmetic, num_gpus, checkpointing, lengths, on_gpu=on_gpu),
        "logits": _logits(config, shape, arithmetic, on_gpu=on_gpu),
    }
    kept = reserve(capacity) if capacity else _held() + _CPU_SHARE * training["activations"]
    free = None if capacity is None else capacity - kept - sum(stays.values()) - training["weights in use"]
    return MemoryPlan(
        training=training,
        resident=sum(stays.values()),
        sampling=_engine(grpo, shape, num_gpus, low_precision, lengths.longest, free) if grpo else {},
        sleeps=sleeps,
        reserve=kept,
        checkpointing=checkpointing,
        host=host,
    )


def _optimizers(config: ModelSource) -> list[OptimSettings]:
    return [config.optim, *([config.ppo.critic_optim] if isinstance(config, PPOConfig) else [])]


@cache
def _num_weights(source: str) -> int:
    from transformers import AutoConfig

    def build(source: str, **options: Any) -> PreTrainedModel:
        return model_class(sizes := AutoConfig.from_pretrained(source, **options)).from_config(sizes)

    with torch.device("meta"):
        return model_shape(loaded(build, source, setting="teacher")).parameters


def plan_on(
    config: ModelSource, shape: ModelShape, gpu: GPU | None, lengths: RowLengths | None, num_cpus: int = 1
) -> MemoryPlan:
    if gpu is None:
        return plan_memory(config, shape, num_gpus=num_cpus, low_precision=config.in_bfloat16(None), lengths=lengths)
    low = config.in_bfloat16(gpu.bfloat16)
    return plan_memory(config, shape, num_gpus=gpu.count, low_precision=low, capacity=gpu.bytes, lengths=lengths)


@cache
def _held() -> float:
    """Bytes of this process before it loads weights: Python, its packages, the data."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, LookupError):
        return _RESERVE_GIB * GIB


def reserve(capacity: float) -> float:
    return _RESERVE_GIB * GIB + _RESERVE_SHARE * capacity


def longest_row(config: ModelSource) -> int:
    """Tokens of the longest possible row of a run."""
    if isinstance(config, GRPOConfig):
        longest = config.env.max_prompt_tokens + config.env.max_turns * config.sampling.max_tokens
        return min(longest, config.env.max_conversation_tokens or longest)
    return config.row_length if isinstance(config, SFTConfig) else config.tokens_per_microbatch


def row_bound(config: ModelSource) -> RowLengths:
    """The longest rows that the settings allow."""
    return RowLengths((longest_row(config),))


def rows_per_gpu(config: ModelSource, num_gpus: int) -> int:
    if isinstance(config, GRPOConfig):
        return -(-config.prompts_per_step * config.group_size * config.env.max_records // num_gpus)
    return -(-config.batch_size // num_gpus) if isinstance(config, SFTConfig) else 1


def _activations(
    config: ModelSource,
    shape: ModelShape,
    arithmetic: Arithmetic,
    num_gpus: int,
    checkpointing: bool,
    lengths: RowLengths,
    *,
    on_gpu: bool,
) -> float:
    """Bytes kept for the backward pass of a micro-batch, plus gradients in flight through one layer."""
    tokens, mask = _tokens(config, shape, num_gpus, lengths, on_gpu=on_gpu)
    length = mask or (lengths.longest if shape.keeps_scores else 0)
    layer = shape.largest_block_keeps(tokens, arithmetic, length=length)
    passing = layer / 2 + (layer if checkpointing else 0)  # checkpointing: the layer being recomputed
    if config.memory.offload == "activations":
        return passing + tokens * shape.kept_after[arithmetic]
    sharded = config.parallel.mode == "fsdp2" and num_gpus > 1
    less = keeps_less(config, shape.hidden, on_gpu=on_gpu, sharded=sharded)
    return passing + shape.activations(tokens, arithmetic, length=length, checkpointing=checkpointing, less=less)


def _tokens(
    config: ModelSource, shape: ModelShape, num_gpus: int, lengths: RowLengths, *, on_gpu: bool
) -> tuple[float, int]:
    """Tokens of a rank's largest micro-batch, and the length of its attention mask, 0 without one."""
    split = config.parallel.context if num_gpus > 1 else 1
    rows = rows_per_gpu(config, num_gpus // split)
    rows = -(-rows // config.updates_per_step) if isinstance(config, GRPOConfig) else rows
    shares = shape.shares and split == 1
    budget = tokens_at_once(config.tokens_per_microbatch, shape.parameters, on_gpu=on_gpu)
    by_row = shape.by_row and not on_gpu and not config.memory.compile
    most, mask = lengths.most_at_once(rows, budget, config.packing, shares, by_row)
    return most / split, mask


def _offloaded(
    config: ModelSource, shape: ModelShape, arithmetic: Arithmetic, num_gpus: int, lengths: RowLengths
) -> float:
    """Bytes of the inputs of all decoder layers, which wait in host memory."""
    width = 2 if arithmetic == "bfloat16" else 4
    return _tokens(config, shape, num_gpus, lengths, on_gpu=True)[0] * shape.num_blocks * width * shape.hidden


def _frozen(config: ModelSource, shape: ModelShape, low_precision: bool) -> float:
    """Bytes of the frozen weights below adapters: in the compute precision; linear layers in 4 bits if quantized."""
    width = 2.0 if low_precision else 4.0
    packed = sum(size for size, _ in shape.linears.values()) if config.lora.quantize else 0
    return width * (shape.parameters - packed) + (0.5 + 4 / 64) * packed  # a float32 scale for every 64 weights


def _weights_in_use(config: ModelSource, shape: ModelShape, arithmetic: Arithmetic, sharded: bool) -> float:
    """Autocast's copies of all weights; with FSDP2 two gathered layers and the outermost parameters, with gradients,
    and its buffers: of a layer being gathered, and of a layer's float32 gradients being added up over the ranks.
    Frozen weights below adapters have no copies and no gradients; 4-bit layers are dequantized one at a time.
    """
    if config.lora:
        blocks = 3 * shape.largest_block + shape.outer if sharded else shape.largest_block
        return (4 if arithmetic == "float32" else 2) * blocks if sharded or config.lora.quantize else 0.0
    if not sharded:
        return 2.0 * shape.parameters if arithmetic == "autocast" else 0.0
    width = 4 if arithmetic == "float32" else 2
    gathered, gradients = 3 * shape.largest_block + shape.outer, shape.largest_block + shape.outer
    return width * gathered + (width + 4) * gradients + 4 * shape.largest_block


def _logits(config: ModelSource, shape: ModelShape, arithmetic: Arithmetic, *, on_gpu: bool) -> float:
    """Three float32 copies of a chunk of logits; if the head is trained, also its weight with the gradient sum."""
    rows = chunk_rows(shape.vocabulary, "cuda" if on_gpu else "cpu")
    trains_head = not config.lora or list(shape.ends)[-1] in saved_modules(config, shape)
    weight = 0 if not trains_head else shape.vocabulary * shape.hidden * (4 if arithmetic == "float32" else 6)
    return 3 * 4.0 * rows * shape.vocabulary + weight


def _engine(
    config: GRPOConfig, shape: ModelShape, num_gpus: int, low_precision: bool, longest: int, free: float | None
) -> dict[str, float]:
    if config.rollout.engine != "vllm":
        rows, row = rows_per_gpu(config, num_gpus), 4.0 * shape.cache_numbers(longest)
        if free is not None:  # as many rows at once as there is memory for
            rows = max(1, min(rows, int(_CACHE_SHARE * free / row)))
        return {"KV cache": row * rows}
    return {} if config.rollout.elsewhere else engine_memory(config, shape, low_precision=low_precision)


def cached_tokens(config: GRPOConfig, model: PreTrainedModel, session: Session, lengths: RowLengths) -> int | None:
    """The most tokens in the KV cache of `TransformersEngine`, by the plan; None on a CPU, or with another engine."""
    gpu = find_gpu(session.device, session.world_size)
    if gpu is None or config.rollout.engine != "transformers":
        return None
    shape = model_shape(model)
    row = 4.0 * shape.cache_numbers(lengths.longest)
    return lengths.longest * round(plan_on(config, shape, gpu, lengths).sampling["KV cache"] / row)


def engine_memory(config: GRPOConfig, shape: ModelShape, *, low_precision: bool) -> dict[str, float]:
    """The minimum that a vLLM engine needs per GPU: weights, workspace, and the cache of one full-length sequence."""
    parts, width = config.rollout.tensor_parallel, 2 if low_precision else 4
    cache = width * shape.cache_numbers(longest_row(config) + 1) / parts
    cache = max(cache, config.rollout.options.get("kv_cache_memory_bytes") or 0)
    return {"engine weights": width * shape.parameters / parts, "engine work": _ENGINE_GIB * GIB, "KV cache": cache}


def trainer_gpus(config: ModelSource, gpu: GPU) -> GPU:
    """The machine's GPUs that train: all but the last ``rollout.gpus``; of the GPUs that a rank's own engine is spread
    over, one.

    Raises  ConfigError if none is left, or they cannot be divided evenly
    """
    rollout = config.rollout if isinstance(config, GRPOConfig) else RolloutSettings()
    taken, parts = rollout.gpus, rollout.tensor_parallel if rollout.engine == "vllm" and not rollout.elsewhere else 1
    if rollout.over_ranks:
        if (here := gpu.count // gpu.nodes) % parts:
            raise ConfigError(f"rollout.over_ranks: tensor_parallel must divide a machine's {here} GPUs: got {parts}.")
        parts = 1
    if taken >= gpu.count:
        raise ConfigError(f"rollout.gpus: must leave a GPU to the trainer: got {taken} of {gpu.count} x {gpu.name}.")
    if gpu.count % parts:
        raise ConfigError(f"rollout.tensor_parallel: must divide the {gpu.count} GPUs: got {parts}.")
    nodes = -(-(gpu.count - taken) // (gpu.count // gpu.nodes))
    trainers = replace(gpu, count=(gpu.count - taken) // parts, nodes=nodes)
    config.parallel.check_count(trainers.count)
    return trainers


def uses_checkpointing(
    config: ModelSource, model: PreTrainedModel, session: Session, lengths: RowLengths | None = None
) -> bool:
    """True if this run checkpoints its decoder layers on these GPUs; the same on every rank."""
    gpu = find_gpu(session.device, session.world_size)
    return session.any(plan_on(config, model_shape(model), gpu, lengths, session.world_size).checkpointing)


def can_spread(heads: tuple[int, int], parts: int) -> bool:
    """True if vLLM can spread an engine over ``parts`` GPUs: it repeats key/value heads that are fewer."""
    queries, keys = heads
    return not queries % parts and (not keys % parts or not parts % keys)
