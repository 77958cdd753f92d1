"""`llmrl new`: the files that it writes pass their own tests, and none is written over."""

import subprocess
import sys

import pytest

from llmrl.commands.new import KINDS


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
