"""A workplace for the recipes: a folder that runs write to, tiny models, and data and rewards of a user's own."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from llmrl.run.cli import main
from llmrl.run.metrics import read_metrics
from llmrl.run.rollout_log import Rollout, read_rollouts

ROOT = Path(__file__).parents[2]  # where tests.support is found
TINY = {"hidden_size": 32, "layers": 1, "heads": 2}
SFT = {
    "model": TINY,
    "data": {"path": "sums", "rows": 40},
    "batch_size": 8,
    "steps": 3,
    "optim": {"lr": 1e-2, "warmup": 1},
    "samples": 1,
}
DPO = {
    "model": TINY,
    "data": {"path": "sums", "rows": 20},
    "batch_size": 8,
    "steps": 3,
    "optim": {"lr": 1e-2, "warmup": 1},
    "samples": 1,
}
REWARD = {**DPO, "eval": {"rows": 6}}
GRPO = {
    "model": TINY,
    "env": {"name": "chat", "dataset": "prompts.jsonl", "reward": "vowels:share"},
    "steps": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "sampling": {"max_tokens": 8},
    "optim": {"lr": 1e-2, "warmup": 1},
    "samples": 1,
}
VOWELS = """
def share(completion, answer):
    return sum(letter in "aeiou" for letter in completion) / 10
"""


@dataclass
class Result:
    """What a command left: its exit code, and what it wrote to its two streams."""

    code: int
    out: str
    err: str


@dataclass
class Workplace:
    """The current folder of a test; it is on the module path, so that a reward of the user's own can be imported."""

    path: Path
    capture: pytest.CaptureFixture[str] | None = None

    def run(self, *arguments: str) -> Result:
        """One ``llmrl`` command, in this process."""
        code = main([str(argument) for argument in arguments])
        out, err = self.capture.readouterr() if self.capture else ("", "")
        return Result(code, out, err)

    def train(
        self, command: str, name: str, *overrides: str, code: int = 0, words: Sequence[str] = (), **changes: Any
    ) -> Result:
        """A run ``name`` of `SFT`, `DPO`, `REWARD` or `GRPO` with ``changes``: exit code, ``words`` that it wrote."""
        base = {"sft": SFT, "dpo": DPO, "reward": REWARD, "grpo": GRPO}[command]
        result = self.run(command, self.recipe(name, base, **changes), *overrides, "--name", name)
        assert result.code == code, result.err
        written = " ".join(f"{result.out} {result.err}".split())
        assert [word for word in words if " ".join(word.split()) not in written] == [], result.out + result.err
        return result

    def process(
        self,
        *arguments: str,
        ranks: int = 1,
        module: str = "llmrl.run.cli",
        start_new_session: bool = False,
        restarts: int = 0,
    ) -> subprocess.Popen[str]:
        """The same in a process of its own, or in ``ranks`` processes of one run."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(restarts)]
        command = [sys.executable, *(launcher if ranks > 1 else []), "-m", module, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": f"{self.path}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=start_new_session,
        )

    def finish(self, process: subprocess.Popen[str], *, timeout_s: float = 600) -> Result:
        """The end of a process."""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s; it wrote:\n{out}\n{err}") from None
        return Result(process.returncode, out, err)

    def recipe(self, name: str, base: Mapping[str, Any], **changes: Any) -> str:
        """Writes ``<name>.yaml``: ``base`` with sections changed where a mapping is given, replaced otherwise."""
        settings = dict(base)
        for key, value in changes.items():
            known = settings.get(key)
            settings[key] = {**known, **value} if isinstance(value, dict) and isinstance(known, dict) else value
        (self.path / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        return f"{name}.yaml"

    def rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Writes a dataset, in the format that its name ends in."""
        path = self.path / name
        if path.suffix == ".parquet":
            from pyarrow import Table, parquet

            parquet.write_table(Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return name

    def module(self, name: str, source: str) -> None:
        """Writes a module that this test alone imports."""
        (self.path / f"{name}.py").write_text(source, encoding="utf-8")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def steps(self, run: str) -> list[dict[str, Any]]:
        """The metrics of a run's steps but those that measure time, which no two runs share.

        Step 0, the evaluation before training, is not among them.
        """
        rows = [row for row in read_metrics(self.path / "runs" / run) if row["step"]]
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]

    def rollouts(self, run: str, step: int) -> list[Rollout]:
        return read_rollouts(self.path / "runs" / run, step)

    def weights(self, run: str, step: int) -> dict[str, torch.Tensor]:
        folder = self.path / "runs" / run / "checkpoints" / f"step{step}"
        (architecture,) = AutoConfig.from_pretrained(folder).architectures
        judges = architecture.endswith("ForSequenceClassification")
        kind = AutoModelForSequenceClassification if judges else AutoModelForCausalLM
        return kind.from_pretrained(folder).state_dict()

    def checkpoints(self, run: str) -> list[str]:
        return sorted(path.name for path in (self.path / "runs" / run / "checkpoints").iterdir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workplace:
    """An empty workplace, with prompts to answer and a reward that a random model gets some of."""
    return _furnish(Workplace(tmp_path, capsys), monkeypatch)


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """The same for the tests of one file that look at one run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield _furnish(Workplace(tmp_path_factory.mktemp("place")), monkeypatch)


@pytest.fixture
def sft() -> dict[str, Any]:
    """Three steps of supervised fine-tuning on the embedded task."""
    return SFT


@pytest.fixture
def dpo() -> dict[str, Any]:
    """Three steps of direct preference optimisation on the embedded task."""
    return DPO


@pytest.fixture
def reward() -> dict[str, Any]:
    """Three steps of a reward model on the embedded task."""
    return REWARD


@pytest.fixture
def grpo() -> dict[str, Any]:
    """Three steps of GRPO on the workplace's prompts and reward."""
    return GRPO


@pytest.fixture
def same():
    """Compares the steps of two runs: to the last bit, or within ``tolerance``."""
    return _compare


def _furnish(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(place.path)
    monkeypatch.syspath_prepend(str(place.path))
    place.module("vowels", VOWELS)
    place.rows("prompts.jsonl", [{"prompt": f"Say {'x' * (i % 5)} {i}", "answer": str(i)} for i in range(12)])
    return place


def _compare(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], *, tolerance: float = 0.0) -> None:
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys(), f"step {left['step']}"
        for name, value in left.items():
            close = value == right[name] or math.isclose(value, right[name], rel_tol=tolerance, abs_tol=tolerance)
            assert close, f"step {left['step']}, {name}: {value} and {right[name]}"
