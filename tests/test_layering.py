"""Imports point one way. The table is the one of AGENTS.md; a row may import the rows it names and itself."""

import ast
import graphlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"llmrl.chat_templates": "chat_templates", "llmrl.tools": "tools", "llmrl.recipes": "recipes"}

BASE = (
    "llmrl.errors",
    "llmrl.lazy",
    "llmrl.optional",
    "llmrl.settings",
    "llmrl.loading",
    "llmrl.strict_json",
    "llmrl.text_files",
    "llmrl.hub",
    "llmrl.notebook_html",
    "llmrl.package_envs",
    "llmrl.concurrency",
)
TOOLS = ("llmrl.tools", "llmrl.chat_templates")
BELOW_TRAIN = (
    *(*BASE, *TOOLS, "llmrl.data", "llmrl.modules", "llmrl.envs", "llmrl.envs.llm", "llmrl.objectives"),
    *("llmrl.weight_update", "llmrl.collectors", "llmrl.testing", "llmrl.endpoint", "llmrl.run", "llmrl.report"),
)
TRAIN = ("llmrl.train", "llmrl.train.settings", "llmrl.train.models", "llmrl.train.data", "llmrl.train.planning")
TABLE: dict[str, tuple[str, ...]] = {
    "llmrl": ("llmrl.lazy",),
    **{module: BASE for module in BASE},
    "llmrl.tools": BASE,
    "llmrl.chat_templates": BASE,
    "llmrl.data": (*BASE, *TOOLS),
    "llmrl.weight_update": BASE,
    "llmrl.modules": (*BASE, *TOOLS, "llmrl.data", "llmrl.weight_update"),
    "llmrl.envs": (*BASE, "llmrl.data"),
    "llmrl.envs.llm": (*BASE, *TOOLS, "llmrl.data", "llmrl.envs", "llmrl.modules"),
    "llmrl.objectives": (*BASE, "llmrl.data", "llmrl.modules", "llmrl.envs.transforms.base"),
    "llmrl.collectors": (
        *(*BASE, *TOOLS, "llmrl.data", "llmrl.modules", "llmrl.envs", "llmrl.envs.llm"),
        *("llmrl.objectives", "llmrl.weight_update"),
    ),
    "llmrl.testing": (*BASE, *TOOLS, "llmrl.data", "llmrl.modules", "llmrl.envs", "llmrl.envs.llm"),
    "llmrl.endpoint": (*BASE, *TOOLS, "llmrl.data", "llmrl.modules", "llmrl.envs.llm"),
    "llmrl.run": BASE,
    "llmrl.report": (*BASE, "llmrl.run"),
    "llmrl.train": (*BELOW_TRAIN, *TRAIN),
    **{room: (*BELOW_TRAIN, *TRAIN[:number]) for number, room in enumerate(TRAIN) if number},
    "llmrl.train.rollouts": (*BELOW_TRAIN, *TRAIN),
    "llmrl.commands": ("llmrl",),  # anything
    "llmrl.recipes": ("llmrl",),  # anything
}
NO_TORCH = {*BASE, *TOOLS, "llmrl.run", "llmrl.report"}
READS_TENSORS = {"llmrl.run.mirrors"}

# Import names that belong to a distribution of another name, or come with one that llmrl depends on.
PROVIDED_BY = {"yaml": "pyyaml", "pydantic_core": "pydantic"}
PROVIDED_BY |= {"tokenizers": "transformers", "safetensors": "transformers", "huggingface_hub": "transformers"}
PROVIDED_BY |= {"cloudpickle": "tensordict"}


# Programs for environments that have other packages.
IN_ANOTHER_PYTHON = {
    "llmrl.endpoint.verifiers_program": {"verifiers", "aiohttp"},
    "llmrl.envs.llm.tasks.textarena_game": {"textarena"},
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in {"llmrl": "llmrl", **FOLDERS}.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def row(name: str) -> str:
    """The longest entry of the table that a module is, or is inside of."""
    rows = [entry for entry in TABLE if name == entry or (entry != "llmrl" and name.startswith(f"{entry}."))]
    return max(rows, key=len, default="")


FACES_OF_OTHERS = {  # documented paths of names that live in a package below them, loaded on demand
    "llmrl.data.llm": "llmrl.collectors.llm.rollout_from_model",
    "llmrl.modules": "llmrl.envs.rnn",
}


@cache
def imports(name: str) -> tuple[tuple[str, int], ...]:
    """Every import that can run, wherever it stands; those under ``if TYPE_CHECKING`` never run."""

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes: list[ast.AST] = list(node.orelse)
        else:
            nodes = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
            base = node.module or ""
            if node.level:
                above = package.split(".")[: package.count(".") + 2 - node.level]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                yield (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base), node.lineno
        for child in nodes:
            yield from walk(child)

    return tuple(walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


def named(name: str) -> set[str]:
    """The modules whose names a package loads on demand."""
    blocks = [node for node in ast.parse(MODULES[name].read_text()).body if isinstance(node, ast.If)]
    return {node.module for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)}


def allowed(importer: str, imported: str) -> bool:
    own = row(importer)
    if TABLE[own] == ("llmrl",) or row(imported) == own:
        return True
    return any(imported == entry or row(imported) == entry for entry in TABLE[own])


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_stands_above_it(name):
    assert row(name), f"{name} is in no row of the table"
    wrong = [
        f"{MODULES[name].name}:{line} imports {imported}"
        for imported, line in imports(name)
        if imported.partition(".")[0] == "llmrl" and not allowed(name, imported)
    ]
    assert not wrong


@pytest.mark.parametrize("name", [name for name in MODULES if MODULES[name].name == "__init__.py" and name != "llmrl"])
def test_a_package_shows_names_of_its_own_and_of_what_stands_above_it(name):
    assert {home for home in named(name) if not allowed(name, home)} <= {FACES_OF_OTHERS.get(name)}


@pytest.mark.parametrize("name", [name for name in MODULES if row(name) in NO_TORCH and name not in READS_TENSORS])
def test_what_answers_on_the_command_line_does_not_know_torch(name):
    heavy = {"torch", "tensordict", "transformers", "datasets", "accelerate"}
    assert not {imported.partition(".")[0] for imported, _ in imports(name)} & heavy


@pytest.mark.parametrize("name", MODULES)
def test_every_other_package_is_a_dependency_and_extras_come_through_require(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {line.partition(">")[0].partition("[")[0].replace("-", "_") for line in project["dependencies"]}
    used = {imported.partition(".")[0] for imported, _ in imports(name)} - set(sys.stdlib_module_names) - {"llmrl"}
    used -= IN_ANOTHER_PYTHON.get(name, set())
    assert {PROVIDED_BY.get(package, package) for package in used} <= known


def test_no_imports_go_in_a_circle_but_for_append_transform():
    graph = {name: {found for found, _ in imports(name) if found in MODULES} - {name} for name in MODULES}
    graph["llmrl.envs.base"].remove("llmrl.envs.transforms.transformed_env")  # append_transform wraps the env
    order = graphlib.TopologicalSorter(graph).static_order()  # raises CycleError, which names the modules
    assert set(order) == set(MODULES)


def test_folders_that_runs_leave_in_a_checkout_change_no_check_of_style(tmp_path):
    """Regression: a folder runs/ made ``from runs import run_steps`` in scripts/bench an import of our own package."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    names = {path.stem for path in (ROOT / "scripts/bench").glob("*.py")} | {"runs", "build", "exports", "models"}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "left.py").write_text("import sys, os\n")
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_the_table_knows_no_module_that_is_gone():
    assert [entry for entry in TABLE if entry not in MODULES] == []


def test_the_walker_sees_imports_everywhere_but_under_type_checking(tmp_path, monkeypatch):
    path = tmp_path / "module.py"
    path.write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nfrom .b import c\n"
        "if TYPE_CHECKING:\n    import llmrl.commands.cli\nelse:\n    import yaml\n"
        "def f():\n    from llmrl import recipes\n"
    )
    monkeypatch.setitem(MODULES, "llmrl.data.module", path)
    found = [found for found, _ in imports("llmrl.data.module")]
    assert found == ["__future__", "typing", "llmrl.data.b", "yaml", "llmrl.recipes"]
    assert not allowed("llmrl.data.module", "llmrl.recipes")
    assert not allowed("llmrl.data.module", "llmrl.envs.base")
    assert allowed("llmrl.objectives.llm.advantage", "llmrl.envs.transforms.base")
    assert not allowed("llmrl.objectives.llm.advantage", "llmrl.envs.base")
