"""A ``vllm.LLM`` of this process: requests, scoring, weights, closing.

What is the same for an engine in a process of its own (`AsyncCore`) is here too; how requests run, who waits for whom,
and how weights get in is what that one replaces.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmrl.concurrency.shared_exclusive_lock import Gate
from llmrl.errors import ConfigError, DeadlineError, LLMRLError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.adapter import Drawn
from llmrl.modules.llm.engines.vllm.transfer import Settings
from llmrl.modules.llm.engines.vllm.weight_spec import WeightSet
from llmrl.modules.llm.engines.vllm.worker import EXTENSION, WorkerExtension

__all__ = ["LocalCore"]

_CLOSING_S = 30.0  # for the step that another thread is in


class LocalCore:
    """Requests to one ``LLM``, one call at a time: vLLM's offline engine belongs to one thread.

    Every call has an ``end``, of `time.monotonic`; here it is looked at between two steps of the engine.
    """

    scores_any_temperature = True
    own_process = False

    def __init__(self, llm: Any, *, owned: bool) -> None:
        if type(llm.llm_engine.engine_core).__name__ != "InprocClient":
            raise ConfigError(
                "VLLMEngine: an LLM must have its core in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): got one "
                "with a process of its own, whose death such an LLM does not notice; let VLLMEngine(path, "
                "own_process=True) build the engine."
            )
        self.llm = llm
        self.owned = owned
        self._closing = False
        try:
            self._adopt(llm.llm_engine.vllm_config, llm.llm_engine.tokenizer)
            self._call("llmrl_prepare", time.monotonic())
        except BaseException:
            self.close()
            raise

    def _adopt(self, config: Any, tokenizer: Any) -> None:
        """What vLLM says of itself."""
        self._turns = Gate()  # first, because closing needs it
        self._has_extension = config.parallel_config.worker_extension_cls == EXTENSION
        self.model = config.model_config.model
        self.max_length = int(config.model_config.max_model_len) - 1
        self.processed = config.model_config.logprobs_mode == "processed_logprobs"
        if not self.processed and config.model_config.logprobs_mode != "raw_logprobs":
            raise ConfigError(
                f"VLLMEngine: logprobs_mode must be 'processed_logprobs': got {config.model_config.logprobs_mode!r}."
            )
        self.takes_adapters = config.lora_config is not None
        self._adapter: Any = None  # vLLM's request for it
        self._lora_numbers = itertools.count(1)
        self.reads_text = tokenizer is not None
        self._request = adapter.request_kind()
        self._scaling = threading.Lock()
        self._scale: float | None = 1.0  # the temperature that the engine's logits are divided by; None: unknown

    def _turn(self, temperature: float) -> Hashable:
        """Equal for calls that may run at the same time: none here."""
        del temperature
        return object()

    # --- requests -----------------------------------------------------------------------------------------------------

    def draw(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        stop_ids: Sequence[int],
        *,
        end: float,
    ) -> list[Drawn]:
        """One answer per prompt, in their order. A row that somebody aborted has what it had, as ``ABORT``."""
        options = adapter.request(params, stop_token_ids=stop_ids) | {"detokenize": bool(params.stop_strings)}
        rows = [
            {**options, "seed": seed, "max_tokens": min(options["max_tokens"], self.max_length - len(prompt))}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with self._turns.holding(self._turn(1.0), end, "generating"):
            self._scale_logits(1.0, end)
            outputs = self._run(prompts, rows, "generating", end)
        aborted = Drawn(torch.zeros(0, dtype=torch.int64), torch.zeros(0), StopReason.ABORT)
        stop_token_ids = options["stop_token_ids"]
        return [aborted if output is None else adapter.read_output(output, stop_token_ids) for output in outputs]

    def score(self, sequences: Sequence[list[int]], temperature: float, *, end: float) -> list[Tensor]:
        """float32[T_i] per sequence. vLLM scores prompts under the plain logits, so these are scaled for it."""
        option = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        with self._turns.holding(self._turn(temperature), end, "scoring"):
            self._scale_logits(temperature, end)
            outputs = self._run(sequences, [option] * len(sequences), "scoring", end)
        if None in outputs:
            raise RolloutError(f"VLLMEngine: every sequence must be scored: {outputs.count(None)} were aborted.")
        return [
            adapter.read_prompt_scores(output, sequence) for output, sequence in zip(outputs, sequences, strict=True)
        ]

    def _requests(self, options: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self._request(**{"detokenize": False, **option}) for option in options]

    def _run(
        self, prompts: Sequence[list[int]], options: Sequence[Mapping[str, Any]], phase: str, end: float
    ) -> list[Any]:
        """The finished output of each prompt, None where it was aborted. The global seed of torch stays as it was."""
        first = int(self.llm.request_counter.counter)
        try:
            with torch.random.fork_rng(devices=[]), self._between_steps(phase, end):
                outputs = self.llm.generate(
                    [{"prompt_token_ids": ids} for ids in prompts],
                    self._requests(options),
                    use_tqdm=False,
                    lora_request=self._adapter,
                )
        except BaseException as error:
            self._forget_requests()
            if not isinstance(error, Exception) or isinstance(error, LLMRLError):
                raise
            raise RolloutError(f"VLLMEngine: {phase} failed: {type(error).__name__}: {error}") from error
        found = {int(output.request_id) - first: output for output in outputs}
        return [found.get(row) for row in range(len(prompts))]

    @contextlib.contextmanager
    def _between_steps(self, phase: str, end: float) -> Iterator[None]:
        """Looks at the deadline, and for `close`, before each step of the engine."""
        engine = self.llm.llm_engine
        step = engine.step

        def checked() -> Any:
            if self._closing:
                raise RolloutError(f"VLLMEngine: the engine must be open: close() was called while it was {phase}.")
            if time.monotonic() > end:
                raise DeadlineError(
                    f"VLLMEngine: {phase} must end before its deadline: the engine in this process "
                    "was still at it; give a longer timeout_s, or ask for less."
                )
            return step()

        own = vars(engine).get("step")  # somebody else's, over that of the class
        engine.step = checked
        try:
            yield
        finally:
            if own is None:
                del engine.step
            else:
                engine.step = own

    def _forget_requests(self) -> None:
        """Takes what a failed call left behind out of the engine, lest the next call be handed its answers."""
        engine = self.llm.llm_engine
        with contextlib.suppress(Exception):  # the engine may be what failed
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _scale_logits(self, temperature: float, end: float) -> None:
        """Sets the temperature before a request, not back after it: that could fail, and nobody would know."""
        with self._scaling:
            if self._scale == temperature:
                return
            self._scale = None
            if not all(self._call("llmrl_set_temperature", end, temperature=temperature)) and temperature != 1.0:
                raise ConfigError("VLLMEngine: this model's logits cannot be scaled, so its temperature must be 1.")
            self._scale = temperature

    # --- weights ------------------------------------------------------------------------------------------------------

    def check_backend(self, backend: Settings | None) -> None:
        """Raises ConfigError for a way of sending weights that this engine has no use for."""
        if backend is not None:
            raise ConfigError(
                f"VLLMEngine: {type(backend).__name__} is for an engine in another process; this one is given tensors."
            )

    def load(self, weights: WeightSet, *, version: int, end: float, backend: Settings | None) -> None:
        """Loads a checked, complete set of weights and forgets everything computed with the old ones."""
        with self._turns.holding(object(), end, f"loading version {version}"), self._paused(end):
            if reason := self._call("llmrl_why_not_loadable", end)[0]:
                raise UnsupportedError(f"VLLMEngine: {self.model} takes no weights: {reason}. Nothing was updated.")
            self._send(weights, end, backend)
            if not self._empty_prefix_cache(end):
                raise WeightSyncError("VLLMEngine: the prefix cache must be emptied after an update: vLLM refused.")
            self._label(version, end)

    def _send(self, weights: WeightSet, end: float, backend: Settings | None) -> None:
        self._call("llmrl_load_weights", end, weights=weights.pairs())

    def load_adapter(self, folder: Path, *, version: int, end: float) -> None:
        """What is drawn from now on is drawn with this adapter. Where it cannot be loaded the one before stays."""
        if not self.takes_adapters:
            raise UnsupportedError(
                "VLLMEngine: adapters are for an engine that was built with enable_lora=True; give this one merged "
                "weights."
            )
        lora = adapter.lora_request(f"llmrl-{version}", next(self._lora_numbers), folder)
        with self._turns.holding(object(), end, f"loading adapter {version}"), self._paused(end):
            try:
                self._add_adapter(lora, end)
            except Exception as error:
                raise WeightSyncError(
                    f"VLLMEngine: adapter {version} could not be loaded: {error}; the one before goes on serving."
                ) from error
            before, self._adapter = self._adapter, lora
            if before is not None:
                self._remove_adapter(before, end)

    def _add_adapter(self, lora: Any, end: float) -> None:
        del end
        self.llm.llm_engine.add_lora(lora)

    def _remove_adapter(self, lora: Any, end: float) -> None:
        del end
        self.llm.llm_engine.remove_lora(lora.lora_int_id)

    def _paused(self, end: float) -> contextlib.AbstractContextManager[None]:
        """The engine takes no step inside the block."""
        del end
        return contextlib.nullcontext()

    def _empty_prefix_cache(self, end: float) -> bool:
        del end
        return self.llm.reset_prefix_cache()

    def _label(self, version: int, end: float) -> None:
        """Says to vLLM which version it has."""
        del end
        label = getattr(self.llm.llm_engine, "set_weight_version", None)
        if label is not None:
            label(str(version))

    def _call(self, name: str, end: float, **arguments: Any) -> list[Any]:
        """A function of ours in each worker."""
        del end
        method: Any = name if self._has_extension else getattr(WorkerExtension, name)
        return self.llm.collective_rpc(method, kwargs=arguments)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends an engine that we built, and the process group that it opened in this process."""
        if not self.owned:
            return
        self._closing = True  # what another thread waits for ends with the step that it is in
        with self._turns.holding(object(), time.monotonic() + _CLOSING_S, "closing"):
            self.llm.llm_engine.engine_core.shutdown(timeout=_CLOSING_S)
            renderer = getattr(self.llm, "renderer", None)
            if hasattr(renderer, "shutdown"):
                renderer.shutdown()
            del self.llm
