"""A function's arguments: the JSON schema that a model reads, and the validation of its calls, both by pydantic.

Types may be str, int, float, bool, list, dict, Literal, Optional, Enum, dataclasses, TypedDict and pydantic models. A
wrong call becomes a message that names the argument and the expected type.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from llmrl.errors import ConfigError, closest, did_you_mean
from llmrl.strict_json import JSONError, parse_json
from llmrl.tools.base import ToolError

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|attributes|see also|source):?\s*", re.I
)
_ENTRY = re.compile(r"(?P<name>\*{0,2}\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>.*)")


class Signature:
    """The arguments of one function, as a pydantic model made from its type hints and docstring.

    ``skip_self`` True: the function is an unbound method.
    """

    def __init__(self, function: Callable[..., Any], tool_name: str, *, skip_self: bool = False):
        self._tool = tool_name
        doc = function.__doc__ if inspect.isroutine(function) else None  # a class would inherit that of `type`
        self.description, described = parse_docstring(doc or "")
        parameters = list(inspect.signature(function).parameters.values())[int(skip_self) :]
        self._parameters = {parameter.name: parameter for parameter in parameters}
        if unknown := [name for name in described if name not in self._parameters]:
            hint = did_you_mean(unknown[0], self._parameters)
            raise ConfigError(f"tool {tool_name!r}: the docstring has {unknown[0]!r}, which is not an argument.{hint}")
        hints = self._hints(function)
        fields: dict[str, Any] = {}
        for number, parameter in enumerate(parameters):
            annotation = self._annotation(parameter, hints)
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            texts = [entry for entry in getattr(annotation, "__metadata__", ()) if isinstance(entry, str)]
            text = described.get(parameter.name) or (texts[0] if texts else None)
            # Argument names are aliases, because names such as "json" and "_x" cannot be field names.
            fields[f"argument_{number}"] = (annotation, Field(default, alias=parameter.name, description=text))
        self._model = create_model(
            f"{tool_name}_arguments", __config__=ConfigDict(extra="forbid", coerce_numbers_to_str=True), **fields
        )
        self.json_schema = _inlined(self._model.model_json_schema(schema_generator=_Quiet))

    def bind(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the annotated types; raises ToolError if the arguments do not fit.

        A string is parsed as JSON if its type requires that, because some call formats have only strings.
        """
        try:
            values = self._validated(dict(arguments))
        except ValidationError as failure:
            raise ToolError(self._explain(failure)) from None
        # Arguments that the call does not have are left out, so that the function uses its own defaults.
        positional = [n for n, p in self._parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        named = {name: values[name] for name in arguments if name not in positional}
        return [values[name] for name in positional], named

    def _validated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            filled = self._model.model_validate(arguments)
        except ValidationError as failure:
            # Only arguments that do not fit are parsed: a string argument stays unchanged even if it looks like JSON.
            faults = {str(fault["loc"][0]) for fault in failure.errors() if fault["loc"]}
            texts = [name for name in faults & self._parameters.keys() if isinstance(arguments.get(name), str)]
            if not texts:
                raise
            try:
                parsed = {name: parse_json(arguments[name]) for name in texts}
                filled = self._model.model_validate({**arguments, **parsed})
            except (ValidationError, JSONError):
                raise failure from None
        return {str(field.alias): getattr(filled, name) for name, field in self._model.model_fields.items()}

    def _explain(self, failure: ValidationError) -> str:
        faults = []
        # Five are enough to correct a call; one error per wrong entry of a long list would fill the context.
        for fault in failure.errors(include_url=False)[:5]:
            name = ".".join(map(str, fault["loc"]))
            if fault["type"] == "missing" and len(fault["loc"]) == 1:
                faults.append(f"argument {name!r} is missing")
            elif fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
                faults.append(f"there is no argument {name!r}{_hint(name, self._parameters)}")
            else:
                message, got = fault["msg"][:1].lower() + fault["msg"][1:], repr(fault["input"])
                got = got if len(got) <= 80 else f"{got[:77]}..."
                hint = _hint(str(fault["input"]), self.json_schema["properties"].get(name, {}).get("enum", ()))
                faults.append(f"argument {name!r}: {message}: got {got} ({type(fault['input']).__name__}){hint}")
        required = self.json_schema.get("required", [])
        expected = [
            f"{name} ({_type_of(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.json_schema["properties"].items()
        ]
        return f"{self._tool}: {'; '.join(faults)}. Expected: {', '.join(expected) or 'no arguments'}."

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
                f"tool {self._tool!r}: every argument must have a name that the model can write: got {parameter}; take "
                "a list or a dict instead."
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
            problem = f"the type of parameter {name!r} cannot be written as a JSON schema"
            raise ConfigError(f"tool {self._tool!r}: {problem}: got {hints[name]}: {reason}") from None
        return hints[name]


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The text before the first section or example, and the text of each argument (Google or Sphinx style).

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
    """Leaves out a default that JSON cannot write, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's form


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the titles that pydantic adds, with definitions written out where they are used."""
    definitions = schema.pop("$defs", {})
    recursive: set[str] = set()

    def walk(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [walk(entry, inside) for entry in node]
        if not isinstance(node, dict):
            return node
        if isinstance(reference := node.get("$ref"), str):
            name = reference.rpartition("/")[2]
            # A recursive type cannot be written out, so it keeps its reference.
            if name in inside:
                recursive.add(name)
                return dict(node)
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return walk({**definitions[name], **rest}, (*inside, name))
        plain = {}
        for key, value in node.items():
            if key == "properties":  # its keys are argument names, and one may be "title"
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


def _hint(name: str, known: Iterable[Any]) -> str:
    match = closest(name, [option for option in known if isinstance(option, str)])
    return f", did you mean {match!r}" if match else ""


def _type_of(schema: Mapping[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(_type_of(entry) for entry in schema["anyOf"])
    return str(schema.get("type", "any"))
