"""The metrics of a run, one JSON object per step in ``metrics.jsonl``, and the table of their names.

All recipes share the names, so that runs can be compared and dashboards reused; a name that is not in the table is
refused. Dashboards (`llmrl.run.mirrors`) get a copy; the file is always written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

from llmrl.errors import ConfigError, DataError, did_you_mean
from llmrl.run.files import open_file, read_text, replace_file, writing
from llmrl.run.mirrors import Mirror, make_mirror
from llmrl.run.rollout_log import Rollout

__all__ = ["METRICS", "MetricsLog", "check_metric_name", "evenly", "read_metrics"]

T = TypeVar("T")
_MAX_BYTES = 1 << 30

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the step's completions, failed ones left out",
    "reward/std": "their standard deviation",
    "reward/p10": "their 10th percentile",
    "reward/p50": "their median",
    "reward/p90": "their 90th percentile",
    "group/zero_var_frac": "share of groups whose rewards are all equal: they teach nothing",
    "group/kept_frac": "share of groups that reached the loss",
    "tokens/completion_mean": "tokens sampled per completion",
    "tokens/completion_max": "the longest",
    "tokens/truncated_frac": "share of completions that ended at the token limit",
    "tokens/trained": "tokens that carried a gradient in this step, over all processes",
    "policy/loss": "the objective, normalised over the trained tokens of the step",
    "policy/entropy": "nats per trained token",
    "policy/ratio_mean": "mean of new over old probability",
    "policy/clip_low_frac": "share of trained tokens clipped from below",
    "policy/clip_high_frac": "share clipped from above",
    "policy/kl_ref": "divergence from the reference model, nats per trained token",
    "policy/grad_norm": "before clipping",
    "policy/lr": "learning rate",
    "preference/right_frac": "share of pairs whose chosen answer has the larger reward; kto: see preference/kl",
    "preference/margin": "mean difference of the rewards of a pair; in dpo of implicit ones, times beta",
    "preference/kl": "kto: nats from the reference; log-ratios of desirable answers should be above, others below",
    "preference/chosen_reward": "mean reward of a chosen answer",
    "preference/rejected_reward": "mean reward of a rejected answer",
    "preference/chosen_logp": "mean log-prob of a chosen answer, of kto a desirable one",
    "preference/rejected_logp": "mean log-prob of a rejected answer, of kto an undesirable one",
    "eval/loss": "held-out rows: the mean loss over all their trained tokens, or over all pairs",
    "eval/perplexity": "its exponential",
    "eval/margin": "held-out pairs: mean difference of the rewards of a pair, as preference/margin",
    "router/aux_loss": "mixtures of experts: the load-balancing loss without its weight; experts per token if balanced",
    "router/load_max": "the load of the busiest expert of a layer over the mean, in the worst layer",
    "router/replayed_frac": "share of (token, layer) pairs whose experts are those that the engine chose",
    "router/differ_frac": "share of those for which the trainer would have chosen others",
    "mismatch/logp_abs_mean": "mean |log p of the trainer - log p of the engine|, same weights",
    "mismatch/logp_abs_max": "the largest",
    "mismatch/probe": "mean |log p of the trainer - log p of the engine| on rows of the run, after each new version",
    "mismatch/probe_warnings": "1 if the probe looked wrong after a new version, whose weights were then sent again",
    "mismatch/kl": "k3 estimate of the divergence between engine and trainer",
    "mismatch/is_mean": "mean importance weight of the engine correction",
    "mismatch/is_max": "the largest",
    "mismatch/masked_frac": "share of tokens that the correction left out",
    "mismatch/ess": "effective share of the tokens under the ratio of trainer to engine",
    "async/staleness_mean": "optimizer steps between the weights that sampled a row's oldest token and those trained",
    "async/staleness_max": "the largest",
    "async/produced": "groups sampled since the run began: delivered, dropped, or queued",
    "async/delivered": "those that a step took",
    "async/moved": "those of them that another rank trained than sampled: the other ranks were slower",
    "async/delivered_frac": "those that a step took, as a share of those taken or dropped; below 1 the slow ones lack",
    "async/dropped_old": "finished groups that were older than max_staleness when a step would have taken them",
    "async/dropped_stragglers": "unfinished groups that were given up because they would have become too old",
    "async/queued": "groups that wait for a step",
    "async/restarted": "groups that were unfinished at a checkpoint, and restarted by the run that resumed from it",
    "async/engine_idle": "share of the step that the engine waited",
    "async/trainer_idle": "share of the step that the trainer waited",
    "engine/cache_max_frac": "vLLM: largest share of the KV cache in use after one of the engine's steps",
    "engine/draft_accepted_frac": "vLLM: share of the tokens drafted by speculative decoding that it accepted",
    "engine/preempted": "vLLM: times that a request was evicted from the KV cache and recomputed",
    "engine/prefix_hit_frac": "vLLM: share of the prompt tokens that were found in the prefix cache",
    "engine/waiting_max": "vLLM: most requests that waited for room after one of the engine's steps",
    "curriculum/moved": "prompts that changed their pool in this step, but for unseen ones",
    "curriculum/level": "level of the prompts that are drawn after this step, from 0",
    "rollout/failed": "conversations lost in this step",
    "rollout/turns_mean": "assistant turns per conversation",
    "agent/calls_mean": "calls of the model per rollout of an agent, those of attempts that failed too",
    "agent/rows_mean": "rows per rollout: paths from a first call to a last one",
    "agent/untrained_frac": "share of the calls that are in no row: of sub-agents, repeated or edited ones",
    "agent/rewritten": "calls that began a row because the template writes earlier turns differently",
    "agent/retried": "attempts that failed and were repeated",
    "agent/overridden": "requests for another temperature or top-p than the run's, which they got",
    "tools/conversations": "conversations that ended in this step",
    "tools/call_rate": "share of them that called a tool",
    "tools/calls_mean": "calls per conversation",
    "tools/ok_frac": "share of the calls that were answered",
    "tools/error_frac": "share that the tool refused, or failed in",
    "tools/timeout_frac": "share that was given up at its deadline",
    "tools/malformed_frac": "share that could not be read",
    "tools/unknown_frac": "share that named no tool",
    "tools/not_run_frac": "share beyond the last turn, or too many in one",
    "tools/cut_frac": "share whose answer was cut",
    "tools/seconds_mean": "seconds per call that ran",
    "data/epoch": "passes over the training data so far",
    "time/generate": "seconds",
    "time/logp": "seconds in scoring passes without a gradient",
    "time/update": "seconds in forward, backward and optimizer",
    "time/sync": "seconds to send weights to the engine",
    "time/eval": "seconds",
    "time/step": "seconds, everything included",
    "perf/gen_tok_s": "tokens sampled per second of generation",
    "perf/train_tok_s": "tokens trained per second of update",
    "perf/imbalance": "cost of the rows of the slowest rank over the mean of all, as they were dealt",
    "perf/train_tok_s_device": "tokens trained per second of update, per device",
    "perf/sync_gb_s": "GB of weights sent to the engine per second, including the time to gather shards",
    "perf/padding_frac": "share of the positions in training batches that were padding",
    "perf/mfu": "training in bfloat16: share of the device's peak FLOP/s that was used, if the peak is known",
    "perf/peak_gb": "peak memory of a device during the updates; on a CPU, peak memory of the process since its start",
}

# An evaluation has the mean, std and count of its scores, call_rate if there are tools, failed if some failed; that of
# pairs is "pairs", of single answers "answers".
_FAMILIES = {
    r"reward/[\w.-]+/\w+": "reward/<function>/mean",
    r"eval/[\w.-]+/[\w@.-]+": "eval/<environment>/mean",
    r"curriculum/[\w.-]+/level": "curriculum/level",
    r"curriculum/([\w.-]+/)?[\w.-]+/(prompts|drawn)": "curriculum/<pool>/prompts",
    r"source/[\w.-]+/(prompts|reward|failed|truncated_frac)": "source/<source>/reward",
}


def check_metric_name(name: str) -> None:
    """Accepts the names of `METRICS`, and those of a function, an environment, a source or a pool, as
    ``reward/<function>/mean``.

    Raises  ConfigError

    >>> check_metric_name("eval/sums/mean")
    >>> check_metric_name("rewards/mean")
    Traceback (most recent call last):
    llmrl.errors.ConfigError: metrics: 'rewards/mean' is not a metric. Did you mean 'reward/mean'?
    """
    if name not in METRICS and not any(re.fullmatch(family, name) for family in _FAMILIES):
        raise ConfigError(f"metrics: {name!r} is not a metric.{did_you_mean(name, [*METRICS, *_FAMILIES.values()])}")


class MetricsLog(AbstractContextManager):
    """Appends one line per step to ``<run>/metrics.jsonl``; each line is passed to the system when `log` returns.

    ``resume_step``  the step of the checkpoint to resume from: later lines are removed, those steps are run again
    ``mirrors``      "wandb", "tensorboard", "mlflow", or any `Mirror`
    ``config``       the run's settings; ``plan``, its rows of label and text; both are for the mirrors
    ``declared``     names of metrics of the user's own, beside those of `METRICS`
    ``enabled``      False on every rank but the first: names are checked, nothing is written

    Raises  ConfigError for an unknown metric or mirror, or if the file holds steps and ``resume_step`` is not given
            MissingDependencyError if a mirror's package is not installed
            RunFolderError if the file cannot be written
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        enabled: bool = True,
        resume_step: int | None = None,
        mirrors: Sequence[str | Mirror] = (),
        config: Mapping[str, Any] | None = None,
        plan: Sequence[tuple[str, str]] = (),
        declared: Collection[str] = (),
    ):
        self._declared = declared
        self.path = Path(run_dir) / "metrics.jsonl"
        self._file = None
        self._mirrors: list[Mirror] = []
        if not enabled:
            return
        if resume_step is not None:
            self._remove_steps_after(resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise ConfigError(f"{self.path}: holds the steps of another run; resume that one, or choose another name.")
        for mirror in mirrors:
            made = make_mirror(mirror, self.path.parent, config or {}, plan) if isinstance(mirror, str) else mirror
            self._mirrors.append(made)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = TextIOWrapper(open_file(self.path, "a+b"), encoding="utf-8")

    def _remove_steps_after(self, last: int) -> None:
        with writing(self.path):
            if self.path.exists():
                # _rows also leaves out a last line that was cut short when the process was killed.
                kept = [json.dumps(row) + "\n" for row in _rows(self.path) if row["step"] <= last]
                replace_file(self.path, "".join(kept))

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Writes one line. Values are numbers or one-element tensors; non-finite ones are written as null.

        Raises  RunFolderError if the line cannot be written or the file was removed
        """
        for name in metrics:
            if name not in self._declared:
                check_metric_name(name)
        numbers = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        values = {name: int(n) if isinstance(n, int) else float(n) for name, n in numbers.items()}  # int: bool too
        if self._file is None:
            return
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with writing(self.path):
            self._file.write(json.dumps({"step": int(step), **line}) + "\n")
            self._file.flush()
            self.path.stat()  # writes to an open file that was removed succeed, but are lost
        for mirror in self._mirrors:
            mirror.log(int(step), values)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Passes a step's conversations to the mirrors, which show some of them."""
        for mirror in self._mirrors:
            mirror.log_rollouts(step, rollouts)

    def close(self) -> None:
        """Closes the file and the mirrors; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self.path):
                file.close()
        for mirror in self._mirrors:
            mirror.close()
        self._mirrors = []

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: Path | str) -> list[dict[str, float | None]]:
    """The steps of a run, given its folder or its ``metrics.jsonl``; lines of the same step are merged.

    A last line that was cut short when the process was killed is left out. Values that are not finite numbers are None.

    Raises  DataError for a missing file, or a line that cannot be read (named)
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: must be the metrics of a run: the file does not exist.")
    steps: dict[int, dict[str, float | None]] = {}
    for row in _rows(path):
        steps.setdefault(row["step"], {}).update({name: _number(value) for name, value in row.items()})
    return list(steps.values())


def evenly(rows: Sequence[T], count: int) -> list[T]:
    """At most ``count`` rows, evenly spaced, the first and the last included; with ``count`` 1, only the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (count - 1))] for place in range(count)] if count > 1 else [rows[-1]]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_text(path, max_bytes=_MAX_BYTES).splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: must be UTF-8: {error}.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
            if abs(row["step"]) >= 1 << 63:
                raise ValueError
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the process was killed while it wrote this line
            raise DataError(f"{path}:{number}: must be a JSON object with a step: got {line[:80]!r}.") from error
        rows.append(row)
    return rows


def _number(value: Any) -> float | None:
    """The value if it is a finite float or int, else None."""
    # math.isfinite raises OverflowError for an integer that is too large for a float.
    if not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return value if math.isfinite(value) else None
