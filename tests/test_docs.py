"""What the documents say can be typed, and what they point at exists."""

import dataclasses
import doctest
import re
import shlex
import sys
import types
from pathlib import Path
from typing import get_args

import pytest

from llmrl import cli
from llmrl.objectives.llm.functional import Aggregation, Correction, KLEstimator
from llmrl.objectives.llm.group_advantage import Scale
from llmrl.objectives.llm.grpo import Surrogate
from llmrl.objectives.llm.presets import PRESETS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    text = "\n".join(re.findall(r"```bash\n(.*?)```", "\n".join(page.read_text() for page in PAGES), flags=re.DOTALL))
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    launched = [re.sub(r"^torchrun .*-m llmrl\.recipes\.", "llmrl ", line) for line in lines]
    return [line for line in launched if line.startswith("llmrl ")]


def test_the_readme_shows_commands():
    assert len(commands()) >= 8


@pytest.mark.parametrize("command", [line for line in commands() if line.split()[1] in cli.RECIPES])
def test_a_training_command_of_the_documents_reaches_its_recipe(command, tmp_path, monkeypatch, capsys):
    recipe = types.ModuleType("recipe")
    recipe.run = lambda config, *, run_dir, resume: 0
    recipe.plan = lambda config, *, runs: []
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    rows = {name: dataclasses.replace(row, module="recipe") for name, row in cli.RECIPES.items()}
    monkeypatch.setattr(cli, "RECIPES", rows)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [line for line in commands() if line.split()[1] not in cli.RECIPES])
def test_every_other_command_of_the_documents_exists(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([shlex.split(command)[1], "--help"])
    assert ended.value.code == 0


def test_every_algorithm_has_a_row_that_says_what_it_is():
    rows = re.findall(
        r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*) \|$", (ROOT / "docs/algorithms.md").read_text(), re.M
    )
    table = {name: cells for name, *cells in rows}
    assert set(PRESETS) <= set(table)
    for name, preset in PRESETS.items():
        advantage, ratio, aggregation, source = table[name]
        assert f"`scale: {preset.advantage['scale']}`" in advantage
        assert ("`whiten`" in advantage) == preset.advantage.get("whiten", False)
        assert aggregation.startswith(f"`{preset.loss['aggregation']}`")
        arxiv = re.findall(r"\d{4}\.\d{5}", preset.source)
        assert all(number in source for number in arxiv) or source == "the same paper"
        surrogate = preset.loss.get("surrogate", "clip")
        if surrogate == "clip":
            low, high = preset.loss["clip_epsilon"]
            assert f"[{1 - low:g}, {1 + high:g}]" in ratio
        else:
            assert f"`{surrogate}`" in ratio


def test_every_choice_of_a_loss_is_in_its_table():
    text = (ROOT / "docs/algorithms.md").read_text()
    for names in (Scale, Aggregation, Correction, KLEstimator, Surrogate):
        assert [name for name in get_args(names) if f"| `{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_the_documents_run(page):
    assert doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_the_documents_name_exist(page):
    folders = "llmrl|recipes|scripts|docs|tests|tools|chat_templates"
    written = rf"\b(?:{folders})/[\w./-]*\w(?![\w.<-]|/<)"  # without the <name> of a pattern
    named = set(re.findall(written, page.read_text()))
    assert {name for name in named if not (ROOT / name).exists()} == set()
