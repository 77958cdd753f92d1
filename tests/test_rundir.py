import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmrl.errors import ConfigError
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
