"""YAML and ``section.key=value`` overrides as plain data, with the source line of every key.

This module accepts any key: `llmrl.run.config` checks the data against a model and uses the lines in its messages.
Scalars follow YAML 1.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llmrl.errors import ConfigError
from llmrl.run.files import read_text
from llmrl.text_files import why_not_text

KeyPath = tuple[str | int, ...]  # ("optim", "betas", 0)


class YamlLoader(yaml.SafeLoader):
    """Safe YAML with the scalar rules of version 1.2."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  overrides PyYAML's table of YAML 1.1 rules


class YamlDumper(yaml.SafeDumper):
    """Writes YAML with `YamlLoader`'s scalar rules, every string and every list of scalars on one line."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


def _null(loader: YamlLoader, node: yaml.Node) -> None:
    text = loader.construct_scalar(node)  # PyYAML's own constructor drops it
    if not re.fullmatch(_SCALARS["null"][0], text):
        raise yaml.constructor.ConstructorError(problem=f"!!null has no value: got {text!r}")


YamlLoader.add_constructor("tag:yaml.org,2002:null", _null)
for _reader_or_writer in (YamlLoader, YamlDumper):
    for _tag, (_pattern, _first) in _SCALARS.items():
        _reader_or_writer.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
YamlDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if len(text.splitlines()) > 1 or text[-1:].isspace() else None
    ),
)
YamlDumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=not any(isinstance(item, (dict, list)) for item in items)
    ),
)

_MAX_ENTRIES = 100_000
_COLLECTIONS = {"sequence": "seq", "mapping": "map"}
# PyYAML's constructors raise the others, for an integer with too many digits and for values that do not fit their tag.
_NOT_YAML = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError, OverflowError)


@dataclass
class Source:
    """Plain data, and for every key path the place where it was set."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    name: str = "command line"

    @classmethod
    def read(cls, path: Path, *, links: bool = True) -> Source:
        """Reads a file; ``links`` False refuses a link. Raises ConfigError that names every fault."""
        try:
            text = read_text(path, links=links, encoding="utf-8-sig")
        except OSError as error:
            raise ConfigError(f"{path}  cannot be read: {error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}  cannot be read: {why_not_text(path, by_line=True) or error}") from error
        source = cls(name=path.name)
        source.data, problems = source.parse(text)
        if problems:
            raise ConfigError("\n".join(problems))
        return source

    def parse(self, text: str) -> tuple[dict[str, Any], list[str]]:
        problems: list[str] = []
        try:
            loader = YamlLoader(text)
            root = loader.get_single_node()
            data = self._plain(loader, root, (), problems) if root is not None else {}
        except _NOT_YAML as error:
            line, reason = _problem(error, text)
            return {}, [f"{self.name}{f':{line}' if line else ''}  is not valid YAML: {reason}"]
        if not isinstance(data, dict):
            problems.append(f"{self.name}:1  must be a mapping of settings: got {type(data).__name__}")
        return data, problems

    def _plain(self, loader: YamlLoader, node: yaml.Node, at: KeyPath, problems: list[str]) -> Any:
        if len(at) > 32:
            raise yaml.MarkedYAMLError(problem="nested deeper than 32 levels", problem_mark=node.start_mark)
        if len(self.places) > _MAX_ENTRIES:  # nested aliases can expand a few lines without bound
            problem = f"more than {_MAX_ENTRIES:,} entries, those of aliases included"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        # Works on nodes, not on loaded values: nodes have line numbers, and mapping nodes keep repeated keys.
        if isinstance(node, yaml.CollectionNode) and node.tag != f"tag:yaml.org,2002:{_COLLECTIONS[node.id]}":
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"a {node.id} cannot have the tag {tag}; leave it out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(loader, item, (*at, index), item, problems) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            place = f"{self.name}:{key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                problems.append(f"{place}  {key!r}  must be a name: got {type(key).__name__}")
            elif key in data:
                first = self.places[(*at, key)]
                problems.append(f"{place}  {dotted((*at, key))}  is set twice: first at {first}; keep one")
            else:
                data[key] = self._item(loader, value_node, (*at, key), key_node, problems)
        return data

    def _item(self, loader: YamlLoader, node: yaml.Node, at: KeyPath, marked: yaml.Node, problems: list[str]) -> Any:
        self.places[at] = f"{self.name}:{marked.start_mark.line + 1}"
        return self._plain(loader, node, at, problems)

    def override(self, text: str) -> str | None:
        """Applies one ``section.key=value``; returns an error message, or None."""
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name):
            hint = f"; write {text.lstrip('-')}, without dashes" if equals and text.startswith("-") else ""
            return f"command line  {text}  must read section.key=value{hint}"
        try:
            loader, problems = YamlLoader(value), []
            root = loader.get_single_node()
            parsed = None if root is None else Source()._plain(loader, root, (), problems)
            if problems:
                return problems[0]
        except _NOT_YAML as error:
            return f"command line  {text}  has a value that is not valid YAML: {_problem(error, value)[1]}"
        *sections, leaf = name.split(".")
        node = self.data
        for depth, section in enumerate(sections):
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
            if not isinstance(node, dict):
                outer = ".".join(sections[: depth + 1])
                return f"command line  {text}  cannot be set: {outer} is {node!r} and not a section"
        node[leaf] = parsed
        at = (*sections, leaf)
        # The value replaces everything at this name and below it, so their places are dropped.
        self.places = {path: place for path, place in self.places.items() if path[: len(at)] != at}
        # A section that only this override creates needs a place too, for messages about the section.
        for depth in range(1, len(at)):
            self.places.setdefault(at[:depth], "command line")
        self._place_override(at, parsed)
        return None

    def _place_override(self, at: KeyPath, value: Any) -> None:
        self.places[at] = "command line"
        if isinstance(value, dict):
            for key, inner in value.items():
                self._place_override((*at, key), inner)

    def place(self, loc: KeyPath) -> tuple[KeyPath, str]:
        """The key path within a pydantic location (which also names union members), and its nearest known place."""
        at: KeyPath = ()
        for part in loc:
            if (*at, part) in self.places:
                at = (*at, part)
        return at, self.places.get(at, self.name)

    def origins(self) -> dict[str, str]:
        # A list is one setting: its items have places for messages, but no separate origins.
        inner = {path[:-1] for path in self.places if isinstance(path[-1], str)}
        leaves = {path for path in self.places if path not in inner and all(isinstance(part, str) for part in path)}
        return {dotted(path): place for path, place in self.places.items() if path in leaves}


def _problem(error: Exception, text: str) -> tuple[int | None, str]:
    """The line and the reason of an error that PyYAML raised for a text."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return mark.line + 1 if mark else None, error.problem or error.context
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return line, f"the control character {chr(error.character)!r} is not allowed; remove it, or escape it in quotes"
    if isinstance(error, RecursionError):
        return None, "nested deeper than 32 levels"
    if not isinstance(error, ValueError | OverflowError):
        return None, f"a value does not fit its tag ({type(error).__name__}: {error})"
    return None, str(error)


def dotted(path: KeyPath) -> str:
    """``("optim", "betas", 0)`` as ``optim.betas.0``."""
    return ".".join(str(part) for part in path)
