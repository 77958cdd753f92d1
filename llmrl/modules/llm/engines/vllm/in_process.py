"""A `Core` in this process: a ``vllm.LLM`` that serves one call at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llmrl.errors import ConfigError, DeadlineError, LLMRLError, RolloutError, WeightSyncError
from llmrl.modules.llm.engines.vllm import compat
from llmrl.modules.llm.engines.vllm.core import (
    Completion,
    CoreInfo,
    LoadedAdapter,
    LogitTemperature,
    Progress,
    Requests,
    completion_of_output,
)
from llmrl.modules.llm.engines.vllm.gauges import EngineStats
from llmrl.modules.llm.engines.vllm.images import prompt_of
from llmrl.modules.llm.engines.vllm.worker import WorkerExtension

_CLOSING_S = 30.0  # longest wait for an engine step that another thread is running


class InProcessCore:
    """Requests to one ``LLM``. Deadlines are checked between engine steps."""

    def __init__(self, llm: Any, *, owned: bool) -> None:
        if type(llm.llm_engine.engine_core).__name__ != "InprocClient":
            raise ConfigError(
                "VLLMEngine: an LLM must have its core in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): got one "
                "with a process of its own, whose exit such an LLM does not notice; let VLLMEngine(path, "
                "own_process=True) build the engine."
            )
        self.llm, self._owned = llm, owned
        self._closing = False
        self._temperature = LogitTemperature(self.call_workers, concurrent=False)
        try:
            config = llm.llm_engine.vllm_config
            self.info = CoreInfo.of_vllm(config, llm.llm_engine.tokenizer, place="process", owned=owned)
            self._has_extension = config.parallel_config.worker_extension_cls == compat.EXTENSION
            self._adapter = LoadedAdapter(enabled=config.lora_config is not None)
            self._make_request = compat.request_factory()
            self.take_gauges = EngineStats(llm.llm_engine).take
            self.call_workers("llmrl_prepare", time.monotonic())
        except BaseException:
            self.close()
            raise

    def complete(self, requests: Requests) -> list[Completion]:
        """One completion per prompt. Leaves torch's global random state unchanged."""
        phase = requests.phase
        heard = requests.hear is not None
        params = [
            self._make_request(heard=heard, **{"detokenize": "stop" in option, **option}) for option in requests.options
        ]
        with self._temperature.held(requests.temperature, phase, requests.end):
            try:
                with torch.random.fork_rng(devices=[]):
                    outputs = self._outputs(requests, params)
            except BaseException as error:  # also Ctrl-C
                self._abort_requests()
                if not isinstance(error, Exception) or isinstance(error, LLMRLError):
                    raise
                raise RolloutError(f"VLLMEngine: {phase} failed: {type(error).__name__}: {error}") from error
        return [
            completion_of_output(output, prompt, option)
            for output, prompt, option in zip(outputs, requests.prompts, requests.options, strict=True)
        ]

    def _outputs(self, requests: Requests, params: list[Any]) -> list[Any]:
        """vLLM's output of each row, None if it was aborted. Checks `close` and the deadline between engine steps."""
        engine, names = self.llm.llm_engine, []
        media = requests.media or [None] * len(requests.prompts)
        for ids, images, param in zip(requests.prompts, media, params, strict=True):
            names.append(str(next(self.llm.request_counter)))
            prompt = prompt_of(self.llm, ids, images, requests.version)
            engine.add_request(names[-1], prompt, param, lora_request=self._adapter.request)
        progress = dict(zip(names, map(Progress, requests.hear or [None] * len(names)), strict=True))
        found, left = {}, {}
        while engine.has_unfinished_requests():
            if self._closing:
                raise RolloutError(f"VLLMEngine: the engine was closed while {requests.phase}.")
            if time.monotonic() > requests.end:
                raise DeadlineError(
                    f"VLLMEngine: {requests.phase} must end before its deadline: the engine in this process was still "
                    "running; set a longer timeout_s, or request less."
                )
            for output in engine.step():
                name = output.request_id
                if output.finished:
                    found[name] = output
                if not progress[name].tell(output) and not output.finished:
                    output.outputs[0].finish_reason = "abort"
                    left[name] = output
                    engine.abort_request([name])
        # vLLM has no output of an aborted request: for one that is not wanted any more, the last one before stands.
        return [found.get(name, left.get(name)) for name in names]

    def _abort_requests(self) -> None:
        """Removes a failed call's requests from the engine, so that the next call does not get their answers."""
        engine = self.llm.llm_engine
        with contextlib.suppress(Exception):  # the engine may be what failed
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def call_workers(self, method: str, end: float, **arguments: Any) -> list[Any]:
        """Calls a method of `WorkerExtension`; ignores ``end``."""
        call: Any = method if self._has_extension else getattr(WorkerExtension, method)
        return self.llm.collective_rpc(call, kwargs=arguments)

    @contextlib.contextmanager
    def updating(self, version: int, end: float) -> Iterator[bool]:
        """Ensures that no other call runs inside the block."""
        with self._temperature.lock.holding(object(), end, f"loading version {version}"):
            yield True
            # Prompts under the new weights must not reuse keys and values that the old ones computed.
            if not self.llm.reset_prefix_cache():
                raise WeightSyncError("VLLMEngine: the prefix cache must be emptied after an update: vLLM refused.")
            # The same for images. The scheduler tracks them and the worker stores their embeddings: if only one of the
            # two were emptied, the next request for the same image would fail.
            self.llm.llm_engine.reset_encoder_cache()

    def set_adapter(self, folder: Path, *, version: int, end: float) -> None:
        engine = self.llm.llm_engine
        with self._temperature.lock.holding(object(), end, f"loading adapter {version}"):
            self._adapter.replace(folder, version, engine.add_lora, engine.remove_lora)

    def sleep(self, end: float, *, keep_weights: bool) -> None:
        self.llm.sleep(level=1 if keep_weights else 2)

    def wake(self, part: str | None, end: float) -> None:
        self.llm.wake_up(None if part is None else [part])

    def close(self) -> None:
        """Shuts down an engine that was built here, and the process group that it opened in this process."""
        if not self._owned:
            return
        self._closing = True  # a call in another thread ends after its current step
        with self._temperature.lock.holding(object(), time.monotonic() + _CLOSING_S, "closing"):
            joins = self.llm.llm_engine.vllm_config.parallel_config.distributed_executor_backend == compat.JOINS_RANKS
            with compat.keeping_default_group() if joins else contextlib.nullcontext():
                self.llm.llm_engine.engine_core.shutdown(timeout=_CLOSING_S)
            renderer = getattr(self.llm, "renderer", None)
            if hasattr(renderer, "shutdown"):
                renderer.shutdown()
            del self.llm
