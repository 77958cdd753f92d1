"""Warnings about a run: a fact that its metrics show, and a remedy to try.

Trends compare the first fifth of a run with its last; the thresholds are rules of thumb, not tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmrl.report.intervals import evaluations
from llmrl.report.run_files import RunFiles
from llmrl.run.console.numbers import counted

MIN_STEPS = 20  # for a trend
_TWO_ERRORS = 2.0  # standard errors that a difference of means must exceed


@dataclass(frozen=True)
class Finding:
    """A fact that the metrics show, and what to try."""

    text: str
    remedy: str


class Trend:
    """The values of a metric in at least `MIN_STEPS` steps, and the means of their first and their last fifth."""

    def __init__(self, values: Sequence[float]):
        fifth = len(values) // 5
        ends = values[:fifth], values[-fifth:]
        self.values = values
        self.first, self.last = map(statistics.fmean, ends)
        error = math.sqrt(sum(statistics.variance(end) / fifth for end in ends))  # standard error of the difference
        self.rose = self.last - self.first > _TWO_ERRORS * error
        self.fell = self.first - self.last > _TWO_ERRORS * error


def findings(run: RunFiles) -> list[Finding]:
    """The warnings that apply, the most serious first."""
    checks = (_not_finite, _failed, _untrained, _reward, _evaluation, _groups, _lengths, _entropy, _updates, _mismatch)
    return [finding for check in (*checks, _rollout_engine, _supervised) for finding in check(run)]


def _trend(run: RunFiles, metric: str) -> Trend | None:
    values = run.values(metric)
    return Trend(values) if len(values) >= MIN_STEPS else None


def _not_finite(run: RunFiles) -> Iterator[Finding]:
    steps = [row["step"] for row in run.trained if "policy/loss" in row and row["policy/loss"] is None]
    if steps:
        yield Finding(
            f"The loss was not a finite number in {counted(len(steps), 'step')}, first in step {steps[0]:.0f}.",
            "A smaller optim.lr; dtype: float32 to see whether it is precision; look at the rewards of that step.",
        )


def _failed(run: RunFiles) -> Iterator[Finding]:
    failed = run.values("rollout/failed")
    if (total := sum(failed)) > 0:
        steps = sum(value > 0 for value in failed)
        yield Finding(
            f"{counted(total, 'rollout')} failed, in {steps} of {len(failed)} steps. They were left out.",
            "The warnings in the run's output name the first error of each step: a reward that raises, a tool or an "
            "engine that does not answer. env.retries tries again.",
        )
    names = {name for row in run.steps for name in row if name.startswith("eval/") and name.endswith("/failed")}
    for name in sorted(names):
        lost = [row[name] for row in run.steps if row.get(name)]
        yield Finding(
            f"In {counted(len(lost), 'evaluation')} of {name.split('/')[1]} {counted(sum(lost), 'answer')} failed. "
            "They are not in its mean.",
            "The warnings in the run's output say why. Means that leave out hard problems are too high.",
        )


def _untrained(run: RunFiles) -> Iterator[Finding]:
    empty = sum(value == 0 for value in run.values("tokens/trained"))
    if empty:
        yield Finding(
            f"{counted(empty, 'step')} of {len(run.trained)} trained no token: no group had different rewards.",
            "zero_variance: refill draws other prompts; a larger group_size; prompts that are sometimes solved.",
        )


def _reward(run: RunFiles) -> Iterator[Finding]:
    reward = _trend(run, "reward/mean")
    if reward is None:
        return
    best = max(statistics.fmean(reward.values[i : i + 5]) for i in range(len(reward.values) - 4))
    span = max(reward.values) - min(reward.values)
    # From differences of neighbours, which a trend hardly affects; they have twice the variance of a value.
    noise = statistics.stdev(b - a for a, b in pairwise(reward.values)) / math.sqrt(2 * 5)  # of a mean of five steps
    if best - reward.last > max(0.3 * span, 6 * noise) and not reward.rose:
        yield Finding(
            f"The reward fell from its best, {best:.3f}, to {reward.last:.3f}.",
            "A smaller optim.lr, or grpo.kl above 0; continue from an earlier checkpoint. Read the last rollouts: the "
            "model may have found a way around the reward.",
        )
    elif len(reward.values) >= 2 * MIN_STEPS and not reward.rose and not reward.fell:
        yield Finding(
            f"The reward is flat: {reward.first:.3f} in the first fifth of the run, {reward.last:.3f} in the last.",
            "A larger optim.lr (ten times, to see any change); easier prompts if it is near its minimum; look at the "
            "rollouts to see whether the reward tells good answers from bad ones.",
        )


def _evaluation(run: RunFiles) -> Iterator[Finding]:
    for name, scores in evaluations(run.steps).items():
        first, last = scores[0], scores[-1]
        if first.interval and last.interval and last.interval[1] < first.interval[0]:
            yield Finding(
                f"The evaluation {name} got worse: {first} at step {first.step}, {last} at step {last.step}.",
                "If the training reward rose meanwhile, the model learns what the evaluation does not measure: compare "
                "their prompts and rewards. Else a smaller optim.lr.",
            )


def _groups(run: RunFiles) -> Iterator[Finding]:
    equal = _trend(run, "group/zero_var_frac")
    if equal is None or equal.last <= 0.6:
        return
    reward, top = _trend(run, "reward/mean"), run.values("reward/p90")
    solved = reward is not None and reward.last > 0.5 * max([1.0, *top])
    yield Finding(
        f"In {equal.last:.0%} of the groups all rewards are equal, and teach nothing.",
        ("Most prompts are solved: harder ones" if solved else "Most prompts are never solved: easier ones")
        + ", a larger group_size, or zero_variance: refill.",
    )


def _lengths(run: RunFiles) -> Iterator[Finding]:
    cut = _trend(run, "tokens/truncated_frac")
    if cut is not None and cut.last > 0.1:
        rising = cut.last > cut.first + 0.05
        yield Finding(
            f"{cut.last:.0%} of the answers end at the token limit"
            + (f", {cut.first:.0%} at the beginning." if rising else "."),
            "A larger sampling.max_tokens; overlong_buffer takes reward off answers that come near the limit; "
            "truncated: mask leaves them out of the loss.",
        )


def _entropy(run: RunFiles) -> Iterator[Finding]:
    entropy, reward = _trend(run, "policy/entropy"), _trend(run, "reward/mean")
    if entropy is None or entropy.first <= 0:
        return
    if entropy.last < 0.1 * entropy.first and not (reward is not None and reward.last > 0.9):
        yield Finding(
            f"The entropy collapses: {entropy.first:.3g} nats per token at the beginning, {entropy.last:.3g} now. The "
            "answers to a prompt become the same.",
            "A higher upper clip (grpo.clip: [0.2, 0.28]), grpo.entropy above 0, a smaller optim.lr.",
        )
    elif entropy.last > 3 * entropy.first and entropy.last > 1:
        yield Finding(
            f"The entropy grows: {entropy.first:.3g} nats per token at the beginning, {entropy.last:.3g} now.",
            "A smaller optim.lr, grpo.entropy: 0, grpo.kl above 0. Read the last rollouts.",
        )


def _updates(run: RunFiles) -> Iterator[Finding]:
    norms = [(row["policy/grad_norm"], row["step"]) for row in run.trained if row.get("policy/grad_norm") is not None]
    if len(norms) >= MIN_STEPS:
        largest, step = max(norms)
        middle = statistics.median(norm for norm, _ in norms)
        if largest > 20 * middle > 0:
            yield Finding(
                f"The gradient norm was {largest:.3g} in step {step:.0f}, {largest / middle:.0f} times its median.",
                "Clipping (optim.clip_norm) bounds the update; if the loss jumps there, a smaller optim.lr or a longer "
                "optim.warmup.",
            )
    clipped = [_trend(run, f"policy/clip_{side}_frac") for side in ("low", "high")]
    share = sum(trend.last for trend in clipped if trend is not None)
    if share > 0.2:
        yield Finding(
            f"{share:.0%} of the trained tokens are clipped: the updates of a step move the policy far.",
            "A smaller optim.lr, or fewer updates_per_step.",
        )


def _mismatch(run: RunFiles) -> Iterator[Finding]:
    difference = _trend(run, "mismatch/logp_abs_mean")
    if difference is not None:
        drifts = difference.last > 3 * difference.first and difference.last > 0.02
        if drifts or difference.last > 0.05:
            yield Finding(
                f"Engine and trainer disagree by {difference.last:.3g} nats per token"
                + (f", by {difference.first:.3g} at the beginning." if drifts else "."),
                "The same dtype on both sides, model_options.float32_head; sampling.top_p and top_k off; keep the "
                "engine correction on (algo's default).",
            )
    if resent := sum(run.values("mismatch/probe_warnings")):
        yield Finding(
            f"The check of the engine's weights looked wrong {counted(resent, 'time')}; they were sent again.",
            "The run's output has the numbers. Quantised engines are expected to differ.",
        )
    effective = _trend(run, "mismatch/ess")
    if effective is not None and effective.last < 0.5:
        yield Finding(
            f"Only {effective.last:.0%} of the tokens count effectively under the engine correction.",
            "A smaller rollout.max_staleness, fewer updates_per_step, a smaller optim.lr.",
        )


def _rollout_engine(run: RunFiles) -> Iterator[Finding]:
    produced = (run.values("async/produced") or [0])[-1]
    dropped = sum((run.values(f"async/dropped_{kind}") or [0])[-1] for kind in ("old", "stragglers"))
    if produced and dropped > 0.1 * produced:
        yield Finding(
            f"{dropped / produced:.0%} of the groups were dropped before they were trained, most of them the slowest: "
            "training is biased towards prompts with short answers.",
            "rollout.oversample=0 with a rollout.max_staleness of 2 or more, which waits for slow groups.",
        )
    for who, other in (("engine", "trainer"), ("trainer", "engine")):
        idle = _trend(run, f"async/{who}_idle")
        if idle is not None and idle.last > 0.5:
            yield Finding(
                f"The {who} waits {idle.last:.0%} of the time for the {other}.",
                f"More GPUs for the {other}, or a larger rollout.max_staleness if it is 0.",
            )


def _supervised(run: RunFiles) -> Iterator[Finding]:
    loss = _trend(run, "policy/loss")
    if loss is not None and loss.last > 1.05 * abs(loss.first) and loss.rose and not run.values("reward/mean"):
        yield Finding(
            f"The loss rises: {loss.first:.3g} in the first fifth of the run, {loss.last:.3g} in the last.",
            "A smaller optim.lr, a longer optim.warmup.",
        )
    right = _trend(run, "preference/right_frac")
    if right is not None and right.last < 0.55:
        yield Finding(
            f"{right.last:.0%} of the pairs are ranked right, little more than by chance.",
            "A larger optim.lr, more epochs; read some pairs to see whether the better answer is the chosen one.",
        )
    chosen = _trend(run, "preference/chosen_logp")
    if chosen is not None and chosen.fell and chosen.first - chosen.last > 0.1 * abs(chosen.first):
        yield Finding(
            f"Chosen answers become less likely: log-prob {chosen.first:.3g} at the beginning, {chosen.last:.3g} now.",
            "Common in DPO. A larger dpo.beta, a smaller optim.lr, fewer epochs.",
        )
