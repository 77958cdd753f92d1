"""vLLM under its documented names: ways to create a `llmrl.modules.llm.VLLMEngine`."""

from typing import TYPE_CHECKING

from llmrl.lazy import on_demand

if TYPE_CHECKING:
    from llmrl.modules.llm.backends.vllm.workers import (
        LLMOnDevice,
        make_vllm_worker,
        stateless_init_process_group,
        vLLMWorker,
    )
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["LLMOnDevice", "make_vllm_worker", "stateless_init_process_group", "vLLMWorker"]
