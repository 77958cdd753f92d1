"""Which of more completions than a group needs are taken into it. Waiting for them is `MCAdvantage`'s business."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.errors import DataError

__all__ = ["CandidateSelector", "check_candidates", "check_selection", "select_spread"]

CandidateSelector = Callable[[TensorDictBase, int], Tensor | Sequence[int] | None]


def select_spread(candidates: TensorDictBase, size: int) -> Tensor | None:
    """The best half and the worst half of a group, int64[size]; None if all returns are equal: wait for more.

    Reads   "return"  float64[N], finite

    The middle is what teaches least: of N candidates these are the ``size`` with the largest variance. With an odd
    ``size`` the better half is the larger one; among equals the first to come are taken.

    >>> from tensordict import TensorDict
    >>> select_spread(TensorDict({"return": torch.tensor([0.0, 0.5, 1.0, 0.4])}, batch_size=[4]), 2).tolist()
    [0, 2]
    """
    returns_N = candidates.get("return")
    if bool(returns_N.amin() >= returns_N.amax()):
        return None
    best_first_N = torch.argsort(returns_N, descending=True, stable=True)
    worst_first_N = torch.argsort(returns_N, stable=True)
    num_best = (size + 1) // 2
    best = best_first_N[:num_best].tolist()
    worst = [index for index in worst_first_N.tolist() if index not in best][: size - num_best]
    return torch.tensor(sorted(best + worst))


def check_candidates(
    grpo_size: int, group_size: int | None, min_size: int | None, selector: CandidateSelector | None
) -> None:
    """Raises ValueError unless ``grpo_size`` of ``group_size`` candidates can be chosen, from ``min_size`` on."""
    for holds, what in (
        (
            group_size is not None or (min_size is None and selector is None),
            "candidate_selection_min_size and candidate_selector belong to candidate_group_size, which is None",
        ),
        (
            group_size is None or group_size >= grpo_size,
            f"candidate_group_size must be at least grpo_size={grpo_size}: got {group_size}",
        ),
        (
            min_size is None or group_size is None or grpo_size <= min_size <= group_size,
            f"candidate_selection_min_size must lie between grpo_size={grpo_size} and "
            f"candidate_group_size={group_size}: got {min_size}",
        ),
        (selector is None or callable(selector), f"candidate_selector must be callable: got {selector!r}"),
    ):
        if not holds:
            raise ValueError(f"MCAdvantage: {what}.")


def check_selection(selected: Tensor | Sequence[int], size: int, num_candidates: int) -> list[int]:
    """Indices of a selection, which may come as a mask. Raises DataError unless they are ``size`` different rows."""
    selected = torch.as_tensor(selected)
    if selected.dtype == torch.bool:
        selected = selected.nonzero()
    indices = selected.flatten().tolist()
    if len(set(indices)) != size or len(indices) != size or not all(0 <= index < num_candidates for index in indices):
        raise DataError(
            f"MCAdvantage: candidate_selector must choose {size} different rows of {num_candidates}, or return None: "
            f"got {indices}."
        )
    return indices
