"""From a function's signature and docstring to the JSON schema that a model sees, and from its arguments back.

Types are read by pydantic: str, int, float, bool, list, dict, Literal, Optional, Enum, dataclasses, TypedDict, pydantic
models. What a model gets wrong becomes a sentence that names the argument and what was expected.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from llmrl.errors import ConfigError, closest, did_you_mean
from llmrl.strict_json import JSONError, parse_json

__all__ = ["Signature", "parse_docstring"]

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|attributes|see also|source):?\s*", re.I
)
_ENTRY = re.compile(r"(?P<name>\*{0,2}\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*)")


class Signature:
    """The arguments of one function: their JSON schema, and the check of what a model wrote.

    ``skip_self``: the function is a method that is not bound yet.
    """

    def __init__(self, function: Callable[..., Any], tool_name: str, *, skip_self: bool = False):
        self._tool = tool_name
        doc = function.__doc__ if inspect.isroutine(function) else None  # not what it inherits from the type of types
        self.description, described = parse_docstring(doc or "")
        parameters = list(inspect.signature(function).parameters.values())[int(skip_self) :]
        self._parameters = {parameter.name: parameter for parameter in parameters}
        if unknown := [name for name in described if name not in self._parameters]:
            raise ConfigError(
                f"tool {tool_name!r}: the docstring describes {unknown[0]!r}, which is no argument."
                + did_you_mean(unknown[0], self._parameters)
            )
        hints = self._hints(function)
        fields: dict[str, Any] = {}
        for number, parameter in enumerate(parameters):
            annotation = self._annotation(parameter, hints)
            # The field has a neutral name and the argument's as its alias: "json" and "_x" are no names for a field.
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            text = described.get(parameter.name) or _annotated_text(annotation)
            fields[f"argument_{number}"] = (annotation, Field(default, alias=parameter.name, description=text))
        self._model = create_model(
            f"{tool_name}_arguments", __config__=ConfigDict(extra="forbid", coerce_numbers_to_str=True), **fields
        )
        self.json_schema = _plain(self._model.model_json_schema(schema_generator=_Quiet))

    def bind(self, arguments: Mapping[str, Any], *, error: type[Exception]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments for the function, of the annotated types; raises ``error`` if they are not.

        A text is also read as JSON where that is what the type needs: some call formats have nothing but text.
        """
        try:
            values = self._validated(arguments)
        except ValidationError as failure:
            raise error(self._explain(failure)) from None
        args, kwargs = [], {}
        for name, parameter in self._parameters.items():
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(values[name])
            elif name in arguments:
                kwargs[name] = values[name]
        return args, kwargs

    def _validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            filled = self._model.model_validate(dict(arguments))
        except ValidationError as failure:
            repaired = dict(arguments)
            for fault in failure.errors():
                name = str(fault["loc"][0]) if fault["loc"] else ""
                if isinstance(repaired.get(name), str) and name in self._parameters:
                    try:
                        repaired[name] = parse_json(repaired[name])
                    except JSONError:
                        raise failure from None
            if repaired == dict(arguments):
                raise
            try:
                filled = self._model.model_validate(repaired)
            except ValidationError:
                raise failure from None
        fields = type(filled).model_fields
        return {str(field.alias): getattr(filled, name) for name, field in fields.items()}

    def _explain(self, failure: ValidationError) -> str:
        faults = []
        for fault in failure.errors(include_url=False)[:5]:
            name = ".".join(map(str, fault["loc"]))
            if fault["type"] == "missing" and len(fault["loc"]) == 1:
                faults.append(f"argument {name!r} is missing")
            elif fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
                hint = closest(name, self._parameters)
                faults.append(f"there is no argument {name!r}" + (f", did you mean {hint!r}" if hint else ""))
            else:
                message = fault["msg"][:1].lower() + fault["msg"][1:]
                faults.append(f"argument {name!r}: {message}: got {_short(fault['input'])}")
        return f"{self._tool}: {'; '.join(faults)}. Expected: {self._expected()}."

    def _expected(self) -> str:
        required = self.json_schema.get("required", [])
        parts = [
            f"{name} ({_type_of(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.json_schema["properties"].items()
        ]
        return ", ".join(parts) or "no arguments"

    def _hints(self, function: Callable[..., Any]) -> dict[str, Any]:
        try:
            return typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ConfigError(
                f"tool {self._tool!r}: a type hint names {error.name!r}, which is not known in its module; "
                "import it there at run time, outside of TYPE_CHECKING."
            ) from None

    def _annotation(self, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
        name = parameter.name
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ConfigError(
                f"tool {self._tool!r}: every argument must have a name that the model can be told: got "
                f"{parameter}; take a list or a dict instead."
            )
        if name not in hints:
            raise ConfigError(
                f"tool {self._tool!r}: parameter {name!r} has no type hint, which the model's schema is made from; "
                f"write for example {name}: str."
            )
        try:
            TypeAdapter(hints[name]).json_schema(schema_generator=_Quiet)
        except (PydanticUserError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"tool {self._tool!r}: the type of parameter {name!r} cannot be written as a JSON schema: got "
                f"{hints[name]}: {reason}"
            ) from None
        return hints[name]


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section or example, and the text of each argument (Google or Sphinx style).

    >>> parse_docstring("Adds.\\n\\nArgs:\\n    a: the first,\\n        an int\\n    b (int): the other")
    ('Adds.', {'a': 'the first, an int', 'b': 'the other'})
    """
    description: list[str] = []
    arguments: dict[str, str] = {}
    section = ""  # lower case, "" before the first
    current, indent = "", None
    for line in inspect.cleandoc(doc).splitlines():
        text = line.strip()
        if sphinx := _SPHINX.match(text):
            section, current = "sphinx", sphinx["name"]
            arguments[current] = sphinx["text"]
        elif (header := _SECTION.match(line)) and (header.end() == len(line) or ":" in header[0]):
            section, current, indent = header[1].lower(), "", None
        elif text.startswith((">>>", ":return", ":raise", ":rtype")):
            section, current = "other", ""
        elif not section:
            description.append(line)
        elif section == "sphinx" and current:
            arguments[current] = f"{arguments[current]} {text}".strip()
        elif section in ("args", "arguments", "parameters", "params") and text:
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            entry = _ENTRY.fullmatch(text)
            if entry and depth <= indent:
                current = entry["name"].lstrip("*")
                arguments[current] = entry["text"]
            elif current:
                arguments[current] = f"{arguments[current]} {text}".strip()
    return "\n".join(description).strip(), arguments


class _Quiet(GenerateJsonSchema):
    """A default that JSON cannot say is left out, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's form


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the titles that pydantic adds, and with definitions written where they are used."""
    definitions = schema.pop("$defs", {})
    recursive: set[str] = set()

    def walk(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [walk(entry, inside) for entry in node]
        if not isinstance(node, dict):
            return node
        if isinstance(reference := node.get("$ref"), str):
            name = reference.rpartition("/")[2]
            if name in inside:
                recursive.add(name)
                return dict(node)
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return walk({**definitions[name], **rest}, (*inside, name))
        plain = {}
        for key, value in node.items():
            if key == "properties":  # its keys are names of the user
                plain[key] = {name: walk(entry, inside) for name, entry in value.items()}
            elif key in ("default", "enum", "const", "examples"):
                plain[key] = value
            elif key != "title":
                plain[key] = walk(value, inside)
        return plain

    result = walk(schema, ())
    result.setdefault("properties", {})
    if recursive:
        result["$defs"] = {name: walk(definitions[name], (name,)) for name in sorted(recursive)}
    return result


def _annotated_text(annotation: Any) -> str | None:
    texts = [entry for entry in getattr(annotation, "__metadata__", ()) if isinstance(entry, str)]
    return texts[0] if texts else None


def _type_of(schema: Mapping[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(_type_of(entry) for entry in schema["anyOf"])
    return str(schema.get("type", "any"))


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
