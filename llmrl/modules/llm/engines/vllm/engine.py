"""`VLLMEngine` and `AsyncVLLMEngine`: generation and scoring by vLLM, behind the methods of every engine.

Seeds, checks, plain log-probs, weights and versions are here, the same wherever vLLM runs; requests are the `Core`'s.
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
from llmrl.modules.llm.engines.base import Generation, SamplingParams, SeededEngine, StopReason
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
from llmrl.modules.llm.engines.weights import WeightGroups, WeightSet, WeightSpec
from llmrl.modules.llm.vision import Media, has_images

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_DEFAULT_TIMEOUT_S = 600.0  # without timeout_s; plus one second for every token that a row may have


class VLLMEngine(SeededEngine):
    """An ``Engine`` over vLLM.

    model          a folder or hub name; a Hugging Face model, which is copied; a ``vllm.LLM``; or the URL of a server
                   started by ``vllm serve``, or a list of URLs of servers of one model, which share the requests
    tokenizer      of a model given as a module: without one, stop strings are refused
    own_process    vLLM's core runs in a process of its own, and calls of several threads at the same time
    devices        numbers of the GPUs that its process sees, one tensor-parallel rank on each; implies own_process
    eos_token_ids  ids that end a response and are part of it; the model's generation settings by default
    seed           of the generator that hands out row seeds if a call brings none
    timeout_s      longest that a call may take, in seconds; None: 600, and one more for every token of its longest row
    connect_s      of a server: longest that its first answer may take
    silence_s      of a server: longest that it may leave ``/health`` unanswered during a request
    weight_backend how weights reach an engine in another process: "shared_memory", "nccl" or "ipc", or a
                   `SharedMemory`, `NCCL` or `CudaIPC` with settings; None or "auto": the shortest of them
    options        arguments of ``vllm.LLM``, when one is built; ``dtype`` is the checkpoint's own unless given

    Log-probs are those of the distribution sampled from; if truncation or a penalty changed it, drawn ids are scored
    once more for the plain ones. A row depends on its prompt, seed and weights alone, up to rounding. All rows of a
    call are of one version: updates wait for calls. docs/engines.md: threads, failures, what a server cannot do.

    Raises  MissingDependencyError  vllm is not installed, or lacks something that is needed
            ConfigError             an impossible setting, a model whose heads vLLM cannot compute on a CPU
            DataError               a folder or hub name without a model
    """

    takes_groups = True  # of weights, one after the other
    update_s = float("inf")  # longest that an update may take; less than what other ranks wait for it
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
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else lambda: model  # for a restart
        self._transfer = WeightTransfer(lambda *args, **kwargs: self.core.call_workers(*args, **kwargs))
        self._lock = SharedExclusiveLock("VLLMEngine")
        self._sleep = SleepCycle(lambda: self.core)
        self._incomplete = False  # the weights in the engine, after an update that failed in the middle
        self._was_updated = self._has_adapter = False
        self._interruptions = 0  # of calls under way, by updates
        self.load_speed = 0.0  # bytes a second, of the last set of weights
        self.core: Core = self._make_core(model)
        try:
            self._config: PretrainedConfig | None = config_of(model, self.core.info.model)
            self.eos_token_ids = eos_ids(eos_token_ids, model, self.core.info.model, tokenizer)
        except BaseException:
            self.close()
            raise

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its response together: one less than ``max_model_len``, the room that vLLM wants
        for scoring what it has generated. A response that reaches it ends as LENGTH.
        """
        return self.core.info.max_length

    @property
    def address(self) -> str | None:
        """The URL of a server, or of all of them, which ranks may share; None for an engine of this process's own."""
        return getattr(self.core, "url", None)

    # --- generation ---------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Raises ConfigError for options that this engine cannot honour; a wrapper asks when it is built."""
        request_options(params, stop_token_ids=())
        info = self.core.info
        if self.in_flight == "continue" and (params.stop_strings or params.extra):
            raise ConfigError(
                "AsyncVLLMEngine: with in_flight='continue' answers are drawn in pieces, in which stop_strings and "
                "options of vLLM alone would restart: leave them out, or use in_flight='finish'."
            )
        if params.stop_strings and not info.reads_text:
            raise ConfigError("VLLMEngine: stop_strings need tokenizer= at construction, to read what was drawn.")
        if not info.processed and (params.scoring_temperature != 1.0 or params.truncates):
            raise ConfigError(
                "VLLMEngine: this engine reports log-probs of the raw logits, so sampling must be at temperature 1 "
                "without truncation or penalty: start it with logprobs_mode='processed_logprobs' (vllm serve "
                "--logprobs-mode processed_logprobs)."
            )
        if info.place == "server" and params.truncates and params.scoring_temperature != 1.0:
            raise ConfigError(
                f"VLLMEngine: a server cannot say the plain log-probs of a truncated distribution at temperature "
                f"{params.temperature}: use temperature 1, or leave truncation and penalty out."
            )

    def generate(
        self,
        prompts: Sequence[Tensor],
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        media: Sequence[Media] | None = None,
    ) -> Generation:
        """Samples one response per prompt: see `Engine`. A server takes no images.

        Raises   ShapeError, ConfigError; UnsupportedError for images that this engine cannot take; RolloutError if
                 vLLM fails, DeadlineError
        """
        self.check(params)
        seeds = self._seeds(seeds, len(prompts))
        images = list(media) if has_images(media) else [None] * len(prompts)
        rows = self._rows(prompts, "a prompt", 1)
        answers = [Answer(row, seed, images) for row, seed, images in zip(rows, seeds, images, strict=True)]
        left = answers
        # One pass, or with in_flight="continue" one more after each update that interrupts it. The lock is held in a
        # pass alone, so that the update gets in between.
        while True:
            end = self._end(params.max_new_tokens)
            with self._lock.holding("requests", end, "generating"):
                self._check_ready("generating")
                version, interruptions = self.version, self._interruptions
                left = [answer for answer in left if answer.can_continue(version, self.max_age)]
                # Compared with the count under this lock: an update that begins from here on ends the drawing.
                if left:
                    self._draw(left, params, end, lambda count=interruptions: self._interruptions != count)
            left = [answer for answer in left if answer.reason is StopReason.ABORT]
            if not left or self.in_flight != "continue" or interruptions == self._interruptions:
                break  # nothing is left that new weights have interrupted
        home = prompts[0].device if answers else torch.device("cpu")
        mixed = self.in_flight == "continue"
        drawn = as_generation(answers, version, truncated=params.truncates, mixed=mixed)
        for rows in (drawn.ids, drawn.log_probs, drawn.plain_log_probs or [], drawn.routes or []):
            rows[:] = [row.to(home) for row in rows]
        return drawn

    def _draw(self, answers: Sequence[Answer], params: SamplingParams, end: float, stop: Callable[[], bool]) -> None:
        """Continues each answer, to its end or until it is aborted."""
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
        given = {"media": media, "version": self.version}
        pieces = self.core.complete(Requests(rows, options, "generating", end, stop=stop, **given))
        for answer, piece in zip(answers, pieces, strict=True):
            answer.add(piece, self.version)
        if params.truncates:
            # vLLM reports one kind of log-probs, those of the truncated distribution. The plain ones are asked for
            # here, before other weights come.
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
        rows = self._rows(sequences, "a sequence", 0)
        end = self._end(max(map(len, rows), default=0))
        with self._lock.holding("requests", end, "scoring"):
            self._check_ready("scoring")
            scores = self._score(rows, temperature, end, list(media) if has_images(media) else None) if rows else []
        scores = [score.to(sequence.device) for score, sequence in zip(scores, sequences, strict=True)]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def _score(
        self, rows: list[list[int]], temperature: float, end: float, media: list[Media] | None = None
    ) -> list[Tensor]:
        given = {"media": media, "version": self.version}
        answers = self.core.complete(Requests(rows, [SCORING] * len(rows), "scoring", end, temperature, **given))
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
        """Loads a complete set of weights, empties the prefix cache, then moves the version.

        Names are those of the Hugging Face model's ``state_dict()``; of tied weights one name is enough. All of them
        are checked before the first one is loaded, and until then the old version stays in use. If it fails in the
        middle, nothing is served until a complete set is loaded. Calls that are under way end first.

        weights  all of them, or groups that are made one after the other (`weight_groups`, `merged_weights`); every
                 group is made even after a failure, because making it may be a collective
        backend  for this update; by default ``weight_backend``
        Raises  DeadlineError    if calls under way do not end within ``timeout_s``: nothing was updated
                WeightSyncError  naming what is unknown, missing, misshapen, tied but different
                UnsupportedError if a server was not started so that it takes weights, or the engine takes adapters
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
            for _ in groups:  # a collective, maybe: the other ranks make them too
                pass

    def update_adapter(self, folder: str | Path, *, version: int) -> None:
        """Draws from now on with the LoRA adapter in ``folder``, as peft saves it (`adapter_folder`); the folder is not
        needed afterwards. For an engine that was built with ``enable_lora=True``; one that sleeps wakes.

        Raises  WeightSyncError if vLLM refuses it: the previous one stays in use; if it sleeps without weights
                UnsupportedError for an engine without ``enable_lora``
        """
        end = self._end(0)
        with self._lock.holding(object(), end, f"loading adapter {version}", self._before_weight_update):
            if self._sleep.state == "asleep":
                self._sleep.wake(end)
            self._sleep.check_awake("an adapter")
            self.core.set_adapter(Path(folder), version=version, end=end)
            self._incomplete, self._has_adapter = False, True
            self.version = version

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        """Names that a set of weights may hold and need not: buffers that the model makes by itself."""
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
        """Hook before a weight update, called where requests are in flight; by default they are waited for."""

    def _load(self, weights: WeightSet, version: int, end: float, settings: TransferSettings | None) -> None:
        try:
            # Also shows that the workers answer, while nothing is paused or changed yet.
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
                    if not same_workers:  # new processes have never opened the buffer
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
        self._incomplete, self._was_updated = False, True  # only now: an error above leaves the engine unready
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
        """Gives the engine's GPU memory to the trainer beside it, once the calls under way have ended.

        The next `update_weights` wakes the engine: memory for the weights, the weights, memory for keys and values.
        On a CPU nothing is freed, and the order is checked all the same. An engine on a GPU is built with
        ``enable_sleep_mode=True`` for this.

        keep_weights  in host memory, for `wake`; else they are gone
        Raises  RolloutError of every request until the engine is awake; UnsupportedError if it cannot sleep
        """
        end = self._end(0)
        with self._lock.holding(object(), end, "falling asleep", self._before_weight_update):
            self._sleep.sleep(end, keep_weights=keep_weights)

    def wake(self) -> None:
        """Wakes an engine that kept its weights. Raises WeightSyncError if it did not, or is awake."""
        end = self._end(0)
        with self._lock.holding(object(), end, "waking up"):
            self._sleep.wake(end)

    # --- life and state -----------------------------------------------------------------------------------------------

    def restart(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Ends the engine that was built here, dead or alive, and builds a new one, which serves once it has `version`.

        weights  of `version`, as in `update_weights`. Needed if the engine was ever given some: no copy is kept here
        Raises   WeightSyncError if they are needed and not given, UnsupportedError for an engine or a server that
                 was not built here: nothing has changed then
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
            raise WeightSyncError("VLLMEngine: restart needs the model that the engine was built from: it is gone.")
        checked = None if weights is None else self._weight_spec.weight_set(weights)  # before anything is lost
        self.close()
        end = self._end(0)
        with self._lock.holding(object(), end, "restarting"):
            self.core = self._make_core(model)
            self._sleep = SleepCycle(lambda: self.core)
            self._incomplete = self._has_adapter  # the adapter is gone, and must be given again
            if checked is not None:
                self._load(checked, self.version, end, self.weight_backend)

    def take_gauges(self) -> dict[str, float]:
        """The numbers of `gauges` since the last call; without those that this vLLM does not report."""
        return self.core.take_gauges()

    def close(self) -> None:
        """Ends an engine that was built here, with its processes and threads. A second call does nothing."""
        core, self.core = self.core, ClosedCore(self.core)
        self._transfer.close()
        core.close()


class AsyncVLLMEngine(VLLMEngine):
    """`VLLMEngine` with ``own_process=True``: the rows of every call join the running batch at once.

    ``generate`` is called by as many threads as there are conversations (``LLMCollector(concurrency=...)``), so that a
    long answer or a slow tool holds back no other conversation and the engine stays full.

    in_flight  what new weights do with the rows that are being drawn: "finish", they are waited for; "abort", they end
               with what they have, as ``StopReason.ABORT``; "continue", they go on with the new weights from where
               they are, keys and values recomputed, and `Generation.versions` says which version drew each id
    max_age    with "continue": a row ends as ABORT once its first id is more than this many versions old
    settings   of `VLLMEngine`

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
        """Ends the rows that are drawn now, as ``StopReason.ABORT`` with the ids so far; the number of requests."""
        return self.core.abort()

    def _before_weight_update(self) -> None:
        if self.in_flight != "finish":
            self._interruptions += 1  # first: a call that has not reached the core yet must see it there
            self.abort()
