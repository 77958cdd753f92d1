"""The settings of ``rollout``: the engine that samples, its place, and its lag behind the trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from llmrl.settings import Settings
from llmrl.train.settings.types import ENGINES, EngineName, named

_SETTINGS = {  # arguments of vLLM that have a setting of their own
    "gpu_memory_utilization": "rollout.gpu_memory",
    "max_model_len": "rollout.max_model_len",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "enable_sleep_mode": "rollout.sleep",
    "enable_return_routed_experts": "rollout.routing_replay",
    "dtype": "dtype",
    "model": "model",
}


class RolloutSettings(Settings):
    """The engine that samples, and the number of versions it may be behind the trainer."""

    engine: EngineName = Field(
        "transformers",
        description="transformers: with the trained weights; vllm: faster, with a copy of them; or a function of your "
        "own, module:name or {module:name: {its options}}, that makes an Engine from model and tokenizer",
    )
    own_process: bool | None = Field(
        None,
        description="vllm in a separate process, where conversations advance independently; null: if max_staleness, "
        "oversample, concurrency or several processes need it",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="versions that sampling weights may be behind those trained. 1: the next step is sampled during "
        "the update; more: groups are queued, and continue with new weights; needs vllm",
    )
    oversample: float = Field(
        0.0,
        ge=0,
        description="extra groups begun per step, as a share of its groups; the slowest are dropped; needs vllm",
    )
    concurrency: int | None = Field(
        None, ge=1, description="max concurrent conversations; null: all advance in lockstep"
    )
    gpu_memory: float | None = Field(
        None,
        gt=0,
        le=1,
        description="vllm's share of a GPU's memory; null: what the trainer leaves",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="tokens of vllm's longest conversation; null: what env needs, or, with turns, memory allows",
    )
    gpus: int = Field(
        0, ge=0, description="the machine's last GPUs run engines only, the others train; needs llmrl launch"
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs that each vllm engine is spread over")
    over_ranks: bool = Field(
        False,
        description="tensor_parallel neighbouring ranks hold one vllm engine on the GPUs that they train on, in their "
        "own processes, and sample together",
    )
    sleep: bool | None = Field(
        None, description="vllm frees its memory during updates; null: if it shares a GPU with the trainer"
    )
    options: dict[str, Any] = Field({}, description="more arguments of vllm's engine, by name: {enforce_eager: true}")
    servers: list[str] = Field([], description="URLs of running vllm servers, which sample instead of a local engine")
    ray: str = Field(
        "",
        description="vllm in actors of a Ray cluster: auto (on this machine, or RAY_ADDRESS), local (starts one), or "
        "host:port of its head",
    )
    ray_engines: int = Field(1, ge=1, description="number of such actors, each with an engine")
    ray_resources: dict[str, float] = Field(
        {},
        description="resources of each actor, such as {CPU: 4, GPU: 1, big_disk: 1}; by default CPU: 1, and GPU: "
        "tensor_parallel if nodes have GPUs",
    )
    routing_replay: Literal["auto", "on", "off"] = Field(
        "auto",
        description="mixtures of experts: the trainer sends each token to the experts that the engine chose; auto: "
        "where the engine reports them",
    )
    probe_factor: float = Field(
        4.0,
        gt=1,
        description="vllm: weights are sent again if the mean |log-prob difference| to the trainer is more than this "
        "factor times the run's median; three such versions in a row end the run",
    )

    @property
    def elsewhere(self) -> bool:
        """True if engines are servers, so that no engine is on a trainer's GPU."""
        return bool(self.servers or self.gpus or self.ray)

    @property
    def overlaps(self) -> bool:
        """True if conversations advance at the same time as others, or as the trainer; a process of its own does it."""
        return bool(self.max_staleness or self.oversample or self.concurrency)

    @property
    def own_engine(self) -> tuple[str, dict[str, Any]] | None:
        """The name and options of the user's function that makes the engine; None for one of llmrl's."""
        return None if self.engine in ENGINES else named(self.engine, "engine")

    @property
    def of_engine(self) -> list[str]:
        """The settings with non-default values that apply only to an engine that this run starts itself."""
        names = ("own_process", "gpu_memory", "max_model_len", "tensor_parallel", "over_ranks", "sleep", "options")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, section: Any) -> Any:
        """Accepts files of older runs: ``kv_cache_gb`` becomes an option of vLLM, ``probe_bound`` is ignored."""
        if not isinstance(section, dict):
            return section
        section = {name: value for name, value in section.items() if name != "probe_bound"}
        if (gb := section.pop("kv_cache_gb", None)) is not None:
            section["options"] = {"kv_cache_memory_bytes": int(gb * 2**30), **section.get("options", {})}
        return section

    @model_validator(mode="after")
    def _check_engine(self) -> RolloutSettings:
        given = "max_staleness" if self.max_staleness else "oversample" if self.oversample else None
        if given and self.engine == "transformers":
            raise ValueError(f"{given} needs engine vllm: Transformers samples with the weights being trained")
        if given and self.own_process is False:
            raise ValueError(f"{given} needs own_process: in this process nothing overlaps")
        if self.max_staleness and self.sleep:
            raise ValueError("max_staleness needs sleep off: the engine samples during updates")
        for name in self.options.keys() & _SETTINGS.keys():
            raise ValueError(f"options: {name} has a setting of its own: use {_SETTINGS[name]}")
        places = [name for name in ("gpus", "servers", "ray") if getattr(self, name)]
        set_here = places + self.of_engine
        if set_here and self.engine != "vllm":
            raise ValueError(f"{set_here[0]} needs engine vllm")
        if self.ray and len(places) > 1:
            raise ValueError(f"ray places the engines: leave out {places[0]}")
        if (self.gpus or self.ray) and (self.sleep or self.own_process is False):
            raise ValueError(
                f"{places[-1]} needs sleep and own_process left out: its engines are servers, always awake"
            )
        if places and self.options.get("enable_lora"):
            raise ValueError(f"{places[-1]} sends whole weights, adapters merged: leave enable_lora out of options")
        if (self.ray_engines > 1 or self.ray_resources) and not self.ray:
            raise ValueError("ray_engines and ray_resources need ray, the address of a cluster, auto or local")
        if self.gpus % self.tensor_parallel:
            raise ValueError(f"gpus {self.gpus} must be a multiple of tensor_parallel {self.tensor_parallel}")
        if self.over_ranks:
            self._check_shared(places)
        if self.tensor_parallel > 1 and self.own_process is False:
            raise ValueError("tensor_parallel needs own_process: in this process there is one GPU")
        return self

    def _check_shared(self, places: list[str]) -> None:
        if self.tensor_parallel == 1:
            raise ValueError("over_ranks needs tensor_parallel, the number of ranks that share an engine")
        faults = [*places, *(["own_process"] if self.own_process else [])]
        faults += [name for name in ("max_staleness", "oversample", "concurrency") if getattr(self, name)]
        faults += ["options.enable_lora"] if self.options.get("enable_lora") else []
        if faults:
            raise ValueError(f"over_ranks needs {faults[0]} left out: the ranks of an engine sample in lockstep")
