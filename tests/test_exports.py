"""The public names, at the paths where people look for them."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from tests.support.golden import GOLDEN

# A module, and in the lines below it what can be imported from it.
PARTS = re.findall(r"^(\S+)\n((?: .*\n)+)", (GOLDEN / "public_names.txt").read_text(), re.M)
PUBLIC = {module: names.split() for module, names in PARTS}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_import_from_their_path_are_exported_and_explained(module):
    home = importlib.import_module(module)
    for name in PUBLIC[module]:
        value = getattr(home, name)
        assert name in home.__all__
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, f"{name} needs a docstring of its own"
        assert value.__module__.startswith("llmrl.")


@pytest.mark.parametrize("module", PUBLIC)
def test_a_package_says_what_it_is_and_exports_what_it_has_and_no_module_of_that_name(module):
    home = importlib.import_module(module)
    assert home.__doc__
    assert sorted(set(home.__all__)) == sorted(home.__all__)
    assert [name for name in home.__all__ if not hasattr(home, name)] == []
    assert set(home.__all__) <= set(dir(home))
    inside = {found.name for found in pkgutil.iter_modules(getattr(home, "__path__", []))}
    assert inside & set(home.__all__) <= {"publish"}  # a name that is imported at once


SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: path.name)
def test_a_script_imports_what_there_is(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmrl"):
            home = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(home, name.name)]
            assert missing == [], f"line {node.lineno}, from {node.module}"
