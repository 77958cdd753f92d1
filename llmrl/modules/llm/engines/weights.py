"""A complete set of weights for an engine, checked against its model before any weight is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmrl.errors import WeightSyncError
from llmrl.modules.llm.vision import model_class
from llmrl.weight_update.groups import Metadata, WeightGroups, sent_dtype
from llmrl.weight_update.target import check_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class WeightSet:
    """A complete set of weights, named as in a checkpoint. ``groups`` can be iterated once.

    dtype  the engine's dtype, in which floating-point weights are sent; None: unchanged
    kept   parts of the names of weights that a model keeps in float32 whatever its dtype: they are sent unchanged
    """

    metadata: Metadata
    groups: Iterable[Mapping[str, Tensor]]
    dtype: torch.dtype | None = None
    kept: tuple[str, ...] = ()

    @cached_property
    def sent(self) -> Metadata:
        """``metadata`` of the tensors that `pairs` yields."""
        return {
            name: (sent_dtype(name, own, self.dtype, self.kept), shape) for name, (own, shape) in self.metadata.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for dtype, shape in self.sent.values())

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors to send. Raises WeightSyncError if they differ from ``metadata``."""
        left = dict(self.metadata)
        for group in self.groups:
            for name, tensor in group.items():
                expected = left.pop(name, None)
                if expected != (tensor.dtype, tensor.shape):
                    raise WeightSyncError(
                        f"VLLMEngine: {name} must match its metadata: got {tensor.dtype} {tuple(tensor.shape)}, "
                        f"expected {expected}."
                    )
                yield name, tensor.to(self.sent[name][0])
        if left:
            raise WeightSyncError(
                f"VLLMEngine: every weight must be sent: {next(iter(left))} was announced but not sent."
            )


class WeightSpec:
    """Names, shapes and dtype kinds of the weights of one model configuration.

    vLLM fuses, packs and renames loaded weights, so sent weights cannot be compared with its own parameters. They are
    compared with the Hugging Face model of the same configuration, which costs nothing on the meta device.

    >>> from llmrl.testing import tiny_model, tiny_tokenizer
    >>> model = tiny_model(tiny_tokenizer(), architecture="gemma")
    >>> spec = WeightSpec(model.config)
    >>> metadata = spec.weight_set(model.state_dict()).metadata
    >>> "model.embed_tokens.weight" in metadata, "lm_head.weight" in metadata  # tied weights are sent once
    (True, False)
    >>> spec.weight_set({**model.state_dict(), "lm_haed.weight": torch.zeros(2)})
    Traceback (most recent call last):
        ...
    llmrl.errors.WeightSyncError: VLLMEngine: no weight is called 'lm_haed.weight'. Did you mean
    'lm_head.weight'? Nothing was updated.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            self._model: nn.Module = model_class(config).from_config(config)
        self.unsaved_buffers = unsaved_buffers(self._model)
        kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        self.kept = tuple({part for name in kept for part in getattr(self._model, name, None) or ()})
        names: dict[int, str] = {}
        self._stored_name = {}  # name -> its name in a checkpoint, which stores tied weights once
        self._own: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            stored = self._stored_name[name] = names.setdefault(id(tensor), name)
            # Tied names have one tensor here too: check_weights recognises them by it.
            self._own[name] = (
                torch.empty(1, dtype=tensor.dtype).expand(tensor.shape) if stored == name else self._own[stored]
            )

    def weight_set(
        self, weights: Mapping[str, Tensor] | WeightGroups, groups: Iterable[Mapping[str, Tensor]] | None = None
    ) -> WeightSet:
        """Checks ``weights``, which must be complete, and names them as in a checkpoint, without a copy. Groups are
        checked by their metadata without producing any; ``groups``, if given, replaces iterating over ``weights``.

        Raises  WeightSyncError naming a weight that is unknown, missing, misshapen, tied but different, or of another
                dtype kind
        """
        if isinstance(weights, Mapping):
            groups = None
        else:
            groups = weights if groups is None else groups
            weights = {
                name: torch.empty(shape, dtype=dtype, device="meta")
                for name, (dtype, shape) in weights.metadata.items()
            }
            self._check_tied_once(weights)
        check_weights(self._own, weights, who="VLLMEngine")
        for name, tensor in weights.items():
            if tensor.is_meta and groups is None:
                raise WeightSyncError(
                    f"VLLMEngine: {name} must have values: got {tensor.dtype} on meta. Nothing was updated."
                )
        renamed = self._renamed(weights)
        metadata = {name: (tensor.dtype, tensor.shape) for name, tensor in renamed.items()}
        return WeightSet(metadata, [renamed] if groups is None else map(self._renamed, groups), kept=self.kept)

    def _check_tied_once(self, names: Iterable[str]) -> None:
        """Raises for two names of one tied weight: comparing them would need both of their groups at once."""
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(self._stored_name.get(name, name), name)
            if other != name:
                raise WeightSyncError(
                    f"VLLMEngine: {other} and {name} are tied in this model, and groups must hold only one. Nothing "
                    "was updated."
                )

    def _renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Named as in a checkpoint: reverts the renaming and merging that Transformers does when it loads one."""
        from transformers.core_model_loading import revert_weight_conversion

        stored = {self._stored_name[name]: tensor.detach() for name, tensor in weights.items()}
        return revert_weight_conversion(self._model, stored)


def unsaved_buffers(model: nn.Module) -> frozenset[str]:
    """Names of buffers that a model creates itself and leaves out of its ``state_dict``, such as rotary frequencies.

    >>> model = nn.BatchNorm1d(2)
    >>> model.register_buffer("scratch", torch.zeros(1), persistent=False)
    >>> unsaved_buffers(model)
    frozenset({'scratch'})
    """
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)).difference(model.state_dict())
