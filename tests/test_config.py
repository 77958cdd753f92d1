import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator

from llmrl.errors import ConfigError
from llmrl.run.config import dump_config, dump_defaults, find_recipe, load_config, settings
from llmrl.run.yaml_source import YamlLoader
from tests.support.golden import check_golden


class Optim(BaseModel, extra="forbid"):
    lr: float = Field(1e-6, gt=0, description="learning rate")
    schedule: Literal["cosine", "constant"] = "cosine"


class Lora(BaseModel, extra="forbid"):
    rank: int = 16
    alpha: float = 32.0


class Tiny(BaseModel, extra="forbid"):
    width: int = Field(16, description="of the layers")


class Either(BaseModel, extra="forbid"):
    model: str | Tiny = Field(description="a name, or a size")


class Config(BaseModel, extra="forbid"):
    model: str = Field(description="path or name of the model")
    group_size: int = Field(
        8, ge=2, description="completions per prompt", json_schema_extra={"also": ["num_generations"]}
    )
    clip: tuple[float, float] = (0.2, 0.28)
    optim: Optim = Optim(lr=2e-5)
    lora: Lora | None = Field(None, description="low-rank adapters")
    extra: dict[str, str] = {}

    @model_validator(mode="after")
    def _ordered(self):
        if self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: low must not exceed high: got {self.clip}")
        return self


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sums.yaml"
    path.write_text(text)
    return path


def fault(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path, overrides)
    return str(caught.value)


def test_a_file_and_overrides_fill_the_model_and_say_where_each_value_came_from(tmp_path):
    path = write(tmp_path, "model: tiny\noptim:\n  lr: 1e-5\nclip: [0.1, 0.2]\n")
    loaded = load_config(Config, path, ["optim.schedule=constant", "group_size=4", "group_size=6", "lora.rank=4"])
    assert loaded.config == Config(
        model="tiny", group_size=6, clip=(0.1, 0.2), optim=Optim(lr=1e-5, schedule="constant"), lora=Lora(rank=4)
    )
    assert loaded.origins == {
        "model": "sums.yaml:1",
        "optim.lr": "sums.yaml:3",
        "clip": "sums.yaml:4",
        "optim.schedule": "command line",
        "group_size": "command line",
        "lora.rank": "command line",
    }


FILES = [  # that cannot mean one thing
    "model: tiny\noptim:\n  # a comment\n  learning_rat: 1e-5\n",
    "group_size: 1\nclip: [a, 1]\nzzzz: 1\noptim: {schedule: cosin}\n",
    *("model: a\nmodel: b\n", "optim: {lr: 1, lr: 2}\n", "model: a\n---\nmodel: b\n", "- a\n- b\n", "1: a\n"),
    "model: m\nclip: [3, 1]\n",  # the model's own
    *("# nothing\n", "model: [1, 2\nclip: 3\n", "model: a\nclip: \a\n", "model: " + "[" * 1500),
    *("model: !!python/object:os.system {}\n", "model: !!bool maybe\n", "model: !!timestamp nope\n"),
    *("a: &a\n  b: *a\n", "clip: " + "9" * 5000),
    "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefgh")),
]
OVERRIDES = [
    *("lr=1", "optim.shedule=1", "num_generations=1", "optim.learning_rate=1"),  # of another section, tool or meaning
    *("optim.zzzz=1", "lora.rnk=3", "--optim.lr=1", "optim.lr", "=1", "group_size.x=1"),
    *("clip=!!null x", "clip=!!null [1, 2]", "clip=[!mine {low: 1}]"),
    *("clip=[1", "clip=\a", "clip=" + "[" * 1500, "clip=" + "9" * 5000, "clip=!!bool abc", "clip=&a {b: *a}"),
    f"clip=[&a0 [1, 1], {', '.join(f'&a{n + 1} [*a{n}, *a{n}]' for n in range(28))}]",
]


def test_faults_of_files_and_overrides_are_said_with_their_place_and_what_was_meant(tmp_path):
    said = [(text, fault(write(tmp_path, text), *["optim.lr=-1"] * ("zzzz" in text))) for text in FILES]
    said += [(override, fault(None, "model=tiny", "group_size=8", override)) for override in OVERRIDES]
    pages = "".join(f"--- {given.strip()!r}\n{text}\n" for given, text in said)
    pages = re.sub(r"(.)\1{99,}", r"\1 and so on", pages)
    pages = re.sub(r"(not valid YAML:|its tag) (\(|expected|but found).*", r"\1 and the reason", pages)
    check_golden("config_faults", pages)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "cannot be read" in fault(tmp_path)
    path = tmp_path / "sums.yaml"
    path.write_bytes(b"group_size: 1\nmodel: caf\xe9\n")
    assert f"cannot be read: {path}, line 2 must be UTF-8 text: byte 0xe9" in fault(path)
    path.write_bytes("model: tiny\n".encode("utf-16"))
    assert "it is UTF-16" in fault(path)


def test_scalars_follow_yaml_1_2(tmp_path):
    class Loose(BaseModel):
        values: list[object]

    loaded = load_config(Loose, write(tmp_path, "values: [1e-6, no, 010, 12:30:00, 2024-01-01, ~]\n"))
    assert loaded.config.values == [1e-6, "no", "010", "12:30:00", "2024-01-01", None]


def test_a_section_given_as_an_override_replaces_the_section(tmp_path):
    path = write(tmp_path, "model: m\noptim: {lr: 1e-3, schedule: constant}\n")
    loaded = load_config(Config, path, ["optim={lr: 0.5}"])
    assert loaded.config.optim == Optim(lr=0.5, schedule="cosine")
    assert loaded.origins == {"model": "sums.yaml:1", "optim.lr": "command line"}


def test_the_dump_is_loaded_back_to_an_equal_model_and_carries_the_origins(tmp_path):
    loaded = load_config(Config, None, ["model=tiny", "optim.lr=1e-7", "lora={}", "extra={a: 'yes', b: '1e-6'}"])
    text = dump_config(loaded.config, loaded.origins)
    assert "  lr: 1.0e-07  # command line\n" in text
    assert load_config(Config, write(tmp_path, text)).config == loaded.config


@given(
    st.text(max_size=40), st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.text()), st.floats(1e-300)
)
@example("m", {}, math.inf)
def test_every_value_survives_the_round_trip_also_behind_a_comment(model, extra, lr):
    config = Config(model=model, extra=extra, optim=Optim(lr=lr))
    comments = {"model": "x.yaml:1", "optim.lr": "x.yaml:2"} | {f"extra.{key}": "command line" for key in extra}
    text = dump_config(config, comments)
    assert Config.model_validate(yaml.load(text, YamlLoader)) == config
    assert text.count("  # ") >= 2 + len(extra)


def test_defaults_list_every_setting_with_its_meaning():
    assert dump_defaults(Config) == (
        "model: null  # required; path or name of the model\n"
        "group_size: 8  # completions per prompt\n"
        "clip: [0.2, 0.28]\n"
        "optim:\n"
        "  lr: 2.0e-05  # learning rate\n"
        "  schedule: cosine\n"
        "lora: null  # low-rank adapters; a section of rank, alpha\n"
        "extra: {}\n"
    )


def test_a_setting_that_is_a_word_or_a_section_is_explained_as_the_one_that_was_written():
    assert [setting.name for setting in settings(Config)][-4:] == ["lora", "lora.rank", "lora.alpha", "extra"]
    assert load_config(Either, None, ["model=a"]).config.model == "a"
    assert load_config(Either, None, ["model.width=3"]).config.model == Tiny(width=3)
    with pytest.raises(ConfigError) as caught:
        load_config(Either, None, ["model.wdth=3"])
    assert str(caught.value) == (
        "command line  model.wdth  is not a setting\ndid you mean  model.width  (of the layers, default 16)?"
    )
    assert dump_defaults(Either) == "model: null  # required; a name, or a size; a section of width\n"


def test_a_recipe_is_a_path_or_a_packaged_name(tmp_path, monkeypatch):
    path = write(tmp_path, "model: m\n")
    monkeypatch.setattr("llmrl.run.config.recipe_names", lambda: {"sums_grpo": Path("packaged/sums_grpo.yaml")})
    assert find_recipe(str(path)) == path
    assert find_recipe("sums_grpo") == find_recipe("sums_grpo.yaml") == Path("packaged/sums_grpo.yaml")
    with pytest.raises(ConfigError, match="did you mean  sums_grpo") as caught:
        find_recipe("sum_grpo.yaml")
    assert "packaged      sums_grpo" in str(caught.value)


def test_thousands_of_unknown_keys_are_counted_and_the_first_explained(tmp_path):
    text = fault(write(tmp_path, "model: m\n" + "".join(f"unknown{number}: 1\n" for number in range(2_000))))
    assert text.count("is not a setting") == 50
    assert text.endswith("and more; 2000 faults in all")
    assert "sums.yaml:2  unknown0" in text
