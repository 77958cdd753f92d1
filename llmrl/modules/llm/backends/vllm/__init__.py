"""vLLM under its documented names: ways to create a `llmrl.modules.llm.VLLMEngine`."""

from llmrl.modules.llm.backends.vllm.workers import (
    LLMOnDevice,
    make_vllm_worker,
    stateless_init_process_group,
    vLLMWorker,
)

__all__ = ["LLMOnDevice", "make_vllm_worker", "stateless_init_process_group", "vLLMWorker"]
