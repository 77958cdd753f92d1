"""vLLM under its documented names. What does the work is `llmrl.modules.llm.VLLMEngine`; these are ways to have one."""

from llmrl.modules.llm.backends.vllm.process_group import stateless_init_process_group
from llmrl.modules.llm.backends.vllm.workers import LLMOnDevice, make_vllm_worker, vLLMWorker

__all__ = ["LLMOnDevice", "make_vllm_worker", "stateless_init_process_group", "vLLMWorker"]
