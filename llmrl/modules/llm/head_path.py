"""A language model taken apart into its body and its output head, so that logits are made only where they are wanted.

Whether head(body) is what the model returns is tried on a few tokens, once per model; nothing is assumed of its class.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HeadPath", "accepted", "evaluating", "find_head_path", "map_logits", "reduction_dtype", "tolerance"]


@dataclass(frozen=True)
class HeadPath:
    """A model taken apart: logits = cap tanh(scale head(body) / cap), or scale head(body) without ``softcap``."""

    body: nn.Module
    head: nn.Module
    scale: float
    softcap: float | None


# model -> index of the split that was found to give the model's own logits, None when none does. The parts themselves
# are looked up at each call: a head that was replaced (LoRA, a larger vocabulary) is then the one that is used.
_probed: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()


def find_head_path(model: nn.Module) -> HeadPath | None:
    """The split of ``model`` into body and head that reproduces its logits on a few tokens; None when there is none."""
    candidates = _candidate_paths(model)
    if model not in _probed:
        _probed[model] = _probe(model, candidates)
    choice = _probed[model]
    return None if choice is None else candidates[choice]


def _candidate_paths(model: nn.Module) -> list[HeadPath]:
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft keeps the model inside
    head = causal_lm.get_output_embeddings() if hasattr(causal_lm, "get_output_embeddings") else None
    if not isinstance(head, nn.Module):
        return []
    config = causal_lm.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    bodies = [causal_lm.base_model, causal_lm.get_decoder()]
    maps = [(scale, softcap), (1.0, None)]
    return [HeadPath(body, head, *map_) for body in bodies if body is not causal_lm for map_ in maps]


@torch.no_grad()
def _probe(model: nn.Module, candidates: list[HeadPath]) -> int | None:
    if not candidates:
        return None
    head_weight = next(candidates[0].head.parameters())
    ids = torch.arange(5, device=head_weight.device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
    with evaluating(model):
        expected = model(**accepted(model, inputs)).logits.double()
        # the two ways run the same operations: any real difference (a cap, a scale, a norm) is far above the rounding
        bound = tolerance(head_weight.dtype) * expected.abs().max()
        for index, path in enumerate(candidates):
            hidden = path.body(**accepted(path.body, inputs)).last_hidden_state
            got = map_logits(path.head(hidden), path, 1.0).double()
            if got.shape == expected.shape and (got - expected).abs().max() <= bound:
                return index
        return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside it the model is in evaluation mode; afterwards each of its modules is in the mode that it was in."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def tolerance(dtype: torch.dtype) -> float:
    """Relative to the largest number: two ways to the same hidden states or logits differ by less."""
    return 1e-5 if dtype in (torch.float32, torch.float64) else 1e-2


def accepted(module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The entries of ``inputs`` that ``module.forward`` names, plus ``use_cache=False`` where it has that."""
    causal_lm = module.get_base_model() if hasattr(module, "get_base_model") else module
    named = inspect.signature(causal_lm.forward).parameters
    arguments: dict[str, Any] = {name: value for name, value in inputs.items() if name in named}
    if "use_cache" in named:
        arguments["use_cache"] = False
    return arguments


def map_logits(logits: Tensor, path: HeadPath | None, temperature: float) -> Tensor:
    """Head output -> float32 logits of the distribution that is sampled from: scale, cap, temperature."""
    logits = logits.to(reduction_dtype(logits.dtype))
    if path is None:
        return logits / temperature
    if path.softcap is None:
        return logits * (path.scale / temperature)
    return torch.tanh(logits * (path.scale / path.softcap)) * (path.softcap / temperature)


def reduction_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
