"""The arithmetic of sampling one token: uniforms, truncation, inverse CDF. Tensors in, tensors out.

B rows, R steps, V vocabulary. The decode loop in ``transformers.py`` calls these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmrl.modules.llm.engines.base import SamplingParams

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants of SplitMix64 as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's ``>>`` is arithmetic and keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), applied to int64 entries."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def row_uniforms(seeds: Sequence[int], num_steps: int) -> Tensor:
    """float32[B, R] in [0, 1): entry (i, t) depends only on ``seeds[i]`` and ``t``.

    A counter-based generator instead of one ``torch.Generator`` per row: the whole table costs a dozen tensor
    operations, a row does not depend on other rows, and a longer table begins with the shorter one.

    Source  Steele, Lea and Flood 2014, SplitMix64

    >>> bool((row_uniforms([5, 7], 9)[1] == row_uniforms([7], 20)[0, :9]).all())
    True
    """
    # A seed may be any Python integer: it is wrapped into a signed 64-bit one.
    seeds_B = torch.tensor([(int(seed) + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds], dtype=torch.int64)
    steps_R = torch.arange(1, num_steps + 1, dtype=torch.int64)
    bits_BR = mix64(mix64(seeds_B + GOLDEN)[:, None] + steps_R * GOLDEN)
    # The upper 24 bits: a float32 represents them exactly, so nothing rounds up to 1.
    return _shift_right(bits_BR, 40).float() * 2.0**-24


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divides the positive and multiplies the negative logits of tokens already in the sequence by ``penalty``.

    Source  Keskar et al. 2019 (arXiv:1909.05858), section 4.1
    """
    penalized_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def truncate(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Applies top-k, top-p and min-p in this order, each to the result of the last: sets excluded logits to -inf.

    At least one token is always kept. Ties with the last kept token are kept too.
    """
    if 0 < params.top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    if params.top_p < 1.0:
        logits_BV = logits_BV.masked_fill(logits_BV < _nucleus_floor(logits_BV, params.top_p), float("-inf"))
    if params.min_p > 0.0:
        floor_B1 = logits_BV.amax(-1, keepdim=True) + math.log(params.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, float("-inf"))
    return logits_BV


def _nucleus_floor(logits_BV: Tensor, top_p: float) -> Tensor:
    """[B, 1]: the smallest logit of the smallest set of most likely tokens that holds a mass of ``top_p``.

    Source  Holtzman et al. 2020 (arXiv:1904.09751), section 3.1
    """
    vocabulary = logits_BV.shape[-1]
    log_total_B1 = logits_BV.logsumexp(-1, keepdim=True)
    # On a CPU, sorting a large vocabulary costs 30 times the rest of a draw, and the nucleus is nearly always small.
    sizes = (256, vocabulary) if vocabulary > 2048 and logits_BV.device.type == "cpu" else (vocabulary,)
    for size in sizes:
        top_BK = (
            logits_BV.topk(size, dim=-1).values if size < vocabulary else logits_BV.sort(-1, descending=True).values
        )
        probs_BK = (top_BK - log_total_B1).exp()
        inside_BK = probs_BK.cumsum(-1) - probs_BK < top_p  # the mass before this token is still below top_p
        if size == vocabulary or not inside_BK[:, -1].any():
            break
    # With top_p = 0 nothing is inside; keep the most likely token.
    return top_BK.gather(1, (inside_BK.sum(-1, keepdim=True) - 1).clamp_(min=0))


def draw(log_probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """int64[B]: the first token whose cumulative probability exceeds the row's uniform. Never draws a token of
    probability 0.
    """
    cdf_BV = log_probs_BV.exp().cumsum(-1)
    # Rounding makes the total differ from 1. Scaled by the total and capped below it, every uniform selects a token.
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1)
    # right=True skips tokens of probability 0, whose cumulative probability equals the previous token's.
    return torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(-1)
