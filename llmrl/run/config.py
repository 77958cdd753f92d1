"""Reads a YAML file and ``section.key=value`` overrides into a validated model, and writes it back; loads no torch.

The pydantic models are in `llmrl.train`. All errors of a file are reported together, each with its line, its dotted
name, and the nearest setting with its meaning (the field's ``description``) and default. Names that other tools use
are recognised too: ``json_schema_extra={"also": ["learning_rate"]}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from llmrl.errors import ConfigError, closest
from llmrl.run.masking import masked
from llmrl.run.yaml_source import Source, YamlDumper, YamlLoader, dotted

__all__ = [
    "Loaded",
    "Setting",
    "dump_config",
    "dump_defaults",
    "find_recipe",
    "load_config",
    "recipe_names",
    "settings",
]

Model = TypeVar("Model", bound=BaseModel)
_MAX_FAULTS = 50  # that are explained; each takes milliseconds


@dataclass(frozen=True)
class Loaded(Generic[Model]):
    """A valid configuration and where each value that is not a default came from."""

    config: Model
    origins: dict[str, str] = field(default_factory=dict)  # dotted name -> "sums.yaml:9" or "command line"


@dataclass(frozen=True)
class Setting:
    """One leaf of a configuration model, for ``--defaults`` and for suggestions on misspelt names."""

    name: str  # dotted
    meaning: str
    default: str  # as YAML; "required" if there is none
    also: tuple[str, ...] = ()
    inside: str = ""  # names in it, if it is an optional section

    def __str__(self) -> str:
        default = "required" if self.default == "required" else f"default {self.default}"
        return f"{self.name}  ({', '.join(filter(None, [self.meaning, default]))})"


def load_config(
    model_cls: type[Model],
    given: Source | Path | str | None,
    overrides: Sequence[str] = (),
    *,
    written: bool = False,
    read: Collection[str] = (),
) -> Loaded[Model]:
    """Fills ``model_cls`` from YAML (None: defaults only), then from overrides such as ``optim.lr=2e-6``.

    An override's value is YAML (``clip=[0.2, 0.3]``). If two set the same name, the later wins. An override that names
    a whole section replaces it.

    ``written``: a run wrote the file, maybe an earlier version, which took settings without effect. Of such a file, and
    of a packaged recipe, a validator judges what the overrides set: its context has their names as "changed".
    ``read``: names that the command reads in any case, which are not judged.

    Returns  the model, with the origin of each value that was given
    Raises   ConfigError that lists the first 50 faults: unreadable file, repeated key, unknown name, value out of range
    """
    source = given if isinstance(given, Source) else Source.read(Path(given)) if given is not None else Source()
    problems = [problem for text in overrides if (problem := source.override(text))]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        written = written or given in recipe_names().values()
        changed = {text.partition("=")[0] for text in overrides} - {*read} if written else None
        config = model_cls.model_validate(source.data, context={"changed": changed})
    except ValidationError as error:
        known = list(settings(model_cls, items=True))
        faults = _without_other_members(error.errors()[: 10 * _MAX_FAULTS], source)
        faults.sort(key=lambda fault: _line(source.place(fault["loc"])[1]))
        lines = [_explain(fault, source, known) for fault in faults[:_MAX_FAULTS]]
        if error.error_count() > 10 * _MAX_FAULTS or len(faults) > _MAX_FAULTS:
            lines.append(f"and more; {error.error_count()} faults in all")
        raise ConfigError("\n".join(lines)) from None
    return Loaded(config, source.origins())


def dump_config(config: BaseModel, origins: Mapping[str, str] | None = None, *, mask: bool = False) -> str:
    """The whole configuration as YAML, which `load_config` reads back to an equal model.

    With ``origins`` (of a `Loaded`), each explicitly set value has a comment that names its source. ``mask`` replaces
    secrets, for text that is shown.

    >>> class Optim(BaseModel):
    ...     lr: float = 1e-6
    ...     betas: tuple[float, float] = (0.9, 0.95)
    >>> print(dump_config(Optim(lr=2e-6), {"lr": "command line"}), end="")
    lr: 2.0e-06  # command line
    betas: [0.9, 0.95]
    """
    tree = config.model_dump(mode="json")
    return _to_yaml(masked(tree) if mask else tree, origins or {})


def dump_defaults(model_cls: type[BaseModel]) -> str:
    """Every setting as YAML: its default as the value, its meaning as the comment. Required ones are left open."""
    tree: dict[str, Any] = {}
    comments = {}
    closed: list[Setting] = []  # optional sections that are off by default
    for setting in settings(model_cls):
        if any(setting.name.startswith(f"{section.name}.") for section in closed):
            continue
        if setting.inside:
            closed.append(setting)
        *sections, leaf = setting.name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        required = setting.default == "required"
        node[leaf] = None if required else yaml.load(setting.default, YamlLoader)
        inside = f"a section of {setting.inside}" if setting.inside else ""
        comments[setting.name] = "; ".join(filter(None, ["required" * required, setting.meaning, inside]))
    return _to_yaml(tree, comments)


def settings(
    model_cls: type[BaseModel], prefix: str = "", filled: BaseModel | None = None, *, items: bool = False
) -> Iterator[Setting]:
    """Every leaf setting of a model and of the models inside it, in the order of declaration.

    An optional section that is off by default is yielded itself, followed by its leaves. ``filled`` is an instance
    whose values replace the class defaults, as in ``optim: Optim = Optim(lr=1e-5)``. With ``items`` the leaves of
    sections in a list or a mapping follow too, named with * for the place: ``env.mix.*.weight``.
    """
    for name, info in model_cls.model_fields.items():
        own = prefix + name
        default = PydanticUndefined if info.is_required() else info.get_default(call_default_factory=True)
        if isinstance(filled, model_cls):
            default = getattr(filled, name)
        nested = list(_models_in(info.annotation))
        is_section = isinstance(default, BaseModel) or (default is PydanticUndefined and _only_models(info.annotation))
        if not nested or not is_section:
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            yield Setting(
                name=own,
                meaning=(info.description or "").strip(),
                default="required" if default is PydanticUndefined else _one_line(default),
                also=tuple(map(str, extra.get("also", ()))),
                inside=", ".join(field for inner in nested for field in inner.model_fields),
            )
        for inner in nested:
            yield from settings(inner, f"{own}.", default if isinstance(default, inner) else None, items=items)
        for inner in _models_in(info.annotation, among=True) if items else ():
            yield from settings(inner, f"{own}.*.", items=True)


def find_recipe(name: str) -> Path:
    """The YAML file of ``name``: an existing path, else a packaged recipe with or without ``.yaml``.

    Raises  ConfigError that lists the packaged recipes
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    stem = name.removesuffix(".yaml")
    packaged = recipe_names()
    if stem in packaged:
        return packaged[stem]
    beside = [str(file) for ending in ("yaml", "yml") for file in path.parent.glob(f"*.{ending}")]
    match = closest(str(path), beside) or closest(stem, packaged)
    hint = f"\ndid you mean  {match}?" if match else ""
    listed = f"\npackaged      {', '.join(packaged) or 'none'}"
    raise ConfigError(f"{name}  is not a file, nor a packaged recipe{hint}{listed}")


def recipe_names() -> dict[str, Path]:
    """The packaged recipes by name."""
    return {path.stem: path for path in sorted(Path(str(resources.files("llmrl.recipes"))).glob("*.yaml"))}


# --- explaining ------------------------------------------------------------------------------------------------------


def _explain(fault: Mapping[str, Any], source: Source, known: Sequence[Setting]) -> str:
    """Formats one pydantic error: place, dotted name, problem; then a suggestion."""
    at, place = source.place(fault["loc"])
    name = dotted(at)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    by_name = {setting.name: setting for setting in known}
    general = _general(at, known)
    if fault["type"] == "extra_forbidden":
        section, general_section = name.rpartition(".")[0], general.rpartition(".")[0]
        meant = _meant(general, known)
        own = partial(_specific, section=section, general=general_section)
        meant = meant and replace(meant, name=own(meant.name))
        inside = [own(setting.name) for setting in known if setting.name.rpartition(".")[0] == general_section]
        hint = f"did you mean  {meant}?" if meant else f"known here    {', '.join(inside) or 'nothing'}"
        return f"{place}  {name}  is not a setting\n{hint}"
    if not fault["loc"] or fault["type"] in ("value_error", "assertion_error"):
        return f"{place}  {name}  {message}" if name else f"{place}  {message}"
    if fault["type"] == "missing":
        name = dotted((*at, fault["loc"][-1]))
        lines = [f"{place}  {name}  must be given"]
    else:
        lines = [f"{place}  {name}  {message.replace('Input should', 'should')}: got {fault['input']!r}"]
    about = by_name.get(_general((*at, fault["loc"][-1]) if fault["type"] == "missing" else at, known))
    about = about or by_name.get(re.sub(r"\.\d+", "", name))
    if fault["type"] in ("literal_error", "enum") and isinstance(fault["input"], str):
        choices = re.findall(r"'([^']*)'", str(fault.get("ctx", {}).get("expected", "")))
        if match := closest(fault["input"], choices):
            lines.append(f"did you mean  {match}?")
    if about:
        lines.append(f"it means      {about}")
    return "\n".join(lines)


def _general(at: Sequence[str | int], known: Sequence[Setting]) -> str:
    """The dotted name with * for each place in a list or mapping of sections: ("env", "mix", 0) is "env.mix.*"."""
    holders = {setting.name[: place.start()] for setting in known for place in re.finditer(r"\.\*\.", setting.name)}
    name = ""
    for part in at:
        name = f"{name}.*" if name in holders else dotted((*filter(None, [name]), part))
    return name


def _specific(name: str, section: str, general: str) -> str:
    """The name of a setting in ``general`` as that in ``section``, which has places for its *."""
    return section + name.removeprefix(general) if "*" in general and name.startswith(f"{general}.") else name


def _without_other_members(faults: Sequence[Mapping[str, Any]], source: Source) -> list[Mapping[str, Any]]:
    """Drops errors of the other union members of a field that may be a section or a plain value.

    If a section has an error inside, the error "should be a string" for the same field would only confuse.
    """
    paths = [source.place(fault["loc"])[0] for fault in faults]
    return [
        fault
        for fault, path in zip(faults, paths, strict=True)
        if not (fault["type"].endswith("_type") and any(len(p) > len(path) and p[: len(path)] == path for p in paths))
    ]


def _meant(name: str, known: Sequence[Setting]) -> Setting | None:
    """The setting whose name, alias or meaning is closest to an unknown name; the same section is preferred."""
    section, _, leaf = name.rpartition(".")

    def likeness(setting: Setting) -> float:
        home, _, own = setting.name.rpartition(".")
        words = re.split(r"[,;:(.]", setting.meaning.lower())[0].strip().replace(" ", "_")
        score = max(SequenceMatcher(None, leaf.lower(), other).ratio() for other in (own, words, *setting.also))
        # Among about equally close names, one in the section that the user wrote wins.
        return score + (0.1 if home == section else 0.0)

    # One of another list or mapping has no place to name.
    near = [setting for setting in known if "*" not in setting.name or setting.name.rpartition(".")[0] == section]
    best = max(near, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.7 else None


def _one_line(value: Any) -> str:
    plain = to_jsonable_python(value)
    text = yaml.dump(plain, Dumper=YamlDumper, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _models_in(annotation: Any, *, among: bool = False) -> Iterator[type[BaseModel]]:
    """The models that a field can hold: its type itself, or members of Optional, Union and Annotated.

    ``among``: instead those that it can hold as items of a list or a mapping.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not among:
            yield annotation
        return
    is_collection = getattr(annotation, "__origin__", None) in (list, dict, tuple, set)
    if is_collection and not among:
        return
    for inner in get_args(annotation):
        yield from _models_in(inner, among=among and not is_collection)


def _only_models(annotation: Any) -> bool:
    """True if a field can hold only sections; false for ``str | TinyModel``."""
    members = get_args(annotation) or (annotation,)
    return all(isinstance(member, type) and issubclass(member, BaseModel) for member in members)


def _line(place: str) -> int:
    number = place.rpartition(":")[2]
    return int(number) if number.isdigit() else 1 << 31  # errors without a line come last


# --- writing ---------------------------------------------------------------------------------------------------------


def _to_yaml(tree: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """YAML of plain data, with a comment at the line of each dotted name that has one."""
    text = yaml.dump(dict(tree), Dumper=YamlDumper, sort_keys=False, allow_unicode=True, width=math.inf)
    # PyYAML cannot write comments, so its text is parsed again to find the line of each name.
    places = Source(name="line")
    places.parse(text)
    lines = text.removesuffix("\n").split("\n")
    for path, place in places.places.items():
        comment = comments.get(dotted(path))
        number = int(place.rpartition(":")[2]) - 1
        if comment and not lines[number].endswith(":"):  # YamlDumper writes every leaf on one line
            lines[number] += f"  # {' '.join(comment.split())}"
    return "\n".join(lines) + "\n" if tree else "{}\n"
