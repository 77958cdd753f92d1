"""A Hugging Face model in this process as a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.model_files import loaded
from llmrl.modules.llm.policies.base import Backend, LLMWrapperBase
from llmrl.modules.llm.vision import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TransformersWrapper(LLMWrapperBase):
    """A Hugging Face model (the module, or its name or path) as a policy. Arguments, keys and errors: `LLMWrapperBase`.

    The engine generates with the same module that is trained. ``scorer`` holds it (``wrapper.model``); recipes wrap
    ``scorer`` for DDP or FSDP. ``device`` moves the model.

    >>> from tensordict import TensorDict
    >>> from llmrl.data.llm.chat import History
    >>> from llmrl.modules.llm import ChatHistory
    >>> from llmrl.testing import tiny_model, tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> policy = TransformersWrapper(tiny_model(tokenizer), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})
    >>> prompts = History.from_chats([[{"role": "user", "content": text}] for text in ("Hi", "What is 2+2?")])
    >>> td = policy(TensorDict(history=ChatHistory.from_rows({"prompt": prompts}), batch_size=[2]))
    >>> [len(row) for row in td.get(("tokens", "response"), as_list=True)]
    [4, 4]
    >>> td["history"].full.to_chats()[1][-1]["role"]
    'assistant'
    """

    def _build(self, model: Any) -> Backend:
        device, pad_model_input = self.settings.device, self.settings.pad_model_input
        model = load_model(model, device)
        config = getattr(model, "generation_config", None) or model.config
        eos = config.eos_token_id if config.eos_token_id is not None else getattr(self.tokenizer, "eos_token_id", None)
        eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        pad = getattr(self.tokenizer, "pad_token_id", None)
        if pad is None:
            # Any id works: masks are derived from lengths, never from ids.
            pad = config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids), 0)
        engine = TransformersEngine(
            model,
            eos_token_ids=eos_ids,
            pad_token_id=pad,
            tokenizer=self.tokenizer,
            pad_inputs=pad_model_input is not False,
        )
        return Backend(engine, TokenScorer(model), pad)

    def _load_tokenizer(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | str | None
    ) -> PreTrainedTokenizerBase | None:
        name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
        if tokenizer is None and name:
            tokenizer = name
        return super()._load_tokenizer(model, tokenizer)

    @property
    def model(self) -> PreTrainedModel:
        """The language model itself, without the scorer's wrappers."""
        return self._scored_model()

    def _source(self) -> PreTrainedModel:
        return self.model


def load_model(model: PreTrainedModel | str, device: torch.device | str | None) -> PreTrainedModel:
    """The given module, or the pretrained model of that name or path; moved to ``device`` if it is given.

    Raises  DataError for a name or path that cannot be loaded, ConfigError for anything else
    """
    if isinstance(model, str):
        model = loaded(
            lambda source, **options: model_class(source, **options).from_pretrained(source, **options),
            model,
            setting="TransformersWrapper: model",
        )
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"TransformersWrapper: model must be a Hugging Face causal language model or its name: got "
            f"{type(model).__name__}."
        )
    return model if device is None else model.to(device)
