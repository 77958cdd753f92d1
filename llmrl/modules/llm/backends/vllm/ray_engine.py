"""`RayEngine`: a vLLM engine in a Ray actor, with the methods of every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from llmrl.errors import DeadlineError, RolloutError, WeightSyncError
from llmrl.modules.llm.engines.base import Engine, Generation, SamplingParams
from llmrl.modules.llm.engines.vllm.engine import VLLMEngine
from llmrl.optional import require


class _Actor(VLLMEngine):
    """The engine in its actor, with methods to read and set attributes remotely."""

    def get(self, name: str) -> Any:
        return getattr(self, name)

    def set_version(self, version: int) -> None:
        self.version = version


class RayEngine(Engine):
    """An ``Engine`` that forwards calls to a `VLLMEngine` in its own Ray actor.

    model         a folder or hub name that the actor's machine can read
    num_gpus      number of the actor's GPUs, one tensor-parallel rank on each; None: no GPU
    timeout_s     longest wait for one answer
    settings      keyword arguments of `VLLMEngine`

    Weights go through Ray's object store as a whole: on one machine ``VLLMEngine(own_process=True)`` is faster.

    Raises  RolloutError, naming the actor, if the actor dies; DeadlineError; any error of the engine
    """

    def __init__(self, model: str, *, num_gpus: int | None = None, timeout_s: float = 900.0, **settings: Any) -> None:
        self._ray = require("ray", extra="ray", used_by="RayEngine")
        self.model, self._timeout_s = model, timeout_s
        if not self._ray.is_initialized():
            self._ray.init()
        if num_gpus is not None:
            settings = {"tensor_parallel_size": num_gpus} | settings
        self._actor = self._ray.remote(_Actor).options(num_gpus=num_gpus or 0).remote(model, **settings)
        try:
            self.context_length = self.max_length = self._ask("get", "max_length")
            self.eos_token_ids: tuple[int, ...] = self._ask("get", "eos_token_ids")
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The version of the weights in the actor."""
        return self._ask("get", "version")

    @version.setter
    def version(self, version: int) -> None:
        self._ask("set_version", version)

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        """See `VLLMEngine.unsaved_buffers`."""
        return self._ask("get", "unsaved_buffers")

    def check(self, params: SamplingParams) -> None:
        """Raises ConfigError for options that the engine does not support."""
        self._ask("check", params)

    def generate(self, prompts: Sequence[Tensor], params: SamplingParams, **options: Any) -> Generation:
        """See `VLLMEngine.generate`."""
        return self._ask("generate", list(prompts), params, **options)

    def score(self, sequences: Sequence[Tensor], **options: Any) -> list[Tensor]:
        """See `VLLMEngine.score`."""
        return self._ask("score", list(sequences), **options)

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """See `VLLMEngine.update_weights`; groups are collected into one set first."""
        if weights is None:
            raise WeightSyncError("RayEngine: weights must be given: the actor holds its own copy of the model.")
        if not isinstance(weights, Mapping):
            weights = {name: tensor for group in weights for name, tensor in group.items()}
        stored = self._ray.put({name: tensor.detach().cpu() for name, tensor in weights.items()})
        self._ask("update_weights", stored, version=version)

    def close(self) -> None:
        """Ends the engine and its actor. A second call does nothing."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            self._ray.get(actor.close.remote(), timeout=60)
        except (self._ray.exceptions.RayError, TimeoutError):
            pass  # the actor is dead or does not answer; it is killed below in any case
        finally:
            self._ray.kill(actor)

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._actor is None:
            raise RolloutError("RayEngine: the engine must be open: close() was called.")
        try:
            answer = getattr(self._actor, method).remote(*arguments, **options)
            return self._ray.get(answer, timeout=self._timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"RayEngine: {method} must be answered within {self._timeout_s:g} s: it was not."
            ) from error
        except self._ray.exceptions.RayActorError as error:
            raise RolloutError(f"RayEngine: the actor must be alive to answer {method}: {error}") from error
