"""The commands and examples of the documents work, and the files that they name exist."""

import dataclasses
import doctest
import importlib
import re
import runpy
import shlex
import sys
import types
from pathlib import Path
from typing import get_args

import pytest
import yaml

from llmrl.commands import cli
from llmrl.envs.llm.transforms import make_rewards
from llmrl.objectives.llm.presets import PRESETS
from llmrl.objectives.llm.settings import Aggregation, Correction, KLEstimator, Scale, Surrogate
from llmrl.package_envs import is_there
from llmrl.run.config import recipe_names
from llmrl.train.settings import GRPOConfig
from tests.support.documents import EXAMPLES, PAGES, ROOT


def commands() -> list[str]:
    text = "\n".join(re.findall(r"```bash\n(.*?)```", "\n".join(page.read_text() for page in PAGES), flags=re.DOTALL))
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    launched = [re.sub(r"^torchrun .*-m llmrl\.recipes\.", "llmrl ", line) for line in lines]
    return [line for line in launched if line.startswith("llmrl ")]


def examples_of(suffix: str) -> pytest.MarkDecorator:
    """A test for each example that is a file of this kind."""
    found = [example for example in EXAMPLES if example.name.endswith(suffix)]
    return pytest.mark.parametrize("example", found, ids=lambda example: example.name)


OF_AGENTS = "needs openai-agents: scripts/foreign_clients suites has it"
SMALL = ("model={hidden_size: 16, layers: 1, heads: 2}", "steps=1", "prompts_per_step=2", "group_size=2")
SMALL += ("updates_per_step=1",)
SMALL += ("sampling.max_tokens=4", "env.split=validation", "eval.rows=2", "eval.max_tokens=4")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the examples in it; as for an installed command, it is not on the module path."""
    for example in EXAMPLES:
        (tmp_path / example.name).write_text(example.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    importlib.invalidate_caches()
    yield tmp_path
    for example in EXAMPLES:
        sys.modules.pop(example.name.removesuffix(".py"), None)


def test_every_file_of_the_documents_has_a_name_of_its_own():
    names = [example.name for example in EXAMPLES]
    assert len(names) >= 12
    assert len(set(names)) == len(names)


@examples_of(".py")
def test_a_program_of_the_documents_runs_and_prints_what_they_say(example, folder, monkeypatch, capsys):
    if "ReasoningGymEnv" in example.text:
        pytest.importorskip("reasoning_gym")
    if "from agents import" in example.text:
        pytest.importorskip("agents", reason=OF_AGENTS)
    if "import verifiers" in example.text:
        pytest.skip("it is for the Python that has verifiers: the recipe beside it is run")
    monkeypatch.syspath_prepend(str(folder))  # as Python does for the file that it runs
    runpy.run_path(example.name, run_name="__main__")
    assert capsys.readouterr().out == (example.prints or "")
    assert example.prints, "a program that shows nothing"


@pytest.mark.slow
@examples_of(".yaml")
def test_a_recipe_of_the_documents_trains(example, folder, capsys):
    if "name: reasoning_gym" in example.text:
        pytest.importorskip("reasoning_gym")
    if "name: verifiers" in example.text and not is_there("verifiers"):
        pytest.skip("no environment with verifiers: llmrl env install verifiers")
    assert f"llmrl grpo {example.name}" in commands(), "the page says how to run it"
    own = "jsonl" in example.text or "name: verifiers" in example.text  # it has no split, or its own
    changes = [change for change in SMALL if not own or change[:4] not in ("env.", "eval")]
    assert cli.main(["grpo", example.name, "--name", "try", *changes]) == 0, capsys.readouterr().err
    assert (folder / "runs" / "try" / "checkpoints" / "step1").is_dir()


def test_a_part_of_a_recipe_that_the_documents_show_is_valid(folder):
    text = "\n".join(page.read_text() for page in PAGES)
    parts = [part for part in re.findall(r"```yaml\n(.*?)```", text, re.S) if part not in {e.text for e in EXAMPLES}]
    assert parts
    for part in parts:
        config = GRPOConfig.model_validate({"model": "tiny", **yaml.safe_load(part)})
        rewards = [reward for task in config.env.tasks for reward in task.rewards or ()]
        specs = [reward.model_dump(exclude_none=True) for reward in rewards if reward.fn is None]
        for reward in make_rewards(specs) if specs else ():
            reward.close()


def test_the_readme_shows_commands():
    assert len(commands()) >= 8


@pytest.mark.parametrize("command", [line for line in commands() if line.split()[1] in cli.RECIPES])
def test_a_training_command_of_the_documents_reaches_its_recipe(command, folder, monkeypatch, capsys):
    if "calculator_agent" in command:
        pytest.importorskip("agents", reason=OF_AGENTS)
    recipe = types.ModuleType("recipe")
    recipe.run = lambda config, *, run_dir, resume: 0
    recipe.plan = lambda config, *, runs, gpu=None: []
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    rows = {name: dataclasses.replace(row, module="recipe") for name, row in cli.RECIPES.items()}
    for name, row in rows.items():
        monkeypatch.setitem(cli.RECIPES, name, row)
    monkeypatch.setattr(cli, "_check_early", lambda *_, **__: None)  # models and packages of the examples are not here
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
        settings = preset.settings.complete()
        assert aggregation.startswith(f"`{settings.aggregation}`")
        arxiv = re.findall(r"\d{4}\.\d{5}", preset.source)
        assert all(number in source for number in arxiv) or source == "the same paper"
        surrogate = settings.surrogate
        if surrogate == "clip":
            low, high = settings.clip
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
    written = rf"\b(?<!\.cache/)(?:{folders})/[\w./-]*\w(?![\w.<-]|/<)"  # without the <name> of a pattern
    named = set(re.findall(written, page.read_text()))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_packaged_recipe_has_a_row():
    rows = re.findall(r"^\| (`.*)", (ROOT / "docs/recipes.md").read_text(), re.M)
    assert {
        name for row in rows for name in re.findall(r"`(\w+_(?:sft|grpo|ppo|rejection|dpo|distill|reward))`", row)
    } == set(recipe_names())


def test_the_benchmarks_have_a_row_each():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "scripts/bench/README.md").read_text(), re.M)
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "scripts/bench").glob("bench_*.py")}
    assert sorted(rows) == sorted(files)


def test_the_layers_are_those_that_are_enforced():
    enforced = runpy.run_path(str(ROOT / "tests/test_layering.py"))["TABLE"]
    table = (ROOT / "AGENTS.md").read_text().partition("| module | may import |\n")[2].partition("\n\n")[0]
    named = {
        name.removeprefix("llmrl.") for row in table.splitlines() for name in re.findall(r"[\w.]+", row.split("|")[1])
    }
    assert {name.removeprefix("llmrl.") for name in enforced} - named == {"llmrl"}


def test_the_minimal_loop_is_shown_as_it_is():
    assert (ROOT / "recipes/grpo_minimal.py").read_text() in (ROOT / "docs/concepts.md").read_text()


def test_the_tree_of_the_readme_names_what_exists():
    """Every name of the block, below the folders that it is indented under."""
    tree = (ROOT / "README.md").read_text().partition("## Tree\n\n```text\n")[2].partition("```")[0]
    folders: list[tuple[int, Path]] = []
    missing = []
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        above = folders[-1][1] if folders else ROOT
        for name in re.findall(r"[\w./]+", re.split(r"\s{3,}", line.strip())[0]):
            missing += [] if (above / name).exists() else [f"{above.name}/{name}"]
            folders.append((indent, above / name))
    assert tree.strip()
    assert missing == []
