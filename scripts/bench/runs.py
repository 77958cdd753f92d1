"""Real runs of the command, in a temporary folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run_steps"]


def run_steps(*arguments: str, environment: Mapping[str, str] | None = None) -> list[dict[str, float]]:
    """The metrics of each step of ``llmrl`` with these arguments, without the evaluation before training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "llmrl.commands.cli", *arguments, "--runs", folder, "--name", "run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [metrics for metrics in map(json.loads, lines) if "time/step" in metrics]
