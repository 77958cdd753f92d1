"""The arguments of each rank's vLLM engine: its GPUs, its share of their memory, its length, its sleep; no weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.vllm.compat import check_options
from llmrl.modules.llm.engines.vllm.factory import config_of
from llmrl.modules.llm.engines.vllm.server import served_model
from llmrl.train.memory import GPU, engine_share
from llmrl.train.model_shape import model_shape
from llmrl.train.models import meta_model
from llmrl.train.settings import GRPOConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from llmrl.train.distributed import Session
    from llmrl.train.tasks import Task

__all__ = ["EnginePlan", "Gpus", "cache_bytes", "make_engine_plan", "plan_engine"]

GIB = 2**30
_WORKING = GIB  # the engine's activations and CUDA graphs
_SETTINGS = {  # arguments of vLLM that are settings of ours
    "gpu_memory_utilization": "rollout.gpu_memory",
    "max_model_len": "rollout.max_model_len",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "enable_sleep_mode": "rollout.sleep",
    "dtype": "dtype",
    "model": "model",
}


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one machine, of ``bytes`` each, and the place of this process among the run's ``ranks`` on it."""

    count: int = 0
    bytes: int = 0
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, session: Session) -> Gpus:
        """Those that this process sees; none on a CPU."""
        if session.device.type != "cuda":
            return cls()
        size = torch.cuda.get_device_properties(session.device).total_memory
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(torch.cuda.device_count(), size, ranks, session.device.index or 0)


@dataclass(frozen=True)
class EnginePlan:
    """The arguments of a rank's engine.

    devices  numbers of its GPUs, which it sees alone; None: those that vLLM takes, or a CPU
    sleeps   it gives up its memory while the trainer updates
    length   most tokens of a conversation; None: as many as model and memory have
    options  arguments of vLLM
    servers  URLs of engines that run elsewhere; then there is none here
    """

    own_process: bool = False
    devices: tuple[int, ...] | None = None
    sleeps: bool = False
    length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    servers: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """In words."""
        if self.servers:
            return f"vLLM behind {', '.join(self.servers)}"
        return "vLLM in a process of its own" if self.own_process else "vLLM in this process"

    def describe(self) -> list[str]:
        """The parts of the plan that are decided by the machine, in words."""
        words = []
        if self.devices:
            words.append(f"GPU {' and '.join(map(str, self.devices))}")
        if share := self.options.get("gpu_memory_utilization"):
            words.append(f"{share:.0%} of the GPU's memory")
        words.append(f"at most {self.length} tokens" if self.length else "as many tokens as model and memory have")
        return [*words, "asleep during updates"] if self.sleeps else words


def plan_engine(
    config: GRPOConfig, session: Session, task: Task, held_out: Sequence[Mapping[str, Any]], *, runs: Path
) -> EnginePlan | None:
    """The engine of this rank; None without vLLM. Reads the model's configuration, and measures problems held out.

    Raises  ConfigError for settings that this machine or this model cannot keep; DataError where the model cannot be
            read
    """
    if config.rollout.engine != "vllm":
        return None
    if config.rollout.options:
        check_options(config.rollout.options)
    longest = task.longest_prompt(held_out) if config.env.max_turns == 1 else 0
    model = meta_model(config, task.tokenizer, runs=runs)
    if config.rollout.servers:
        return _plan_servers(config, model.config, session.world_size, _needed_length(config, longest))
    return make_engine_plan(
        config,
        Gpus.of(session),
        model,
        dtype=torch.bfloat16 if session.low_precision else torch.float32,
        world_size=session.world_size,
        longest_evaluated=longest,
    )


def make_engine_plan(
    config: GRPOConfig,
    gpus: Gpus,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    world_size: int = 1,
    longest_evaluated: int = 0,
) -> EnginePlan:
    """The engine of one rank on a machine with ``gpus``; ``model`` needs no weights.

    longest_evaluated  tokens of the longest problem that is measured, 0 for none
    """
    rollout, sizes = config.rollout, model.config.get_text_config()
    for name, setting in _SETTINGS.items():
        if name in rollout.options:
            raise ConfigError(f"rollout.options: {name} has a setting of its own: use {setting}.")
    devices = _place(rollout.tensor_parallel, gpus, sizes)
    own_process = (
        bool(rollout.max_staleness or rollout.oversample or rollout.concurrency) or world_size > 1 or len(devices) > 1
    )
    own_process = own_process if rollout.own_process is None else rollout.own_process
    needed = _needed_length(config, longest_evaluated)
    length = _length(config, needed, sizes)
    sleeps = bool(gpus.count) and not rollout.max_staleness if rollout.sleep is None else rollout.sleep
    options = {"dtype": str(dtype).removeprefix("torch."), "max_model_len": -1 if length is None else length}
    if gpus.count:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        share = rollout.gpu_memory
        if share is None:
            gpu, low = GPU("GPU", gpus.bytes, world_size), dtype == torch.bfloat16
            share = engine_share(config, model_shape(model), gpu, low_precision=low)
        options |= {"gpu_memory_utilization": share, "enable_sleep_mode": sleeps}
        parts = rollout.tensor_parallel
        weights = parameters * dtype.itemsize / parts
        cache = cache_bytes(sizes, length or needed, dtype) / parts
        _check_room(share * gpus.bytes, weights, cache, length or needed)
    return EnginePlan(
        own_process, devices if own_process and devices else None, sleeps, length, options | rollout.options
    )


def _plan_servers(config: GRPOConfig, own: PretrainedConfig, world_size: int, needed: int) -> EnginePlan:
    """Raises ConfigError for a server of another model or too short a length, RolloutError for an absent one."""
    rollout = config.rollout
    here = ("own_process", "gpu_memory", "max_model_len", "tensor_parallel", "sleep", "options")
    if given := [name for name in here if getattr(rollout, name) != type(rollout).model_fields[name].default]:
        raise ConfigError(f"rollout.servers: {', '.join(given)} is decided where a server is started: leave it out.")
    if world_size > 1:
        raise ConfigError(f"rollout.servers: must be used by one process: got {world_size}.")
    lengths = []
    for url in rollout.servers:
        served = served_model(url)
        lengths.append(int(served["max_model_len"]))
        if lengths[-1] < needed:
            raise ConfigError(
                f"rollout.servers: {url} must hold what the environment asks, {needed} tokens: it was started with "
                f"--max-model-len {lengths[-1]}."
            )
        theirs = config_of(None, served.get("root") or served["id"])
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers") if theirs is not None else ():
            if getattr(theirs, name, None) != getattr(own, name, None):
                raise ConfigError(
                    f"rollout.servers: {url} must serve the model that is trained: its {name} is "
                    f"{getattr(theirs, name, None)}, expected {getattr(own, name, None)}."
                )
    return EnginePlan(length=min(lengths), servers=tuple(rollout.servers))


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _place(parts: int, gpus: Gpus, sizes: PretrainedConfig) -> tuple[int, ...]:
    """The GPUs of this rank's engine: engines lie side by side, so that with one GPU each it is the rank's own."""
    heads = sizes.num_attention_heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    if heads % parts or (kv_heads % parts and parts % kv_heads):
        raise ConfigError(
            f"rollout.tensor_parallel: must divide the model's {heads} attention heads and {kv_heads} key/value heads: "
            f"got {parts}."
        )
    if not gpus.count and parts == 1:
        return ()
    needed = gpus.ranks * parts
    if needed > gpus.count or gpus.count % parts:
        raise ConfigError(
            f"rollout.tensor_parallel: {gpus.ranks} processes on this machine, with an engine on {parts} GPUs each, "
            f"need {needed} GPUs, and their number must be a multiple of {parts}: got {gpus.count}; start fewer "
            "processes (--nproc-per-node), or spread engines over fewer GPUs."
        )
    return tuple(range(gpus.rank * parts, (gpus.rank + 1) * parts))


# --- length -----------------------------------------------------------------------------------------------------------


def _needed_length(config: GRPOConfig, longest_evaluated: int) -> int:
    """Tokens of the longest prompt with its longest answers, and the one more that vLLM wants for scoring. What tools
    and users say in between is not in it.
    """
    env, answer = config.env, config.sampling.max_tokens
    evaluated = longest_evaluated + config.eval.max_tokens if longest_evaluated else 0
    return max(env.max_prompt_tokens + env.max_turns * answer, evaluated) + 1


def _length(config: GRPOConfig, needed: int, sizes: PretrainedConfig) -> int | None:
    """``max_model_len``; None: vLLM finds out what model and memory have."""
    asked, env = config.rollout.max_model_len, config.env
    if asked is None:
        # What tools and users say has no bound that is known here, and the model's own length may be above what it
        # writes in its configuration (rotary scaling).
        known = getattr(sizes, "max_position_embeddings", None) or 0
        return needed if env.max_turns == 1 and needed <= known else None
    if asked < needed:
        raise ConfigError(
            f"rollout.max_model_len: must hold what the environment asks, {needed} tokens (env.max_prompt_tokens "
            f"{env.max_prompt_tokens}, {env.max_turns} x sampling.max_tokens {config.sampling.max_tokens}, the "
            f"problems measured, and one more): got {asked}; raise it, or lower those."
        )
    return asked


# --- memory -----------------------------------------------------------------------------------------------------------


def cache_bytes(sizes: PretrainedConfig, length: int, dtype: torch.dtype) -> int:
    """The keys and values of one sequence, on all GPUs of an engine together."""
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = 2 * heads * (getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads)
    if rank := getattr(sizes, "kv_lora_rank", None):  # latent attention keeps one vector for all heads
        width = rank + sizes.qk_rope_head_dim
    window = getattr(sizes, "sliding_window", None) or length
    kept = {"full_attention": length, "sliding_attention": min(length, window), "chunked_attention": length}
    layers = getattr(sizes, "layer_types", None) or ["full_attention"] * sizes.num_hidden_layers
    return sum(kept.get(kind, 0) for kind in layers) * width * dtype.itemsize


def _check_room(share: float, weights: float, cache: float, length: int) -> None:
    needed = weights + cache + _WORKING
    if share < needed:
        raise ConfigError(
            f"rollout.gpu_memory: an engine's share must hold its weights ({weights / GIB:.1f} GiB), one conversation "
            f"of {length} tokens ({cache / GIB:.1f} GiB) and {_WORKING / GIB:.0f} GiB to compute in: got "
            f"{share / GIB:.1f} GiB; raise rollout.gpu_memory, lower rollout.max_model_len, spread the engine over "
            "more GPUs (rollout.tensor_parallel), or the trainer (parallel.mode=fsdp2)."
        )
