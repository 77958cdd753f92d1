"""Static analysis of chat templates: detects reads of message contents; computes the shape of a conversation.

A template that only writes contents treats all conversations of one shape the same way: results for stand-in texts hold
for all of them. An expression that the analysis does not support counts as reading.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, nodes
from jinja2 import TemplateError as JinjaError

from llmrl.data.llm.spans import STAND_IN
from llmrl.data.llm.templates import Message, plain_columns

_EXACT = ("role", "type", "name", "tools")  # part of a shape with their values: a template may compare them
_STRUCTURE = ("tool_calls", "function")  # contain more structure, not text
_KEPT = {*_EXACT, *_STRUCTURE}
_TYPE_TESTS = ("string", "none", "defined", "undefined", "mapping", "iterable", "sequence", "boolean", "number")
_TYPE_TESTS += ("true", "false", "integer", "float")
_WRITING_FILTERS = ("trim", "string", "tojson", "safe", "default", "d")
_HOLDERS = (nodes.Or, nodes.And, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword)
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

_NOTHING, _PARTS, _TEXT = range(3)  # content of a value: nothing of the messages, messages or calls, or their strings


def _shape_of(value: Any, key: str = "") -> Any:
    """The part of a value that a template reads without reading contents: types, keys, roles, names, empty texts."""
    if isinstance(value, str):
        return value if key in _KEPT or not value or value.isspace() else None
    if key in _EXACT:
        return repr(value)
    if isinstance(value, (dict, Mapping)):  # the check for dict is faster
        shapes = [
            # Nearly all items are strings. A call for each would double the time of a turn with tools.
            _shape_of(item, name)
            if type(item) is not str
            else (item if name in _KEPT or not item or item.isspace() else None)
            for name, item in value.items()
        ]
        return (*value, *shapes)
    if isinstance(value, (list, tuple)):
        return (list, *[_shape_of(item, key) for item in value])
    # An object of another type may render as any text: its shape equals no other, not even its own.
    return type(value), value if value is None or isinstance(value, (bool, int, float)) else object()


def conversation_shape(chat: Sequence[Message]) -> tuple[Any, ...]:
    """The shape of each message; of one that is a role and a text, as nearly all are, its role."""
    columns = plain_columns(chat)
    if columns is not None and all(columns[1]) and not any(map(str.isspace, columns[1])):
        return tuple(columns[0])
    shapes: list[Any] = []
    for message in chat:
        role, text = message.get("role"), message.get("content")
        if len(message) == 2 and type(role) is type(text) is str:
            shapes.append((role, text) if not text or text.isspace() else role)
        else:
            shapes.append(_shape_of(message))
    return tuple(shapes)


def stand_ins(chat: Sequence[Message], first: int = 0) -> list[Message]:
    """A conversation of the same shape with a unique text, in white space, in place of each text."""
    numbers = itertools.count(first << 16)

    def replaced(value: Any, key: str = "") -> Any:
        if key in _EXACT:
            return value
        if isinstance(value, str):
            return value if key in _STRUCTURE or not value or value.isspace() else f" {chr(STAND_IN)}{next(numbers)} "
        if isinstance(value, Mapping):
            return {name: replaced(item, name) for name, item in value.items()}
        return [replaced(item, key) for item in value] if isinstance(value, (list, tuple)) else value

    return [replaced(message) for message in chat]


@lru_cache(maxsize=64)
def reads_contents(jinja: str) -> bool:
    """True if a template's output may depend on more of a conversation than its shape and its texts, unchanged.

    >>> reads_contents("{% for m in messages %}{{ m.role ~ m.content | trim }}{% endfor %}")
    False
    >>> reads_contents("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    True
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAGS.sub("", jinja))
        walk = _Walk({macro.name: macro for macro in tree.find_all(nodes.Macro)})
        while True:  # until nothing changes: in a loop, a name may be used before it is assigned
            before = dict(walk.names)
            walk.statements(tree.body)
            if walk.names == before:
                return False
    except (_ReadsError, JinjaError):
        return True


class _ReadsError(Exception):
    """The template does something that may depend on a text."""


class _Walk:
    """Tracks the messages through a template's names; raises _ReadsError if a text is used beyond writing it."""

    def __init__(self, macros: Mapping[str, nodes.Macro]) -> None:
        self.names = {"messages": _PARTS}  # name -> the most of the messages that it may contain
        self._macros = macros

    def statements(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    self._levels(node.nodes)
                case nodes.If():
                    self._level(node.test)
                    self.statements([*node.body, *node.elif_, *node.else_])
                case nodes.For():
                    self._bind(node.target, level := self._iterated(node.iter))
                    self._bind(nodes.Name("loop", "store"), level)
                    self._levels([node.test] if node.test is not None else [])
                    self.statements([*node.body, *node.else_])
                case nodes.Assign():
                    self._bind(node.target, self._level(node.node))
                case nodes.AssignBlock(filter=None):
                    self._bind(node.target, _TEXT)
                    self.statements(node.body)
                case nodes.Macro():
                    self._levels(node.defaults)
                    self.statements(node.body)
                case nodes.ExprStmt():
                    self._level(node.node)
                case nodes.Break() | nodes.Continue():
                    pass
                case _:
                    raise _ReadsError

    def _iterated(self, iterable: nodes.Node) -> int:
        match iterable:
            case nodes.Filter(name="items", node=mapping) | nodes.Call(node=nodes.Getattr(attr="items", node=mapping)):
                return _TEXT if self._level(mapping) else _NOTHING
        if (level := self._level(iterable)) == _TEXT:  # a string would be iterated by character
            raise _ReadsError
        return level

    def _bind(self, target: nodes.Node, level: int) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._bind(item, level)
        else:  # a name, or the namespace of an attribute
            self.names[target.name] = max(level, self.names.get(target.name, _NOTHING))

    def _levels(self, expressions: Sequence[nodes.Node]) -> int:
        return max([self._level(node) for node in expressions], default=_NOTHING)

    def _level(self, node: nodes.Node) -> int:
        """The part of the messages that the value of an expression contains."""
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _NOTHING
            case nodes.Name():
                return self.names.get(node.name, _NOTHING)
            case nodes.Getattr():
                return self._field(node.node, node.attr)
            case nodes.Getitem(arg=nodes.Const(value=str(name))):
                return self._field(node.node, name)
            case nodes.Getitem():
                # Messages may be indexed. A slice of a text, or an index computed from the messages, reads contents.
                level = self._level(node.node)
                if level != _TEXT and not self._levels(list(node.arg.iter_child_nodes()) or [node.arg]):
                    return level
            case nodes.Call():
                return self._call(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Compare():
                return self._compare(node)
            case nodes.CondExpr():
                self._level(node.test)
                return self._levels([branch for branch in (node.expr1, node.expr2) if branch is not None])
            case _:
                return self._combination(node)
        raise _ReadsError

    def _combination(self, node: nodes.Node) -> int:
        level = self._levels(list(node.iter_child_nodes()))
        match node:  # anything else may depend on a text: arithmetic, slices, operators
            case nodes.Not():
                return _NOTHING
            case nodes.Test() if node.name in _TYPE_TESTS:
                return _NOTHING
            case nodes.Concat() | nodes.Add():
                return _TEXT if level else _NOTHING
            case _ if isinstance(node, _HOLDERS):
                return level
        if level:
            raise _ReadsError
        return _NOTHING

    def _field(self, holder: nodes.Node, name: Any) -> int:
        level = self._level(holder)
        if isinstance(holder, nodes.Name) and holder.name == "loop":
            return level if name in ("previtem", "nextitem") else _NOTHING
        if not level or name in _EXACT:
            return _NOTHING
        return _PARTS if level == _PARTS and name in _STRUCTURE else _TEXT

    def _call(self, node: nodes.Call) -> int:
        given = [*node.args, *node.kwargs]
        level, called = self._levels(given), node.node
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _ReadsError
        if isinstance(called, nodes.Getattr) and (holder := self._level(called.node)):
            if called.attr == "get" and given and isinstance(given[0], nodes.Const):
                return max(self._field(called.node, given[0].value), level)
            if called.attr != "strip" or given:
                raise _ReadsError
            return holder
        if isinstance(called, nodes.Name) and called.name in self._macros:
            # A macro is analysed once, with the highest level that any of its calls passes.
            for parameter in self._macros[called.name].args:
                self._bind(parameter, level)
            return _TEXT
        if level and getattr(called, "name", "") not in ("raise_exception", "namespace"):
            raise _ReadsError
        return level

    def _filter(self, node: nodes.Filter) -> int:
        # Without a node it is a filter block, whose body is text.
        level, given = self._level(node.node) if node.node else _TEXT, self._levels([*node.args, *node.kwargs])
        if not level and not given:
            return _NOTHING
        if node.name in _WRITING_FILTERS and not (node.name == "trim" and node.args):
            return _TEXT
        if level == _PARTS and node.name in ("length", "count"):
            return _NOTHING
        if level == _PARTS and node.name in ("first", "last", "list"):
            return _PARTS
        raise _ReadsError

    def _compare(self, node: nodes.Compare) -> int:
        level = self._levels([node.expr, *[operand.expr for operand in node.ops]])
        if not level:
            return _NOTHING
        match node.ops:
            case [nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=None | ""))]:
                return _NOTHING  # a comparison with None or ""
            case [nodes.Operand(op="in" | "notin")] if level == _PARTS and not self._level(node.expr):
                return _NOTHING  # a test for a key
        raise _ReadsError
