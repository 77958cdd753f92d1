"""Run folders as a training command leaves them, with made-up metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from llmrl.run.metrics import MetricsLog
from llmrl.run.rollout_log import Rollout, RolloutLog
from llmrl.run.run_dir import RunDir

GRPO = {  # metric -> its value in the share x of a run that goes well
    "reward/mean": lambda x: 0.3 + 0.6 * x + 0.02 * math.sin(90 * x),
    "reward/std": lambda x: 0.4 - 0.1 * x,
    "reward/p10": lambda x: 0.1 + 0.5 * x,
    "reward/p50": lambda x: 0.3 + 0.6 * x,
    "reward/p90": lambda x: 0.6 + 0.4 * x,
    "reward/correct/mean": lambda x: 0.3 + 0.6 * x,
    "reward/short/mean": lambda x: 0.5,
    "group/zero_var_frac": lambda x: 0.2,
    "group/kept_frac": lambda x: 0.8,
    "tokens/completion_mean": lambda x: 200 + 50 * x,
    "tokens/completion_max": lambda x: 400,
    "tokens/truncated_frac": lambda x: 0.01,
    "tokens/trained": lambda x: 10_000,
    "policy/loss": lambda x: 0.001 * math.sin(50 * x),
    "policy/entropy": lambda x: 0.8 - 0.4 * x,
    "policy/ratio_mean": lambda x: 1.0,
    "policy/clip_low_frac": lambda x: 0.01,
    "policy/clip_high_frac": lambda x: 0.02,
    "policy/kl_ref": lambda x: 0.05 * x,
    "policy/grad_norm": lambda x: 1 + 0.2 * math.sin(40 * x),
    "policy/lr": lambda x: 1e-6,
    "mismatch/logp_abs_mean": lambda x: 0.004,
    "mismatch/logp_abs_max": lambda x: 0.2,
    "mismatch/kl": lambda x: 10 ** (-6 + 3 * x),
    "mismatch/ess": lambda x: 0.98,
    "async/staleness_mean": lambda x: 0.5,
    "async/staleness_max": lambda x: 2,
    "rollout/failed": lambda x: 0,
    "time/generate": lambda x: 4.0,
    "time/logp": lambda x: 1.0,
    "time/update": lambda x: 3.0,
    "time/sync": lambda x: 0.5,
    "time/step": lambda x: 9.0,
    "perf/gen_tok_s": lambda x: 20_000,
    "perf/train_tok_s": lambda x: 8_000,
    "perf/peak_gb": lambda x: 41.5,
}


def make_run(
    path: Path,
    steps: int = 40,
    changes: Mapping[str, Callable[[float], float | None]] | None = None,
    *,
    base: Mapping[str, Callable[[float], float | None]] = GRPO,
    config: str = "steps: 40\noptim: {lr: 2.0e-6}\n",
    rollouts: int = 0,
) -> RunDir:
    """A run in ``path``, evaluated before, in the middle and at the end; ``changes`` stand in for ``base``."""
    path.mkdir(parents=True)
    run = RunDir(path)
    run.write_config(config)
    origins, defaults = {"steps": "sums.yaml:5", "optim.lr": "command line"}, {"steps": "200", "optim.lr": "1.0e-06"}
    info = {"command": "grpo", "recipe": "sums_grpo", "created": "2026-11-23T02:46:06+0000", "llmrl": "0.1.0"}
    run.write_info(info | {"origins": origins, "defaults": defaults, "plan": [["machine", "1 process · CPU"]]})
    metrics = {**base, **(changes or {})}
    lines = [{"step": 0, **evaluation(0.5)}]
    for step in range(1, steps + 1):
        x = (step - 1) / max(1, steps - 1)
        line = {"step": step, **{name: value(x) for name, value in metrics.items()}}
        lines.append(line | (evaluation(0.5 + 0.4 * x) if step in (steps // 2, steps) else {}))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = RolloutLog(path)
    for step in range(1, rollouts + 1):
        log.write(
            step, [Rollout("2 + 2?", "4", float(i % 2), 0.5, "eos", version=0, tokens=3, group=0) for i in range(4)]
        )
    return run


def small_run(root: Path | str, name: str, *steps: Mapping[str, float], recipe: str = "toy", **info: object) -> RunDir:
    """A run with these metrics, for steps from 0 on."""
    run = RunDir.create(recipe, "", root=root, name=name)
    run.write_config("steps: 4\n")
    run.write_info({"command": "grpo", "recipe": recipe, **info})
    with MetricsLog(run.path) as log:
        for step, metrics in enumerate(steps):
            log.log(step, metrics)
    return run


def evaluation(mean: float, count: int = 500) -> dict[str, float]:
    return {"eval/sums/mean": mean, "eval/sums/std": math.sqrt(mean * (1 - mean)), "eval/sums/count": count}
