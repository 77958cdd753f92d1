"""A ``vllm.LLM`` of this process, whose core runs here or in a process of its own: requests, scoring, weights, closing.

Both are one class, because vLLM makes them look alike. They differ in how weights get in (tensors here, a file in
memory there) and in who may call a function of ours inside the worker.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmrl.errors import ConfigError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.adapter import Drawn
from llmrl.modules.llm.engines.vllm.worker import EXTENSION, WorkerExtension

__all__ = ["LocalCore"]

_SHARED_MEMORY = Path("/dev/shm")
_CLOSING_S = 30.0  # for the core to end its own worker; killed earlier, it leaves that and shared memory behind


class LocalCore:
    """Requests to one ``LLM``, one call at a time: vLLM's offline engine belongs to one thread."""

    scores_any_temperature = True

    def __init__(self, llm: Any, *, owned: bool) -> None:
        self.llm = llm
        self.owned = owned
        config = llm.llm_engine.vllm_config
        self.own_process = type(llm.llm_engine.engine_core).__name__ != "InprocClient"
        self._has_extension = config.parallel_config.worker_extension_cls == EXTENSION
        if self.own_process and not self._has_extension:
            raise ConfigError(
                f"VLLMEngine: an LLM whose core has its own process must have worker_extension_cls={EXTENSION!r}: got "
                f"{config.parallel_config.worker_extension_cls!r}; or let VLLMEngine(path, own_process=True) build it."
            )
        self.model = config.model_config.model
        self.max_length = int(config.model_config.max_model_len) - 1
        self.processed = config.model_config.logprobs_mode == "processed_logprobs"
        if not self.processed and config.model_config.logprobs_mode != "raw_logprobs":
            raise ConfigError(
                f"VLLMEngine: logprobs_mode must be 'processed_logprobs': got {config.model_config.logprobs_mode!r}."
            )
        self.reads_text = llm.llm_engine.tokenizer is not None
        self._request = adapter.load_vllm().SamplingParams
        self._lock = threading.Lock()
        self._call("llmrl_prepare")

    # --- requests -----------------------------------------------------------------------------------------------------

    def draw(
        self, prompts: Sequence[list[int]], params: SamplingParams, seeds: Sequence[int], stop_ids: Sequence[int]
    ) -> list[Drawn]:
        """One answer per prompt, in their order. A row that somebody aborted is there too, empty, as ``ABORT``."""
        options = adapter.request(params, stop_token_ids=stop_ids) | {"detokenize": bool(params.stop_strings)}
        with self._lock:
            outputs = self._run(
                prompts,
                [
                    {**options, "seed": seed, "max_tokens": min(options["max_tokens"], self.max_length - len(prompt))}
                    for prompt, seed in zip(prompts, seeds, strict=True)
                ],
            )
        aborted = Drawn(torch.zeros(0, dtype=torch.int64), torch.zeros(0), StopReason.ABORT)
        return [aborted if output is None else adapter.read_output(output) for output in outputs]

    def score(self, sequences: Sequence[list[int]], temperature: float) -> list[Tensor]:
        """float32[T_i] per sequence. vLLM scores prompts under the plain logits, so these are scaled meanwhile."""
        option = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        with self._lock, self._temperature(temperature):
            outputs = self._run(sequences, [option] * len(sequences))
        if None in outputs:
            raise RolloutError(f"VLLMEngine: every sequence must be scored: {outputs.count(None)} were aborted.")
        return [
            adapter.read_prompt_scores(output, sequence) for output, sequence in zip(outputs, sequences, strict=True)
        ]

    def _run(self, prompts: Sequence[list[int]], options: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The finished output of each prompt, None where it was aborted. The global seed of torch stays as it was."""
        requests = [self._request(**{"flat_logprobs": True, "detokenize": False, **option}) for option in options]
        first = int(self.llm.request_counter.counter)
        try:
            with torch.random.fork_rng(devices=[]):
                outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], requests, use_tqdm=False)
        except BaseException as error:
            self._forget_requests()
            if not isinstance(error, Exception):
                raise
            raise RolloutError(f"VLLMEngine: generating failed: {type(error).__name__}: {error}") from error
        found = {int(output.request_id) - first: output for output in outputs}
        return [found.get(row) for row in range(len(prompts))]

    def _forget_requests(self) -> None:
        """Takes what a failed call left behind out of the engine, lest the next call be handed its answers."""
        engine = self.llm.llm_engine
        with contextlib.suppress(Exception):  # the engine may be what failed
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    @contextlib.contextmanager
    def _temperature(self, temperature: float) -> Any:
        if temperature == 1.0:
            yield
            return
        try:
            if not all(self._call("llmrl_set_temperature", temperature=temperature)):
                raise ConfigError("VLLMEngine: this model's logits cannot be scaled, so its temperature must be 1.")
            yield
        finally:
            self._call("llmrl_set_temperature", temperature=1.0)

    # --- weights ------------------------------------------------------------------------------------------------------

    def load(self, weights: dict[str, Tensor], *, version: int) -> None:
        """Loads a checked, complete set of weights and forgets everything computed with the old ones."""
        with self._lock:
            if reason := self._call("llmrl_why_not_loadable")[0]:
                raise UnsupportedError(f"VLLMEngine: {self.model} takes no weights: {reason}. Nothing was updated.")
            if self.own_process:
                with weight_file(weights) as path:
                    self._call("llmrl_load_file", path=path)
            else:
                self._call("llmrl_load_weights", weights=weights.items())
            if not self.llm.reset_prefix_cache():
                raise WeightSyncError("VLLMEngine: the prefix cache must be emptied after an update: vLLM refused.")
            label = getattr(self.llm.llm_engine, "set_weight_version", None)
            if label is not None:
                label(str(version))

    def _call(self, name: str, **arguments: Any) -> list[Any]:
        method: Any = name if self._has_extension else getattr(WorkerExtension, name)
        return self.llm.collective_rpc(method, kwargs=arguments)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends an engine that we built, and the process group that it opened in this process."""
        if not self.owned:
            return
        core, renderer = self.llm.llm_engine.engine_core, getattr(self.llm, "renderer", None)
        core.shutdown(timeout=_CLOSING_S)
        if self.own_process:  # what vLLM leaves to the garbage collector: the thread that listened, and its sockets
            listener = getattr(core, "output_queue_thread", None)
            if listener is not None:
                listener.join(_CLOSING_S)
            core.ctx.destroy(linger=0)
        if hasattr(renderer, "shutdown"):
            renderer.shutdown()
        del self.llm


@contextlib.contextmanager
def weight_file(weights: Mapping[str, Tensor]) -> Any:
    """The path of a safetensors file with these weights, in memory where the system has such a folder; gone afterwards.

    One whole copy of the model for the length of the update. It serves any process of this machine.
    """
    from safetensors.torch import save_file

    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
    handle, path = tempfile.mkstemp(prefix="llmrl-weights-", suffix=".safetensors", dir=folder)
    os.close(handle)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
        yield path
    finally:
        os.unlink(path)
