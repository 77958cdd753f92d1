"""Tools from typed functions or callable objects. ``schema.py`` makes the schema."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from pydantic_core import to_json

from llmrl.concurrency.background_loop import UserLoop
from llmrl.errors import ConfigError, did_you_mean
from llmrl.tools.base import Tool, ToolTimeout
from llmrl.tools.schema import Signature, parse_docstring


class FunctionTool(Tool):
    """A tool from a typed function, an object with ``__call__``, or a class of such objects.

    An object serves all conversations, and its calls may run concurrently. For a class, each conversation gets its own
    instance, made at its first call and closed (with ``close``, if defined) at its end. The function may be ``async``;
    its calls run in the process's event loop for users. A plain function cannot be stopped: after its deadline it
    continues in its thread.

    >>> def lookup(city: str, days: int = 1) -> str:
    ...     '''The weather of a city.
    ...
    ...     Args:
    ...         city: its English name
    ...     '''
    ...     return f"sunny in {city} for {days} days"
    >>> weather = FunctionTool(lookup)
    >>> weather.parameters["properties"]["city"]
    {'description': 'its English name', 'type': 'string'}
    >>> weather.call({"city": "Rome", "days": "2"}, conversation=0, deadline=float("inf"))
    'sunny in Rome for 2 days'
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
    ):
        self._target = target
        self._per_conversation = inspect.isclass(target)
        function = target if inspect.isroutine(target) else target.__call__  # of a class: unbound, with ``self``
        if self._per_conversation:
            check_constructor(target)
        self.name = name or _name_of(target)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ConfigError(f"FunctionTool: name= must be letters, digits, _ and -, at most 64: got {self.name!r}.")
        self._signature = Signature(function, self.name, skip_self=self._per_conversation)
        own = parse_docstring(inspect.getdoc(target) or "")[0]
        self.description = description or self._signature.description or own
        if not self.description:
            raise ConfigError(
                f"tool {self.name!r}: needs a docstring, or description=, which tells the model what it does."
            )
        self.parameters = self._signature.json_schema
        self.timeout_s = timeout_s
        self.keeps_deadline = inspect.iscoroutinefunction(function)
        self._loop = UserLoop(f"tool {self.name}") if self.keeps_deadline else None
        self._instances: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original function."""
        return self._target(*args, **kwargs)

    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        args, kwargs = self._signature.bind(arguments)
        function = self._target
        if self._per_conversation:
            with self._lock:
                if conversation not in self._instances:
                    self._instances[conversation] = self._target()
                function = self._instances[conversation]
        if self._loop is None:
            return to_text(function(*args, **kwargs))
        try:
            # One event loop for all, so that tools, rewards and users can share clients.
            return to_text(self._loop.run(function(*args, **kwargs), deadline))
        except TimeoutError:
            if time.monotonic() < deadline:
                raise  # the function's own
            raise ToolTimeout(f"{self.name}: no result in time; the call was cancelled.") from None

    def end(self, conversation: Hashable) -> None:
        with self._lock:
            instance = self._instances.pop(conversation, None)
        _close(instance)

    def close(self) -> None:
        with self._lock:
            instances, self._instances = list(self._instances.values()), {}
        for instance in [*instances, *([] if self._per_conversation else [self._target])]:
            _close(instance)
        if self._loop is not None:
            self._loop.close()


def tool(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Makes a function a tool, as ``@tool`` or ``@tool(timeout_s=2)``. It can still be called as a function.

    >>> @tool(name="shout")
    ... def upper(text: str) -> str:
    ...     "The text in capitals."
    ...     return text.upper()
    >>> upper.name, upper("a")
    ('shout', 'A')
    """

    def make(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name=name, description=description, timeout_s=timeout_s)

    return make if fn is None else make(fn)


def as_tool(obj: Any) -> Tool:
    """A tool as it is; a function, an object with ``__call__`` or a class of such objects as a `FunctionTool`.

    >>> def now() -> str:
    ...     "The time."
    >>> as_tool(now).schema()["function"]["name"]
    'now'
    """
    if isinstance(obj, Tool):
        return obj
    if inspect.isclass(obj) and issubclass(obj, Tool):
        raise ConfigError(f"as_tool: must be given a tool: got the class {obj.__name__}; pass {obj.__name__}(...).")
    # callable() is true for every class; whether its instances are callable shows in the classes' own dicts.
    has_call = any("__call__" in base.__dict__ for base in obj.__mro__) if inspect.isclass(obj) else callable(obj)
    if not has_call:
        raise ConfigError(
            f"as_tool: must be given a Tool, a function, or an object with __call__: got {obj!r:.80} "
            f"({type(obj).__name__}){'; for a tool by name use load_tool' if isinstance(obj, str) else ''}."
        )
    return FunctionTool(obj)


def to_text(value: Any) -> str:
    """A function's result as the model reads it: strings unchanged, None as an empty string, all else as JSON.

    >>> to_text({"a": [1, 2.5]}), to_text(None)
    ('{"a":[1,2.5]}', '')
    """
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value, fallback=str, inf_nan_mode="constants").decode()


def check_constructor(
    cls: type, settings: Mapping[str, Any] | None = None, who: str = "as_tool: a class is called without arguments"
) -> None:
    """Raises ConfigError, with the nearest name, if the class cannot be called with ``settings``."""
    try:
        signature = inspect.signature(cls)
        signature.bind(**(settings or {}))
    except TypeError as error:
        unknown = [key for key in settings or {} if key not in signature.parameters]
        hint = did_you_mean(unknown[0], signature.parameters) if unknown else ""
        raise ConfigError(f"{who}: {cls.__name__}{signature}: {error}.{hint}") from None


def _name_of(target: Any) -> str:
    if isinstance(given := getattr(target, "name", None), str):
        return given
    if inspect.isroutine(target):
        return target.__name__
    kind = target if inspect.isclass(target) else type(target)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def _close(instance: Any) -> None:
    close = getattr(instance, "close", None)
    if callable(close):
        close()
