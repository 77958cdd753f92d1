"""A workplace for the recipes: a folder that runs write to, tiny models, and data and rewards of a user's own."""

from __future__ import annotations

import importlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmrl.commands.cli import main
from llmrl.modules.llm.vision import model_class
from llmrl.run.metrics import read_metrics
from llmrl.run.rollout_log import Rollout, read_rollouts
from llmrl.train.distributed import Session
from llmrl.train.settings import SFTConfig
from tests.support.commands import Result
from tests.support.processes import wait_until
from tests.support.ranks import ROOT, run_ranks
from tests.support.saved_models import save_tiny

TINY = {"hidden_size": 32, "layers": 1, "heads": 2}
SFT = {
    "model": TINY,
    "data": {"path": "sums", "rows": 40},
    "batch_size": 8,
    "steps": 3,
    "optim": {"lr": 1e-2, "warmup": 1},
    "samples": 1,
}
DPO = {**SFT, "data": {"path": "sums", "rows": 20}}
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
MIX = {  # in place of the one task of GRPO
    "dataset": None,
    "reward": None,
    "mix": [
        {"dataset": "prompts.jsonl", "reward": "vowels:share", "weight": 2, "eval_dataset": "prompts.jsonl"},
        {"name": "big_sums", "tools": ["calculator"], "max_turns": 2}
        | {"dataset": "prompts.jsonl", "eval_dataset": "prompts.jsonl"},
    ],
}
CRITIC = {"critic_optim": {"lr": 1e-2}, "critic_warmup": 1, "gamma": 0.99, "lam": 0.9}
PPO = {**GRPO, "prompts_per_step": 14, "group_size": 1, "ppo": CRITIC}
BASES = {"sft": SFT, "dpo": DPO, "reward": REWARD, "grpo": GRPO, "ppo": PPO, "rejection": GRPO, "distill": GRPO}
OWN_ENGINE = """
import copy
from llmrl.modules.llm.engines import TransformersEngine

def make(model, tokenizer, seed=None):
    ids = {"eos_token_ids": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TransformersEngine(copy.deepcopy(model), tokenizer=tokenizer, seed=seed, **ids)

def wrong(model, tokenizer):
    return model
"""
WAITED = ("async/trainer_idle", "async/engine_idle")  # measures of time
VOWELS = """
def share(completion, answer):
    return sum(letter in "aeiou" for letter in completion) / 10

def odd(completion, answer):
    return int(answer) % 2 + share(completion, answer)
"""


@dataclass
class Workplace:
    """The current folder of a test; it is on the module path, so that a reward of the user's own can be imported."""

    path: Path
    capture: pytest.CaptureFixture[str] | None = None

    def run(self, *arguments: object, **expected: Any) -> Result:
        """One ``llmrl`` command, in this process; see `Result.check` for what is ``expected``."""
        ended = main([str(argument) for argument in arguments])
        out, err = self.capture.readouterr() if self.capture else ("", "")
        return Result(ended, out, err).check(**expected)

    def train(
        self, command: str, name: str, *overrides: str, code: int = 0, words: Sequence[str] = (), **changes: Any
    ) -> Result:
        """A run ``name`` of `SFT`, `DPO`, `REWARD`, `GRPO` or `PPO` with ``changes``."""
        recipe = self.recipe(name, command, **changes)
        return self.run(command, recipe, *overrides, "--name", name, code=code, words=words)

    def plan(self, command: str, *overrides: str, code: int = 0, words: Sequence[str] = (), **changes: Any) -> Result:
        """The same as a dry run."""
        recipe = self.recipe("plan", command, **changes)
        return self.run(command, recipe, *overrides, "--dry-run", code=code, words=words)

    def process(
        self,
        *arguments: str,
        ranks: int = 1,
        module: str = "llmrl.commands.cli",
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

    def wait_for_step(self, process: subprocess.Popen[str], step: int) -> None:
        """Reads what a run prints up to the line of this step."""
        for line in process.stdout:
            if line.split()[:1] == [str(step)]:
                return
        raise AssertionError(self.finish(process, code=None).err)

    def wait_for_lines(self, process: subprocess.Popen[str], run: str, count: int) -> None:
        """Waits until a run has written metrics so often; where it ends before, shows what it said."""
        wait_until(lambda: self.num_lines(run) >= count or process.poll() is not None, 600)
        assert process.poll() is None, process.communicate()

    def wait_for_checkpoint(self, process: subprocess.Popen[str], run: str) -> None:
        """Waits until a run has published a checkpoint, which it does in the background while it takes more steps."""
        folder = self.path / "runs" / run / "checkpoints"
        wait_until(lambda: any(folder.glob("step*")) or process.poll() is not None, 600)
        assert any(folder.glob("step*")), self.finish(process, code=None).err

    def finish(self, process: subprocess.Popen[str], *, timeout_s: float = 600, **expected: Any) -> Result:
        """The end of a process; see `Result.check` for what is ``expected``."""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s; it wrote:\n{out}\n{err}") from None
        return Result(process.returncode, out, err).check(**expected)

    def ranks(
        self, *arguments: object, ranks: int = 2, module: str = "", timeout_s: float = 600, **expected: Any
    ) -> Result:
        """A command, or a module, in several processes of one run, to its end."""
        lines = [str(argument) for argument in arguments]
        if not module:
            module, lines = "tests.support.commands", [shlex.join(lines)]
        return run_ranks(module, lines, ranks=ranks, folder=self.path, timeout_s=timeout_s).check(**expected)

    def train_as_one_and_as_ranks(
        self,
        command: str,
        *overrides: str,
        step: int,
        ranks: int = 2,
        words: Sequence[str] = (),
        sizes: Mapping[str, Any] = {},
        tolerance: float = 1e-5,
        **changes: Any,
    ) -> Result:
        """A run "one" of "mine.yaml" and "two" of ``ranks`` with ``overrides``: the same numbers. The model, of these
        ``sizes``, is read from files and has tied embeddings; unless ``changes`` have a model, "one-untied" and
        "two-untied" have not.
        """
        recipe, kinds = self.recipe("mine", command, **changes), {"": "", "-untied": ""}
        if "model" in changes:
            del kinds["-untied"]
        else:
            for suffix in kinds:
                save_tiny(self.path / f"model{suffix}", tied=not suffix, **sizes)
                kinds[suffix] = f"model=model{suffix}"
        for suffix, model in kinds.items():
            self.run(command, recipe, *filter(None, [model]), "--name", f"one{suffix}")
        lines = [
            shlex.join([command, recipe, *overrides, *filter(None, [model]), "--name", f"two{suffix}"])
            for suffix, model in kinds.items()
        ]
        result = self.ranks(*lines, ranks=ranks, module="tests.support.commands", words=words)
        for suffix in kinds:
            self.same(f"one{suffix}", f"two{suffix}", tolerance=tolerance, step=step)
        return result

    def recipe(self, name: str, base: str | Mapping[str, Any], **changes: Any) -> str:
        """Writes ``<name>.yaml``: ``base``, or that of a command, with sections changed where a mapping is given."""
        settings = dict(BASES[base] if isinstance(base, str) else base)
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
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in self.metrics(run)]

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """All metrics of a run's steps but step 0."""
        return [row for row in read_metrics(self.path / "runs" / run) if row["step"]]

    def num_lines(self, run: str) -> int:
        """The lines of metrics of a run, which may be going on."""
        metrics = self.path / "runs" / run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def rollouts(self, run: str, step: int) -> list[Rollout]:
        return read_rollouts(self.path / "runs" / run, step)

    def checkpoint(self, run: str, step: int) -> Path:
        return self.path / "runs" / run / "checkpoints" / f"step{step}"

    def checkpoints(self, run: str) -> list[str]:
        return sorted(path.name for path in (self.path / "runs" / run / "checkpoints").iterdir())

    def weights(self, run: str, step: int) -> dict[str, torch.Tensor]:
        folder = self.checkpoint(run, step)
        (architecture,) = AutoConfig.from_pretrained(folder).architectures
        judges = architecture.endswith("ForSequenceClassification")
        kind = AutoModelForSequenceClassification if judges else model_class(str(folder))
        return kind.from_pretrained(folder).state_dict()

    def cut_back(self, run: str, copy: str, *, to: int) -> None:
        """Copies a run as a kill would have left it: with all its metrics, but no checkpoint after step ``to``."""
        late = [name for name in self.checkpoints(run) if int(name.removeprefix("step")) > to]
        shutil.copytree(self.path / "runs" / run, self.path / "runs" / copy, ignore=shutil.ignore_patterns(*late))

    def same(self, one: str, other: str, *, tolerance: float = 0.0, step: int = 0, without: Sequence[str] = ()) -> None:
        """Two runs have the same metrics, to the last bit or within ``tolerance``, and the same weights at ``step``."""
        steps = [{row["step"]: row for row in self.steps(run)} for run in (one, other)]
        assert list(steps[0]) == list(steps[1])
        for number, row in steps[0].items():
            assert row.keys() == steps[1][number].keys(), f"step {number}"
            for name in row.keys() - set(without):
                left, right = row[name], steps[1][number][name]
                close = left == right or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
                assert close, f"step {number}, {name}: {left} and {right}"
        if step:
            weights, others = self.weights(one, step), self.weights(other, step)
            assert weights.keys() == others.keys()
            for name, value in weights.items():
                torch.testing.assert_close(value, others[name], rtol=0, atol=1e-3 if tolerance else 0)

    def same_rollouts(self, one: str, other: str, steps: int) -> None:
        for step in range(1, steps + 1):
            assert self.rollouts(one, step) == self.rollouts(other, step)


@pytest.fixture
def session() -> Iterator[Session]:
    """This process alone, for a test that computes steps."""
    with Session(SFTConfig(model={}, data={"path": "sums"})) as session:
        yield session


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workplace:
    """An empty workplace, with prompts to answer and a reward that a random model gets some of."""
    return _furnish(Workplace(tmp_path, capsys), monkeypatch)


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """The same for the tests of one file that look at one run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield _furnish(Workplace(tmp_path_factory.mktemp("place")), monkeypatch)


def _furnish(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(place.path)
    monkeypatch.syspath_prepend(str(place.path))
    place.module("vowels", VOWELS)
    place.rows("prompts.jsonl", [{"prompt": f"Say {'x' * (i % 5)} {i}", "answer": str(i)} for i in range(12)])
    return place
