"""`VLLMEngine` and `AsyncVLLMEngine`: generation and scoring by vLLM, as an `Engine`.

This file handles seeds, checks, plain log-probs, weights and versions, wherever vLLM runs; a `Core` runs the requests.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock
from llmrl.errors import ConfigError, LLMRLError, RolloutError, ShapeError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import Generation, Hear, SamplingParams, SeededEngine, StopReason
from llmrl.modules.llm.engines.vllm.answer import Answer, as_generation
from llmrl.modules.llm.engines.vllm.core import SCORING, ClosedCore, Core, NothingLoadedError, Requests, request_options
from llmrl.modules.llm.engines.vllm.factory import config_of, eos_ids, make_core
from llmrl.modules.llm.engines.vllm.sleep import SleepCycle
from llmrl.modules.llm.engines.vllm.transfer import (
    TransferSettings,
    WeightTransfer,
    nearest_transfer,
    transfer_settings,
)
from llmrl.modules.llm.engines.vllm.worker import place_of_process
from llmrl.modules.llm.engines.weights import WeightSet, WeightSpec
from llmrl.modules.llm.vision import Media, has_images
from llmrl.weight_update.groups import WeightGroups

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_DEFAULT_TIMEOUT_S = 600.0  # if timeout_s is None; plus one second per token of the longest possible row


class VLLMEngine(SeededEngine):
    """An ``Engine`` over vLLM.

    model          a folder or hub name; a Hugging Face model, which is copied; a ``vllm.LLM``; or the URL of a server
                   started by ``vllm serve``, or a list of URLs of servers of one model, which share the requests
    tokenizer      for a model given as a module: without one, stop strings are refused
    own_process    runs vLLM's core in a separate process, and calls of several threads concurrently
    devices        numbers of the GPUs that its process sees, one tensor-parallel rank on each; implies own_process
    eos_token_ids  ids that end a response and are part of it; default: the model's generation settings
    seed           seeds the generator of row seeds, used if a call passes none
    timeout_s      longest duration of a call, in seconds; None: 600, and one more for every token of its longest row
    connect_s      for a server: longest wait for its first answer
    silence_s      for a server: longest that it may leave ``/health`` unanswered during a request
    weight_backend transfer of weights to an engine in another process: "shared_memory", "nccl" or "ipc", or a
                   `SharedMemory`, `NCCL` or `CudaIPC` with settings; None or "auto": the shortest of these paths
    options        arguments of ``vllm.LLM``, if one is built; ``dtype`` is the checkpoint's own unless given

    Log-probs are those of the sampling distribution; if truncation or a penalty changed it, sampled ids are scored
    again for the plain ones. A row depends only on its prompt, seed and weights, up to rounding. All rows of a call
    have one version: updates wait for calls. docs/engines.md: threads, failures, limits of servers.

    Raises  MissingDependencyError  vllm is not installed, or lacks something that is needed
            ConfigError             an impossible setting, a model whose heads vLLM cannot compute on a CPU
            DataError               a folder or hub name without a model
    """

    streams = True
    takes_groups = True  # accepts weights in groups, one after the other
    update_s = float("inf")  # longest duration of an update; must be shorter than other ranks wait for it
    in_flight: Literal["finish", "abort", "continue"] = "finish"  # see AsyncVLLMEngine
    max_age: int | None = None

    def __init__(
        self,
        model: str | Path | PreTrainedModel | Any,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        own_process: bool = False,
        devices: Sequence[int] | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
        connect_s: float = 30.0,
        silence_s: float = 7.0,
        weight_backend: str | TransferSettings | None = None,
        **options: Any,
    ) -> None:
        self.weight_backend = transfer_settings(weight_backend)
        waits = {"timeout_s": timeout_s, "connect_s": connect_s, "silence_s": silence_s}
        waits = {name: seconds for name, seconds in waits.items() if seconds is not None}
        for name, seconds in waits.items():
            if not seconds > 0:
                raise ConfigError(f"VLLMEngine: {name} must be positive: got {seconds}.")
        super().__init__(seed)
        self.tokenizer = tokenizer
        self.timeout_s = timeout_s
        place = {"own_process": own_process, "devices": devices}
        self._make_core = partial(make_core, tokenizer=tokenizer, options=options, waits=waits, **place)
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else lambda: model  # kept for `restart`
        self._transfer = WeightTransfer(lambda *args, **kwargs: self.core.call_workers(*args, **kwargs))
        self._lock = SharedExclusiveLock("VLLMEngine")
        self._sleep = SleepCycle(lambda: self.core)
        self._incomplete = False  # True after an update failed in the middle: the weights are a mix
        self._was_updated = self._has_adapter = False
        self._interruptions = 0  # number of updates that interrupted calls in progress
        self.load_speed = 0.0  # bytes per second of the last weight update
        self.core: Core = self._make_core(model)
        try:
            self._config: PretrainedConfig | None = config_of(model, self.core.info.model)
            self.eos_token_ids = eos_ids(eos_token_ids, model, self.core.info.model, tokenizer)
        except BaseException:
            self.close()
            raise

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt and its response together: one less than ``max_model_len``, because vLLM needs one
        more to score what it has generated. A response that reaches it ends as LENGTH.
        """
        return self.core.info.max_length

    @property
    def context_length(self) -> int:
        return self.max_length

    @property
    def concurrent(self) -> bool:
        """True unless the engine runs in this process."""
        return self.core.info.place != "process"

    @property
    def address(self) -> str | None:
        """The URL of a server, or of all servers, which ranks may share; None for an engine that this process built."""
        return getattr(self.core, "url", None)

    # --- generation ---------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Raises ConfigError for options that this engine does not support; wrappers call it at construction."""
        request_options(params, stop_token_ids=())
        info = self.core.info
        if self.in_flight == "continue" and (params.stop_strings or params.extra):
            raise ConfigError(
                "AsyncVLLMEngine: with in_flight='continue' answers are sampled in pieces, and stop_strings and "
                "vLLM-specific options would restart in each: leave them out, or use in_flight='finish'."
            )
        if params.stop_strings and not info.reads_text:
            raise ConfigError("VLLMEngine: stop_strings need tokenizer= at construction, to decode sampled tokens.")
        if not info.processed and (params.scoring_temperature != 1.0 or params.truncates):
            raise ConfigError(
                "VLLMEngine: this engine reports log-probs of the raw logits, so sampling must be at temperature 1 "
                "without truncation or penalty: start it with logprobs_mode='processed_logprobs' (vllm serve "
                "--logprobs-mode processed_logprobs)."
            )
        if info.place == "server" and params.truncates and params.scoring_temperature != 1.0:
            raise ConfigError(
                f"VLLMEngine: a server cannot report plain log-probs of a truncated distribution at temperature "
                f"{params.temperature}: use temperature 1, or leave truncation and penalty out."
            )

    def generate(
        self,
        prompts: Sequence[Tensor],
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        media: Sequence[Media] | None = None,
        hear: Hear | None = None,
    ) -> Generation:
        """Samples one response per prompt: see `Engine`. A server takes no images.

        Raises   ShapeError, ConfigError; UnsupportedError for images that this engine does not support; RolloutError
                 if vLLM fails, DeadlineError
        """
        self.check(params)
        seeds = self._seeds(seeds, len(prompts))
        images = list(media) if has_images(media) else [None] * len(prompts)
        rows = self._rows(prompts, "a prompt", 1)
        answers = [Answer(row, seed, images) for row, seed, images in zip(rows, seeds, images, strict=True)]
        for row, answer in enumerate(answers):
            answer.hear = None if hear is None else partial(hear, row)
        left = answers
        # One pass, or with in_flight="continue" another one after each update that interrupts it. Each pass takes the
        # lock again, so that the update can run in between.
        while True:
            end = self._end(params.max_new_tokens)
            with self._lock.holding("requests", end, "generating"):
                self._check_ready("generating")
                version, interruptions = self.version, self._interruptions
                left = [answer for answer in left if answer.can_continue(version, self.max_age)]
                # The count was read under this lock, so any update that begins from here on stops the sampling.
                if left:
                    self._draw(left, params, end, lambda count=interruptions: self._interruptions != count)
            left = [answer for answer in left if answer.reason is StopReason.ABORT]
            if not left or self.in_flight != "continue" or interruptions == self._interruptions:
                break  # no answer is left that an update interrupted
        home = prompts[0].device if answers else torch.device("cpu")
        mixed = self.in_flight == "continue"
        drawn = as_generation(answers, version, truncated=params.truncates, mixed=mixed)
        for rows in (drawn.ids, drawn.log_probs, drawn.plain_log_probs or [], drawn.routes or []):
            rows[:] = [row.to(home) for row in rows]
        return drawn

    def _draw(self, answers: Sequence[Answer], params: SamplingParams, end: float, stop: Callable[[], bool]) -> None:
        """Continues each answer until it ends or is aborted."""
        rows = [answer.so_far for answer in answers]
        shared = request_options(params, stop_token_ids=self.eos_token_ids)
        options = [
            {
                **shared,
                "seed": answer.seed,
                "max_tokens": min(params.max_new_tokens - len(answer.ids), self.max_length - len(row)),
            }
            for answer, row in zip(answers, rows, strict=True)
        ]
        media = [answer.media for answer in answers] if answers[0].media is not None else None
        given: dict[str, Any] = {"media": media, "version": self.version}
        given["hear"] = [answer.hear for answer in answers] if answers[0].hear is not None else None
        pieces = self.core.complete(Requests(rows, options, "generating", end, stop=stop, **given))
        for answer, piece in zip(answers, pieces, strict=True):
            answer.add(piece, self.version)
        if params.truncates:
            # vLLM reports only the log-probs of the truncated distribution. The plain ones are scored here, under the
            # same lock and thus with the same weights.
            scores = self._score([answer.so_far for answer in answers], params.scoring_temperature, end, media)
            for answer, score, row in zip(answers, scores, rows, strict=True):
                answer.plain.append(score[len(row) :])

    def score(
        self,
        sequences: Sequence[Tensor],
        *,
        temperature: float = 1.0,
        masks: Sequence[Tensor] | None = None,
        media: Sequence[Media] | None = None,
    ) -> list[Tensor]:
        """Log-probs of the tokens of each sequence: see `Engine`. A server scores at temperature 1 only."""
        if temperature != 1.0 and self.core.info.place == "server":
            raise ConfigError(
                f"VLLMEngine: a server scores at temperature 1 only: got {temperature}; score with the trainer's model."
            )
        scores = self._score_rows(self._rows(sequences, "a sequence", 0), temperature, media)
        scores = [score.to(sequence.device) for score, sequence in zip(scores, sequences, strict=True)]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def _score_rows(self, rows: list[list[int]], temperature: float, media: Sequence[Media] | None) -> list[Tensor]:
        end = self._end(max(map(len, rows), default=0))
        with self._lock.holding("requests", end, "scoring"):
            self._check_ready("scoring")
            return self._score(rows, temperature, end, list(media) if has_images(media) else None) if rows else []

    def likeliest(self, sequences: Sequence[Tensor], k: int) -> list[Tensor]:
        """Of each token the ``k`` likeliest ids at its place and their log-probs, float32[T, 2K]; only of a server.

        The first token has none, 0. A server gives at most as many as its ``--max-logprobs``, 20 by default.
        Raises  UnsupportedError for another engine; ConfigError for more than the server gives
        """
        if self.core.info.place != "server":
            raise UnsupportedError("VLLMEngine: likeliest tokens are read from a server: this engine is none.")
        rows = self._rows(sequences, "a sequence", 0)
        end = self._end(max(map(len, rows), default=0))
        with self._lock.holding("requests", end, "scoring"):
            self._check_ready("scoring")
            try:
                scores = self._score(rows, 1.0, end, k=k) if rows else []
            except ConfigError as error:
                raise ConfigError(f"{error} Start it with --max-logprobs {k}, or ask for fewer.") from error
        return [score.to(sequence.device) for score, sequence in zip(scores, sequences, strict=True)]

    def _score(
        self, rows: list[list[int]], temperature: float, end: float, media: list[Media] | None = None, k: int = 0
    ) -> list[Tensor]:
        given = {"media": media, "version": self.version}
        options = [{**SCORING, "prompt_logprobs": k}] * len(rows)
        answers = self.core.complete(Requests(rows, options, "scoring", end, temperature, **given))
        scores = [answer.prompt_log_probs for answer in answers]
        if aborted := sum(score is None for score in scores):
            raise RolloutError(f"VLLMEngine: every sequence must be scored: {aborted} were aborted.")
        return scores

    def _end(self, num_tokens: int) -> float:
        return time.monotonic() + (_DEFAULT_TIMEOUT_S + num_tokens if self.timeout_s is None else self.timeout_s)

    def _rows(self, tensors: Sequence[Tensor], what: str, room: int) -> list[list[int]]:
        for row, tensor in enumerate(tensors):
            if tensor.ndim != 1 or not tensor.numel():
                raise ShapeError(f"VLLMEngine: {what} is a non-empty int64[T]: got {tuple(tensor.shape)} in row {row}.")
            if len(tensor) + room > self.max_length:
                raise ShapeError(
                    f"VLLMEngine: {what} must have at most {self.max_length - room} tokens (max_model_len="
                    f"{self.max_length + 1}): got {len(tensor)} in row {row}."
                )
        return [tensor.tolist() for tensor in tensors]

    # --- weights ------------------------------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: Mapping[str, Tensor] | WeightGroups | None,
        *,
        version: int,
        backend: str | TransferSettings | None = None,
    ) -> None:
        """Loads a complete set of weights, empties the prefix cache, then sets the version.

        Names are those of the Hugging Face model's ``state_dict()``; of tied weights one name is enough. All of them
        are checked before the first one is loaded, and until then the old version stays in use. If an update fails in
        the middle, requests fail until a complete set is loaded. Calls in progress end first.

        weights  all of them, or groups that are produced one by one (`weight_groups`, `merged_weights`); every group is
                 produced even after a failure, because that may be a collective
        backend  for this update; default: ``weight_backend``
        Raises  DeadlineError    if calls in progress do not end within ``timeout_s``: nothing was updated
                WeightSyncError  naming a weight that is unknown, missing, misshapen, or tied but different
                UnsupportedError if a server was started without weight updates, or the engine takes adapters
                ConfigError      for a backend that does not reach this engine
        """
        if weights is None:
            raise WeightSyncError("VLLMEngine: weights must be given: vLLM holds its own copy of the model.")
        groups = iter(() if isinstance(weights, Mapping) else weights)
        try:
            settings = self.weight_backend if backend is None else transfer_settings(backend)
            if settings is not None and self.core.info.place == "process":
                raise ConfigError(
                    f"VLLMEngine: {type(settings).__name__} does not reach an engine in this process: leave "
                    "weight_backend out."
                )
            checked = self._weight_spec.weight_set(weights, groups)
            end = min(self._end(0), time.monotonic() + self.update_s)
            with self._lock.holding(object(), end, f"loading version {version}", self._before_weight_update):
                self._load(checked, version, end, settings)
        finally:
            for _ in groups:  # producing a group may be a collective, which the other ranks also run
                pass

    def update_adapter(self, folder: str | Path, *, version: int) -> None:
        """Samples from now on with the LoRA adapter in ``folder``, as peft saves it (`adapter_folder`); the folder is
        not needed afterwards. The engine must be built with ``enable_lora=True``; it wakes if it sleeps.

        Raises  WeightSyncError if vLLM refuses the adapter (the previous one stays in use), or if the engine sleeps
                without its weights; UnsupportedError for an engine without ``enable_lora``
        """
        end = self._end(0)
        with self._lock.holding(object(), end, f"loading adapter {version}", self._before_weight_update):
            if self._sleep.state == "asleep":
                self._sleep.wake(end)
            self._sleep.check_awake("an adapter")
            self.core.set_adapter(Path(folder), version=version, end=end)
            self._incomplete, self._has_adapter = False, True
            self.version = version

    def weight_precision(self) -> tuple[torch.dtype | None, tuple[str, ...]]:
        """That of the workers. Raises LLMRLError if they do not answer."""
        [described, *_] = self.core.call_workers("llmrl_describe", self._end(0))
        return getattr(torch, described["dtype"]), self._weight_spec.kept

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        """Names that a set of weights may leave out: buffers that the model creates itself."""
        return frozenset() if self._config is None else self._weight_spec.unsaved_buffers

    @cached_property
    def _weight_spec(self) -> WeightSpec:
        if self._config is None:
            raise WeightSyncError(
                f"VLLMEngine: the configuration of {self.core.info.model!r} must be readable here to check weights "
                "before they are loaded: it is not."
            )
        return WeightSpec(self._config)

    def _before_weight_update(self) -> None:
        """Hook before a weight update, called while requests are in flight; the default is to wait for them."""

    def _load(self, weights: WeightSet, version: int, end: float, settings: TransferSettings | None) -> None:
        try:
            # Also confirms that the workers answer, before anything is paused or changed.
            workers = self.core.call_workers("llmrl_describe", end)
        except UnsupportedError:
            raise
        except LLMRLError as error:
            raise NothingLoadedError(f"{error} Nothing was updated.") from error
        if reason := workers[0]["refuses"]:
            raise UnsupportedError(
                f"VLLMEngine: {self.core.info.model} takes no weights: {reason}. Nothing was updated."
            )
        weights = replace(weights, dtype=getattr(torch, workers[0]["dtype"]))
        was_incomplete, self._incomplete, began = self._incomplete, True, time.monotonic()
        try:
            with self._sleep.loading(end), self.core.updating(version, end) as same_workers:
                if self.core.info.place == "process":
                    self.core.call_workers("llmrl_load_weights", end, weights=weights.pairs())
                else:
                    if not same_workers:  # new workers have not opened the buffer yet
                        self._transfer.close()
                    self._transfer.send(weights, end, settings or nearest_transfer(place_of_process(), workers))
        except (UnsupportedError, NothingLoadedError):  # both are raised before anything is loaded
            self._incomplete = was_incomplete
            raise
        except Exception as error:
            raise WeightSyncError(
                f"VLLMEngine: version {version} was checked but could not be loaded: {type(error).__name__}: {error}; "
                "nothing is served until a complete set of weights is loaded."
            ) from error
        self._incomplete, self._was_updated = False, True  # last: an error above leaves the engine not ready
        self.load_speed = weights.num_bytes / max(time.monotonic() - began, 1e-9)
        self.version = version

    def _check_ready(self, phase: str) -> None:
        self._sleep.check_awake(phase)
        if self._incomplete:
            raise RolloutError(
                "VLLMEngine: the weights must be complete: the last update failed in the middle, or the engine was "
                "restarted without its adapter; update them again."
            )

    # --- sleep --------------------------------------------------------------------------------------------------------

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Frees the engine's GPU memory for a trainer on the same GPU, once the calls in progress have ended.

        The next `update_weights` wakes the engine: memory for the weights, the weights, then the KV cache. On a CPU
        nothing is freed, but the order is still checked. An engine on a GPU must be built with
        ``enable_sleep_mode=True``.

        keep_weights  keeps the weights in host memory, for `wake`; otherwise they are discarded
        Raises  UnsupportedError if it cannot sleep; every request raises RolloutError until the engine is awake
        """
        end = self._end(0)
        with self._lock.holding(object(), end, "falling asleep", self._before_weight_update):
            self._sleep.sleep(end, keep_weights=keep_weights)

    def wake(self) -> None:
        """Wakes an engine that kept its weights. Raises WeightSyncError if it did not keep them, or is awake."""
        end = self._end(0)
        with self._lock.holding(object(), end, "waking up"):
            self._sleep.wake(end)

    # --- life and state -----------------------------------------------------------------------------------------------

    def restart(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Replaces the engine that was built here, running or crashed, by a new one with the weights of `version`.

        weights  of `version`, as in `update_weights`. Needed if the engine was ever updated: no copy is kept here
        Raises   WeightSyncError if they are needed and not given, UnsupportedError for an engine or a server that
                 was not built here: in both cases nothing has changed
        """
        if not self.core.info.owned:
            raise UnsupportedError(
                f"VLLMEngine: only an engine that was built here can be restarted: {self.core.info.model} was not."
            )
        if self._was_updated and weights is None:
            raise WeightSyncError(
                f"VLLMEngine: restart needs the weights of version {self.version}: they are not kept here; pass the "
                "trainer's state_dict()."
            )
        if (model := self._model()) is None:
            raise WeightSyncError("VLLMEngine: restart needs the model that the engine was built from: it was deleted.")
        checked = None if weights is None else self._weight_spec.weight_set(weights)  # before the old engine is closed
        self.close()
        end = self._end(0)
        with self._lock.holding(object(), end, "restarting"):
            self.core = self._make_core(model)
            self._sleep = SleepCycle(lambda: self.core)
            self._incomplete = self._has_adapter  # the new engine needs its adapter again
            if checked is not None:
                self._load(checked, self.version, end, self.weight_backend)

    def take_gauges(self) -> dict[str, float]:
        """The numbers of `gauges` since the last call, without those that this vLLM does not report."""
        return self.core.take_gauges()

    def close(self) -> None:
        """Shuts down an engine that was built here, with its processes and threads. A second call does nothing."""
        core, self.core = self.core, ClosedCore(self.core)
        self._transfer.close()
        core.close()


class AsyncVLLMEngine(VLLMEngine):
    """`VLLMEngine` with ``own_process=True``: the rows of every call join the running batch at once.

    One thread per conversation calls ``generate`` (``LLMCollector(concurrency=...)``), so a long answer or a slow tool
    delays no other conversation, and the engine's batch stays full.

    in_flight  treatment of rows in progress when new weights arrive: "finish", the update waits for them; "abort", they
               end with the ids so far, as ``StopReason.ABORT``; "continue", they continue with the new weights (which
               recompute keys and values), and `Generation.versions` holds the version of each id
    max_age    with "continue": a row ends as ABORT once its first id is more than this many versions old
    settings   keyword arguments of `VLLMEngine`

    ::

        engine = AsyncVLLMEngine("Qwen/Qwen2.5-0.5B-Instruct", max_model_len=4096)
        collector = LLMCollector(env, policy=vLLMWrapper(engine), yield_only_last_steps=True, concurrency=32)
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        in_flight: Literal["finish", "abort", "continue"] = "finish",
        max_age: int | None = None,
        **settings: Any,
    ) -> None:
        if in_flight not in ("finish", "abort", "continue"):
            raise ConfigError(f"AsyncVLLMEngine: in_flight must be 'finish', 'abort' or 'continue': got {in_flight!r}.")
        self.in_flight, self.max_age = in_flight, max_age
        super().__init__(model, own_process=True, **settings)

    def abort(self) -> int:
        """Ends rows in progress as ``StopReason.ABORT`` with the ids so far; returns the number of requests ended."""
        return self.core.abort()

    def _before_weight_update(self) -> None:
        if self.in_flight != "finish":
            self._interruptions += 1  # before abort: calls that have not reached the core yet check it there
            self.abort()
