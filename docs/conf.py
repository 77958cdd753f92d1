"""Settings of Sphinx: the pages of this folder, the README as the first one, and a page per package from docstrings.

scripts/docs builds the site; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

PACKAGES = {
    "llmrl.envs.llm": "Conversations as environments",
    "llmrl.envs.llm.transforms": "Between the turns: tools, rewards, users, KL",
    "llmrl.modules.llm": "Models as policies, and engines",
    "llmrl.collectors.llm": "Collectors of conversations",
    "llmrl.objectives.llm": "Losses and advantages",
    "llmrl.data.llm": "History, chat templates, datasets",
    "llmrl.data": "Replay buffers, specs, maps",
    "llmrl.envs": "Environments of any kind",
    "llmrl.envs.transforms": "Transforms of any environment",
    "llmrl.collectors": "Collectors of any environment",
    "llmrl.weight_update": "Weights to workers elsewhere",
    "llmrl.modules": "Recurrent modules",
    "llmrl.tools": "What a model can call",
    "llmrl.testing": "For tests: tiny models, scripted policies",
}

project = html_title = "llmrl"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_copy_source = False
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
maximum_signature_line_length = 100
suppress_warnings = ["ref.python"]  # a name that two packages export


def setup(app):
    app.connect("config-inited", write_package_pages)
    app.connect("autodoc-process-docstring", as_restructured_text)


def write_package_pages(app, config) -> None:
    """Writes api/PACKAGE.md for each package: its public classes and functions, under the names that users import."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    pages: dict[int, str] = {}
    for package, title in PACKAGES.items():
        module = importlib.import_module(package)
        lines = [f"# {package}", "", f"{title}.", "", "```{eval-rst}", f".. currentmodule:: {package}", ""]
        elsewhere = []
        for name in sorted(set(module.__all__)):
            value = getattr(module, name)
            kind = "class" if inspect.isclass(value) else "function" if inspect.isfunction(value) else None
            if kind is None or not value.__module__.startswith("llmrl"):
                continue
            if (page := pages.setdefault(id(value), package)) != package:
                elsewhere.append(f"`{name}` ([{page}]({page}.md))")
            else:
                lines += [f".. auto{kind}:: {package}.{name}", "   :members:" if kind == "class" else "", ""]
        also = f"Also here: {', '.join(elsewhere)}.\n" if elsewhere else ""
        text = "\n".join([*lines, "```", "", also])
        page = folder / f"{package}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:  # else Sphinx reads it again
            page.write_text(text, encoding="utf-8")


def as_restructured_text(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings as Sphinx reads them: aligned rows as they stand, examples as code, names in single quotes as code."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    lines[:] = "\n\n".join(_block(block) for block in blocks).splitlines()


def _block(block: str) -> str:
    if block.lstrip().startswith(">>>"):
        return inspect.cleandoc(block)
    if re.search(r"\S {2,}\S", block) or re.search(r"^ +", block, re.MULTILINE):  # rows in columns
        return "::\n\n" + "\n".join(f"    {line}" for line in block.replace("``", "").splitlines())
    escaped = re.sub(r"(?<![`\\])([*|_])(?=\S)", r"\\\1", re.sub(r"(``.+?``|`.+?`)", _hide, block, flags=re.DOTALL))
    return re.sub("\x00(.+?)\x01", lambda match: f"``{_HIDDEN[int(match[1])]}``", escaped)


_HIDDEN: list[str] = []


def _hide(match: re.Match[str]) -> str:
    _HIDDEN.append(" ".join(match[0].strip("`").split()))
    return f"\x00{len(_HIDDEN) - 1}\x01"
