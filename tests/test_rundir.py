import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from llmrl.errors import ConfigError, DataError, RunFolderError
from llmrl.run import files
from llmrl.run.files import replace_file
from llmrl.run.metrics import read_metrics
from llmrl.run.rollout_log import RolloutLog, read_rollouts
from llmrl.run.run_dir import RunDir


def test_a_run_is_named_after_its_recipe_and_four_digits(tmp_path):
    run = RunDir.create("Sums_GRPO", "model: m\n", root=tmp_path)
    assert re.fullmatch(r"sums-grpo-[0-9a-f]{4}", run.path.name)
    assert run.path.is_dir()


def test_runs_that_start_in_the_same_nanosecond_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 1)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDir.create("sums", "same", root=tmp_path), range(32)))
    assert len({run.path for run in runs}) == 32


def test_a_name_that_is_taken_is_refused_and_points_to_resume(tmp_path):
    RunDir.create("sums", "", root=tmp_path, name="try1")
    with pytest.raises(ConfigError, match=r"try1 exists; .*llmrl resume"):
        RunDir.create("sums", "", root=tmp_path, name="try1")


@pytest.mark.parametrize(
    ("kept", "is_used_again"),
    [
        ({}, True),
        ({"metrics.jsonl": '{"step": 0, "eval/sums/mean": 0.5}\n'}, True),
        ({"metrics.jsonl": '{"step": 1, "policy/loss": 0.5}\n'}, False),
        ({"metrics.jsonl": "not JSON"}, False),
        ({"notes.txt": "of the user"}, False),
    ],
)
def test_the_name_of_a_run_that_ended_before_its_first_step_is_used_again(tmp_path, kept, is_used_again):
    run = RunDir.create("sums", "", root=tmp_path, name="try1")
    run.write_config("steps: 1")
    with run.lock():
        pass  # as each training does
    for name, text in kept.items():
        (run.path / name).write_text(text)
    if not is_used_again:
        with pytest.raises(ConfigError, match="exists"):
            RunDir.create("sums", "", root=tmp_path, name="try1")
        return
    again = RunDir.create("sums", "", root=tmp_path, name="try1")
    assert (again.path, list(again.path.iterdir())) == (run.path, [])


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "a b"])
def test_a_name_must_be_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="--name"):
        RunDir.create("sums", "", root=tmp_path, name=name)


def test_a_run_is_opened_by_path_or_by_name(tmp_path):
    run = RunDir.create("sums", "", root=tmp_path, name="try1")
    run.config.write_text("")
    assert RunDir.open(run.path) == RunDir.open("try1", root=tmp_path) == run
    with pytest.raises(ConfigError, match=r"did you mean .*try1"):
        RunDir.open("tyr1", root=tmp_path)


def test_info_is_read_back_and_a_broken_file_is_named(tmp_path):
    run = RunDir(tmp_path)
    for content in (None, "[]", "[" * 100_000, "{", '{"origins": 3}', '{"plan": {}}'):
        if content is not None:
            run.info.write_text(content)
        with pytest.raises(ConfigError, match=r"run\.json"):
            run.read_info()
    run.write_info({"command": "sft"})
    run.write_config("steps: 3\n")
    assert run.read_info() == {"command": "sft"}
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "run.json"}  # no draft is left


def test_a_link_in_a_run_folder_is_not_followed(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    for name in (".lock", "metrics.jsonl", "rollouts", "checkpoints"):
        run = RunDir.create("r", "", root=tmp_path, name=f"run{name}")
        (run.path / name).symlink_to(tmp_path if "." not in name else precious)
        with pytest.raises(RunFolderError, match=rf"'{name}' is a link"), run.lock():
            pass
        assert run.holder is None
    (run.path / "rollouts").mkdir()
    (run.path / f".config.yaml.{os.getpid()}.draft").symlink_to(precious)
    run.write_config("steps: 3\n")
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "large"])
def test_only_regular_files_of_bounded_size_are_read_and_nothing_waits(tmp_path, kind):
    run = RunDir.create("r", "", root=tmp_path)
    (run.path / "rollouts").mkdir()
    (tmp_path / "elsewhere").write_text("{}")
    for path in (run.config, run.info, run.metrics, run.rollouts / "step000009.parquet", run.path / ".lock"):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "large":
            path.touch()
            os.truncate(path, 5 << 30)  # a hole: takes no space
        else:
            path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "elsewhere")
    for read in (run.read_config, run.read_info):
        with pytest.raises(ConfigError, match="cannot be read"):
            read()
    for read in (read_metrics, read_rollouts):
        with pytest.raises(DataError):
            read(run.path)
    assert run.holder is None


def test_a_write_that_fails_leaves_no_draft_and_the_old_file(tmp_path, monkeypatch):
    replace_file(tmp_path / "config.yaml", "old")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(full))
    with pytest.raises(RunFolderError, match="make room"):
        replace_file(tmp_path / "config.yaml", "new")
    log = RolloutLog(tmp_path)
    with pytest.raises(RunFolderError, match="make room"):
        log.write(1, [])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "rollouts"]
    assert (tmp_path / "config.yaml").read_text() == "old"


@pytest.mark.parametrize(("total", "free", "words"), [(4 << 20, 1 << 19, "0.50 MiB"), (4 << 30, 1 << 29, "0.50 GiB")])
def test_free_space_is_told_in_a_unit_that_fits_the_disk(tmp_path, monkeypatch, total, free, words):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))
    assert files.free_space(tmp_path) == f"{words} free of 4.00 {words[-3:]} on that disk"
