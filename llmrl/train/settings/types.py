"""Types of values that name a function, tool, environment or format."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import split_name
from llmrl.text_files import why_not_text

EMBEDDED = ("sums", "big_sums", "colours", "arithmetic")  # tasks whose problems come with the package
VERIFIERS = "verifiers"  # its tasks are played by an agent: see `llmrl.endpoint.verifiers`
GAMES = ("textarena", "text_env")  # of which the policy may play all seats: see `llmrl.endpoint.self_play`
EPISODES = ("openenv", "textarena", "gem", "text_env")  # environments with reset and step
ENVIRONMENTS = (*EMBEDDED, "gsm8k", "math", "countdown", "ifeval", "reasoning_gym", *EPISODES, VERIFIERS, "chat")
ENGINES = ("transformers", "vllm")
TOOL_FORMATS = ("auto", "hermes", "qwen", "llama", "mistral", "deepseek", "harmony", "gpt_oss")
TOOL_FORMATS += ("function", "tagged", "xml", "python")


def _check_own(name: str) -> str:
    """Checks the form of a user's name. The object is loaded later, once all other settings are valid."""
    try:
        split_name(name, what="name")
    except ConfigError as error:
        raise ValueError(str(error).partition(": ")[2]) from None  # no prefix: the error names the setting
    return name


def _check_known(name: str, known: Iterable[str], what: str) -> str:
    """Accepts a ``known`` name, or a well-formed name of the user's."""
    if name in known or ":" in name:
        return name if name in known else _check_own(name)
    listed = f"{', '.join(known)}, or package.module:name"
    raise ValueError(f"{name!r} is not {what}: must be one of {listed}.{did_you_mean(name, known)}")


def _check_tool(tool: Tool) -> Tool:
    from llmrl.tools.load import BUILT_IN  # imported here: most runs have no tools

    _check_known(named(tool, "tool")[0], sorted(BUILT_IN), "a tool")
    return tool


def _check_algorithm(algorithm: Tool) -> Tool:
    _check_own(named(algorithm, "algorithm")[0])
    return algorithm


def _check_engine(engine: Tool) -> Tool:
    name, options = named(engine, "engine")
    _check_known(name, ENGINES, "an engine")
    if options and name in ENGINES:
        raise ValueError(f"{name} has no options here: vllm's are rollout.options")
    return engine


def named(value: Tool, what: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of a setting that is a name, or a mapping from one name to its options."""
    if isinstance(value, str):
        return value, {}
    if len(value) != 1:
        raise ValueError(f"must be one {what}'s name with its options: got {', '.join(value) or 'nothing'}")
    name, options = next(iter(value.items()))
    return name, options or {}


def _read_template(text: str) -> str:
    """The text of a template's file; anything else as it is. A run's settings then hold the template itself."""
    if "{%" in text or "{{" in text or "\n" in text or not text.endswith((".jinja", ".jinja2", ".j2", ".txt")):
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        near = did_you_mean(path.name, [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise ValueError(f"the file {path} (from {Path.cwd()}) must exist: it does not.{near}")
    try:
        if reason := why_not_text(path, by_line=True):
            raise ValueError(reason)
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


Tool = str | dict[str, dict[str, Any] | None]
ToolName = Annotated[Tool, AfterValidator(_check_tool)]
EngineName = Annotated[Tool, AfterValidator(_check_engine)]
AlgorithmName = Annotated[Tool, AfterValidator(_check_algorithm)]
FunctionName = Annotated[str, AfterValidator(_check_own)]
TemplateText = Annotated[str, AfterValidator(_read_template)]
EnvName = Annotated[str, AfterValidator(partial(_check_known, known=ENVIRONMENTS, what="an environment"))]
FormatName = Annotated[str, AfterValidator(partial(_check_known, known=TOOL_FORMATS, what="a format of calls"))]
