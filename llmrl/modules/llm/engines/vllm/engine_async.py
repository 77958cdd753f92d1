"""``AsyncVLLMEngine``: a vLLM engine in a process of its own, which every conversation asks by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.vllm.engine import VLLMEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["AsyncVLLMEngine"]


class AsyncVLLMEngine(VLLMEngine):
    """`VLLMEngine` with ``own_process=True``: the rows of every call join the running batch at once.

    ``generate`` is called by as many threads as there are conversations (``LLMCollector(concurrency=...)``), so that a
    long answer or a slow tool keeps nobody else waiting and the engine stays full.

    in_flight  what new weights do with the rows that are being drawn: "finish", they are waited for; "abort", they end
               with what they have, as ``StopReason.ABORT``. Either way no row is of two versions
    settings   of `VLLMEngine`

    ::

        engine = AsyncVLLMEngine("Qwen/Qwen2.5-0.5B-Instruct", max_model_len=4096)
        collector = LLMCollector(env, policy=vLLMWrapper(engine), yield_only_last_steps=True, concurrency=32)
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        in_flight: Literal["finish", "abort"] = "finish",
        **settings: Any,
    ) -> None:
        if in_flight not in ("finish", "abort"):
            raise ConfigError(f"AsyncVLLMEngine: in_flight must be 'finish' or 'abort': got {in_flight!r}.")
        self.in_flight = in_flight
        super().__init__(model, own_process=True, **settings)

    def abort(self) -> int:
        """Ends the rows that are being drawn now: they have the ids drawn so far and end as ``StopReason.ABORT``.

        Returns  how many requests that were
        """
        return self.core.abort()

    def _make_way(self) -> None:
        if self.in_flight == "abort":
            self.abort()
