"""Which weights a vLLM engine takes: the names and shapes of the trainer's model, and how its checkpoint names them.

vLLM fuses, packs and renames what it loads, so its own parameters say little about what may be sent. The Hugging Face
model of the same configuration does, and costs nothing when built without storage. Loading is the worker's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmrl.errors import WeightSyncError
from llmrl.modules.llm.engines.weights import check_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["WeightLayout"]


class WeightLayout:
    """The complete set of weights of one model configuration.

    >>> from llmrl.testing import tiny_model, tiny_tokenizer
    >>> model = tiny_model(tiny_tokenizer(), architecture="gemma")
    >>> layout = WeightLayout(model.config)
    >>> weights = layout.checked(model.state_dict())
    >>> "model.embed_tokens.weight" in weights, "lm_head.weight" in weights
    (True, False)
    >>> layout.checked({**model.state_dict(), "lm_haed.weight": weights["model.embed_tokens.weight"]})
    Traceback (most recent call last):
        ...
    llmrl.errors.WeightSyncError: VLLMEngine: every weight must have its place: got unknown names lm_haed.weight. Did
    you mean 'lm_head.weight'? Nothing was updated.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self._model: nn.Module = AutoModelForCausalLM.from_config(config)
        names: dict[int, str] = {}
        self._first = {}  # name -> the name that a checkpoint has for it: tied weights are stored once
        own: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            self._first[name] = names.setdefault(id(tensor), name)
            tied = own.get(self._first[name])
            own[name] = torch.empty(1, dtype=tensor.dtype).expand(tensor.shape) if tied is None else tied
        self._own = own

    def checked(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``weights``, which must be all of the model, named as in a checkpoint. They are not copied.

        Raises  WeightSyncError naming what is unknown, missing, misshapen, tied but different, or no number
        """
        check_weights(self._own, weights, who="VLLMEngine")
        for name, tensor in weights.items():
            if tensor.is_meta or tensor.is_floating_point() != self._own[name].is_floating_point():
                raise WeightSyncError(
                    f"VLLMEngine: {name} must hold {self._own[name].dtype} or another type of its kind: got "
                    f"{tensor.dtype} on {tensor.device}. Nothing was updated."
                )
        return _checkpoint_names(self._model, {self._first[name]: tensor.detach() for name, tensor in weights.items()})


def _checkpoint_names(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes what the Transformers library renames and merges when it loads a checkpoint (the experts of a mixture)."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, weights)
