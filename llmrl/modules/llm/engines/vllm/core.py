"""The protocol behind a `VLLMEngine`: one running vLLM in this process, in another one, or behind a URL.

It also holds the values that cross the protocol (request options, completions) and two parts that cores on this machine
share: the temperature of the logits and the LoRA adapter.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock
from llmrl.errors import ConfigError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.modules.llm.engines.vllm import compat

_LOWEST_TEMPERATURE = 0.01  # vLLM silently raises temperatures between 0 and this value to it
_TINY_TOP_P = 1e-9  # replaces 0, which vLLM refuses; in float32 both keep only the most likely token
SCORING: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


RowHear = Callable[[list[int], list[float]], bool]  # `Hear` of one row


class NothingLoadedError(WeightSyncError):
    """An update failed before the first weight was loaded: the engine keeps its weights."""


class Completion(NamedTuple):
    """One answer: int64[R], float32[R], stop reason; with `SCORING` float32[P] of the prompt, 0 for the first token.

    ``routes``  int16[tokens of prompt and answer that the model read, layers, K], if vLLM reports them
    """

    ids: Tensor
    log_probs: Tensor
    reason: StopReason
    prompt_log_probs: Tensor | None = None
    routes: Tensor | None = None


ABORTED = Completion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), StopReason.ABORT)


@dataclass(frozen=True)
class CoreInfo:
    """Properties of a running vLLM.

    model       the model's folder or hub name
    max_length  maximum tokens of a prompt and its response together
    processed   True: log-probs are of the sampling distribution; False: of the raw logits
    reads_text  True if vLLM has a tokenizer, so that stop strings work
    place       "process" (this one), "subprocess" or "server"
    owned       True if it was built here, so that `Core.close` shuts it down
    can_sleep   True if it can release its memory and get it back
    """

    model: str
    max_length: int
    processed: bool
    reads_text: bool
    place: str
    owned: bool = True
    can_sleep: bool = False

    @classmethod
    def of_vllm(cls, config: Any, tokenizer: Any, *, place: str, owned: bool = True) -> CoreInfo:
        """Reads a ``VllmConfig``. Raises ConfigError if it reports logits instead of log-probs."""
        mode = config.model_config.logprobs_mode
        if mode not in ("processed_logprobs", "raw_logprobs"):
            raise ConfigError(f"VLLMEngine: logprobs_mode must be 'processed_logprobs': got {mode!r}.")
        length = int(config.model_config.max_model_len) - 1
        processed, reads_text = mode == "processed_logprobs", tokenizer is not None
        can_sleep = config.model_config.enable_sleep_mode or config.device_config.device_type == "cpu"
        return cls(config.model_config.model, length, processed, reads_text, place, owned, can_sleep)


@dataclass(frozen=True)
class Requests:
    """Prompts of one call with the options of each, as from `request_options`.

    phase        "generating" or "scoring", for messages
    end          the deadline, on the clock of `time.monotonic`
    temperature  divides the logits for scoring prompts
    stop         if it returns True, requests that have not begun end as ABORT at once
    media        one entry per prompt, if any has images
    version      weight version, which is part of vLLM's cache keys for images
    hear         one entry per prompt, if answers are heard of while they are sampled
    """

    prompts: Sequence[list[int]]
    options: Sequence[Mapping[str, Any]]
    phase: str
    end: float
    temperature: float = 1.0
    stop: Callable[[], bool] = lambda: False
    media: Sequence[Mapping[str, Tensor]] | None = None
    version: int = 0
    hear: Sequence[RowHear] | None = None


class Core(Protocol):
    """One running vLLM. Every call ends by ``end`` (on the clock of `time.monotonic`) with an answer or an error.

    ``complete``      returns one `Completion` per prompt, in order
    ``call_workers``  calls a method of `WorkerExtension` in every worker; returns their answers
    ``updating``      ensures that no request runs inside the block; empties the prefix cache at its end. Yields False
                      if the workers have changed since the last update
    ``set_adapter``   samples with the LoRA adapter in ``folder`` from now on; after an error the previous one stays
    ``sleep``         frees the KV cache and the weights, which can be kept in host memory; no request may run
    ``wake``          allocates memory again for one part, "weights" or "kv_cache", or for all (None)
    ``take_gauges``   returns the numbers of `gauges` since the last call, without those that it does not report
    ``close``         ends waiting requests, and an engine that was built here
    """

    @property
    def info(self) -> CoreInfo: ...

    def complete(self, requests: Requests) -> list[Completion]: ...

    def call_workers(self, method: str, end: float, **arguments: Any) -> list[Any]: ...

    def updating(self, version: int, end: float) -> AbstractContextManager[bool]: ...

    def set_adapter(self, folder: Path, *, version: int, end: float) -> None: ...

    def sleep(self, end: float, *, keep_weights: bool) -> None: ...

    def wake(self, part: str | None, end: float) -> None: ...

    def take_gauges(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class ClosedCore:
    """The core of a closed engine: everything except ``info`` and ``close`` raises RolloutError."""

    def __init__(self, core: Core) -> None:
        self.info = core.info

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise RolloutError("VLLMEngine: the engine must be open: close() was called.")


# --- requests and answers ---------------------------------------------------------------------------------------------


def request_options(params: SamplingParams, *, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The options of a request; names are the same in ``vllm.SamplingParams`` and in the server's completions.

    The model's own end-of-sequence ids are ignored and passed as stop ids instead, so that only this list decides which
    ids end a response.

    Raises  ConfigError  for options that vLLM would change silently
    """
    if not params.greedy and params.temperature < _LOWEST_TEMPERATURE:
        raise ConfigError(
            f"VLLMEngine: temperature must be 0 or at least {_LOWEST_TEMPERATURE}: got {params.temperature}; vLLM "
            "raises values in between."
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
        "logprobs": 0,  # only for the sampled token
    }
    if params.stop_strings:
        options |= {"stop": list(params.stop_strings), "skip_special_tokens": False}
        options |= {"spaces_between_special_tokens": False, "include_stop_str_in_output": True}
    return options | dict(params.extra)


def completion_of_output(output: Any, prompt: Sequence[int], options: Mapping[str, Any]) -> Completion:
    """The completion in a ``vllm.RequestOutput``, or `ABORTED` for None, which an aborted request gives."""
    if output is None:
        return ABORTED
    if (read := getattr(output, "prompt_token_ids", None)) is not None and list(read) != list(prompt):
        raise RolloutError("VLLMEngine: vLLM must read the prompt ids that it was given: it read others.")
    if "prompt_logprobs" in options:
        scores = torch.tensor([0.0, *_of_tokens(output.prompt_logprobs, prompt, first=1)], dtype=torch.float32)
        return ABORTED._replace(reason=StopReason.LENGTH, prompt_log_probs=scores)
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    log_probs = torch.tensor(_of_tokens(answer.logprobs, ids), dtype=torch.float32)
    reason = stop_reason(answer.finish_reason, answer.stop_reason, ids, options["stop_token_ids"])
    routed = getattr(answer, "routed_experts", None)
    routes = None if routed is None else torch.from_numpy(routed.astype("int16"))
    return Completion(torch.tensor(ids, dtype=torch.int64), log_probs, reason, routes=routes)


class Progress:
    """Tells `RowHear` of what is new in the outputs of a request, each of which has all ids so far."""

    def __init__(self, hear: RowHear | None) -> None:
        self._hear, self._num_heard = hear, 0

    def tell(self, output: Any) -> bool:
        """False if the row is not wanted any more."""
        if self._hear is None or output is None:
            return True
        answer = output.outputs[0]
        ids, first, log_probs = list(answer.token_ids), self._num_heard, answer.logprobs
        if first == len(ids):
            return True
        self._num_heard = len(ids)
        # An output holds the list that vLLM goes on writing: it may be ahead of the ids.
        log_probs = log_probs if len(log_probs) == len(ids) else log_probs[: len(ids)]
        return self._hear(ids[first:], _of_tokens(log_probs, ids, first=first))


def stop_reason(finish: str | None, cause: Any, ids: Sequence[int], stop_token_ids: Sequence[int]) -> StopReason:
    """Converts vLLM's finish reason, and the id or string that caused it, to a `StopReason`.

    An id of ``stop_token_ids`` at the end of ``ids`` gives EOS, even if its text contains a stop string: vLLM then
    reports the string.
    """
    if finish == "stop":
        by_string = isinstance(cause, str) and ids[-1] not in stop_token_ids
        return StopReason.STOP_STRING if by_string else StopReason.EOS
    if finish in ("length", "abort"):
        return StopReason.LENGTH if finish == "length" else StopReason.ABORT
    raise RolloutError(f"VLLMEngine: a response must end by stop, length or abort: got {finish!r} ({cause!r}).")


def _of_tokens(log_probs: Any, ids: Sequence[int], *, first: int = 0) -> list[float]:
    """The log-prob of each id from position ``first``; vLLM may report other likely tokens after each."""
    if len(log_probs if log_probs is not None else ()) != len(ids):
        raise RolloutError(f"VLLMEngine: there must be a log-prob per token: got {log_probs!r} for {len(ids)} tokens.")
    if hasattr(log_probs, "start_indices"):  # vLLM's flat form
        starts = log_probs.start_indices[first:]  # start of each position's entries; the first is its own token
        if [log_probs.token_ids[start] for start in starts] != list(ids[first:]):
            raise RolloutError("VLLMEngine: log-probs must be those of the sampled tokens: got those of others.")
        values = [log_probs.logprobs[start] for start in starts]
    else:
        values = [entry[token].logprob for entry, token in zip(log_probs[first:], ids[first:], strict=True)]
    if not all(math.isfinite(value) for value in values):
        raise RolloutError(f"VLLMEngine: log-probs must be finite: got {values}.")
    return values


# --- shared by the cores on this machine ------------------------------------------------------------------------------


class LogitTemperature:
    """The temperature that all workers divide their logits by. Calls at the same temperature may run concurrently.

    vLLM scores prompts under the plain logits whatever a request's temperature, so the workers scale the logits.

    concurrent  False: calls run one at a time
    """

    def __init__(self, call_workers: Callable[..., list[Any]], *, concurrent: bool) -> None:
        self._call_workers, self._concurrent = call_workers, concurrent
        self.lock = SharedExclusiveLock("VLLMEngine")
        self._setting = threading.Lock()
        self._current: float | None = 1.0  # None: unknown, after a failure

    @contextmanager
    def held(self, temperature: float, phase: str, end: float) -> Iterator[None]:
        key = temperature if self._concurrent else object()
        with self.lock.holding(key, end, phase):
            with self._setting:  # several threads may enter with the same temperature; the first one sets it
                # Set before each call rather than reset after it: a failed reset could go unnoticed.
                if self._current != temperature:
                    self._current = None
                    scaled = self._call_workers("llmrl_set_temperature", end, temperature=temperature)
                    if not all(scaled) and temperature != 1.0:
                        raise ConfigError(
                            "VLLMEngine: this model's logits cannot be scaled, so its temperature must be 1."
                        )
                    self._current = temperature
            yield


class LoadedAdapter:
    """The LoRA adapter of requests. ``request`` is vLLM's ``LoRARequest``, or None before the first adapter."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._numbers = itertools.count(1)
        self.request: Any = None

    def replace(self, folder: Path, version: int, add: Callable[[Any], Any], remove: Callable[[int], Any]) -> None:
        """Adds the adapter in ``folder``, then removes the previous one; ``add`` and ``remove`` are the engine's."""
        if not self._enabled:
            raise UnsupportedError(
                "VLLMEngine: adapters need an engine that was built with enable_lora=True; give this one merged "
                "weights."
            )
        # The new one is added before the old one is removed: if vLLM refuses it, the old one stays in use.
        request = compat.lora_request(folder, version, next(self._numbers))
        try:
            add(request)
        except Exception as error:
            raise WeightSyncError(
                f"VLLMEngine: adapter {version} could not be loaded: {error}; the previous one stays in use."
            ) from error
        before, self.request = self.request, request
        if before is not None:
            remove(before.lora_int_id)
