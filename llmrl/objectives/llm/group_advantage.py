"""Advantages of the completions of one prompt against each other, as arithmetic. N groups, G completions of each.

Tensors in, tensors out. Which rows form a group, and when it is whole, is ``advantage.py``'s business.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from llmrl.errors import ShapeError

__all__ = ["Scale", "group_advantage", "whitened"]

Scale = Literal["group", "population", "clamp", "none", "loo", "loo_std", "batch", "max_rl", "raw"]


@torch.no_grad()
def group_advantage(rewards_NG: Tensor, *, scale: Scale = "group", eps: float = 1e-6) -> Tensor:
    """How much better each completion is than its group, float64[N, G].

    Reads    float[N, G] or [G]; NaN is an absent completion: it counts in no mean, and its advantage is NaN
    Returns  exactly 0 for a whole group when its rewards are equal, whatever ``eps`` ("raw" excepted); the arithmetic
             is float64

    With R the reward, mean and std over the group, and n completions in it:

    | ``scale`` | advantage | known as |
    |---|---|---|
    | ``"group"`` | (R - mean) / (std + eps), std with n - 1 | GRPO (arXiv:2402.03300) |
    | ``"population"`` | the same, std with n | |
    | ``"clamp"`` | (R - mean) / max(std, eps), std with n - 1 | |
    | ``"none"`` | R - mean | Dr. GRPO (arXiv:2503.20783) |
    | ``"loo"`` | R - mean of the others | RLOO (arXiv:2402.14740) |
    | ``"loo_std"`` | the same over (std of the others + eps), where that std is above 0 | |
    | ``"batch"`` | (R - mean) / (std over all N * G rewards + eps) | |
    | ``"max_rl"`` | (R - mean) / mean, for rewards that are not negative | MaxRL (arXiv:2602.02710) |
    | ``"raw"`` | R: the group is no baseline, see `whitened` | REINFORCE++ (arXiv:2501.03262) |

    >>> group_advantage(torch.tensor([1.0, 0.0, 0.5, 0.0]), scale="none").tolist()
    [0.625, -0.375, 0.125, -0.375]
    """
    if scale not in get_args(Scale):
        raise ValueError(f"group_advantage: scale must be one of {', '.join(get_args(Scale))}: got {scale!r}.")
    if rewards_NG.ndim not in (1, 2):
        raise ShapeError(f"group_advantage: rewards must have the shape [N, G] or [G]: got {list(rewards_NG.shape)}.")
    single = rewards_NG.ndim == 1
    rewards_NG = rewards_NG.to(torch.float64)
    if scale == "raw":
        return rewards_NG.clone()
    if single:
        rewards_NG = rewards_NG.unsqueeze(0)
    absent_NG = rewards_NG.isnan()
    some_absent = bool(absent_NG.any())
    known_NG = rewards_NG.masked_fill(absent_NG, 0.0) if some_absent else rewards_NG
    count_N1 = (~absent_NG).sum(1, keepdim=True).to(torch.float64)
    mean_N1 = known_NG.sum(1, keepdim=True) / count_N1
    centred_NG = rewards_NG - mean_N1
    known_centred_NG = centred_NG.masked_fill(absent_NG, 0.0) if some_absent else centred_NG

    if scale == "none":
        advantage_NG = centred_NG
    elif scale in ("group", "clamp", "population"):
        squares_N1 = known_centred_NG.square().sum(1, keepdim=True)
        std_N1 = (squares_N1 / (count_N1 if scale == "population" else count_N1 - 1)).sqrt()
        advantage_NG = centred_NG / (std_N1.clamp(min=eps) if scale == "clamp" else std_N1 + eps)
    elif scale in ("loo", "loo_std"):
        advantage_NG = centred_NG * (count_N1 / (count_N1 - 1))
        if scale == "loo_std":
            # squares around the mean of the others: all squares, less one's own, less the shift of the mean
            squares_N1 = known_centred_NG.square().sum(1, keepdim=True)
            others_NG = squares_N1 - centred_NG.square() * (count_N1 / (count_N1 - 1))
            tiny_N1 = 1e-12 * squares_N1  # rounding: the others are equal
            std_NG = (others_NG / (count_N1 - 2)).sqrt()
            advantage_NG = torch.where(
                (others_NG > tiny_N1) & (count_N1 > 2), advantage_NG / (std_NG + eps), advantage_NG
            )
    elif scale == "batch":
        advantage_NG = centred_NG / (rewards_NG[~absent_NG].std() + eps)
    else:
        if bool((known_NG < 0).any()):
            raise ValueError("group_advantage: max_rl divides by the mean reward, so rewards must not be negative.")
        advantage_NG = centred_NG / mean_N1

    lowest_N1 = rewards_NG.masked_fill(absent_NG, torch.inf).amin(1, keepdim=True)
    highest_N1 = rewards_NG.masked_fill(absent_NG, -torch.inf).amax(1, keepdim=True)
    advantage_NG = advantage_NG.masked_fill((lowest_N1 >= highest_N1) & ~absent_NG, 0.0)
    return advantage_NG.squeeze(0) if single else advantage_NG


@torch.no_grad()
def whitened(values_N: Tensor, weights_N: Tensor, *, min_variance: float = 1e-8) -> Tensor:
    """(value - mean) / std, float64[N], where value i counts ``weights_N[i]`` times; 0 for all if they are equal.

    With the number of trained tokens as weight these are the moments over the tokens of a batch, which is what
    REINFORCE++ divides by (arXiv:2501.03262). A value that counts 0 times moves no moment.

    >>> whitened(torch.tensor([1.0, 0.0]), torch.tensor([1, 3])).tolist()
    [1.7320508075688774, -0.57735026918962...]
    """
    values_N, weights_N = values_N.to(torch.float64), weights_N.to(torch.float64)
    counted_N = weights_N > 0
    if not bool(counted_N.any()) or bool(values_N[counted_N].amin() >= values_N[counted_N].amax()):
        return torch.zeros_like(values_N)
    share_N = weights_N / weights_N.sum()
    centred_N = values_N - (share_N * values_N).sum()
    return centred_N / (share_N * centred_N.square()).sum().clamp(min=min_variance).sqrt()
