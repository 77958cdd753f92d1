"""Sleep and wake of an engine that shares its GPU with the trainer; enforces the only order that yields valid state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from llmrl.errors import LLMRLError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.vllm.core import Core, NothingLoadedError


class SleepCycle:
    """The memory that an engine holds: "awake", all of it; "asleep", none; "weights", weights but no KV cache yet.

    awake -> `sleep` -> asleep -> `loading` begins -> weights -> `loading` ends -> awake. `wake` also restores weights
    that were kept in host memory. Any other order is an error, also on a CPU, where vLLM frees nothing.
    """

    def __init__(self, core: Callable[[], Core]) -> None:
        self._core = core
        self._kept = False
        self.state: Literal["awake", "asleep", "weights"] = "awake"

    def check_awake(self, phase: str) -> None:
        """Raises RolloutError if the engine is not awake."""
        if self.state != "awake":
            remedy = "wake() it" if self._kept else "update its weights, which wakes it"
            raise RolloutError(f"VLLMEngine: the engine must be awake for {phase}: it sleeps; {remedy}.")

    def sleep(self, end: float, *, keep_weights: bool) -> None:
        self.check_awake("sleep")
        core = self._core()
        if not core.info.can_sleep:
            raise UnsupportedError(
                f"VLLMEngine: {core.info.model} cannot sleep: a server has its own GPU; any other engine on a GPU must "
                "be built with enable_sleep_mode=True."
            )
        core.sleep(end, keep_weights=keep_weights)
        self.state, self._kept = "asleep", keep_weights

    def wake(self, end: float) -> None:
        if self.state != "asleep" or not self._kept:
            found = "it is awake" if self.state == "awake" else "they were discarded"
            raise WeightSyncError(f"VLLMEngine: wake needs an engine that sleeps with its weights kept: {found}.")
        self._wake(None, end)
        self.state = "awake"

    @contextmanager
    def loading(self, end: float) -> Iterator[None]:
        """Wraps a weight update: allocates memory for the weights before it, and for the KV cache after it."""
        if self.state == "asleep":
            try:
                self._wake("weights", end)
            except LLMRLError as error:
                raise NothingLoadedError(f"{error} Nothing was updated.") from error
            self.state = "weights"
        yield
        # The KV cache is allocated last, which leaves room for temporary tensors of the loading.
        if self.state == "weights":
            self._wake("kv_cache", end)
            self.state = "awake"

    def _wake(self, part: str | None, end: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine needs the memory that this process has cached
        try:
            self._core().wake(part, end)
        except Exception as error:
            raise WeightSyncError(
                f"VLLMEngine: the GPU must have room for the engine to wake ({part or 'all of it'}): "
                f"{type(error).__name__}: {error}; give the engine less (gpu_memory_utilization)."
            ) from error
