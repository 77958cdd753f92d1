"""``vLLMWrapper``: the policy over a vLLM engine, in this process, in one of its own, or behind a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmrl.errors import ConfigError
from llmrl.modules.llm.backends.vllm.ray_engine import RayEngine
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.engines.vllm.server import served_model
from llmrl.modules.llm.policies.base import Backend, LLMWrapperBase
from llmrl.modules.llm.policies.batching import own_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["vLLMWrapper"]


class vLLMWrapper(LLMWrapperBase):
    """vLLM as a policy. Arguments, keys and errors: `LLMWrapperBase`.

    model  a `VLLMEngine`, or one in a Ray actor (`make_vllm_worker`); or what an engine is built from with its
           defaults: a ``vllm.LLM``, a model's folder or hub name, a Hugging Face model, the URL of a server started by
           ``vllm serve``. An engine built here is closed by ``wrapper.engine.close()``

    ``generate_kwargs`` may hold vLLM's own options too: presence_penalty, frequency_penalty, min_tokens, logit_bias,
    allowed_token_ids, bad_words. Log-probs are those of the distribution sampled from, with the plain ones beside
    them. What would make ids or log-probs untrue (best_of, say) is refused with the reason.

    Without ``tokenizer``, that of the engine or of the folder is taken. There are no logits here: ``get_dist`` and
    gradients are a `TransformersWrapper`'s, and ``device`` and ``pad_model_input`` are decided by vLLM.

    ::

        policy = vLLMWrapper("Qwen/Qwen2.5-0.5B-Instruct", generate_kwargs={"max_new_tokens": 64})
        policy = vLLMWrapper(VLLMEngine(folder, own_process=True, max_model_len=4096))
        policy = vLLMWrapper("http://localhost:8000")
    """

    takes_vllm_options = True

    def _build(self, model: Any) -> Backend:
        for name in ("device", "pad_model_input"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(f"{type(self).__name__}: {name} is decided by vLLM: leave it out.")
        given = isinstance(model, (VLLMEngine, RayEngine))
        engine = model if given else VLLMEngine(model, tokenizer=self.tokenizer)
        try:
            engine.check(self.options.params)
        except BaseException:
            if engine is not model:
                engine.close()
            raise
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return Backend(engine, None, next(iter(engine.eos_token_ids), 0) if pad is None else pad)

    def _load_tokenizer(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | str | None
    ) -> PreTrainedTokenizerBase | None:
        if tokenizer is not None or self.settings.input_mode == "tokens":
            return super()._load_tokenizer(model, tokenizer)
        if isinstance(model, VLLMEngine):
            return (
                model.tokenizer
                if model.tokenizer is not None
                else super()._load_tokenizer(model, model.core.info.model)
            )
        if isinstance(model, RayEngine):
            return super()._load_tokenizer(model, model.model)
        if isinstance(model, str) and model.startswith(("http://", "https://")):
            model = served_model(model)["root"]
        elif not isinstance(model, str):
            llm = getattr(model, "llm_engine", None)
            model = getattr(model, "name_or_path", None) if llm is None else llm.model_config.model
        return super()._load_tokenizer(model, None if model is None else str(model))

    def _source(self) -> VLLMEngine | RayEngine:
        return own_engine(self.engine)
