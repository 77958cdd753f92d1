"""The proof that an engine has the trainer's weights: both score the same tokens.

A checksum shows that bytes arrived; only this shows that the engine computes with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmrl.errors import ConfigError, ShapeError, WeightSyncError

__all__ = ["Scorer", "SyncProbe"]

Scorer = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class SyncProbe:
    """A few fixed sequences, scored on both sides after an update.

    Reads    sequences: int64[T_i] each, at least two tokens
             bound: largest mean of |engine - trainer| over their tokens, in nats. Rounding alone makes 1e-6 in float32,
             0.01 to 0.05 in bfloat16; a weight that did not arrive makes 0.1 and more
    Calls    both scorers with ``sequences``; they return float32[T_i] each, the log-prob of every token after those
             before it (the first one's is not looked at)
    Returns  that mean
    Raises   WeightSyncError  above the bound, or where a log-prob is not a number
             ShapeError       where a scorer answers for other tokens

    >>> probe = SyncProbe([torch.tensor([1, 2, 3])], bound=1e-3)
    >>> trainer = lambda sequences: [torch.tensor([0.0, -1.5, -2.0])]
    >>> probe(trainer, trainer)
    0.0
    >>> stale = lambda sequences: [torch.tensor([0.0, -1.5, -2.5])]
    >>> probe(stale, trainer, version=7)
    Traceback (most recent call last):
        ...
    llmrl.errors.WeightSyncError: SyncProbe: after version 7 the engine must score as the trainer does, to 0.001 nats: 2
    tokens differ by 0.25 on average, by up to 0.5 (token 2 of sequence 0). The engine does not have these weights.
    """

    def __init__(self, sequences: Sequence[Tensor], *, bound: float) -> None:
        if not bound > 0:
            raise ConfigError(f"SyncProbe: bound must be positive: got {bound}.")
        for row, ids in enumerate(sequences):
            if ids.ndim != 1 or len(ids) < 2:
                raise ShapeError(f"SyncProbe: a sequence is int64[T] with T > 1: got {tuple(ids.shape)} in row {row}.")
        if not sequences:
            raise ConfigError("SyncProbe: there must be a sequence to score: got none.")
        self.sequences = [ids.clone() for ids in sequences]
        self.bound = bound

    @torch.no_grad()
    def __call__(self, engine: Scorer, trainer: Scorer, *, version: int | None = None) -> float:
        differences = [
            (mine - theirs).abs()[1:]
            for mine, theirs in zip(self._scores(engine, "engine"), self._scores(trainer, "trainer"), strict=True)
        ]
        every = torch.cat(differences)
        mean = every.mean().item()
        if math.isnan(mean) or mean > self.bound:
            row = max(range(len(differences)), key=lambda row: differences[row].nan_to_num(nan=math.inf).max().item())
            token = int(differences[row].nan_to_num(nan=math.inf).argmax()) + 1
            update = "an update" if version is None else f"version {version}"
            raise WeightSyncError(
                f"SyncProbe: after {update} the engine must score as the trainer does, to {self.bound:g} nats: "
                f"{len(every)} tokens differ by {mean:.3g} on average, by up to "
                f"{differences[row][token - 1].item():.3g} (token {token} of sequence {row}). The engine does not have "
                "these weights."
            )
        return mean

    def _scores(self, scorer: Scorer, who: str) -> list[Tensor]:
        scores = [score.detach().double().cpu() for score in scorer(self.sequences)]
        shapes = [tuple(score.shape) for score in scores]
        expected = [tuple(ids.shape) for ids in self.sequences]
        if shapes != expected:
            raise ShapeError(f"SyncProbe: the {who} must score every token: got shapes {shapes}, expected {expected}.")
        return scores
