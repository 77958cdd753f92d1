"""Which weights a vLLM engine takes: the names and shapes of the trainer's model, and how its checkpoint names them.

vLLM fuses, packs and renames what it loads, so its own parameters say little about what may be sent. The Hugging Face
model of the same configuration does, and costs nothing when built without storage. Loading is the worker's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from llmrl.errors import WeightSyncError
from llmrl.modules.llm.engines.weights import check_weights, unsaved_buffers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["WeightGroups", "WeightLayout", "WeightSet"]

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


class WeightGroups(Protocol):
    """Weights that come a group at a time: what they will be is known before, their values are made when asked for."""

    @property
    def metadata(self) -> Metadata: ...

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]: ...


@dataclass(frozen=True)
class WeightSet:
    """A complete set of weights for an engine, named as in a checkpoint. ``groups`` can be gone through once."""

    metadata: Metadata
    groups: Iterable[Mapping[str, Tensor]]

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors. Raises WeightSyncError where they are not those of ``metadata``."""
        left = dict(self.metadata)
        for group in self.groups:
            for name, tensor in group.items():
                expected = left.pop(name, None)
                if expected != (tensor.dtype, tensor.shape):
                    raise WeightSyncError(
                        f"VLLMEngine: {name} must be what was announced: got {tensor.dtype} {tuple(tensor.shape)}, "
                        f"expected {expected}."
                    )
                yield name, tensor
        if left:
            raise WeightSyncError(
                f"VLLMEngine: every weight must be sent: {next(iter(left))} was announced and did not come."
            )


class WeightLayout:
    """The complete set of weights of one model configuration.

    >>> from llmrl.testing import tiny_model, tiny_tokenizer
    >>> model = tiny_model(tiny_tokenizer(), architecture="gemma")
    >>> layout = WeightLayout(model.config)
    >>> weights = layout.checked(model.state_dict())
    >>> "model.embed_tokens.weight" in weights, "lm_head.weight" in weights
    (True, False)
    >>> layout.checked({**model.state_dict(), "lm_haed.weight": torch.zeros(2)})
    Traceback (most recent call last):
        ...
    llmrl.errors.WeightSyncError: VLLMEngine: every weight must have its place: got unknown names lm_haed.weight. Did
    you mean 'lm_head.weight'? Nothing was updated.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self._model: nn.Module = AutoModelForCausalLM.from_config(config)
        self.unsaved_buffers = unsaved_buffers(self._model)
        names: dict[int, str] = {}
        self._first = {}  # name -> the name that a checkpoint has for it: tied weights are stored once
        own: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            self._first[name] = names.setdefault(id(tensor), name)
            tied = own.get(self._first[name])
            own[name] = torch.empty(1, dtype=tensor.dtype).expand(tensor.shape) if tied is None else tied
        self._own = own

    def weight_set(self, weights: Mapping[str, Tensor] | WeightGroups) -> WeightSet:
        """`checked`, as what a transfer sends. Groups are checked by what they announce; none is asked for."""
        if isinstance(weights, Mapping):
            whole = self.checked(weights)
            return WeightSet(_metadata(whole), [whole])
        announced = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in weights.metadata.items()
        }
        self._check_once(announced)
        check_weights(self._own, announced, who="VLLMEngine")
        for name, tensor in announced.items():
            self._check_kind(name, tensor.dtype)
        return WeightSet(_metadata(self._renamed(announced)), map(self._renamed, weights))

    def checked(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``weights``, which must be all of the model, named as in a checkpoint. They are not copied.

        Raises  WeightSyncError naming what is unknown, missing, misshapen, tied but different, or no number
        """
        check_weights(self._own, weights, who="VLLMEngine")
        for name, tensor in weights.items():
            self._check_kind(name, tensor.dtype, " on meta" if tensor.is_meta else "")
        return self._renamed(weights)

    def _check_kind(self, name: str, dtype: torch.dtype, place: str = "") -> None:
        if place or dtype.is_floating_point != self._own[name].is_floating_point():
            raise WeightSyncError(
                f"VLLMEngine: {name} must hold {self._own[name].dtype} or another type of its kind: got "
                f"{dtype}{place}. Nothing was updated."
            )

    def _check_once(self, names: Iterable[str]) -> None:
        """Groups name a tied weight once: whether two of them are equal is not known before they are made."""
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(self._first.get(name, name), name)
            if other != name:
                raise WeightSyncError(
                    f"VLLMEngine: {other} and {name} are tied in this model, and groups must hold one of them. Nothing "
                    "was updated."
                )

    def _renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Named as in a checkpoint. Undoes what the Transformers library renames and merges when it loads one (the
        experts of a mixture).
        """
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(
            self._model, {self._first[name]: tensor.detach() for name, tensor in weights.items()}
        )


def _metadata(weights: Mapping[str, Tensor]) -> Metadata:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
