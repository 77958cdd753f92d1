"""Dashboards that receive a run's settings and plan, the metrics of every step, and some of the rollouts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmrl.errors import ConfigError, did_you_mean
from llmrl.optional import require
from llmrl.run.masking import masked, masked_text
from llmrl.run.rollout_log import Rollout

_EVERY, _ROWS = 10, 16  # steps between tables of rollouts, and conversations in one: first, 10th, 20th ... step
_COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "stop_reason", "tokens")


class Mirror(Protocol):
    """A dashboard that receives every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None: ...

    def close(self) -> None: ...


def make_mirror(name: str, run_dir: Path, config: Mapping[str, Any], plan: Sequence[tuple[str, str]]) -> Mirror:
    """The mirror of that name. Raises ConfigError for an unknown one, MissingDependencyError for its package."""
    if name not in MIRRORS:
        near = did_you_mean(name, MIRRORS)
        raise ConfigError(f"log: must name mirrors among {', '.join(MIRRORS)}: got {name!r}.{near}")
    # Dashboards are shared with other people.
    shown = [(label, masked_text(text)) for label, text in plan]
    return MIRRORS[name](run_dir, masked(config), shown)


class WandbMirror:
    """Weights & Biases; resumes under the run's name. The plan is part of the configuration."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], plan: Sequence[tuple[str, str]]):
        self._wandb = require("wandb", extra="wandb", used_by="log: [wandb]")
        name = run_dir.resolve().name
        settings = dict(config) | {"plan": _lines(plan)}
        self._run = self._wandb.init(
            project="llmrl", id=name, name=name, dir=str(run_dir), config=settings, resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        if rows := _table(step, rollouts):
            table = self._wandb.Table(columns=list(_COLUMNS), data=rows)
            self._run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardMirror:
    """TensorBoard event files in ``<run>/tensorboard``; settings, plan and rollouts are logged as text."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], plan: Sequence[tuple[str, str]]):
        require("tensorboard", extra="tensorboard", used_by="log: [tensorboard]")
        from torch.utils.tensorboard import SummaryWriter  # loads tensorboard, so not at the top

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("settings", _as_code(json.dumps(config, indent=2)))
        self._writer.add_text("plan", _as_code(_lines(plan)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        if rows := _table(step, rollouts):
            blocks = (json.dumps(dict(zip(_COLUMNS, row, strict=True)), indent=2, ensure_ascii=False) for row in rows)
            self._writer.add_text("rollouts", _as_code("\n".join(blocks)), step)

    def close(self) -> None:
        self._writer.close()


class MLflowMirror:
    """MLflow, at the server or database in MLFLOW_TRACKING_URI if that is set, else in ``<run>/mlflow``."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], plan: Sequence[tuple[str, str]]):
        mlflow = require("mlflow", extra="mlflow", used_by="log: [mlflow]")
        name = run_dir.resolve().name
        folder = run_dir.resolve() / "mlflow"
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("llmrl")
        number = experiment.experiment_id if experiment else self._client.create_experiment("llmrl", artifacts)
        # A resumed run continues the MLflow run of the same name.
        known = self._client.search_runs([number], f"attributes.run_name = '{name}'", max_results=1)
        self._id = (known[0] if known else self._client.create_run(number, run_name=name)).info.run_id
        self._client.log_dict(self._id, dict(config), "settings.json")
        self._client.log_text(self._id, _lines(plan), "plan.txt")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # MLflow rejects names such as eval/aime25/pass@16.
            self._client.log_metric(self._id, re.sub(r"[^\w./ -]", "_", name), value, step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        if rows := _table(step, rollouts):
            lines = (json.dumps(dict(zip(_COLUMNS, row, strict=True))) for row in rows)
            self._client.log_text(self._id, "\n".join(lines), f"rollouts/step{step:06d}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._id)


MIRRORS = {"wandb": WandbMirror, "tensorboard": TensorBoardMirror, "mlflow": MLflowMirror}


def _table(step: int, rollouts: Sequence[Rollout]) -> list[list[Any]]:
    """Table rows from the worst to the best reward, evenly spaced; empty for steps without a table."""
    if step != 1 and step % _EVERY:
        return []
    scored = sorted(rollouts, key=lambda rollout: -1e300 if rollout.reward is None else rollout.reward)
    number = min(_ROWS, len(scored))
    chosen = [scored[index * (len(scored) - 1) // max(1, number - 1)] for index in range(number)]
    return [[step, *(getattr(rollout, name) for name in _COLUMNS[1:])] for rollout in chosen]


def _lines(plan: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<10} {text}" for label, text in plan)


def _as_code(text: str) -> str:
    """The text as a Markdown code block, which shows every character unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
