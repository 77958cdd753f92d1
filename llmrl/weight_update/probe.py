"""The proof that an engine has the trainer's weights: both score tokens that the engine sampled.

A checksum shows that bytes arrived; only this shows that the engine computes with them. How far healthy scores are
apart depends on model and precision (0.01 in bfloat16, 0.07 in FP8), and a lost update at a small learning rate changes
far less, so nothing is compared with a fixed number: a lost update shows in scores that did not move at all, a damaged
one in a difference that is large for this run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from llmrl.errors import ConfigError, ShapeError, WeightSyncError

Scorer = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_MOVED = 16  # tokens of the trainer that must have moved: then at least one of a healthy engine has moved too
_BASELINE, _NEEDED = 50, 3  # healthy differences that are remembered, and that drift is judged from
_FLOOR = 1e-3  # nats: rounding of float32, too small to measure drift by
_PATIENCE = 3  # versions in a row with a problem that a second push did not solve: the last one ends the run


class SyncProbe:
    """Compares engine and trainer after each update, on rows that `use` sets.

    factor        a mean |log-prob difference| above that many times the median of this run's healthy ones is drift
    any_problem   of several ranks: the problem of any of them, given this rank's ("" for none); pushes are collectives

    A scorer returns float32[T_i] for each sequence: the log-prob of every token after those before it.

    >>> ids, sampled = torch.arange(40), torch.arange(40) > 3
    >>> weights = {"trainer": torch.zeros(40), "engine": torch.zeros(40)}
    >>> trainer, engine = (lambda rows, who=who: [weights[who]] for who in ("trainer", "engine"))
    >>> probe = SyncProbe()
    >>> probe.use([ids], [sampled], engine, trainer)
    0.0
    >>> weights["trainer"] = weights["trainer"] + 1e-7  # an update, which is lost on its way
    >>> probe.check(engine, trainer)[1]
    "the engine's scores of 36 tokens are those of an earlier version, to the last bit, and 36 of the trainer's moved"
    """

    def __init__(self, *, factor: float = 4.0, any_problem: Callable[[str], str] = str) -> None:
        if not factor > 1:
            raise ConfigError(f"SyncProbe: factor must be above 1: got {factor}.")
        self.factor, self._any_problem = factor, any_problem
        self._healthy: deque[float] = deque(maxlen=_BASELINE)
        self._unsolved = 0  # versions in a row

    def use(self, sequences: Sequence[Tensor], masks: Sequence[Tensor], engine: Scorer, trainer: Scorer) -> float:
        """Compares ``sequences`` from now on, at the tokens where ``masks`` is True, and begins with their scores under
        these weights, which must be the same on both sides.

        Returns  the mean |difference|
        Raises   ShapeError for a sequence without a token before the last, or a mask of another length
        """
        for row, (ids, mask) in enumerate(zip(sequences, masks, strict=True)):
            if ids.ndim != 1 or len(ids) < 2 or mask.shape != ids.shape:
                raise ShapeError(
                    f"SyncProbe: a row is int64[T] and bool[T] with T > 1: got {tuple(ids.shape)} and "
                    f"{tuple(mask.shape)} in row {row}."
                )
        self._sequences = [ids.clone() for ids in sequences]
        self._masks = [mask.bool().cpu() & (torch.arange(len(mask)) > 0) for mask in masks]
        self._engine, self._trainer = self._scores(engine, "engine"), self._scores(trainer, "trainer")
        mean = _mean_difference(self._engine, self._trainer)
        self._healthy.append(mean)
        return mean

    def prove(self, push: Callable[[], None], engine: Scorer, trainer: Scorer) -> tuple[float, str]:
        """Pushes weights and compares; if something is wrong, pushes them once more.

        Returns  the mean |difference|, and a warning or ""
        Raises   WeightSyncError  if neither push helped, for the third version in a row, or a score is not a number
        """
        push()
        mean, problem = self.check(engine, trainer)
        if not problem:
            self._unsolved = 0
            return mean, ""
        push()  # a single lost push costs no more than this
        mean, left = self.check(engine, trainer)
        self._unsolved = self._unsolved + 1 if left else 0
        if self._unsolved >= _PATIENCE:
            raise WeightSyncError(
                f"SyncProbe: the engine must score as the trainer does: for {_PATIENCE} versions in a row, each sent "
                f"twice, {left}. The engine does not have these weights."
            )
        return mean, f"{problem}; " + ("a second push did not help" if left else "a second push helped")

    def check(self, engine: Scorer, trainer: Scorer) -> tuple[float, str]:
        """The mean |difference| now, and what is wrong with it or ""."""
        engine_N, trainer_N = self._scores(engine, "engine"), self._scores(trainer, "trainer")
        mean = _mean_difference(engine_N, trainer_N)
        moved = int((trainer_N != self._trainer).sum())  # since the engine's scores moved last
        count, problem = len(engine_N), ""
        baseline = median(self._healthy) if len(self._healthy) >= _NEEDED else float("inf")
        # New weights change some score, if only in its last bit. Where none changed the engine has the old weights,
        # or the update was so small that the trainer's own scores hardly moved either.
        if not torch.equal(engine_N, self._engine):
            self._engine, self._trainer = engine_N, trainer_N
        elif count and moved >= min(_MOVED, count):
            problem = (
                f"the engine's scores of {count} tokens are those of an earlier version, to the last bit, and {moved} "
                "of the trainer's moved"
            )
        if not problem and mean > self.factor * max(baseline, _FLOOR):
            problem = (
                f"{count} tokens differ by {mean:.3g} nats on average, more than {self.factor:g} times the "
                f"{baseline:.3g} that is usual in this run"
            )
        problem = self._any_problem(problem)  # ranks decide together: a push is a collective
        if not problem:
            self._healthy.append(mean)
        return mean, problem

    @torch.no_grad()
    def _scores(self, scorer: Scorer, who: str) -> Tensor:
        """The scores of the compared tokens of all rows, one after the other."""
        scores = [score.detach().float().cpu() for score in scorer(self._sequences)]
        shapes = [tuple(score.shape) for score in scores]
        expected = [tuple(ids.shape) for ids in self._sequences]
        if shapes != expected:
            raise ShapeError(f"SyncProbe: the {who} must score every token: got shapes {shapes}, expected {expected}.")
        for row, (score, mask) in enumerate(zip(scores, self._masks, strict=True)):
            if not score[mask].isfinite().all():
                token = int((mask & ~score.isfinite()).nonzero()[0])
                raise WeightSyncError(
                    f"SyncProbe: log-probs must be numbers: the {who} scores token {token} of row {row} as "
                    f"{score[token].item()}. Its weights are damaged."
                )
        return torch.cat([score[mask] for score, mask in zip(scores, self._masks, strict=True)] or [torch.zeros(0)])


def _mean_difference(one_N: Tensor, other_N: Tensor) -> float:
    return (one_N.double() - other_N.double()).abs().mean().item() if len(one_N) else 0.0
