"""Decoder layers that keep less for the backward pass: what follows without a matrix product is computed again there.

A gated MLP, ``down(act(gate(x)) * up(x))``, keeps gate(x), act(gate(x)), up(x) and the product, half of what its layer
keeps; the second and the last follow from the others. An RMS norm keeps its input and the normalised values, which
follow from it. A third of a layer's memory is saved for about a hundredth of a step; results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from llmrl.modules.llm.packing import LEAST_HIDDEN_SIZE, evaluating
from llmrl.train.models.shape import decoder_blocks
from llmrl.train.settings.model import ModelSource

_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def keeps_less(config: ModelSource, hidden_size: int, *, on_gpu: bool, sharded: bool) -> bool:
    """True if a run without checkpointing calls `keep_less`: on a CPU, for all but tiny models and sharded ones."""
    return not on_gpu and not sharded and not config.memory.compile and hidden_size >= LEAST_HIDDEN_SIZE


def keep_less(model: nn.Module) -> int:
    """Changes the gated MLPs and RMS norms of the decoder layers; returns how many. Others are left as they are.

    Calls  each MLP on two random tokens: it must compute just what the one above does
    """
    count = 0
    for block in decoder_blocks(model):
        for module in block.modules():
            if all(hasattr(module, part) for part in _PARTS) and _is_plain(module):
                module.forward = partial(_mlp, module)
            elif type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module.forward)
            else:
                continue
            count += 1
    return count


def _norm(forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and hidden.requires_grad):
        return forward(hidden)
    return checkpoint(forward, hidden, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def _is_plain(mlp: nn.Module) -> bool:
    weight = next(mlp.parameters())
    width = getattr(mlp.gate_proj, "in_features", None)
    if weight.is_meta or not weight.is_floating_point() or width is None:  # in 4 bits: no random tokens of its type
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    hidden = torch.randn(2, width, dtype=weight.dtype, device=weight.device, generator=generator)
    with evaluating(mlp):
        return torch.equal(mlp(hidden), _mlp(mlp, hidden))


def _mlp(mlp: Any, hidden: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(hidden), mlp.up_proj(hidden)
    if not (torch.is_grad_enabled() and gate.requires_grad):
        return mlp.down_proj(mlp.act_fn(gate) * up)
    kept = _Recomputed(mlp.act_fn, gate.detach(), up.detach())
    with saved_tensors_hooks(kept.pack, kept.unpack):
        # Named, so that neither is freed inside: another tensor at its place would be taken for it.
        active = kept.note(mlp.act_fn(gate))
        product = kept.note(active * up)
        return mlp.down_proj(product)


class _Recomputed:
    """Replaces act(gate), 0, and act(gate) * up, 1, among the tensors that are kept, by this number and the shape."""

    def __init__(self, act: Any, gate: Tensor, up: Tensor) -> None:
        self.act, self.gate, self.up = act, gate, up
        self._places: list[int] = []  # in memory, of act(gate) and of the product
        self._active: Tensor | None = None  # between the two calls of `unpack`

    def note(self, value: Tensor) -> Tensor:
        self._places.append(value.data_ptr())
        return value

    def pack(self, value: Tensor) -> Any:
        is_whole = value.numel() == self.gate.numel() and value.dtype == self.gate.dtype
        if is_whole and value.data_ptr() in self._places:
            return self._places.index(value.data_ptr()), value.shape
        return value

    @torch.no_grad()
    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, shape = kept
        active = self.act(self.gate) if self._active is None else self._active
        self._active = active if number else None  # the product is needed first, act(gate) right after it
        return (active * self.up if number else active).reshape(shape)
