"""Values of a row as messages: text, one message, or a list of them, in the forms of OpenAI, ShareGPT and HH-RLHF.

| value | messages |
|---|---|
| text, a number | one message of the role that is asked for |
| ``{"role", "content"}`` or ``{"from", "value"}``, or a list of them | those messages, with OpenAI's roles |
| text that begins ``\\n\\nHuman:`` (HH-RLHF) | its turns |

A role ``human`` or ``gpt`` is a user or an assistant; ``observation`` and ``function`` are a tool. A message of the
role ``function_call``, and a key ``function_call``, become ``tool_calls``. Anything else is an error: nothing is
printed as Python, and nothing is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from llmrl.errors import DataError
from llmrl.strict_json import JSONError, parse_json

Message = dict[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_ROLES |= dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool")
_CALLS = ("function_call", "tool_call")  # roles of a message that is a call, as JSON
_TURN = re.compile(r"\n\n(Human|Assistant):")


def read_messages(value: Any, column: str, role: str, where: str) -> list[Message]:
    """The messages of a value, new dicts. Raises DataError naming the row (``where``), the column and the message.

    >>> read_messages([{"from": "human", "value": "Hi"}], "conversations", "user", "row 1")
    [{'role': 'user', 'content': 'Hi'}]
    >>> read_messages("\\n\\nHuman: Hi\\n\\nAssistant: Hello", "chosen", "assistant", "row 1")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if isinstance(value, str):
        return _turns(value) if value.startswith("\n\nHuman:") else [{"role": role, "content": value}]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
        return [{"role": role, "content": str(value)}]
    messages = [value] if isinstance(value, Mapping) and is_message(value) else value
    if not isinstance(messages, (list, tuple)) or not messages or not any(map(_is_object, messages)):
        raise DataError(
            f"dataset: {column!r} must be text or a list of messages: {where} has {value!r:.60}; write it as text or "
            "JSON."
        )
    return [_message(message, f"{where}, message {n} of {column!r}") for n, message in enumerate(messages, 1)]


def says(content: Any) -> bool:
    """False for a content that is empty, or text parts that are."""
    if isinstance(content, (list, tuple)):
        return any(part.get("text", part) != "" if isinstance(part, Mapping) else True for part in content)
    return content not in ("", None)


def check_calls(message: Message) -> None:
    """Raises ValueError for a call whose arguments are text but not a JSON object."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        text = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(text, str):
            continue
        try:
            is_object = isinstance(parse_json(text), dict)
        except JSONError:
            is_object = False
        if not is_object:
            raise ValueError(f"the arguments of a call to train on must be a JSON object: got {text!r:.60}")


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, (Mapping, str))


def _message(given: Any, where: str) -> Message:
    role = (
        next((given[key] for key in ("role", "from") if isinstance(given.get(key), str)), None)
        if is_message(given)
        else None
    )
    if role is None:
        raise DataError(f"dataset: a message must have 'role' and 'content': {where} is {given!r:.80}.")
    # Parquet gives every message the union of all fields; those that this one never had are None.
    message = {key: value for key, value in given.items() if value is not None and key not in ("role", "from")}
    if "content" not in message and "value" in message:
        message = {"content": message.pop("value"), **message}
    if role in _CALLS:
        message["tool_calls"] = _calls(message.pop("content", None), where)
        role = "assistant"
    elif "from" in given and "role" not in given and role not in (*_ROLES, "user", "assistant", "system", "tool"):
        known = ", ".join(("system", "user", "assistant", "tool", *_ROLES, *_CALLS))
        raise DataError(f"dataset: the sender of a message must be one of {known}: {where} is from {role!r}.")
    if "function_call" in message:
        if message.get("tool_calls"):
            raise DataError(
                f"dataset: a message must have its calls in one place: {where} has two; drop function_call."
            )
        message["tool_calls"] = _calls(message.pop("function_call"), where)
    if isinstance(message.get("loss"), bool):  # as ms-swift calls it
        message["train"] = message.pop("loss") and message.get("train", True)
    # An empty list is left out: templates test whether there are calls, not how many.
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    elif isinstance(message["tool_calls"], (list, tuple)):
        message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    if "content" not in message:
        if "tool_calls" not in message:
            raise DataError(f"dataset: a message must have 'content': {where}, role {role!r}, has none.")
        message["content"] = ""
    return {"role": _ROLES.get(role, role), "content": message.pop("content"), **message}


def _with_arguments(call: Any) -> Any:
    """The call, with an object in place of the empty text that some APIs give for a call without arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("arguments") != "":
        return call
    return {**call, "function": {**function, "arguments": {}}}


def _calls(value: Any, where: str) -> list[Message]:
    """The calls of an object with a name and arguments, a list of them, or either as JSON text."""
    try:
        calls = parse_json(value) if isinstance(value, str) else value
    except JSONError as error:
        raise DataError(f"dataset: a call must be JSON with a name and arguments: {where}: {error}.") from error
    calls = calls if isinstance(calls, (list, tuple)) else [calls]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise DataError(f"dataset: a call must have a name and arguments: {where} has {call!r:.80}.")
    keys = ("name", "arguments")
    for call in calls:
        if lost := [key for key, value in call.items() if key not in keys and value is not None]:
            raise DataError(
                f"dataset: a call must have a name and arguments alone: {where} also has {', '.join(lost)}."
            )
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def _turns(text: str) -> list[Message]:
    _, *parts = _TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[name], "content": said.strip()} for name, said in zip(parts[::2], parts[1::2], strict=True)]
    # A prompt in this format ends with the name of the one who is to speak.
    return turns[:-1] if len(turns) > 1 and not parts[-1].strip() and parts[-2] == "Assistant" else turns


def declared_tools(tools: Any, where: str) -> list[Any]:
    """The schemas in the column ``tools`` of a row: a list, or JSON text. Raises DataError naming the row otherwise."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except JSONError as error:
            raise DataError(f"dataset: 'tools' must be a list of schemas or JSON text: {where}: {error}.") from error
    if tools and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError(f"dataset: 'tools' must be a list of schemas or JSON text: {where} has {tools!r:.80}.")
    return list(tools or ())
