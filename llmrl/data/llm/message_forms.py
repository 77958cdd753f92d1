"""The messages of a conversation in the form that one template writes, and errors for what it would leave out.

Jinja ignores what a template does not read, and prints lists and objects as Python does. So contents and the arguments
of calls are converted to the form that the template writes in full, which short probes show. A key that the template
does not read, and a content that its text lacks, are errors; a name or an id that it does not read is noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, nodes
from jinja2 import TemplateError as JinjaError

from llmrl.data.llm.template_text import REFUSALS, cause, render
from llmrl.data.llm.templates import Chat, ChatTemplate, Message, Tools, check_variables
from llmrl.errors import TemplateError
from llmrl.strict_json import JSONError, parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAGS = ("weight", "train", "trainable", "training")  # on a message: whether it is trained; no template reads them
_ALWAYS = {"role", "content", "is_complete", "tools", *FLAGS}  # read by llmrl, or checked elsewhere
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one thing; a template reads one of them
_USUAL_ROLES = ("system", "user", "assistant", "tool")
_STAND_IN = 0x100000  # private-use plane B, as in `llmrl.data.llm.spans`
_MARK = "\U00108000"
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_QUESTION = {"role": "user", "content": "question"}
_MAX_KNOWN = 4096


def is_trained(message: Message) -> bool:
    """False if a flag of the message, such as ``"weight": 0`` or ``"train": false``, leaves it out of the loss.

    Raises  ValueError for a flag that is not true, false, 0 or 1

    >>> is_trained({"role": "assistant", "content": "Hi", "train": False}), is_trained({"role": "assistant"})
    (False, True)
    """
    values = {flag: message[flag] for flag in FLAGS if message.get(flag) is not None}
    for flag, value in values.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"its {flag!r} must be true, false, 0 or 1: got {value!r:.40}")
    return all(values.values())


class MessageForms:
    """Fits conversations to one template.

    Reads  write  `render` with the template and its variables
    """

    def __init__(self, template: ChatTemplate, write: Callable[..., Any]) -> None:
        self._template = template
        self._write = write
        self._known: dict[Any, Any] = {}  # results of probes, which are the same for all conversations
        self.unused: dict[str, None] = {}  # names and ids of messages that the template does not write, in their order

    def _render(self, chat: Chat, tools: Tools | None = None, **options: Any) -> str:
        return self._write([chat], tools, **options)[0][0]

    def fit(self, chats: Sequence[Chat]) -> Sequence[Chat]:
        """The conversations with each value in the form that the template writes; the same objects if all are.

        | value | if the template does not write it in full |
        |---|---|
        | a content of text parts | their texts, joined |
        | a content that is another list, an object, a number or a boolean | JSON text |
        | no content, beside calls or a thought | ``""`` |
        | a thought, under one of its usual names | the same under the name that the template reads |
        | arguments of a call | JSON text that holds an object, as that object; an object, as JSON text |

        Raises  TemplateError naming the message, for a key with a value that the template does not read
        """
        return [chat if all(map(_is_plain, chat)) else self._fit_chat(chat, row) for row, chat in enumerate(chats)]

    def refuse_lost(
        self, chats: Sequence[Chat], texts: Sequence[str], first: int = 0, *, answers: bool = False, **options: Any
    ) -> None:
        """Raises TemplateError naming a message from number ``first`` on whose content the template does not write.

        ``answers``: the assistant's too. ``options``: those that the texts were rendered with.
        """
        for row, (chat, text) in enumerate(zip(chats, texts, strict=True)):
            checked = [
                index
                for index in range(first, len(chat))
                if (answers or chat[index]["role"] != "assistant")
                and isinstance(chat[index].get("content"), str)
                and chat[index]["content"].strip()
            ]
            if _holds(text, [chat[index] for index in checked]):
                continue
            # A content may be moved or rewritten. One that the template ignores is missing whatever it says.
            shape = (first, answers, options.get("add_generation_prompt"), *map(_shape, chat))
            if shape not in self._known or options.get("tools"):
                self._remember(shape, self._lost(chat, checked, options))
            if (lost := self._known[shape]) is not None:
                raise TemplateError(
                    f"ChatCodec: each message must be in the text of template {self._template.name!r}: message {lost} "
                    f"of conversation {row}, role {chat[lost]['role']!r}, is not, as the template leaves it out; give "
                    "it a role and a place that the template writes."
                )

    def _lost(self, chat: Chat, checked: Sequence[int], options: dict[str, Any]) -> int | None:
        probe = [
            {**message, "content": chr(_STAND_IN + index)} if index in checked else message
            for index, message in enumerate(chat)
        ]
        try:
            text = self._render(probe, **options)
        except REFUSALS:  # it needs contents of another kind, which it then reads
            return None
        return next((index for index in checked if chr(_STAND_IN + index) not in text), None)

    def _fit_chat(self, chat: Chat, row: int) -> Chat:
        fitted = list(chat)
        for step in (self._fit_message, self._check_read):  # what is read is seen in conversations that fit
            for index, message in enumerate(fitted):
                if _is_plain(message):
                    continue
                try:
                    fitted[index] = step(fitted, index)
                except ValueError as error:
                    raise TemplateError(
                        f"ChatCodec: template {self._template.name!r} must write all of a message: not of message "
                        f"{index} of conversation {row}, role {message.get('role')!r}: {error}."
                    ) from error
        return fitted

    def _check_read(self, chat: Chat, index: int) -> Message:
        """The message. Raises ValueError for a key that the template does not read; notes names and ids."""
        for key in self._unread(chat, index):
            if not _is_name(key):
                raise ValueError(
                    f"it does not use {key}, which would be lost; write it as content, or leave it out of the message"
                )
            self.unused[key] = None
        return chat[index]

    def _unread(self, chat: Chat, index: int) -> tuple[str, ...]:
        """The keys of a message without which, and with another value of which, the conversation's text is the same."""
        given = _given(message := chat[index])
        if not given:
            return ()
        shape = ("unread", message.get("role"), bool(message.get("content")), *given)
        if shape not in self._known:
            try:
                text = self._render(chat)
            except REFUSALS:
                return ()  # the rendering of the conversation itself says why
            # Thoughts of earlier turns are dropped by many templates, and are to be.
            read = {*_THOUGHTS} & named_keys(self._template.jinja)
            unread = [key for key in given if key not in read and not self._changes(text, chat, index, key)]
            self._remember(shape, tuple(unread))
        return self._known[shape]

    def _changes(self, text: str, chat: Chat, index: int, key: str) -> bool:
        """True if a conversation with this text has another one, or none, without a key or with more in it."""
        value = chat[index][key]
        others = [{name: own for name, own in chat[index].items() if name != key}]
        others += [{**chat[index], key: value + _MARK}] if isinstance(value, str) else []
        try:
            return any(self._render([*chat[:index], other, *chat[index + 1 :]]) != text for other in others)
        except REFUSALS:
            return True

    def _fit_message(self, chat: Chat, index: int) -> Message:
        is_trained(message := chat[index])
        fitted = {key: value for key, value in message.items() if key not in (*FLAGS, *_THOUGHTS)}
        for key in _THOUGHTS:
            if (thought := message.get(key)) is not None and fitted.setdefault(self._name(key), thought) != thought:
                raise ValueError(f"it must have one thought: {key} is another than that under a name before it")
        content = message.get("content")
        if content is None:
            if all(map(_is_name, _given(fitted))):
                raise ValueError("it must have content, or calls: it has none")
            fitted["content"] = ""  # a template may print None
        elif not isinstance(content, str):
            fitted["content"] = self._content(content, message.get("role"))
        if calls := message.get("tool_calls"):
            fitted["tool_calls"] = [self._call(call) for call in calls] if isinstance(calls, (list, tuple)) else calls
        return fitted

    def _name(self, key: str) -> str:
        """The name under which the template reads a thought; of anything else its own."""
        names = named_keys(self._template.jinja)
        return next((name for name in (key, *_THOUGHTS) if name in names), key) if key in _THOUGHTS else key

    def _content(self, content: Any, role: Any) -> Any:
        if isinstance(content, (list, tuple)) and content and all(map(_is_part, content)):
            if all(map(_is_text, content)):
                return content if self._writes("parts", role) else "".join(part["text"] for part in content)
            other = [part for part in content if not _is_text(part)]  # those are the processor's
            if not self._writes_text_beside(other, role):
                kinds = ", ".join(sorted({str(part.get("type")) for part in other}))
                raise ValueError(f"it writes text alone, and the content has parts of type {kinds}; leave them out")
            return content
        if isinstance(content, (Mapping, list, tuple, bool, int, float)):
            kind = "object" if isinstance(content, Mapping) else "list"
            if isinstance(content, (Mapping, list, tuple)) and self._writes(kind, role):
                return content
            with suppress(TypeError, ValueError):  # an object of Python inside
                return json.dumps(content, ensure_ascii=False, allow_nan=False)
        raise ValueError(f"its content must be text, parts or a JSON value: got {type(content).__name__}")

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        held = function if isinstance(function, Mapping) else call
        if not isinstance(held, Mapping) or not isinstance(given := held.get("arguments"), (str, Mapping)):
            return call
        other: Any = None
        if isinstance(given, Mapping):
            if not self._writes("arguments") and self._writes("arguments as text"):
                try:
                    other = json.dumps(given, ensure_ascii=False)
                except TypeError as error:
                    raise ValueError(f"the arguments of a call must be a JSON object: {error}") from error
        elif not self._writes("arguments as text"):
            with suppress(JSONError):
                parsed = parse_json(given)
                other = parsed if isinstance(parsed, dict) else None
        if other is None:
            return call
        held = {**held, "arguments": other}
        return {**call, "function": held} if held is not call and function is not None else held

    def _writes(self, kind: str, role: Any = "assistant") -> bool:
        """True if the template writes a value of this kind in full, by a probe."""
        key = (kind, role)
        if key not in self._known:
            self._remember(key, self._probe(kind, role))
        return self._known[key]

    def _writes_text_beside(self, parts: Sequence[Any], role: Any) -> bool:
        """True unless a text beside such parts is left out, or written as Python does."""
        key = ("beside", role, *(str(part.get("type")) for part in parts))
        if key not in self._known:
            try:
                text = self._render(_with_role(role, [*parts, {"type": "text", "text": _MARK}]))
                self._remember(key, _MARK in text and "{'type'" not in text)
            except REFUSALS:
                self._remember(key, True)  # the rendering of the conversation itself says why
        return self._known[key]

    def _probe(self, kind: str, role: Any) -> bool:
        values = {
            "parts": [{"type": "text", "text": _MARK}],
            "object": {"key": _MARK},
            "list": [{"key": _MARK}],
            "arguments": {"key": _MARK},
            "arguments as text": f'{{"key": "{_MARK}"}}',
        }
        given = values[kind]
        try:
            if kind.startswith("arguments"):
                text = self._render([_QUESTION, _calling(given)])
                return f'{{"key": "{_MARK}"}}' in text if isinstance(given, str) else _in_full(text)
            text = self._render(_with_role(role, given))
            return text == self._render(_with_role(role, _MARK)) if kind == "parts" else _in_full(text)
        except REFUSALS:
            return False

    def _remember(self, key: Any, value: Any) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = value


@lru_cache(maxsize=64)
def named_keys(jinja: str) -> frozenset[str]:
    """The names that a template may read from a message: its attributes, its variables, and its short strings.

    >>> sorted(named_keys("{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% endfor %}"))
    ['content', 'm', 'messages', 'role']
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAGS.sub("", jinja))
    except JinjaError:
        return frozenset(re.findall(r"\w+", jinja))
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.name for node in tree.find_all(nodes.Name)}
    strings = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return frozenset(names | {text for text in strings if text.isidentifier()})


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and isinstance(message, Mapping) and type(message.get("content")) is str


def _given(message: Message) -> list[str]:
    """The keys with a value that a template may or may not read."""
    return [
        key
        for key, value in message.items()
        if key not in _ALWAYS
        and value is not None
        and value is not False
        and (not hasattr(value, "__len__") or len(value) > 0)
    ]


def _is_name(key: str) -> bool:
    return key in ("name", "id") or key.endswith("_id")


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and ("type" in part or list(part) == ["text"])


def _is_text(part: Message) -> bool:
    return part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _shape(message: Message) -> Any:
    content = message.get("content")
    return message["role"], bool(message.get("tool_calls")), isinstance(content, str) and bool(content.strip())


def _holds(text: str, messages: Sequence[Message]) -> bool:
    """True if the contents are in the text in their order, and all roles are usual ones."""
    at = 0
    for message in messages:
        content = message["content"].strip()
        at = text.find(content, at)
        if at < 0 or message["role"] not in _USUAL_ROLES:
            return False
        at += len(content)
    return True


def _in_full(text: str) -> bool:
    return _MARK in text and "{'key'" not in text and "{\\" not in text


def _calling(arguments: Any) -> Message:
    call = {"id": "call00000", "type": "function", "function": {"name": "name", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_role(role: Any, content: Any) -> list[Message]:
    message = {"role": role, "content": content}
    if role == "tool":
        return [_QUESTION, _calling({}), {**message, "name": "name", "tool_call_id": "call00000"}]
    return [message, _QUESTION] if role == "system" else [_QUESTION, message] if role != "user" else [message]


def render_text(
    template: ChatTemplate,
    chats: Sequence[Chat],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """The text of each conversation as the template writes it, nothing escaped: for display, not for tokenising.

    Raises  TemplateError if the template refuses a conversation or leaves a part of it out, ConfigError for
            ``template_kwargs`` it does not use
    """
    check_variables(template, template_kwargs)
    holder = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds its tokenizer
    special_tokens = holder.special_tokens_map if holder is not None else {}
    options = {"chat_template": template.jinja, **special_tokens, **(template_kwargs or {})}
    forms = MessageForms(template, partial(render, **options))
    asks = {"add_generation_prompt": add_generation_prompt}
    try:
        chats = forms.fit(chats)
        texts = render(chats, tools, continue_final_message=continue_final_message, **asks, **options)[0]
        forms.refuse_lost(chats, texts, tools=tools, **asks)
    except TemplateError:
        raise
    except REFUSALS as error:
        raise TemplateError(
            f"render_text: template {template.name!r} must render the conversation: got {cause(error)}."
        ) from error
    return texts
