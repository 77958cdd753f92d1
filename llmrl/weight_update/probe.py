"""A check that an engine has the trainer's weights: both score tokens that the engine sampled.

A checksum shows that the bytes arrived; only scores show that the engine computes with them. Healthy differences depend
on model and precision (0.01 nats in bfloat16, 0.07 in FP8), and an update at a small learning rate changes far less, so
there is no fixed threshold: a lost update shows as scores that did not change at all, a damaged one as a difference
that is large for this run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from llmrl.errors import ConfigError, ShapeError, WeightSyncError

Scorer = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_MOVED = 16  # if the trainer's scores of this many tokens changed, a healthy engine's score of at least one did too
_BASELINE, _NEEDED = 50, 3  # healthy differences: the most that are kept, and the fewest from which drift is judged
_FLOOR = 1e-3  # nats: float32 rounding; smaller differences are not evidence of drift
_PATIENCE = 3  # the run ends after this many consecutive versions that a second push did not repair


class SyncProbe:
    """Compares engine and trainer after each update, on the rows set by `use`.

    factor        drift: a mean |log-prob difference| above ``factor`` times the median of this run's healthy ones
    any_problem   maps this rank's problem ("" for none) to one of any rank: all must agree, as pushes are collectives

    A scorer returns float32[T_i] for each sequence: the log-prob of every token given those before it.

    >>> ids, sampled = torch.arange(40), torch.arange(40) > 3
    >>> weights = {"trainer": torch.zeros(40), "engine": torch.zeros(40)}
    >>> trainer, engine = (lambda rows, who=who: [weights[who]] for who in ("trainer", "engine"))
    >>> probe = SyncProbe()
    >>> probe.use([ids], [sampled], engine, trainer)
    0.0
    >>> weights["trainer"] = weights["trainer"] + 1e-7  # an update that never reaches the engine
    >>> probe.check(engine, trainer)[1]
    "the engine's scores of 36 tokens are those of an earlier version, to the last bit, and 36 of the trainer's moved"
    """

    def __init__(self, *, factor: float = 4.0, any_problem: Callable[[str], str] = str) -> None:
        if not factor > 1:
            raise ConfigError(f"SyncProbe: factor must be above 1: got {factor}.")
        self.factor, self._any_problem = factor, any_problem
        self._healthy: deque[float] = deque(maxlen=_BASELINE)
        self._unsolved = 0  # consecutive versions

    def use(self, sequences: Sequence[Tensor], masks: Sequence[Tensor], engine: Scorer, trainer: Scorer) -> float:
        """Sets the sequences to compare, at the tokens where ``masks`` is True, and scores them under the current
        weights, which must be the same on both sides.

        Returns  the mean |difference|
        Raises   ShapeError for a sequence of fewer than two tokens, or a mask of another length
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
        """Pushes weights and compares; if the scores do not agree, pushes them once more.

        Returns  the mean |difference|, and a warning or ""
        Raises   WeightSyncError  if both pushes failed for the third version in a row, or a score is not finite
        """
        push()
        mean, problem = self.check(engine, trainer)
        if not problem:
            self._unsolved = 0
            return mean, ""
        push()  # a single lost push must not end the run
        mean, left = self.check(engine, trainer)
        self._unsolved = self._unsolved + 1 if left else 0
        if self._unsolved >= _PATIENCE:
            raise WeightSyncError(
                f"SyncProbe: the engine must score as the trainer does: for {_PATIENCE} versions in a row, each sent "
                f"twice, {left}. The engine does not have these weights."
            )
        return mean, f"{problem}; " + ("a second push did not help" if left else "a second push helped")

    def check(self, engine: Scorer, trainer: Scorer) -> tuple[float, str]:
        """The mean |difference| now, and a problem or ""."""
        engine_N, trainer_N = self._scores(engine, "engine"), self._scores(trainer, "trainer")
        mean = _mean_difference(engine_N, trainer_N)
        moved = int((trainer_N != self._trainer).sum())  # since the engine's scores last changed
        count, problem = len(engine_N), ""
        baseline = median(self._healthy) if len(self._healthy) >= _NEEDED else float("inf")
        # New weights change at least the last bit of some score. If none changed, the engine has the old weights, or
        # the update was so small that the trainer's own scores hardly changed either.
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
        """float32[N]: the scores of the compared tokens of all rows, concatenated."""
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
