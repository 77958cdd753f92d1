import json
import os
import re
import resource
import socket
import subprocess
import sys
import unicodedata

import pytest
import yaml

from llmrl.commands import cli, run_folder
from llmrl.commands.new import KINDS
from llmrl.commands.recipes import RECIPES, Recipe
from llmrl.errors import ConfigError
from llmrl.run.checkpoint import CheckpointStore
from llmrl.run.config import load_config, recipe_names, settings
from llmrl.run.rollout_log import Rollout, RolloutLog
from llmrl.run.run_dir import RunDir
from tests.support.golden import check_golden
from tests.support.runs import small_run

RECIPE = """
from llmrl.run.checkpoint import CheckpointStore
from llmrl.errors import ConfigError, DataError, RolloutError, MissingDependencyError
from llmrl.run.run_dir import RunDir

ERRORS = {"data": DataError, "rollout": RolloutError, "extra": MissingDependencyError, "config": ConfigError}
calls = []

def plan(config, *, runs):
    return [("batch", f"{config.steps} steps of everything")]

def run(config, *, run_dir, resume=False, on_start=None):
    calls.append((config, run_dir, resume))
    if config.fail == "interrupt":
        raise KeyboardInterrupt
    if config.fail == "user":
        return 1 / 0
    if config.fail == "bug":
        return RunDir(None).metrics
    if on_start and not config.fail:
        on_start()
    if config.fail:
        raise ERRORS[config.fail]("toy: must work: got a failure")
    CheckpointStore(run_dir).save(config.steps, lambda folder: (folder / "weights").touch())
    return 0
"""

SETTINGS = """
from pydantic import BaseModel, Field

class ToyConfig(BaseModel, extra="forbid"):
    steps: int = Field(3, ge=1, description="optimizer steps")
    fail: str = ""
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A recipe of six lines in the place of sft and grpo, and a folder to work in."""
    (tmp_path / "toy_recipe.py").write_text(RECIPE)
    (tmp_path / "toy_settings.py").write_text(SETTINGS)
    (tmp_path / "toy.yaml").write_text("steps: 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("toy_recipe", "toy_settings"):
        sys.modules.pop(name, None)
    row = Recipe("toy_settings:ToyConfig", "toy_recipe")
    for command in RECIPES:
        monkeypatch.setitem(RECIPES, command, row)
    import toy_recipe

    return toy_recipe


def only_run() -> RunDir:
    (entry,) = os.listdir("runs")
    return RunDir.open(entry)


ANSWERED = """
grpo toy.yaml --dry-run
sft --defaults
runs
"""
REFUSED = """
gpro
zzzzzz
grpo
grpo toy.yaml other.yaml
grpo nowhere.yaml
grpo toy.yml
grpo toy.yaml stepz=3
grpo bad.yaml
grpo toy.yaml steps=0
grpo toy.yaml --steps 4
grpo toy.yaml --steps=3
grpo toy.yaml --model=tiny
grpo toy.yaml --dry
resume nothing
show
eval nothing
grpo toy.yaml --name a --runs toy.yaml
grpo toy.yaml --name a --runs toy.yaml/below
grpo toy.yaml --name a --runs /sys/runs
"""


def test_what_is_said_of_a_command_line_that_starts_no_run(tmp_path, toy, run_llmrl, monkeypatch):
    """Settings and plan are printed; what is wrong is said with where to look, before torch is loaded."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "bad.yaml").write_text("# comment\nstps: 5\n")
    pages = ""
    for code, lines in ((0, ANSWERED), (None, REFUSED)):
        for line in lines.strip().splitlines():
            result = run_llmrl(*line.split(), code=code)
            assert not (result.out and result.err), "one or the other"
            pages += f"$ llmrl {line}\n{result.out}{result.err}exit code {result.code}\n\n"
    for names, title in ((recipe_names(), "RECIPES"), (RECIPES, "COMMANDS")):
        pages = pages.replace(", ".join(sorted(names)), title)
    pages = pages.replace("Permission denied", "Operation not permitted")  # the one or the other, by who runs the tests
    check_golden("cli", re.sub(r"[\d.]+ s\b", "N s", pages).replace(str(tmp_path), "FOLDER"))
    assert toy.calls == []
    assert not os.path.exists("runs")


def test_a_run_gets_a_folder_with_what_was_asked_and_what_it_came_to(toy, run_llmrl):
    run_llmrl("grpo", "toy.yaml", "steps=7")
    run = only_run()
    assert run.path.name.startswith("toy-")
    assert yaml.safe_load(run.config.read_text()) == {"steps": 7, "fail": ""}
    assert "steps: 7  # command line" in run.config.read_text()
    info = run.read_info()
    assert (info["command"], info["recipe"], info["arguments"]) == ("grpo", "toy", ["toy.yaml", "steps=7"])
    assert info["origins"] == {"steps": "command line"}
    ((config, run_dir, resume),) = toy.calls
    assert (config.steps, run_dir, resume) == (7, run.path, False)


def test_options_may_stand_between_settings_and_name_and_place_the_run(toy, run_llmrl):
    run_llmrl("sft", "toy.yaml", "--name", "try1", "steps=2", "--runs", "elsewhere", "fail=''")
    assert RunDir.open("elsewhere/try1").read_info()["command"] == "sft"
    run_llmrl("sft", "steps=2")  # settings alone are enough
    assert only_run().path.name.startswith("sft-")


@pytest.mark.parametrize(
    ("failure", "code"), [("data", 3), ("extra", 3), ("rollout", 4), ("config", 2), ("interrupt", 130)]
)
def test_exit_codes_tell_the_failures_apart(toy, run_llmrl, failure, code):
    err = run_llmrl("grpo", "toy.yaml", f"fail={failure}", code=code).err
    assert ("interrupted; nothing was saved\n" if code == 130 else "toy: must work") in err
    assert "Traceback" not in err
    assert (only_run().path / "error.txt").exists() == (code == 4)
    run_llmrl("grpo", "toy.yaml", f"fail={failure}", "--name", only_run().path.name, code=code)  # it did not begin


def test_an_error_of_the_users_code_is_shown_with_its_frames_alone_and_one_of_llmrl_with_all(toy, run_llmrl):
    head, file, line, *_, kind, said = run_llmrl("grpo", "toy.yaml", "fail=user", code=4).err.splitlines()
    assert (head, line.strip(), kind) == (
        "Traceback (most recent call last):",
        "return 1 / 0",
        "ZeroDivisionError: division by zero",
    )
    path = only_run().path / "error.txt"
    place = file.split('"')[1]
    assert re.fullmatch(rf"error  +{place}:\d+, in run: {kind}; all frames: {path}", said)
    assert "cli.py" in path.read_text()
    with pytest.raises(TypeError):
        run_llmrl("grpo", "toy.yaml", "fail=bug", "--name", path.parent.name)
    assert "run_dir.py" in path.read_text()


def test_torchrun_gets_the_message_that_it_prints_last(tmp_path, toy, run_llmrl, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "told.json"))
    for failure, code, words in (
        ("rollout", 4, "toy: must work"),
        ("config", 2, "toy: must work"),
        ("user", 4, "Zero"),
    ):
        run_llmrl("grpo", "toy.yaml", f"fail={failure}", code=code)
        message = json.loads((tmp_path / "told.json").read_text())["message"]
        assert words in message["message"]
        assert int(message["extraInfo"]["timestamp"]) > 0


def test_other_ranks_leave_a_bad_setting_to_the_first_and_only_then_say_it(toy, run_llmrl, monkeypatch):
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    run_llmrl("grpo", "toy.yaml", "steps=0", code=2, words=["steps"])
    assert waited == [cli.RANK_0_SPEAKS_WITHIN_S]


def test_a_full_disk_at_the_start_is_one_line_and_leaves_no_run(toy, run_llmrl):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        (line,) = run_llmrl("grpo", "toy.yaml", code=3).err.splitlines()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "config.yaml: cannot be written: File too large; " in line
    assert line.endswith(" on that disk; make room.")
    assert os.listdir("runs") == []


@pytest.fixture
def run(toy, run_llmrl):
    """A run that the toy recipe made."""
    run_llmrl("grpo", "toy.yaml")
    return only_run()


def test_resume_goes_on_with_the_recorded_settings_and_the_changed_ones(toy, run, run_llmrl):
    run_llmrl("resume", run.path.name, "steps=9")
    config, run_dir, resume = toy.calls[-1]
    assert (config.steps, config.fail, run_dir, resume) == (9, "", run.path, True)
    assert "steps: 9  # resume" in run.config.read_text()


def test_a_resume_that_fails_before_it_goes_on_leaves_the_settings_as_they_were(run, run_llmrl):
    files = run.config.read_text(), run.info.read_text()
    run_llmrl("resume", run.path.name, "steps=9", "fail=data", code=3)
    assert (run.config.read_text(), run.info.read_text()) == files
    run_llmrl("resume", run.path.name)


def test_a_run_is_replaced_by_one_of_its_name_if_that_is_asked_for(toy, run, run_llmrl):
    again = ["grpo", "toy.yaml", "steps=9", "--name", run.path.name]
    run_llmrl(*again, code=2, words=["or replace it: --overwrite"])
    (run.path / "error.txt").touch()
    (run.path / "tensorboard").mkdir()
    err = run_llmrl(*again, "--overwrite", words=[f"removed the run {run.path} with step5"]).err
    assert len(err.splitlines()) == 1
    assert sorted(os.listdir(run.path / "checkpoints")) == ["step9"]
    assert not (run.path / "error.txt").exists()
    assert toy.calls[-1][2] is False
    run_llmrl(*again[:-1], "new", "--overwrite")


@pytest.mark.parametrize(
    ("prepare", "options", "said"),
    [
        (lambda path: (path / "notes.txt").touch(), (), "has notes.txt, which no run writes"),
        (lambda path: (path / "run.json").unlink(), (), "is not a run"),
        (lambda path: (path.rename("moved"), path.symlink_to(os.path.abspath("moved"))), (), "is not a run"),
        (lambda path: None, ("--resume",), "without --resume"),
    ],
)
def test_what_is_not_a_run_is_never_removed(run, run_llmrl, prepare, options, said):
    prepare(run.path)
    before = sorted(run.path.rglob("*"))
    run_llmrl("grpo", "toy.yaml", "--name", run.path.name, "--overwrite", *options, code=2, words=[said])
    assert sorted(run.path.rglob("*")) == before


def test_the_model_that_a_run_starts_from_is_not_removed(run):
    with pytest.raises(ConfigError, match="has the model to start from"):
        run_folder._remove(run, str(run.path))
    assert run.path.is_dir()


HOLD = """
import sys
from pathlib import Path
from llmrl.run.run_dir import RunDir

with RunDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_trains_in_one_process_at_a_time_and_a_dead_owner_holds_nothing(toy, run, run_llmrl):
    command = [sys.executable, "-c", HOLD, str(run.path)]
    resume = ("resume", run.path.name, "steps=9")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        words = [f"beside process {owner.pid} on {socket.gethostname()}, which runs"]
        assert "Traceback" not in run_llmrl(*resume, code=3, words=words).err
        run_llmrl("grpo", "toy.yaml", "--name", run.path.name, "--overwrite", code=3, words=words)
        assert len(toy.calls) == 1
        assert "steps: 9" not in run.config.read_text()
        owner.kill()
    run_llmrl(*resume)
    assert "steps: 9" in run.config.read_text()


def make_run(tmp_path, *steps, name="try1") -> RunDir:
    """A run with metrics for each step, counted from 0."""
    run = small_run(tmp_path / "runs", name, *steps, arguments=["toy.yaml"])
    rollouts = [Rollout(f"p{reward}", "c", reward, 0.0, "eos", version=1, tokens=3) for reward in (0.0, 1.0, 0.5)]
    RolloutLog(run.path).write(2, rollouts)
    CheckpointStore(run.path).save(2, lambda folder: (folder / "weights").touch())
    return run


def test_show_prints_steps_before_and_after_the_best_and_worst_sample_and_calls_of_tools(tmp_path, toy, run_llmrl):
    first, last = ({"reward/mean": reward, "time/step": 60.0} for reward in (0.25, 0.75))
    run = make_run(tmp_path, {"eval/sums/mean": 0.25}, first, last | {"eval/sums/mean": 0.5})
    columns = ("call_rate", "calls_mean", "ok_frac", "malformed_frac", "cut_frac", "error_frac")
    rows = [(0, 0, 0, 0, 0, 0), (0.25, 0.5, 0.5, 0.5, 0.25, 0), (1, 1.5, 1, 0, 0, 0)]
    tools = [{f"tools/{name}": value for name, value in zip(columns, row, strict=True)} for row in rows]
    common = {"reward/mean": 0.5, "time/step": 1.0, "tools/conversations": 8}
    make_run(tmp_path, {}, *(common | metrics for metrics in tools), name="tools")
    pages = "".join(run_llmrl("show", name).out for name in ("try1", "tools"))
    check_golden("show", pages)
    run_llmrl("show", run.path, "--step", "1", code=3)
    facts, called = (json.loads(run_llmrl("show", name, "--json").out) for name in ("try1", "tools"))
    assert facts["checkpoints"] == [2]
    assert facts["calls"] is None, "a run without tools"
    assert facts["changes"]["eval/sums"] == {"before": 0.25, "after": 0.5}
    outcomes = {"ok": {"before": 0.5, "after": 1.0}, "malformed": {"before": 0.5, "after": 0.0}}
    assert called["calls"] == {"count": 16, "outcomes": outcomes}


def test_eval_hands_the_checkpoint_to_the_evaluation(tmp_path, toy, run_llmrl, monkeypatch):
    run = make_run(tmp_path)
    (tmp_path / "toy_evaluate.py").write_text("calls = []\ndef evaluate(**k):\n    calls.append(k)\n    return 0\n")
    import toy_evaluate

    monkeypatch.setitem(sys.modules, "llmrl.commands.evaluate", toy_evaluate)
    run_llmrl("eval", "try1", "steps=9", "--json")
    (given,) = toy_evaluate.calls
    assert given["run"].path.resolve() == run.path
    assert given["checkpoint"].name == "step2"
    assert (given["config"].steps, given["as_json"]) == (9, True)
    run_llmrl("eval", "try1", "--checkpoint", "step7", code=3)


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_of_a_recipe_has_a_meaning_and_unknown_ones_are_refused(name):
    model = RECIPES[name].settings()
    assert [setting.name for setting in settings(model) if not setting.meaning and not setting.inside] == []
    sections = [setting.name.rpartition(".")[0] for setting in settings(model)]
    for section in dict.fromkeys(sections):
        with pytest.raises(ConfigError, match=rf"{section}\.?zzzz  is not a setting"):
            load_config(model, None, [f"{section}.zzzz=1".lstrip(".")])


@pytest.mark.parametrize(
    ("load", "given", "expected"),
    [
        (1.0, {}, ("PASSIVE", "10000")),
        (7.0, {}, ("PASSIVE", "1000")),
        (1.0, {"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        (1.0, {"GOMP_SPINCOUNT": "9"}, (None, "9")),
    ],
)
def test_idle_threads_soon_sleep_unless_the_user_said_how_they_wait(monkeypatch, load, given, expected):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for name in cli.WAITING:
        monkeypatch.setenv(name, "")  # so that its value comes back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    cli.main(["--version"])
    assert (os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")) == expected


def test_help_and_version_answer(run_llmrl):
    run_llmrl("--help", words=["grpo    RECIPE", "template NAME_OR_PATH"])
    run_llmrl(code=2)
    assert run_llmrl("--version").out.startswith("llmrl ")


def test_a_reader_that_stops_early_is_not_an_error():
    script = "import sys; from llmrl.commands.cli import main; sys.exit(main(['--help']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.wait(timeout=120) in (0, 120)
        assert b"Traceback" not in child.stderr.read()


@pytest.mark.slow  # it starts pytest
def test_what_is_written_passes_its_tests(tmp_path, monkeypatch, run_llmrl):
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        run_llmrl("new", kind, f"my_{kind}", words=[f"pytest test_my_{kind}.py"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "9 passed" in ran.stdout


@pytest.mark.parametrize("name", ["My_Reward", "class", "a-b", "../up", ""])
def test_a_name_that_no_module_can_have_is_refused(tmp_path, monkeypatch, run_llmrl, name):
    monkeypatch.chdir(tmp_path)
    run_llmrl("new", "reward", name, code=2, words=["as that of a Python module"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "torch"])
def test_a_name_that_another_module_has_is_refused(tmp_path, run_llmrl, name):
    words = [f"{name} is the name of a module that is installed"]
    run_llmrl("new", "reward", name, "--folder", str(tmp_path), code=2, words=words)
    assert list(tmp_path.iterdir()) == []


def test_files_that_exist_stay_as_they_are(tmp_path, run_llmrl):
    (tmp_path / "test_kept_tool.py").write_text("mine")
    run_llmrl("new", "tool", "kept_tool", "--folder", tmp_path, code=2, words=["test_kept_tool.py exists"])
    assert [path.name for path in tmp_path.iterdir()] == ["test_kept_tool.py"]


@pytest.fixture
def rows(tmp_path, monkeypatch, run_llmrl):
    monkeypatch.chdir(tmp_path)
    return lambda: {row["name"]: row for row in json.loads(run_llmrl("runs", "--json").out)}


def test_a_line_has_the_state_the_steps_and_the_best_measure(rows, run_llmrl):
    rewards = ({"eval/sums/mean": 0.3}, {"reward/mean": 0.5}, {"reward/mean": 0.4, "eval/sums/mean": 0.25})
    small_run("runs", "whole", *rewards, ended="done")
    small_run("runs", "killed", {}, {"policy/loss": 2.0}, {"policy/loss": 1.5})
    (small_run("runs", "broken", {}).info).write_text("{")
    strange = small_run("runs", "strange", {"reward/mean": 0.5})
    strange.metrics.write_text(strange.metrics.read_text() + '{"step": 1, "reward/mean": "high"}\n')
    found = rows()
    assert found.pop("strange")["best"] == 0.5, "a value that is not a number is left out"
    states = {"whole": "done", "killed": "stopped", "broken": "damaged"}
    assert {name: row["state"] for name, row in found.items()} == states
    assert (found["whole"]["metric"], found["whole"]["best"], found["whole"]["step"]) == ("sums", 0.3, 2)
    assert (found["killed"]["metric"], found["killed"]["best"]) == ("policy/loss", 1.5)
    assert found["whole"]["steps"] == 4
    lines = [line.split()[:6] for line in run_llmrl("runs").out.splitlines()]
    assert ["whole", "toy", "done", "2/4", "sums", ".300"] in lines


def test_a_run_that_another_process_trains_is_running_until_that_ends(rows):
    run = small_run("runs", "live", {})
    hold = "import sys; from llmrl.run.run_dir import RunDir\nwith RunDir.open(sys.argv[1]).lock():\n print(); input()"
    command = [sys.executable, "-uc", hold, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert f"process {process.pid} " in run.holder
        assert rows()["live"]["state"] == "running"
        process.stdin.close()
        process.wait(120)
    assert run.holder is None
    assert rows()["live"]["state"] == "stopped"


def test_without_runs_it_says_how_to_begin_one(tmp_path, monkeypatch, run_llmrl):
    monkeypatch.chdir(tmp_path)
    run_llmrl("runs", words=["llmrl sft sums_sft"])


def test_text_of_a_run_is_shown_and_not_obeyed(rows, run_llmrl, capsys):
    run = small_run("runs", "odd", {"reward/mean": 0.5})
    hostile = "\x1b]0;mine\x07\x00\x7f\x9b2J\u202e\u2066\ud800"
    names = ("recipe", "created", "llmrl", "ended")
    run.write_info(run.read_info() | dict.fromkeys(names, hostile) | {"arguments": [hostile]})
    broken = small_run("runs", "broken", {})
    broken.write_info({"command": hostile})
    for command, code in (("runs", 0), ("show odd", 0), ("eval broken", 2)):
        shown = run_llmrl(*command.split(), code=code)
        assert not [
            letter
            for letter in shown.out + shown.err
            if unicodedata.category(letter) in ("Cc", "Cf", "Cs") and letter != "\n"
        ], command
