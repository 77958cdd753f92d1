# ruff: noqa: RUF001 (DeepSeek's format is written with full-width bars)
"""The tool call formats of the model families, one class each; `choice` maps names to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmrl.data.llm.parsers.turns import between
from llmrl.envs.llm.tool_calls.base import CallFormat, ParsedCall, Schemas, json_text, shown, structured_call
from llmrl.errors import ConfigError
from llmrl.strict_json import JSONError, read_json

Read = tuple[list[ParsedCall], int]


class HermesFormat(CallFormat):
    """Hermes and Qwen: ``<tool_call>`` {"name": ..., "arguments": {...}} ``</tool_call>``, the last tag optional.

    >>> HermesFormat().parse('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "hermes"
    in_templates = True
    opening = re.compile(r"<tool_call>")
    resume = re.compile(r"</tool_call>|(?=<tool_call>)")
    example = '<tool_call>\n{"name": "<tool>", "arguments": {...}}\n</tool_call>'
    _after = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|$)")

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        return self._of_json(text, opening.end(), self._after, "</tool_call>")


class TaggedFormat(CallFormat):
    """``<tool>name`` line end ``{...}</tool>``, or ``<tool name="name">{...}</tool>``; the arguments are optional.

    >>> TaggedFormat().parse('Let me see. <tool>add\\n{"a": 1}</tool>')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "tagged"
    opening = re.compile(r"<tool(?:\s[^<>\n]*)?>")
    resume = re.compile(r"</tool>|(?=<tool[\s>])")
    example = '<tool><name>\n{"argument": value}</tool>'
    _after = re.compile(r"\s*(?:</tool>|$)")
    _name = re.compile(r"\s*([^\s{<]+)[ \t]*")
    _attribute = re.compile(r"""\bname\s*=\s*["']?([^"'\s>]+)""")

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool>{name}\n{json_text(dict(arguments))}</tool>"

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        found, place = self._attribute.search(opening[0]), opening.end()
        if found is None:
            found = self._name.match(text, place)
            if found is None:
                return self._malformed("it names no tool"), self._skip(text, place)
            place = found.end()
        if empty := self._after.match(text, place):
            return [ParsedCall(found[1], {})], empty.end()
        return self._of_json(text, place, self._after, "</tool>", found[1])


class FunctionFormat(CallFormat):
    """Qwen 3 Coder: ``<function=name>`` ``<parameter=x>`` value ``</parameter>`` ... ``</function>``.

    ``<tool_call>`` tags around it are optional. A value is text if the tool's schema says "string"; otherwise it is
    JSON if it can be, and text if it cannot. Text that holds the format's own tags is written as a JSON string.

    >>> FunctionFormat().parse("<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>")
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "function"
    in_templates = True
    opening = re.compile(r"<function=([^<>\n]*)>")
    resume = re.compile(r"(?=</function>|<function=)")
    example = "<function=<tool>>\n<parameter=<name>>\nvalue\n</parameter>\n</function>"
    _parameter = re.compile(r"\s*<parameter=([^<>\n]*)>")
    _value_end = re.compile(r"\n?</parameter>|(?=\n?<parameter=|\n?</function>)")
    _close = re.compile(r"\s*</function>")
    _own_tags = re.compile(r"</?(?:parameter|function)")

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{self._value_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        name = opening[1].strip()
        properties = schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        place = opening.end()
        while parameter := self._parameter.match(text, place):
            key = parameter[1].strip()
            start = parameter.end() + (text[parameter.end() : parameter.end() + 1] == "\n")
            # An empty value may have a single newline between its tags: it serves as both the first and the last.
            end = self._value_end.search(text, max(parameter.end(), start - 1))
            if end is None:
                return self._malformed(f"the value of {key!r} does not end with </parameter>", name), len(text)
            arguments[key] = self._value(text[start : max(start, end.start())], properties.get(key, {}))
            place = end.end()
        close = self._close.match(text, place)
        if close is None:
            reason = f"{shown(text, place)} stands where <parameter=...> or </function> should"
            return self._malformed(reason, name), self._skip(text, place)
        if not name:
            return self._malformed("it names no tool"), close.end()
        return [ParsedCall(name, arguments)], close.end()

    def _value_text(self, value: Any) -> str:
        """The text itself if it parses back unchanged, else JSON."""
        if isinstance(value, str) and not self._own_tags.search(value) and self._value(value, {}) == value:
            return value
        return json_text(value).replace("<", "\\u003c")

    @staticmethod
    def _value(text: str, schema: Any) -> Any:
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            value, end = read_json(text, 0)
        except ValueError:
            return text
        return value if not text[end:].strip() else text


class MistralFormat(CallFormat):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``; newer models: ``[TOOL_CALLS]name[ARGS]{...}`` per call.

    Both are parsed; ``named`` selects the one that is rendered, and shown to a model whose call is malformed. A call's
    id has nine letters or digits, as these templates require.

    >>> MistralFormat().parse('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS] [{"name": "sub", "arguments": {}}]')[1]
    ParsedCall(name='sub', arguments={}, error=None)
    >>> MistralFormat().call_id(conversation=36, turn=1, number=0)
    '001000100'
    """

    name = "mistral"
    in_templates = True
    opening = re.compile(r"\[TOOL_CALLS\]")
    resume = re.compile(r"(?=\[TOOL_CALLS\])")
    _list = re.compile(r"\s*(?=[\[{])")
    _single = re.compile(r"\s*([\w.-]{1,80})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]{1,40})\s*)?(?:\[ARGS\])?")
    _id = re.compile(r"[A-Za-z0-9]{9}")

    def __init__(self, named: bool = False) -> None:
        one = "<tool>[ARGS]{...}" if named else ' [{"name": "<tool>", "arguments": {...}}]'
        self.example = f"[TOOL_CALLS]{one}"

    def call_id(self, conversation: int, turn: int, number: int) -> str:
        return _base_36(conversation, 4) + _base_36(turn, 3) + _base_36(number, 2)

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        entries = []
        for call, call_id in calls:
            written = text[slice(*call.span)].removeprefix("[TOOL_CALLS]").strip()
            arguments = written if call.arguments is None else call.arguments
            entries.append(structured_call(call.name, arguments, call_id))
        return {"content": text[: calls[0][0].span[0]].strip(), "tool_calls": entries}

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        several = self._list.match(text, opening.end())
        named = None if several else self._single.match(text, opening.end())
        name = named[1] if named else ""
        if not several and not named:
            return self._malformed("it names no tool"), self._skip(text, opening.end())
        try:
            # These models write no closing marker: the end of the JSON ends the call.
            value, end = read_json(text, (several or named).end())
        except ValueError as error:
            return self._malformed(str(error), name), self._skip(text, opening.end())
        if named:
            return self._with_id({"name": name, "arguments": value}, named[2]), end
        entries = value if isinstance(value, list) else [value]
        ids = (entry.get("id") if isinstance(entry, dict) else None for entry in entries)
        return [call for entry, given in zip(entries, ids, strict=True) for call in self._with_id(entry, given)], end

    def _with_id(self, value: Any, given: Any) -> list[ParsedCall]:
        """The call with the id that the model gave it, if the templates accept that id."""
        calls = self._of_object(value)
        accepted = isinstance(given, str) and self._id.fullmatch(given)
        return [replace(call, id=given) for call in calls] if accepted else calls


def _base_36(number: int, width: int) -> str:
    digits = ""
    for _ in range(width):
        number, last = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[last] + digits
    return digits


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekFormat(CallFormat):
    """V3 and R1: the kind, ``<｜tool▁sep｜>``, the name, the arguments in a JSON fence. V3.1: name, separator, JSON.

    Both are parsed; ``fenced`` selects the one that is rendered, and shown to a model whose call is malformed.

    >>> form = DeepSeekFormat(fenced=False)
    >>> form.render("add", {"a": 1})
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    >>> form.parse(form.render("add", {"a": 1}))
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "deepseek"
    in_templates = True
    opening = re.compile(_CALL)
    resume = re.compile(f"{_CALL_END}|(?={_CALL}|{_CALLS_END})")
    _head = re.compile(rf"\s*+([^\n<]*+){_SEP}")
    _fenced = re.compile(r"[ \t]*([^\s`{<]+)[ \t]*\n\s*(?:```(?:json)?)?")
    _after = re.compile(rf"\s*(?:```\s*)?(?:{_CALL_END}|(?={_CALL}|{_CALLS_END})|$)")

    def __init__(self, fenced: bool = True) -> None:
        inner = f"function{_SEP}<tool>\n```json\n{{...}}\n```" if fenced else f"<tool>{_SEP}{{...}}"
        self.example = f"{_CALLS}{_CALL}{inner}{_CALL_END}{_CALLS_END}"

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        """The message with arguments as text, because these templates expect text."""
        content = text[: calls[0][0].span[0]].rstrip().removesuffix(_CALLS)
        entries = [structured_call(call.name, self._arguments(text[slice(*call.span)]), id) for call, id in calls]
        return {"content": content, "tool_calls": entries}

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        name, place = self._name_of(text, opening.end())
        if name is None:
            return self._malformed(f"{_SEP} must follow the name"), self._skip(text, place)
        if not name:
            return self._malformed("it names no tool"), self._skip(text, place)
        return self._of_json(text, place, self._after, _CALL_END, name)

    def _name_of(self, text: str, place: int) -> tuple[str | None, int]:
        """The name of the call that begins at ``place`` (None without a separator), and where its arguments begin."""
        if (head := self._head.match(text, place)) is None:
            return None, place
        fenced = self._fenced.match(text, head.end())
        return (fenced[1], fenced.end()) if fenced else (head[1].rstrip(), head.end())

    def _arguments(self, written: str) -> str:
        """The text after the name of a call, even if the call is malformed."""
        name, place = self._name_of(written, len(_CALL))
        if name is None:
            return written
        return written[place:].strip().removesuffix(_CALL_END).strip().removesuffix("```").strip()


class HarmonyFormat(CallFormat):
    """gpt-oss: a header with ``to=functions.name``, before or after the channel, ``<|message|>``, JSON, ``<|call|>``.

    Other channels, such as analysis, hold no calls. The model ends its turn with ``<|call|>``, so an answer has at most
    one call. ``thought`` is the message key from which the template reads the text before the call.

    >>> HarmonyFormat().parse('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "harmony"
    in_templates = True
    opening = re.compile(
        r"to=(?!assistant|user)([\w.-]{1,80})[^<\n]{0,40}(?:<\|(?:channel|constrain)\|>[^<\n]{0,40}){0,3}<\|message\|>"
    )
    resume = re.compile(r"<\|(?:call|end|return)\|>|(?=<\|start\|>)")
    example = "<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"
    _after = re.compile(rf"\s*(?:{resume.pattern}|$)")

    def __init__(self, thought: str = "reasoning_content") -> None:
        self.thought = thought

    def message(self, text: str, calls: Sequence[tuple[ParsedCall, str]]) -> dict[str, Any] | None:
        """The message with the text before the call, on any channel, as reasoning. Templates accept one call a turn."""
        [*_, (call, call_id)] = calls
        start, end = call.span
        arguments = call.arguments
        if arguments is None:
            arguments = self.resume.split(text[self.opening.search(text, start).end() : end])[0].strip()
        said = "\n".join(between(text[:start], "<|message|>", "<|end|>"))
        thought = {self.thought: said} if said else {}
        return {"content": "", "tool_calls": [structured_call(call.name, arguments, call_id)], **thought}

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        name = opening[1].removeprefix("functions.")
        ending = self.resume.search(text, opening.end())
        if not text[opening.end() : ending.start() if ending else len(text)].strip():
            return [ParsedCall(name, {})], ending.end() if ending else len(text)
        return self._of_json(text, opening.end(), self._after, "<|call|>", name)


class LlamaFormat(CallFormat):
    """Llama 3: {"name": ..., "parameters": {...}} at the start of a line, with or without ``<|python_tag|>``.

    Several calls are separated by ``;`` or line ends. A JSON object without a name is not a call, unless
    ``<|python_tag|>`` precedes it.

    >>> LlamaFormat().parse('{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}')[1]
    ParsedCall(name='sub', arguments={}, error=None)
    """

    name = "llama"
    in_templates = True
    opening = re.compile(r"<\|python_tag\|>|(?:^|;)[ \t]*(?=\{)", re.MULTILINE)
    example = '{"name": "<tool>", "parameters": {...}}'
    _object = re.compile(r"\{\s*+[\"}]")

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        tagged = opening[0] == "<|python_tag|>"
        # A "name" in the first 200 characters of the line tells a malformed call from other JSON.
        begun = text[opening.end() : opening.end() + 200].partition("\n")[0]
        if not tagged and '"name"' not in begun and not self._object.match(text, opening.end()):
            return [], opening.end() + 1
        try:
            value, end = read_json(text, opening.end())
        except JSONError as error:
            if tagged or '"name"' in begun:
                line_end = text.find("\n", opening.end())
                return self._malformed(str(error)), len(text) if line_end < 0 else line_end
            return [], error.place  # not a call; valid JSON up to there, so scanning continues after it
        is_call = isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)
        return (self._of_object(value) if tagged or is_call else []), end


class PythonFence(CallFormat):
    """Markdown fences for ``python``, ``py`` or ``python3``, in any case: each is a call with the argument "code".

    For models that were not trained on a call format.

    >>> PythonFence("python").parse("Let us see:\\n```py\\nprint(1)\\n```")
    [ParsedCall(name='python', arguments={'code': 'print(1)'}, error=None)]
    """

    name = "python"
    opening = re.compile(r"^[ \t]*(`{3,})[ \t]*(?:python[0-9.]*|py)[ \t]*\r?\n", re.MULTILINE | re.IGNORECASE)
    example = "```python\nprint(1 + 1)\n```"

    def __init__(self, tool: str = "python") -> None:
        self.tool = tool

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        code = arguments["code"]
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", code))])
        return f"{fence}python\n{code}\n{fence}"

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        close = re.compile(rf"^[ \t]*`{{{len(opening[1])},}}[ \t]*\r?$", re.MULTILINE).search(text, opening.end())
        if close is None:
            return self._malformed("the code block does not end with ```", self.tool), len(text)
        code = text[opening.end() : max(opening.end(), close.start() - 1)]
        return [ParsedCall(self.tool, {"code": code})], close.end()


class PatternFormat(CallFormat):
    """Calls that match a user's regular expression: group 1 is the tool's name, group 2 its JSON arguments.

    Raises  ConfigError for a pattern without two groups, or that cannot be compiled

    >>> PatternFormat(r"CALL (\\w+) (\\{.*\\})").parse('CALL add {"a": 1}')
    [ParsedCall(name='add', arguments={'a': 1}, error=None)]
    """

    name = "pattern"
    _after = re.compile("")  # any text may follow the JSON in the second group

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        try:
            self.opening = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"tool_call_pattern: must be a regular expression: got {pattern!r}: {error}.") from error
        if self.opening.groups < 2:
            raise ConfigError(f"tool_call_pattern: must have two groups, name and JSON arguments: got {pattern!r}.")
        self.example = f"what matches {self.opening.pattern}"

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise ConfigError("tool_call_pattern: a pattern reads calls, it cannot write them.")

    def _read(self, text: str, opening: re.Match[str], schemas: Schemas) -> Read:
        name, body = (opening[1] or "").strip(), (opening[2] or "").strip()
        calls = self._of_json(body, 0, self._after, "", name)[0] if body else self._of_object({"name": name})
        return calls, opening.end()
