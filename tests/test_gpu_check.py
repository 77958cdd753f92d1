"""scripts/gpu_check without a GPU: every part in small sizes, parts that fail, and the bundle."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from scripts.gpu import bundle
from scripts.gpu.check import LIMITS_S, MARK, run_part
from scripts.gpu.figures import Figure, constants
from tests.support.processes import is_running, wait_until

ROOT = Path(__file__).parents[1]
COMMAND = ROOT / "scripts/gpu_check"
GIVEN = os.environ | {"PYTHON": sys.executable}
SLOW = pytest.mark.slow
MARKS = dict.fromkeys(("head", "sft", "grpo", "decode"), ()) | {"engine": (SLOW, pytest.mark.vllm)}
FIGURES = {  # some that each part must print
    "machine": {"products", "copies", "context of a process"},
    "tests": {"passed"},
    "head": {"128 x 2048: log-probs from float64", "128 x 2048: gradient of weight"},
    "memory": {"0.5B: peak", "1.5B, FSDP2: peak", "7B, LoRA: peak"},
    "sft": {"0.5B: loss by hand", "1.5B: of the loop by hand"},
    "grpo": {"largest first ratio", "time of a token, of SFT's"},
    "decode": {"log-probs, trainer - engine", "mean ratio"},
    "transfer": {"shared memory", "loss after loading"},
    "engine": {"here: start", "here, version 3: log-probs, trainer - engine", "here: a lost push is found"},
    "run": {"step", "named parts", "speed"},
}


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.chdir(ROOT)
    return importlib.import_module("scripts.gpu.parts"), importlib.import_module("scripts.gpu.engine_parts")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, SLOW)) for name in FIGURES],
)
def test_a_part_runs_in_small_sizes(parts, name):
    context = importlib.import_module("scripts.gpu.context").Context(small=True)
    figures = list((parts[0].PARTS | parts[1].PARTS)[name](context))
    assert [str(figure) for figure in figures if figure.verdict == "FAIL"] == []
    assert {f"{name}/{each}" for each in FIGURES[name]} <= {each.name for each in figures}
    assert all(math.isfinite(figure.value) for figure in figures if not isinstance(figure.value, str))


def test_every_part_has_a_limit_and_the_whole_check_runs_them_in_this_order(parts):
    assert list(LIMITS_S) == [*parts[0].PARTS, *parts[1].PARTS]


def running(code, limit_s=60.0):
    """The verdicts and values of a part that is this code."""
    figure = json.dumps(vars(Figure("part/one", 1.5, most=2.0)))
    command = [sys.executable, "-c", f"print({MARK + figure!r}, flush=True)\n{code}"]
    return [(figure.verdict, figure.value) for figure in run_part("part", command, limit_s)]


def test_a_part_that_crashes_or_lasts_too_long_is_one_line_and_leaves_no_process(tmp_path):
    assert running("") == [("PASS", 1.5)]
    said = "torch.OutOfMemoryError: CUDA out of memory."
    assert running(f"import sys; print({said!r}); sys.exit(1)") == [("PASS", 1.5), ("FAIL", said)]
    assert running("1 / 0")[1] == ("FAIL", "ZeroDivisionError: division by zero")
    assert running("import os; os.kill(os.getpid(), 11)")[1] == ("FAIL", "killed by SIGSEGV")
    child = tmp_path / "child"
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); "
    code += f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    assert running(code, limit_s=2.0)[1] == ("FAIL", "still running after 2 s")
    wait_until(lambda: not is_running(int(child.read_text())))


def test_an_interrupted_check_writes_what_it_has(tmp_path):
    file = tmp_path / "figures.json"
    command = [str(COMMAND), "machine", "--json", str(file), "--small"]
    with subprocess.Popen(command, env=GIVEN, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(1.0)  # it begins with imports of seconds
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "FAIL  gpu_check  interrupted" in out
    assert json.loads(file.read_text())["figures"][-1] == Figure.failed("gpu_check", "interrupted").as_json()


def test_parts_for_which_no_time_is_left_are_named(tmp_path):
    command = [str(COMMAND), "head", "run", "--seconds", "0", "--json", str(tmp_path / "f")]
    done = subprocess.run(command, env=GIVEN, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.findall(r"^SKIP  (\w+)  no time left", done.stdout, re.M) == ["head", "run"]
    wrong = subprocess.run([str(COMMAND), "heads"], env=GIVEN, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "unknown: heads; parts: machine, tests" in wrong.stderr


def test_figures_have_lines_and_give_the_ranges_of_the_plan():
    figures = [Figure("a", 0.9, "x", cause="weights"), Figure("b", 1.0, "x", cause="weights")]
    figures += [Figure("c", 0.5, "GiB", cause="context"), Figure.skipped("d", "no peft")]
    assert str(figures[-1]) == "SKIP  d  no peft"
    assert str(Figure("e", 2.0, "GB/s", least=3.0, most=4)) == "FAIL  e  2 GB/s  (>= 3, <= 4)"
    assert [" ".join(line.split()) for line in constants(figures)] == [
        "weights 0.9 to 1 x the plan",
        "context 0.5 GiB",
    ]


def test_the_bundle_has_what_llmrl_needs_and_the_machine_lacks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {"torch", "transformers", "numpy", "jinja2", "pyyaml"}
    not_imported = {"datasets"}  # for data that is not in files of JSON alone; too large with pandas
    needed = {line for line in project["dependencies"] if re.split(r"[<>=]", line)[0] not in there | not_imported}
    needed |= set(project["optional-dependencies"]["lora"])
    assert needed <= {*bundle.WHOLE, *bundle.ALONE}


def test_the_bundle_is_refused_where_packages_are_already(tmp_path, capsys):
    (tmp_path / "torch-2.9.0.whl").touch()
    assert bundle.bundle(tmp_path) == 1
    assert "must be empty or new" in capsys.readouterr().err
