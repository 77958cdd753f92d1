"""Log-probs of the policy's tokens under another model: a frozen copy, an engine, or the policy without its adapter.

They are computed from the sampled ids, never from text that is tokenised again, and have the same layout as those ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn

from llmrl.data.ragged.tensordicts import present_keys
from llmrl.data.specs import Composite, NonTensor
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, MissingKeyError, check_choice
from llmrl.modules.llm.engines import Engine
from llmrl.modules.llm.policies.base import LLMWrapperBase
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.modules.llm.policies.scoring import Conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FullKey = tuple[str, str]
Scorer = LLMWrapperBase | Engine


class RetrieveLogProb(Transform):
    """Scores every turn with ``model`` and writes the log-probs to the key that losses read for a reference.

    Reads   ("tokens", "full")               int64 ragged[T] or [B, T]; if it is missing, (mode, "full") of a wrapper,
                                             encoded
            ("masks", "all_assistant_mask")  bool ragged[T] or [B, T]   with ``assistant_only``, in any input mode
    Calls   ``model``'s engine (with ``detach=False``, if gradients are enabled, its scorer): in an env one forward
            pass over the conversation so far at each turn, in a buffer one over each sampled batch
    Writes  ("next", *log_probs_full_key)    float32, as ("tokens", "full"): [t] = log p(token t | tokens before t);
                                             ``assistant_only``: 0 at other tokens; at the root of data without "next"
    Raises  ConfigError for a model that cannot score; MissingKeyError if the data do not record which tokens the policy
            wrote

    model               a wrapper with ``generate=False``, or an engine
    log_probs_full_key  (name, "full"); default (the wrapper's ``log_probs_key``, "full") if it was given one, else
                        ("ref_log_probs", "full"), which `GRPOLoss` and `SFTLoss` read in "next" or at the root
    tokenizer, tokenizer_kwargs  for conversations without ids; arguments of ``History.apply_chat_template``
    device              of the log-probs; None: of the tokens. ``padding_side`` has no effect
    reference           "adapter_off": ``model`` is the policy's own PEFT model, run without its adapter; no other
                        thread may run it at the same time
    temperature         of sampling; None: the wrapper's own

    >>> from llmrl.testing import FakeEngine
    >>> RetrieveLogProb(FakeEngine([torch.tensor([1])])).log_probs_full_key
    ('ref_log_probs', 'full')
    """

    def __init__(
        self,
        model: Scorer,
        *,
        log_probs_full_key: FullKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        padding_side: Literal["left", "right"] = "left",
        reference: Literal["model", "adapter_off"] = "model",
        temperature: float | None = None,
    ):
        super().__init__()
        check_choice(type(self).__name__, "padding_side", padding_side, ("left", "right"))
        self.model = _scoring_wrapper(model, tokenizer, tokenizer_kwargs)
        name = self.model.keys["log_probs"]
        name = "ref_log_probs" if name == "log_probs" else name  # the policy's own, which are never replaced by default
        self.log_probs_full_key = full_key(log_probs_full_key or (name, "full"), type(self).__name__)
        check_choice("RetrieveLogProb", "reference", reference, ("model", "adapter_off"))
        if reference == "adapter_off" and not hasattr(_module(self.model), "disable_adapter"):
            raise ConfigError(
                "RetrieveLogProb: reference='adapter_off' needs a PEFT model whose adapter can be turned off: got "
                f"{type(_module(self.model)).__name__}; give a frozen copy of the model instead."
            )
        if not detach and self.model.scorer is None:
            raise ConfigError("RetrieveLogProb: detach=False needs a model with gradients here: got an engine alone.")
        if temperature is not None and temperature <= 0:
            raise ConfigError(f"RetrieveLogProb: temperature must be positive: got {temperature}.")
        self.assistant_only = assistant_only
        self.detach = detach
        self.device = None if device is None else torch.device(device)
        self.reference = reference
        self.temperature = self.model.temperature if temperature is None else temperature

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        next_td = td.get("next", None)
        if next_td is not None:
            return td.set("next", self._step(td, next_td))
        return self._step(td, td)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        name, _ = self.log_probs_full_key
        next_td.set(name, _beside(next_td.get(name, None), self._scored(td)))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        # In the reward spec because, like a reward, a reset does not write it and the next turn does not read it.
        return with_rows_spec(reward_spec, self.log_probs_full_key[0])

    def _scored(self, td: TensorDictBase) -> LogProbs:
        model = self.model
        conversations = Conversations.read(td, model.mode, model.keys, model.input_key, model.attention_mask_key)
        masks = None
        if self.assistant_only:
            if conversations.assistant is None:
                raise MissingKeyError(
                    "RetrieveLogProb: assistant_only needs a record of which tokens the policy wrote: both "
                    f"{(model.keys['masks'], 'all_assistant_mask')!r} and {(model.keys['tokens'], 'response')!r} are "
                    f"missing; keys present: {present_keys(td)}; keep one of them, or pass assistant_only=False."
                )
            # The mask comes from what was recorded while sampling, never from the text.
            masks = [mask.bool() for mask in conversations.assistant]
        with ExitStack() as stack:
            if self.reference == "adapter_off":
                stack.enter_context(adapter_off(_module(model)))
            if self.detach:
                stack.enter_context(torch.no_grad())
            given = {"masks": masks, "temperature": self.temperature, "media": conversations.media}
            scores = model.score_rows(conversations.rows, **given)
        scores = [row.to(self.device or ids.device) for row, ids in zip(scores, conversations.rows, strict=True)]
        return conversations.containers(scores, td.batch_size, model.output_pad_id)["log_probs"]


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Disables a PEFT model's adapter inside the block, and restores every ``requires_grad`` flag afterwards.

    PEFT itself would make an adapter trainable when it re-enables it, even one that was frozen.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def full_key(key: Any, who: str) -> FullKey:
    """The name of a container and "full". Raises ConfigError for anything else."""
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and key[1] == "full"):
        raise ConfigError(f"{who}: a key of log-probs is (name, 'full'), as ('ref', 'full'): got {key!r}.")
    return key


def with_rows_spec(spec: Composite, name: str) -> Composite:
    """``spec`` with a container of that name, except "log_probs", which an env already carries between turns."""
    if name not in spec and name != "log_probs":
        spec[name] = NonTensor(shape=spec.shape)
    return spec


def _scoring_wrapper(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, tokenizer_kwargs: Mapping[str, Any] | None
) -> LLMWrapperBase:
    given = {"tokenizer": tokenizer} if tokenizer is not None else {}
    if isinstance(model, LLMWrapperBase):
        if model.generate:
            hint = "give model.get_new_version(generate=False)"
            raise ConfigError(f"RetrieveLogProb: the model must score, not generate: got generate=True; {hint}.")
        given |= _encoding(tokenizer_kwargs or {}, model.mode.name)
        return model.get_new_version(**given) if given else model
    if isinstance(model, Engine):
        mode = "tokens" if tokenizer is None else "history"
        given |= _encoding(tokenizer_kwargs or {}, mode)
        return LLMWrapperBase(model, input_mode=mode, generate=False, **given)
    hint = "; wrap it in TransformersWrapper(model, generate=False)" if isinstance(model, nn.Module) else ""
    raise ConfigError(f"RetrieveLogProb: model must be an LLM wrapper or an engine: got {type(model).__name__}{hint}.")


# Arguments of History.apply_chat_template that scoring fixes, with the accepted equivalent values.
_SETTLED = {
    "tokenize": (True, None),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "padding": (False, True, "longest", None),
    "truncation": (False, None),
    "return_tensors": ("pt", None),
    "return_dict": (True, None),
    "return_assistant_tokens_mask": (True, False),
}


def _encoding(tokenizer_kwargs: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """``tokenizer_kwargs`` as arguments of a wrapper. Raises ConfigError for values that scoring does not support."""
    if mode != "history":
        return {"tokenizer_kwargs": dict(tokenizer_kwargs)} if tokenizer_kwargs else {}
    named = {
        name: tokenizer_kwargs[name] for name in ("chat_template", "chat_template_name") if name in tokenizer_kwargs
    }
    for name, accepted in _SETTLED.items():
        if tokenizer_kwargs.get(name, accepted[0]) not in accepted:
            raise ConfigError(
                f"RetrieveLogProb: whole conversations are scored, as rows of ids: tokenizer_kwargs must have {name}="
                f"{accepted[0]!r}: got {tokenizer_kwargs[name]!r}; leave it out."
            )
    variables = {name: value for name, value in tokenizer_kwargs.items() if name not in {*named, *_SETTLED}}
    return named | ({"tokenizer_kwargs": variables} if variables else {})


def _module(model: LLMWrapperBase) -> Any:
    return getattr(model, "model", None)


def _beside(old: Any, new: LogProbs) -> LogProbs:
    """``new`` with the other fields of ``old``, so that entries carried to the next turn are kept."""
    if not isinstance(old, LogProbs):
        return new
    names = [name for name in LogProbs.__expected_keys__ if name not in ("full", "padded")]
    fields = [name for name in names if old.get(name, None, as_list=True) is not None]
    if new.padded:
        return LogProbs.from_padded({**{name: old.get(name) for name in fields}, "full": new.full}, new.batch_size)
    return LogProbs.from_rows({**{name: old.rows(name) for name in fields}, "full": new.rows("full")}, new.batch_size)
