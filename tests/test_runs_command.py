"""`llmrl runs`: one line per run, whatever state its files are in."""

import json
import subprocess
import sys
import unicodedata

import pytest

from tests.support.runs import small_run


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
