"""Checks that a run fits in memory, finds the settings with which it would, and says so in the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmrl.errors import ConfigError
from llmrl.modules.llm.sequence_split import can_share_heads
from llmrl.train.data.lengths import RowLengths
from llmrl.train.gpus import GPU, find_gpu, host_memory
from llmrl.train.models.shape import ModelShape
from llmrl.train.planning.memory import (
    GIB,
    MemoryPlan,
    can_spread,
    engine_memory,
    plan_on,
    reserve,
    row_bound,
    rows_per_gpu,
    trainer_gpus,
)
from llmrl.train.planning.seconds import step_seconds
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.machine import LoraSettings
from llmrl.train.settings.model import ModelSource
from llmrl.train.settings.preferences import RewardConfig
from llmrl.train.settings.rollout import RolloutSettings

if TYPE_CHECKING:
    from llmrl.train.distributed import Session


def engine_share(config: GRPOConfig, shape: ModelShape, gpu: GPU, lengths: RowLengths | None = None) -> float:
    """The share of each trainer GPU that its engine may take: all memory that trainer and reserve leave.

    Raises  ConfigError if that cannot hold the engine's weights and one sequence
    """
    plan = plan_on(config, shape, gpu, lengths)  # with checkpointing as the run will use it
    # An engine that sleeps during updates shares the GPU with what stays resident, not with activations.
    beside = plan.resident if plan.sleeps else sum(plan.training.values())
    free, least = gpu.bytes - beside - plan.reserve, sum(plan.sampling.values())
    if free < least:
        raise ConfigError(_does_not_fit(config, shape, plan, gpu, lengths))
    return int(100 * free / gpu.bytes) / 100


def remedies(
    config: ModelSource, shape: ModelShape, gpu: GPU, lengths: RowLengths | None = None
) -> dict[str, Any] | None:
    """The changes of settings that make the run fit on the GPUs and cost the least time (`step_seconds`); {} if it fits
    already, None if none helps.

    Some GPUs may be set aside for engines, on one machine, where ``llmrl launch`` starts them; or engines be divided
    over the GPUs of several ranks. Adapters, which train
    fewer parameters, are the last resort.
    """

    def seconds(config: ModelSource, changes: dict[str, Any]) -> float:
        trainers = replace(gpu, count=gpu.count - changes.get("rollout.gpus", 0))
        return _seconds(config, changes, shape, trainers, lengths)

    for adapters in ({}, {"lora.r": 16}, {"lora.r": 16, "lora.quantize": "nf4"}):
        if adapters and (config.lora or ("lora.quantize" in adapters and config.parallel.mode == "fsdp2")):
            continue
        changed = with_changes(config, adapters)
        if (found := _remedies_here(changed, shape, gpu, lengths)) == {}:
            return adapters
        others = [*_remedies_apart(changed, shape, gpu, lengths), *_remedies_shared(changed, shape, gpu, lengths)]
        if possible := [changes for changes in (found, *others) if changes is not None]:
            return adapters | min(possible, key=lambda changes: seconds(changed, changes))
    return None


def _seconds(
    config: ModelSource, changes: dict[str, Any], shape: ModelShape, trainers: GPU, lengths: RowLengths | None
) -> float:
    changed = with_changes(config, changes)
    rollout = changed.rollout if isinstance(changed, GRPOConfig) else RolloutSettings()
    tokens = rows_per_gpu(changed, 1) * (lengths or row_bound(config)).longest
    return step_seconds(changed, shape, trainers, tokens, engines=rollout.gpus or trainers.count, changes=len(changes))


def _remedies_apart(
    config: ModelSource, shape: ModelShape, gpu: GPU, lengths: RowLengths | None
) -> Iterator[dict[str, Any]]:
    """`remedies` with engines on separate GPUs."""
    apart = isinstance(config, GRPOConfig) and config.rollout.engine == "vllm" and config.rollout.tensor_parallel == 1
    if not apart or config.rollout.elsewhere or gpu.nodes > 1:
        return
    for num_engines in sorted({gpu.count // 8, gpu.count // 4, gpu.count // 2} - {0}):
        trainers = replace(gpu, count=gpu.count - num_engines)
        for parts in (1, 2, 4, 8):
            changes: dict[str, Any] = {"rollout.gpus": num_engines}
            changes |= {"rollout.tensor_parallel": parts} if parts > 1 else {}
            changes |= _even_prompts(config, trainers.count)
            changed = with_changes(config, changes)
            even = not num_engines % parts and can_spread(shape.heads, parts)
            if even and sum(_engine_apart(changed, shape, gpu).values()) <= gpu.bytes:
                if (here := _remedies_here(changed, shape, trainers, lengths)) is not None:
                    yield changes | here
                break  # a larger tensor_parallel does not change the trainers


def _remedies_shared(
    config: ModelSource, shape: ModelShape, gpu: GPU, lengths: RowLengths | None
) -> Iterator[dict[str, Any]]:
    """`remedies` with engines over the GPUs of as few ranks as possible."""
    rollout = config.rollout if isinstance(config, GRPOConfig) else RolloutSettings()
    alone = rollout.engine == "vllm" and rollout.tensor_parallel == 1 and not (rollout.elsewhere or rollout.overlaps)
    if not alone or rollout.own_process or config.env.agent:
        return
    for parts in (2, 4, 8):
        if gpu.count // gpu.nodes % parts == 0 and can_spread(shape.heads, parts):
            changes: dict[str, Any] = {"rollout.tensor_parallel": parts, "rollout.over_ranks": True}
            if (here := _remedies_here(with_changes(config, changes), shape, gpu, lengths)) is not None:
                yield changes | here
                return


def _even_prompts(config: ModelSource, ranks: int) -> dict[str, Any]:
    """The change that makes prompts_per_step a multiple of ``ranks``; {} if it is one."""
    more = -config.prompts_per_step % ranks if isinstance(config, GRPOConfig) else 0
    return {"prompts_per_step": config.prompts_per_step + more} if more else {}


def _with_more_gpus(config: ModelSource, shape: ModelShape, gpu: GPU, lengths: RowLengths | None) -> str:
    """The smallest number of such GPUs (doubled each time) that fits, and the settings to change there, in words."""
    for power in range(1, 7):
        more = gpu.of(gpu.count << power)
        changed = with_changes(config, changes := _even_prompts(config, more.count))
        if (found := remedies(changed, shape, more, lengths)) is not None:
            return f"more GPUs would be needed: it fits on {more.place}{_in_words(changes | found)}"
    return "more or larger GPUs would be needed"


def _in_words(changes: Mapping[str, Any]) -> str:
    words = " with " * bool(changes) + " ".join(f"{name}={value}" for name, value in changes.items())
    words += f", where {changes.get('parallel.context')} ranks share each sequence" * ("parallel.context" in changes)
    return words + " under llmrl launch" * ("rollout.gpus" in changes)


def _engine_apart(config: GRPOConfig, shape: ModelShape, gpu: GPU) -> dict[str, float]:
    """The minimum per GPU of an engine on separate GPUs, with the cache of one conversation."""
    needs = engine_memory(config, shape, low_precision=config.in_bfloat16(gpu.bfloat16))
    return needs | {"reserve": reserve(gpu.bytes)}


def _remedies_here(
    config: ModelSource, shape: ModelShape, gpu: GPU, lengths: RowLengths | None
) -> dict[str, Any] | None:
    """`remedies` that leave the engines where they are."""
    several = gpu.count > 1 and not (config.lora and config.lora.quantize)
    values: dict[str, Sequence[Any]] = {"memory.checkpointing": ["on"], "parallel.mode": ["fsdp2"] * several}
    longest = (lengths or row_bound(config)).longest
    values["tokens_per_microbatch"] = _smaller_microbatches(config, longest)
    values |= {"parallel.context": _splits(config, shape, gpu.count), "optim.name": ["adamw_8bit", "adamw_offload"]}
    values["memory.offload"] = ["activations", *["parameters"][: gpu.count - 1]]

    def fits(changes: dict[str, Any]) -> bool:
        changed = with_changes(config, changes)
        mode, optimizer = changed.parallel.mode, changed.optim.name
        refused = changed.memory.offload == "parameters" and (mode, optimizer) != ("fsdp2", "adamw")
        refused |= (mode, optimizer) == ("fsdp2", "adamw_8bit") and changed.lora is None
        needs_split = changed.tokens_per_microbatch <= longest
        refused |= "parallel.context" in changes and not needs_split
        return not refused and plan_on(changed, shape, gpu, lengths).fits(gpu)

    # The search tries hundreds of combinations, so first check that all savings together suffice. The two strongest
    # exclude each other: parameters in host memory need plain AdamW, which then computes there.
    most = {name: options[-1] for name, options in values.items() if options}
    if not fits(most | {"memory.offload": "activations"}) and not fits(most | {"optim.name": config.optim.name}):
        return None
    by_time = sorted(_fewest_first(values), key=lambda changes: _seconds(config, changes, shape, gpu, lengths))
    return {} if fits({}) else next((changes for changes in by_time if fits(changes)), None)


def _smaller_microbatches(config: ModelSource, longest: int) -> list[int]:
    return [tokens for tokens in (8192, 4096, longest) if longest <= tokens < config.tokens_per_microbatch]


def _splits(config: ModelSource, shape: ModelShape, num_gpus: int) -> list[int]:
    """Possible values of parallel.context; none if sequences are split already or cannot be."""
    taken = config.parallel.context > 1 or config.memory.compile or config.packing == "on" or not shape.splits
    sizes = range(2, 1 if taken or isinstance(config, RewardConfig) else num_gpus + 1)
    return [size for size in sizes if num_gpus % size == 0 and can_share_heads(*shape.heads, size)]


def _fewest_first(values: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for count in range(len(values) + 1):
        for names in itertools.combinations(values, count):
            for chosen in itertools.product(*(values[name] for name in names)):
                yield dict(zip(names, chosen, strict=True))


def with_changes(config: ModelSource, changes: dict[str, Any]) -> ModelSource:
    """The settings with ``changes`` (dotted name: value) applied."""
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        update = {field: value}
        if section:
            update = {section: (getattr(config, section) or LoraSettings()).model_copy(update=update)}
        config = config.model_copy(update=update)
    return config


def memory_rows(
    config: ModelSource,
    shape: ModelShape,
    session: Session,
    gpu: GPU | None = None,
    lengths: RowLengths | None = None,
) -> list[tuple[str, str]]:
    """Rows of the plan on memory, for ``gpu`` or the GPU of this machine; on a CPU they state its RAM, and what would
    make the run fit.

    Raises  ConfigError if the run cannot fit on the GPUs, naming the settings that would make it fit
    """
    gpu = trainer_gpus(config, gpu) if gpu else find_gpu(session.device, session.world_size)
    count = gpu.count if gpu else session.world_size
    if gpu or count > 1:
        config.parallel.check_count(count)
    plan = plan_on(config, shape, gpu, lengths, count)
    if gpu and not plan.fits(gpu):
        raise ConfigError(_does_not_fit(config, shape, plan, gpu, lengths))
    memory = host_memory() / count
    place = f"CPU, {_gib(memory)} GiB of RAM" + " for each process" * (count > 1)
    if gpu:
        place = f"{gpu.count} x {gpu.name}, {_gib(gpu.bytes)} GiB each"
    kept = "checkpointing" if plan.checkpointing else "no checkpointing"
    if config.memory.offload == "parameters" and count == 1:
        raise ConfigError("memory.offload=parameters needs several processes, which share the parameters: got 1")
    if plan.host:
        assumed = "" if gpu is None or gpu.host else ", assumed"
        there = f" of {_gib(gpu.host_bytes)}{assumed}" if gpu else ""
        kept += f" · {_gib(plan.host)} GiB{there} of host memory for each"
    rows = [("memory", f"needs {_gib(plan.peak)} GiB{_assumed(config)} · {place} · {kept}"), ("", _causes(plan))]
    if not gpu and plan.peak > memory:
        rows.append(("", f"DOES NOT FIT in {_gib(memory)} GiB; {_on_cpu(config, shape, memory, lengths, count)}"))
    if gpu and isinstance(config, GRPOConfig) and config.rollout.gpus:
        rows.append(("", _engines_row(config, shape, gpu)))
    return rows


def _engines_row(config: GRPOConfig, shape: ModelShape, gpu: GPU) -> str:
    needs = _engine_apart(config, shape, gpu)
    least = sum(needs.values())
    if least > gpu.bytes:
        raise ConfigError(
            f"rollout.gpus: an engine on {config.rollout.tensor_parallel} x {gpu.name} of {_gib(gpu.bytes)} GiB must "
            f"hold its weights and one conversation: needs {_gib(least)} GiB on each ({_listed(needs)}); "
            "spread engines over more GPUs (rollout.tensor_parallel)."
        )
    return f"{config.rollout.gpus} GPUs for engines alone, at least {_gib(least)} GiB: {_listed(needs)}"


def _on_cpu(config: ModelSource, shape: ModelShape, memory: float, lengths: RowLengths | None, count: int) -> str:
    """The fewest changes of settings with which the run fits in ``memory`` bytes, in words."""
    smaller = _smaller_microbatches(config, (lengths or row_bound(config)).longest)
    values = {"tokens_per_microbatch": smaller, "memory.checkpointing": ["on"], "lora.r": [] if config.lora else [16]}
    for changes in _fewest_first(values):
        if plan_on(with_changes(config, changes), shape, None, lengths, count).peak <= memory:
            return "set " + " ".join(f"{name}={value}" for name, value in changes.items())
    return "take a smaller model, shorter rows, or a GPU"


def _does_not_fit(
    config: ModelSource, shape: ModelShape, plan: MemoryPlan, gpu: GPU, lengths: RowLengths | None
) -> str:
    changes = remedies(config, shape, gpu, lengths)
    words = f"it fits{_in_words(changes)}" if changes else _with_more_gpus(config, shape, gpu, lengths)
    if plan.peak <= gpu.bytes:
        size = f"{_gib(gpu.host_bytes)} GiB{'' if gpu.host else ' (assumed: three times that of the GPU)'}"
        return (
            f"memory: what is offloaded must fit in nine tenths of each GPU's part of the host memory, {size}: needs "
            f"{_gib(plan.host)} GiB; {words}."
        )
    return (
        f"memory: the run must fit on {gpu.count} x {gpu.name} of {_gib(gpu.bytes)} GiB: needs {_gib(plan.peak)} GiB "
        f"on each{_assumed(config)} ({_causes(plan)}); {words}."
    )


def _assumed(config: ModelSource) -> str:
    """What the plan assumes of lengths that are not known before the run, in words."""
    if not isinstance(config, GRPOConfig):
        return ""
    turns = f" and every conversation {config.env.max_turns} turns" if config.env.max_turns > 1 else ""
    return f" if every answer has {config.sampling.max_tokens} tokens{turns}"


def _causes(plan: MemoryPlan) -> str:
    return _listed(plan.training | plan.sampling | {"reserve": plan.reserve})


def _listed(causes: Mapping[str, float]) -> str:
    return " · ".join(f"{cause} {_gib(size)}" for cause, size in causes.items() if size)


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.0f}" if gib >= 99.5 else f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2g}"
