"""Masks passwords and keys in whatever shows settings: pages, model cards, dashboards, run.json, printed text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from llmrl.run.yaml_source import YamlLoader

_MASK = "***"
# Words that merely end in "key"; any other is masked: a name that is hidden in vain does less harm than a secret shown.
_WORDS = "".join(rf"(?:(?<!{word})|(?<=[a-z]{word}))" for word in ("mon", "don", "tur", "hoc", "joc", "whis"))
_NAME = rf"(?:(?<!answer_)(?<!data_){_WORDS}key|token|secret|password|passwd|credentials?)"
_SECRET = re.compile(rf"{_NAME}$|authorization|^cookie$", re.IGNORECASE)
_MAPPING = re.compile(r"headers|credentials?|secrets", re.IGNORECASE)  # all values of such a mapping are secret
_VARIABLE = re.compile(r"_env$", re.IGNORECASE)  # api_key_env holds the name of a variable
_IN_BROKEN = re.compile(rf"{_NAME}\b|authorization|headers|\benv\b", re.IGNORECASE)  # in a value that is not YAML
_OPTION = re.compile(rf"(?s)(-{{1,2}}[\w-]*{_NAME})(=.*)?", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"(?<=://)[^/@\s'\"]+@"), f"{_MASK}@"),  # user and password of a URL
    (re.compile(rf"([?&][\w-]*{_NAME}=)[^&\s'\"#]+", re.IGNORECASE), rf"\1{_MASK}"),  # query of a URL
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{4,}"), rf"\1 {_MASK}"),
    # Keys by the prefixes of their issuers.
    (re.compile(r"\b(?:sk-|gh[opsu]_|github_pat_|hf_|xox[abp]-|glpat-|AKIA)\w[\w-]{4,}"), _MASK),
    # An entry of a mapping in text, as Python, JSON or YAML write it.
    (re.compile(rf"((['\"])[\w-]*{_NAME}\2\s*[:=]\s*)(['\"])(?:(?!\3).)+\3", re.IGNORECASE), rf"\1\3{_MASK}\3"),
    (re.compile(rf"(\b[\w-]*{_NAME}=)(['\"])(?:(?!\2).)+\2", re.IGNORECASE), rf"\1\2{_MASK}\2"),
)


def masked(value: Any, name: str = "", *, depth: int = 0) -> Any:
    """A copy of settings without secrets: values under a name like ``api_key``, of ``headers`` and of a process's
    ``env``, after an option like ``--token``, and what `masked_text` finds in any other text.

    ``name``  under which the value stands; ``depth`` is 0 for whole settings, whose section ``env`` is not secret

    >>> masked({"url": "http://me:pw@host", "headers": {"X": "y"}, "args": ["--token", "t"], "api_key": "k"})
    {'url': 'http://***@host', 'headers': {'X': '***'}, 'args': ['--token', '***'], 'api_key': '***'}
    """
    if isinstance(value, Mapping):
        hidden = _MAPPING.fullmatch(name) or (name == "env" and depth > 1)
        return {
            key: _MASK if hidden and inner not in (None, "") else masked(inner, str(key), depth=depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _MASK
            if isinstance(inner, str) and place and _is_option(value[place - 1])
            else masked(inner, name, depth=depth + 1)
            for place, inner in enumerate(value)
        ]
    if value in (None, "") or isinstance(value, bool):
        return value
    if _SECRET.search(name) and not _VARIABLE.search(name) and (isinstance(value, str) or "pass" in name.lower()):
        return _MASK
    if not isinstance(value, str):
        return value
    if (option := _OPTION.fullmatch(value)) and option[2]:
        return f"{option[1]}={_MASK}"
    return masked_text(value)


def masked_text(text: str) -> str:
    """Text without users of URLs, keys with a known prefix, and values beside a name like ``API_KEY``.

    >>> masked_text("GET http://me:pw@host/?api_key=1 failed for {'TOKEN': 'abc'}")
    "GET http://***@host/?api_key=*** failed for {'TOKEN': '***'}"
    """
    for pattern, replacement in _IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command line, ``section.key=value``; those without a secret are unchanged.

    >>> masked_arguments(["env.tools=[{mcp: {server: {command: x, env: {TOKEN: abc}}}}]", "steps=3"])
    ['env.tools=[{"mcp": {"server": {"command": "x", "env": {"TOKEN": "***"}}}}]', 'steps=3']
    """
    words = [str(argument) for argument in arguments]
    after_option = [False, *map(_is_option, words)]
    return [_MASK if is_value else _masked_argument(word) for word, is_value in zip(words, after_option, strict=False)]


def _masked_argument(argument: str) -> str:
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        return masked(argument)
    try:
        value = yaml.load(text, YamlLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return f"{name}={_MASK}" if _IN_BROKEN.search(text) else masked_text(argument)
    whole: Any = value
    for part in reversed(name.split(".")):
        whole = {part: whole}
    shown = masked(whole)
    for part in name.split("."):
        shown = shown[part] if isinstance(shown, Mapping) else shown
    if shown == value:
        return argument
    return f"{name}={json.dumps(shown, ensure_ascii=False)}"  # JSON is YAML on one line


def masked_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """run.json without secrets, also in the arguments of its command."""
    return masked(info) | {"arguments": masked_arguments(info.get("arguments") or [])} if info else {}


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and (match := _OPTION.fullmatch(value)) is not None and not match[2]
