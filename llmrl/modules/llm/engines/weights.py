"""Whether a set of weights can replace those of a model, whole: checked before the first one is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmrl.errors import WeightSyncError, did_you_mean

__all__ = ["check_weights", "unsaved_buffers"]


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, who: str = "TransformersEngine") -> None:
    """Raises WeightSyncError unless ``weights`` can replace all of ``own`` (a state dict); names that share storage
    count as one.
    """
    unknown = sorted(weights.keys() - own.keys())
    if unknown:
        raise WeightSyncError(
            f"{who}: every weight must have its place: got unknown names {_some(unknown)}."
            f"{did_you_mean(unknown[0], own)} Nothing was updated."
        )
    aliases: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in own.items():
        aliases.setdefault(
            (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,), []
        ).append(name)
    missing = []
    for names in aliases.values():
        given = [name for name in names if name in weights]
        if not given:
            missing.append(names[0])
        for name in given[1:]:
            if weights[name] is not weights[given[0]] and not torch.equal(weights[name], weights[given[0]]):
                raise WeightSyncError(
                    f"{who}: {given[0]} and {name} are tied in this model and must be equal. Nothing was updated."
                )
    if missing:
        raise WeightSyncError(
            f"{who}: every weight must be sent: missing {_some(sorted(missing))}. Nothing was updated."
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise WeightSyncError(
                f"{who}: {name} must keep its shape: got {tuple(tensor.shape)}, expected "
                f"{tuple(own[name].shape)}. Nothing was updated."
            )


def unsaved_buffers(model: nn.Module) -> frozenset[str]:
    """The names of buffers that a model makes by itself and leaves out of its ``state_dict``: rotary frequencies, say.

    >>> model = nn.BatchNorm1d(2)
    >>> model.register_buffer("scratch", torch.zeros(1), persistent=False)
    >>> unsaved_buffers(model)
    frozenset({'scratch'})
    """
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)).difference(model.state_dict())


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
