"""``llmrl new reward|tool|env|recipe NAME``: files to start from, with a test that passes."""

from __future__ import annotations

import keyword
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

from llmrl.errors import ConfigError
from llmrl.run.console import make_console, print_summary
from llmrl.run.files import writing

KINDS = ("reward", "tool", "env", "recipe")


def new(kind: str, name: str, *, folder: Path) -> int:
    """Writes ``NAME.py`` and ``test_NAME.py`` (for a recipe also its YAML and data) into ``folder``, and returns 0.

    Raises  ConfigError for an invalid or taken module name, or if a file exists; nothing is written then
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"llmrl new  NAME must be a name in lower case, as that of a Python module: got {name!r}")
    if name in sys.modules or find_spec(name):  # a file of that name here would shadow it
        raise ConfigError(f"llmrl new  {name} is the name of a module that is installed; choose another name")
    starters = sorted(resources.files("llmrl.commands").joinpath("starters").iterdir(), key=lambda file: file.name)
    starters.sort(key=lambda file: file.name.startswith("test_"))
    words = {"name": name, "Name": name.title().replace("_", "")}
    texts = {
        folder / starter.name.removesuffix(".txt").replace(kind, name, 1): Template(starter.read_text()).substitute(
            words
        )
        for starter in starters
        if starter.name.removeprefix("test_").split(".")[0] == kind
    }
    if taken := [path.name for path in texts if path.exists()]:
        raise ConfigError(f"llmrl new  {', '.join(taken)} exists; choose another name, or another folder with --folder")
    for path, text in texts.items():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    following = [f"pytest {folder / f'test_{name}.py'}"] + [f"llmrl grpo {name}.yaml"] * (kind == "recipe")
    files = ", ".join(str(path) for path in texts)
    print_summary(make_console(), [f"{kind} {name}"], files=files, following=following)
    return 0
