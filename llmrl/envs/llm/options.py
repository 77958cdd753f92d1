"""Options that several environments and transforms share, as two records: of a conversation, and of its tool calls.

Constructors keep their documented keywords; `options_of` reads the records from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from llmrl.errors import ConfigError, did_you_mean
from llmrl.modules.llm.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.envs.llm.tool_calls import CallFormat

__all__ = ["MODES", "ConversationOptions", "ToolOptions", "check_keywords", "options_of"]

MODES = ("history", "text", "tokens")
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """The view that a conversation is kept in, how its prompt is rendered, and the names in it.

    input_mode       "history", "text" or "tokens"; the last two render the prompt and need a tokenizer
    tokenizer        its chat template renders the prompt
    template_kwargs  variables of the chat template
    data_key         entry that holds what the user says; None: "query"
    system_prompt    first message of conversations that do not begin with a system message; None: none
    Raises           ConfigError for an unknown mode, or a mode that lacks its tokenizer
    """

    input_mode: str = "history"
    tokenizer: PreTrainedTokenizerBase | None = None
    template_kwargs: Mapping[str, Any] | None = None
    data_key: str | None = None
    system_prompt: str | None = None
    system_role: str = "system"
    user_role: str = "user"
    policy_role: str = "assistant"

    def __post_init__(self) -> None:
        if self.input_mode not in MODES:
            raise ConfigError(
                f"ChatEnv: input_mode must be one of {', '.join(MODES)}: got "
                f"{self.input_mode!r}.{did_you_mean(str(self.input_mode), MODES)}"
            )
        if self.input_mode != "history" and self.tokenizer is None:
            raise ConfigError(
                f"ChatEnv: input_mode={self.input_mode!r} renders the prompt at reset and needs a tokenizer."
            )
        if self.data_key is None:
            object.__setattr__(self, "data_key", "query")

    def make_renderer(self) -> Renderer | None:
        """The renderer of prompts; None in history mode, where the policy renders."""
        if self.input_mode == "history":
            return None
        return Renderer(self.tokenizer, template_kwargs=self.template_kwargs)


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Options of reading, running and answering tool calls: arguments of `ToolTransform`.

    format              of the calls: a name as `call_format` takes it, or a `CallFormat`; "auto": that of the chat
                        template, else by the form of each call
    timeout_s           of one call, where the tool has none of its own
    max_calls_per_turn  calls beyond are not run, and the model gets a message
    max_result_chars    of one answer; the middle of a longer one is cut, with a notice
    max_tool_turns      turns whose calls are answered; None: no limit but the env's
    max_concurrency     calls that run at a time, over all rows
    end_without_call    False leaves the end of a conversation to the env and its other transforms
    declare             True passes the schemas through the chat template; None: where templates teach ``format``
    role                of the messages with the answers
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
        for name in ("max_calls_per_turn", "max_tool_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"ToolTransform: {name} must be at least 1: got {value}.")


def options_of(record: type[Record], arguments: Mapping[str, Any]) -> Record:
    """The record of those ``arguments`` that are fields of it; the others are left to the caller.

    >>> options_of(ConversationOptions, {"system_prompt": "Be brief.", "num_envs": 2}).system_prompt
    'Be brief.'
    """
    names = {field.name for field in fields(record)}
    return record(**{name: value for name, value in arguments.items() if name in names})


def check_keywords(given: Iterable[str], receiver: type, who: str) -> None:
    """Raises ConfigError for the name of a forwarded option that the constructor of ``receiver`` does not take."""
    known = [name for name in inspect.signature(receiver).parameters if name != "self"]
    for name in given:
        if name not in known:
            raise ConfigError(f"{who}: {name!r} is not one of its arguments.{did_you_mean(name, known)}")
