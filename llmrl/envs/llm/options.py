"""Options shared by several environments and transforms, and the routing of keyword arguments to constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrl.errors import ConfigError, check_at_least, did_you_mean

if TYPE_CHECKING:
    from llmrl.envs.llm.tool_calls import CallFormat

MODES = ("history", "text", "tokens")


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Options for parsing, running and answering tool calls: arguments of `ToolTransform`.

    format              of the calls: a name for `call_format`, or a `CallFormat`; "auto": the chat template's format,
                        else detected for each call
    timeout_s           of one call, for tools without their own timeout
    max_calls_per_turn  further calls are not run, and the model gets a message
    max_result_chars    of one result; the middle of a longer one is cut, with a notice
    max_tool_turns      turns whose calls are answered; None: only the env's limit
    max_concurrency     calls that run at the same time, over all rows
    end_without_call    False leaves the end of a conversation to the env and its other transforms
    declare             True declares the schemas through the chat template; None: if templates support ``format``
    role                of the messages with the results
    Raises  ConfigError for a limit below 1
    """

    format: str | CallFormat = "auto"
    timeout_s: float = 10.0
    max_calls_per_turn: int = 8
    max_result_chars: int = 4000
    max_tool_turns: int | None = None
    max_concurrency: int = 64
    end_without_call: bool = True
    declare: bool | None = None
    role: str = "tool"

    def __post_init__(self) -> None:
        limits = {"max_calls_per_turn": self.max_calls_per_turn, "max_tool_turns": self.max_tool_turns}
        check_at_least("ToolTransform", 1, **limits)


def keywords_of(receiver: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``given`` that the constructor, or the function, accepts."""
    names = inspect.signature(receiver).parameters
    return {name: value for name, value in given.items() if name in names and name not in ("self", "options")}


def split_keywords(given: Mapping[str, Any], who: str, *receivers: Callable[..., Any]) -> list[dict[str, Any]]:
    """`keywords_of` each constructor. Raises ConfigError, suggesting a close name, for one that none of them accepts.

    >>> split_keywords({"max_tool_turns": 3}, "MyTools", ToolOptions)
    [{'max_tool_turns': 3}]
    """
    known = [name for receiver in receivers for name in inspect.signature(receiver).parameters if name != "self"]
    for name in given:
        if name not in known:
            raise ConfigError(f"{who}: {name!r} is not one of its arguments.{did_you_mean(name, known)}")
    return [keywords_of(receiver, given) for receiver in receivers]
