"""The packaged YAML files, and the settings that they leave out."""

import pytest
import yaml

from llmrl.commands.recipes import RECIPES
from llmrl.run.config import dump_config, dump_defaults, find_recipe, load_config, recipe_names

SETTINGS = {name: recipe.settings() for name, recipe in RECIPES.items()}


def settings_of(recipe: str) -> type:
    return SETTINGS[recipe.rpartition("_")[2]]


def test_every_packaged_recipe_says_in_its_name_which_command_runs_it():
    assert {"sums_sft", "sums_grpo", "gsm8k_grpo", "chat_sft"} <= set(recipe_names())
    assert {name.rpartition("_")[2] for name in recipe_names()} == set(RECIPES)


@pytest.mark.parametrize("name", recipe_names())
def test_a_packaged_recipe_is_valid_and_short(name):
    path = find_recipe(name)
    loaded = load_config(settings_of(name), path, [])
    assert loaded.config.model
    assert len(path.read_text().splitlines()) < 25


@pytest.mark.parametrize("name", recipe_names())
def test_what_a_run_writes_down_as_its_settings_gives_the_same_settings(name, tmp_path):
    loaded = load_config(settings_of(name), find_recipe(name), [])
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(loaded.config, loaded.origins), encoding="utf-8")
    assert load_config(settings_of(name), written, []).config == loaded.config


@pytest.mark.parametrize("command", list(RECIPES))
def test_the_listed_defaults_are_yaml_and_name_every_setting(command):
    listed = yaml.safe_load(dump_defaults(SETTINGS[command]))
    assert set(listed) == set(SETTINGS[command].model_fields)


def test_a_model_can_be_asked_for_with_the_word_tiny():
    config = load_config(SETTINGS["sft"], None, ["model=tiny", "data.path=sums"]).config
    assert config.model.architecture == "qwen2"
