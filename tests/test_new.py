"""`llmrl new`: the files that it writes pass their own tests, and none is written over."""

import subprocess
import sys

import pytest

from llmrl.run import cli
from llmrl.run.new import KINDS


@pytest.mark.slow  # it starts pytest
def test_what_is_written_passes_its_tests(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        assert cli.main(["new", kind, f"my_{kind}"]) == 0
        assert f"pytest test_my_{kind}.py" in capsys.readouterr().out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "9 passed" in ran.stdout


@pytest.mark.parametrize("name", ["My_Reward", "class", "a-b", "../up", ""])
def test_a_name_that_no_module_can_have_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "reward", name]) == 2
    assert "as that of a Python module" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "torch"])
def test_a_name_that_another_module_has_is_refused(tmp_path, capsys, name):
    assert cli.main(["new", "reward", name, "--folder", str(tmp_path)]) == 2
    assert f"{name} is the name of a module that is installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_that_exist_stay_as_they_are(tmp_path, capsys):
    (tmp_path / "test_mine.py").write_text("mine")
    assert cli.main(["new", "tool", "mine", "--folder", str(tmp_path)]) == 2
    assert "test_mine.py exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
