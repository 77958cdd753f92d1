"""The bytes that a run needs on each GPU, by cause; whether they fit, and the settings that would make them fit.

A pure function of the model's shape, the settings and the number of GPUs: it plans for machines that are not here.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmrl.errors import ConfigError, did_you_mean
from llmrl.modules.llm.log_probs import chunk_rows
from llmrl.train.model_shape import Arithmetic, ModelShape, model_shape
from llmrl.train.settings import GRPOConfig, ModelSource, SFTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmrl.train.distributed import Session

__all__ = [
    "GPU",
    "MemoryPlan",
    "engine_share",
    "find_gpu",
    "memory_rows",
    "parse_gpu",
    "plan_memory",
    "remedies",
    "uses_checkpointing",
    "with_changes",
]

_GIB = 2**30
_GPUS = {  # GiB that a program can have, and dense bfloat16 TFLOP/s; 0: it has no bfloat16
    "T4": (14.6, 0),
    "V100": (31.7, 0),
    "A10": (22.0, 125),
    "L4": (22.0, 121),
    "3090": (23.6, 71),
    "4090": (23.6, 165),
    "5090": (31.4, 210),
    "A6000": (47.4, 155),
    "L40": (44.4, 181),
    "L40S": (44.4, 362),
    "A100-40": (39.4, 312),
    "A100": (79.2, 312),
    "H100": (79.2, 989),
    "H200": (139.8, 989),
    "B200": (178.4, 2250),
    "MI300X": (191.5, 1307),
}
_USABLE = 0.985  # of the size that a GPU is sold by
_RESERVE_GIB, _RESERVE_SHARE = 1.0, 0.04  # the driver, NCCL and libraries; what the allocator cannot use
_ENGINE_GIB = 1.5  # what vLLM computes in, beside weights and cache


@dataclass(frozen=True)
class GPU:
    """``count`` GPUs of ``bytes`` each; ``flops`` a second at their best, None where unknown."""

    name: str
    bytes: float
    count: int = 1
    flops: float | None = None
    bfloat16: bool = True


def parse_gpu(text: str) -> GPU:
    """The GPUs of ``--gpu``: a name of the table or gigabytes, and how many.

    Raises  ConfigError

    >>> gpu = parse_gpu("H100:8")
    >>> gpu.name, gpu.count, round(gpu.bytes / 2**30, 1)
    ('H100', 8, 79.2)
    >>> parse_gpu("48").name
    '48 GB'
    """
    name, _, number = text.partition(":")
    known = {label.lower(): label for label in _GPUS}
    size = name.lower().removesuffix("gb").strip()
    counted = not number or (number.isdecimal() and int(number) > 0)
    if counted and name.lower() in known:
        return _named(known[name.lower()], int(number or 1))
    if counted and size.isdecimal() and int(size) > 0:
        return GPU(f"{int(size)} GB", int(size) * _USABLE * _GIB, int(number or 1))
    raise ConfigError(
        f"--gpu {text}: must be a name or gigabytes, and a number of GPUs, as H100:8 or 48:2; names: "
        f"{', '.join(_GPUS)}.{did_you_mean(name, _GPUS)}"
    )


def _named(label: str, count: int, memory: float | None = None) -> GPU:
    size, teraflops = _GPUS[label]
    return GPU(label, memory or size * _GIB, count, teraflops * 1e12 or None, teraflops > 0)


def find_gpu(device: torch.device, count: int = 1) -> GPU | None:
    """The GPU that ``device`` is; None for a CPU."""
    if device.type != "cuda":
        return None
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    words = name.replace("-", " ").split()  # the longest label first: an L40S is not an L40
    label = next((label for label in sorted(_GPUS, key=len, reverse=True) if label.partition("-")[0] in words), None)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return _named(label, count, memory) if label else GPU(name, memory, count, None, bfloat16)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU by cause.

    ``training``   at the peak of a backward pass
    ``resident``   of those, what stays while the engine samples
    ``sampling``   of the engine; beside ``training`` all the time, unless it ``sleeps`` meanwhile
    ``reserve``    driver, libraries, and what the allocator cannot use
    ``per_token``  bytes of the KV cache
    """

    training: dict[str, float]
    resident: float
    sampling: dict[str, float]
    sleeps: bool
    reserve: float
    per_token: float
    checkpointing: bool

    @property
    def peak(self) -> float:
        trained, sampled = sum(self.training.values()), sum(self.sampling.values())
        return self.reserve + (max(trained, self.resident + sampled) if self.sleeps else trained + sampled)


def plan_memory(
    config: ModelSource,
    shape: ModelShape,
    *,
    num_gpus: int,
    low_precision: bool,
    capacity: float | None = None,
    checkpointing: bool | None = None,
) -> MemoryPlan:
    """The plan of a run on ``num_gpus`` of ``capacity`` bytes; None for a CPU, where nothing is reserved.

    ``checkpointing``  None: by the settings, of which "auto" takes it where the run does not fit otherwise
    """
    given = {"num_gpus": num_gpus, "low_precision": low_precision, "capacity": capacity}
    if checkpointing is None:
        checkpointing = config.memory.checkpointing == "on" or config.memory.offload == "activations"
        if config.memory.checkpointing == "auto" and not checkpointing and capacity is not None:
            checkpointing = plan_memory(config, shape, **given, checkpointing=False).peak > capacity
        return plan_memory(config, shape, **given, checkpointing=checkpointing)
    sharded = config.parallel.mode == "fsdp2" and num_gpus > 1
    arithmetic: Arithmetic = "float32" if not low_precision else "bfloat16" if sharded else "autocast"
    ranks = num_gpus // getattr(config.parallel, "replicas", 1) if sharded else 1
    whole, trained = 4.0 * shape.parameters, 4.0 * (shape.parameters - shape.frozen)
    grpo = config if isinstance(config, GRPOConfig) else None
    state = {"adamw": 2.0, "adamw_8bit": 0.5, "adamw_offload": 0.0}[config.optim.name]
    stays = {"weights": whole / ranks, "optimizer": state * trained / ranks}
    if grpo and grpo.grpo.kl:
        stays["reference"] = whole / ranks
    if num_gpus > 1 and not sharded:
        stays["DDP's buckets"] = trained
    training = stays | {
        "gradients": trained / ranks,
        "weights in use": _weights_in_use(shape, arithmetic, sharded),
        "activations": _activations(config, shape, arithmetic, num_gpus, checkpointing),
        "logits": _logits(shape, arithmetic, on_gpu=capacity is not None),
    }
    return MemoryPlan(
        training=training,
        resident=sum(stays.values()),
        sampling=_engine(grpo, shape, num_gpus, low_precision) if grpo else {},
        sleeps=_engine_sleeps(grpo) if grpo else True,
        reserve=0.0 if capacity is None else _RESERVE_GIB * _GIB + _RESERVE_SHARE * capacity,
        per_token=shape.keys_values * (2 if low_precision else 4) / (grpo.rollout.tensor_parallel if grpo else 1),
        checkpointing=checkpointing,
    )


def longest_row(config: ModelSource) -> int:
    """Tokens of the longest row that a run can have."""
    if isinstance(config, GRPOConfig):
        return config.env.max_prompt_tokens + config.env.max_turns * config.sampling.max_tokens
    return config.max_length if isinstance(config, SFTConfig) else config.tokens_per_microbatch


def _rows(config: ModelSource, num_gpus: int) -> int:
    """Rows of a step on one GPU."""
    if isinstance(config, GRPOConfig):
        return -(-config.prompts_per_step * config.group_size * config.env.max_records // num_gpus)
    return -(-config.batch_size // num_gpus) if isinstance(config, SFTConfig) else 1


def _activations(
    config: ModelSource, shape: ModelShape, arithmetic: Arithmetic, num_gpus: int, checkpointing: bool
) -> float:
    """Bytes kept for the backward pass of a micro-batch, and the gradients on their way through one layer."""
    longest = longest_row(config)
    tokens = max(longest, min(config.tokens_per_microbatch, _rows(config, num_gpus) * longest))
    layer = tokens * shape.largest_kept[arithmetic]
    passing = layer / 2 + (layer if checkpointing else 0)  # checkpointing: the layer that is computed again
    if config.memory.offload == "activations":
        return passing + tokens * shape.kept_after[arithmetic]
    return passing + shape.activations(tokens, arithmetic, checkpointing=checkpointing)


def _weights_in_use(shape: ModelShape, arithmetic: Arithmetic, sharded: bool) -> float:
    """Autocast's copies of all weights; of shards, two layers and the outermost parameters whole, with gradients."""
    if not sharded:
        return 2.0 * shape.parameters if arithmetic == "autocast" else 0.0
    width = 4 if arithmetic == "float32" else 2
    return width * (2 * shape.largest_block + shape.outer) + (width + 4) * (shape.largest_block + shape.outer)


def _logits(shape: ModelShape, arithmetic: Arithmetic, *, on_gpu: bool) -> float:
    """A chunk of logits three times, in float32, and the head's weight with its gradient in the making."""
    rows = chunk_rows(shape.vocabulary, "cuda" if on_gpu else "cpu")
    weight = shape.vocabulary * shape.hidden * (4 if arithmetic == "float32" else 6)
    return 3 * 4.0 * rows * shape.vocabulary + weight


def _engine_sleeps(config: GRPOConfig) -> bool:
    """True if the engine gives its memory back while the trainer updates."""
    if config.rollout.engine == "transformers":
        return True  # its cache is gone when a batch is sampled
    return config.rollout.sleep is not False and not config.rollout.max_staleness


def _engine(config: GRPOConfig, shape: ModelShape, num_gpus: int, low_precision: bool) -> dict[str, float]:
    """The least that the engine on a trainer's GPU needs: weights, and a cache for one sequence of full length."""
    rollout, longest, width = config.rollout, longest_row(config), 2 if low_precision else 4
    if rollout.engine == "transformers":
        return {"KV cache": 4.0 * shape.keys_values * longest * _rows(config, num_gpus)}
    if rollout.servers:
        return {}  # on GPUs of its own
    parts = rollout.tensor_parallel
    cache = width * shape.keys_values * (longest + 1) / parts
    cache = max(cache, rollout.options.get("kv_cache_memory_bytes") or 0)
    return {"engine weights": width * shape.parameters / parts, "engine work": _ENGINE_GIB * _GIB, "KV cache": cache}


def engine_share(config: GRPOConfig, shape: ModelShape, gpu: GPU, *, low_precision: bool) -> float:
    """The share of each trainer's GPU that its engine may take: all that the trainer leaves, less the reserve.

    Raises  ConfigError if that cannot hold the engine's weights and one sequence
    """
    plan = plan_memory(
        config, shape, num_gpus=gpu.count, low_precision=low_precision, capacity=gpu.bytes
    )  # with the checkpointing that the run will use
    beside = plan.resident if plan.sleeps else sum(plan.training.values())
    free, least = gpu.bytes - beside - plan.reserve, sum(plan.sampling.values())
    if free < least:
        raise ConfigError(_does_not_fit(config, shape, plan, gpu, low_precision))
    return int(100 * free / gpu.bytes) / 100


def uses_checkpointing(config: ModelSource, model: PreTrainedModel, session: Session) -> bool:
    """True if decoder layers keep their inputs alone in this run on these GPUs: the same on every rank."""
    gpu = find_gpu(session.device, session.world_size)
    if config.memory.offload == "activations" or config.memory.checkpointing != "auto" or gpu is None:
        return config.memory.offload == "activations" or config.memory.checkpointing == "on"
    given = {"num_gpus": gpu.count, "low_precision": session.low_precision, "capacity": gpu.bytes}
    return session.any(plan_memory(config, model_shape(model), **given).checkpointing)


# --- what would make it fit -------------------------------------------------------------------------------------------


def remedies(config: ModelSource, shape: ModelShape, gpu: GPU, *, low_precision: bool) -> dict[str, Any] | None:
    """The fewest settings to change for the run to fit on the GPUs; {} if it fits, None if nothing here makes it fit.

    Of as many changes, those come first that cost the least time.
    """
    values: dict[str, Sequence[Any]] = {"memory.checkpointing": ["on"], "parallel.mode": ["fsdp2"][: gpu.count - 1]}
    longest = longest_row(config)
    smaller = [tokens for tokens in (8192, 4096) if longest < tokens < config.tokens_per_microbatch]
    values["tokens_per_microbatch"] = [*smaller, *([longest] if longest < config.tokens_per_microbatch else [])]
    values["optim.name"] = ["adamw_8bit", "adamw_offload"]
    values["memory.offload"] = ["activations"]

    def fits(changes: dict[str, Any]) -> bool:
        plan = plan_memory(
            with_changes(config, changes), shape, num_gpus=gpu.count, low_precision=low_precision, capacity=gpu.bytes
        )
        return plan.peak <= gpu.bytes

    if not fits({name: options[-1] for name, options in values.items() if options}):  # what saves most
        return None
    return next((changes for changes in _fewest_first(values) if fits(changes)), None)


def _fewest_first(values: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for count in range(len(values) + 1):
        for names in itertools.combinations(values, count):
            for chosen in itertools.product(*(values[name] for name in names)):
                yield dict(zip(names, chosen, strict=True))


def with_changes(config: ModelSource, changes: dict[str, Any]) -> ModelSource:
    """The settings with others in their place, by their dotted names."""
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        update = {field: value}
        if section:
            update = {section: getattr(config, section).model_copy(update=update)}
        config = config.model_copy(update=update)
    return config


def memory_rows(
    config: ModelSource, shape: ModelShape, session: Session, gpu: GPU | None = None
) -> list[tuple[str, str]]:
    """Rows of the plan for ``gpu``, or for the one that is found; on a CPU a remark on its memory.

    Raises  ConfigError if the run cannot fit on the GPUs, naming the settings that would make it fit
    """
    low = session.low_precision
    if gpu is not None:
        low = config.dtype == "bfloat16" or (config.dtype == "auto" and gpu.bfloat16)
    gpu = gpu or find_gpu(session.device, session.world_size)
    count = gpu.count if gpu else session.world_size
    plan = plan_memory(config, shape, num_gpus=count, low_precision=low, capacity=gpu and gpu.bytes)
    if gpu and plan.peak > gpu.bytes:
        raise ConfigError(_does_not_fit(config, shape, plan, gpu, low))
    if gpu:
        place = f"{gpu.count} x {gpu.name}, {_gib(gpu.bytes)} GiB each"
    else:
        place = f"CPU, {_gib(_ram() / count)} GiB of RAM for each process"
    kept = "checkpointing" if plan.checkpointing else "no checkpointing"
    return [("memory", f"{_gib(plan.peak)} GiB at most · {place} · {kept}"), ("", _causes(plan))]


def _does_not_fit(config: ModelSource, shape: ModelShape, plan: MemoryPlan, gpu: GPU, low_precision: bool) -> str:
    changes = remedies(config, shape, gpu, low_precision=low_precision)
    words = "more or larger GPUs would be needed"
    if changes:
        words = "it fits with " + " ".join(f"{name}={value}" for name, value in changes.items())
    return (
        f"memory: the run must fit on {gpu.count} x {gpu.name} of {_gib(gpu.bytes)} GiB: needs {_gib(plan.peak)} GiB "
        f"on each ({_causes(plan)}); {words}."
    )


def _causes(plan: MemoryPlan) -> str:
    causes = plan.training | plan.sampling | {"reserve": plan.reserve}
    return " · ".join(f"{cause} {_gib(size)}" for cause, size in causes.items() if size)


def _gib(size: float) -> str:
    gib = size / _GIB
    return f"{gib:.0f}" if gib >= 99.5 else f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2g}"


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
