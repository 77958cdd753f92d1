"""What the parts share: the sizes, random models, clocks and peaks of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from timing import best, memory_mb
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llmrl.testing import tiny_tokenizer
from llmrl.train.gpus import GPU, find_gpu
from llmrl.train.models.shape import ModelShape, model_shape
from llmrl.train.planning.memory import MemoryPlan, plan_memory
from llmrl.train.settings import GRPOConfig, SFTConfig
from scripts.memory_table import MODELS

__all__ = ["GIB", "Context"]

T = TypeVar("T")
GIB = 2**30
SIZES = {name: MODELS[name][1] for name in ("0.5B", "7B")}
SIZES["1.5B"] = SIZES["0.5B"] | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
SIZES["1.5B"] |= {"num_attention_heads": 12}
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 2048}


class Context:
    """The device, and ``small`` sizes or those of a GPU; always small without one. Then no speed is judged."""

    def __init__(self, small: bool = False):
        self.on_gpu = torch.cuda.is_available()
        self.small = small or not self.on_gpu
        self.device = torch.device("cuda" if self.on_gpu else "cpu", 0 if self.on_gpu else None)

    def pick(self, full: T, small: T) -> T:
        return small if self.small else full

    def judged(self, limit: float) -> float | None:
        """A limit that makes sense only in full size on a GPU."""
        return self.pick(limit, None)

    @cached_property
    def gpu(self) -> GPU | None:
        return find_gpu(self.device)

    # --- models and settings ------------------------------------------------------------------------------------------

    def sizes(self, name: str) -> PretrainedConfig:
        tokenizer = tiny_tokenizer()
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        return AutoConfig.for_model("qwen2", **(SIZES[name] | ends | self.pick({}, SMALL)))

    def shape(self, name: str) -> ModelShape:
        with torch.device("meta"):
            return model_shape(AutoModelForCausalLM.from_config(self.sizes(name)))

    def model(self, name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A random Qwen2.5 of this size, on the device."""
        torch.manual_seed(0)
        with self.device:
            return AutoModelForCausalLM.from_config(self.sizes(name), dtype=dtype).eval()

    def sft(self, **changes: Any) -> SFTConfig:
        return SFTConfig(**{"model": "x", "data": {"path": "sums"}, "optim": {"lr": 1e-5}, **changes})

    def grpo(self, **changes: Any) -> GRPOConfig:
        return GRPOConfig(**{"model": "x", "env": {"name": "sums"}, "optim": {"lr": 1e-5}, **changes})

    def plan(self, config: SFTConfig | GRPOConfig, shape: ModelShape, *, num_gpus: int = 1, **given: Any) -> MemoryPlan:
        gpu = self.gpu
        low = config.in_bfloat16(gpu.bfloat16 if gpu else None)
        return plan_memory(
            config, shape, num_gpus=num_gpus, low_precision=low, capacity=gpu.bytes if gpu else None, **given
        )

    # --- time and memory ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, *functions: Callable[[], object]) -> list[float]:
        """The fastest of three calls of each (small: of one), after one that is not counted."""

        def waiting(function: Callable[[], object]) -> Callable[[], None]:
            def call() -> None:
                function()
                self.synchronize()

            return call

        calls = [waiting(function) for function in functions]
        for call in calls:
            call()
        return [milliseconds / 1e3 for milliseconds in best(*calls, repeats=self.pick(3, 1))]

    def held(self) -> float:
        """Bytes of tensors on the GPU; on a CPU of this process."""
        return float(torch.cuda.memory_allocated()) if self.on_gpu else memory_mb("VmRSS") * 2**20

    def free_bytes(self) -> float:
        """Bytes of the GPU that no process holds; 0 without one."""
        return float(torch.cuda.mem_get_info()[0]) if self.on_gpu else 0.0

    @contextmanager
    def peak(self) -> Iterator[Callable[[], float]]:
        """Context that gives a function: the most bytes since its start, counted as in `held`."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            yield lambda: float(torch.cuda.max_memory_allocated())
        else:
            Path("/proc/self/clear_refs").write_text("5")
            yield lambda: memory_mb("VmHWM") * 2**20

    def free(self) -> None:
        """Returns what is no longer used to the GPU."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def matmul_rate(self) -> float:
        """FLOP/s of products of matrices, in bfloat16 on a GPU."""
        size, times = self.pick(8192, 256), 10
        a, b = torch.randn(2, size, size, device=self.device, dtype=self.dtype)
        out = torch.empty_like(a)

        def many() -> None:
            for _ in range(times):
                torch.mm(a, b, out=out)

        return times * 2 * size**3 / self.seconds(many)[0]

    @property
    def dtype(self) -> torch.dtype:
        """That of matrix products."""
        return torch.bfloat16 if self.on_gpu else torch.float32
