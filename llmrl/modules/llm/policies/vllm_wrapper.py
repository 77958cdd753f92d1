"""vLLM as a policy, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmrl.modules.llm.backends.vllm.ray_engine import RayEngine
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.engines.vllm.server import served_model
from llmrl.modules.llm.policies.base import Backend, LLMWrapperBase
from llmrl.modules.llm.policies.batching import own_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class vLLMWrapper(LLMWrapperBase):
    """vLLM as a policy. Arguments, keys and errors: `LLMWrapperBase`.

    model  a `VLLMEngine`, or one in a Ray actor (`make_vllm_worker`); or the argument for building an engine with its
           defaults: a ``vllm.LLM``, a model's folder or hub name, a Hugging Face model, the URL of a server started by
           ``vllm serve``. An engine built here is closed by ``wrapper.engine.close()``

    ``generate_kwargs`` may also contain vLLM's own options: presence_penalty, frequency_penalty, min_tokens,
    logit_bias, allowed_token_ids, bad_words. Log-probs are those of the sampling distribution; "plain" holds those
    before truncation. Options that would make ids or log-probs wrong (such as best_of) are refused with the reason.

    The default ``tokenizer`` is that of the engine or of the folder. vLLM gives no logits: for ``get_dist`` and
    gradients use a `TransformersWrapper`. vLLM decides ``device`` and ``pad_model_input``.

    ::

        policy = vLLMWrapper("Qwen/Qwen2.5-0.5B-Instruct", generate_kwargs={"max_new_tokens": 64})
        policy = vLLMWrapper(VLLMEngine(folder, own_process=True, max_model_len=4096))
        policy = vLLMWrapper("http://localhost:8000")
    """

    takes_vllm_options = True

    def _build(self, model: Any) -> Backend:
        self._leave_to_engine("vLLM")
        given = isinstance(model, (VLLMEngine, RayEngine))
        engine = model if given else VLLMEngine(model, tokenizer=self.tokenizer)
        try:
            engine.check(self.options.params)
        except BaseException:
            if engine is not model:  # built here, so the caller cannot close it
                engine.close()
            raise
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return Backend(engine, None, next(iter(engine.eos_token_ids), 0) if pad is None else pad)

    def _load_tokenizer(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | str | None
    ) -> PreTrainedTokenizerBase | None:
        if tokenizer is not None or self.settings.input_mode == "tokens":
            return super()._load_tokenizer(model, tokenizer)
        source = model
        if isinstance(model, VLLMEngine):
            if model.tokenizer is not None:
                return model.tokenizer
            source = model.core.info.model
        elif isinstance(model, RayEngine):
            source = model.model
        elif isinstance(model, str) and model.startswith(("http://", "https://")):
            source = served_model(model)["root"]
        elif not isinstance(model, str):
            llm = getattr(model, "llm_engine", None)
            source = getattr(model, "name_or_path", None) if llm is None else llm.model_config.model
        return super()._load_tokenizer(model, None if source is None else str(source))

    def _source(self) -> VLLMEngine | RayEngine:
        return own_engine(self.engine)
