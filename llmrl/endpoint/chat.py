"""Chat completions: what a request must be, and the answer as a JSON object or as server-sent events.

Fields and shapes are those of OpenAI's API reference; ``return_token_ids`` and ``return_tokens_as_token_ids`` those of
vLLM's server.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from llmrl.data.llm.templates import plain_columns
from llmrl.endpoint.streams import Piece
from llmrl.envs.llm.tool_calls import CallFormat
from llmrl.envs.llm.tool_calls.base import structured_call
from llmrl.errors import ConfigError, did_you_mean
from llmrl.modules.llm.conversation import SampledTurn
from llmrl.modules.llm.engines.base import SamplingParams

# Accepted without effect: they are about OpenAI's service, or ask for what a model without such a setting cannot do.
_WITHOUT_EFFECT = ("store", "metadata", "reasoning_effort", "verbosity", "prompt_cache_key", "prompt_cache_retention")
_WITHOUT_EFFECT += ("prompt_cache_options", "service_tier", "user", "safety_identifier", "cache_salt", "session_id")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEMPLATE_ROLES = frozenset(_ROLES.values())
_READ = {name: name for name in ("name", "tool_call_id", "tool_calls", "reasoning_content")}
_READ["reasoning"] = "reasoning_content"


class BadRequestError(ValueError):
    """A request that cannot be answered. ``status``: of HTTP; ``code``: of OpenAI's error object."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.field = status, code, field

    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


Body = TypeVar("Body", bound=BaseModel)


def read_request(kind: type[Body], body: bytes, without_effect: Collection[str]) -> Body:
    """A request from its JSON, without the fields that are accepted ``without_effect``.

    Raises  BadRequestError that names the field
    """
    try:
        fields = orjson.loads(body)
    except ValueError as error:
        raise BadRequestError(f"the body must be JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise BadRequestError(f"the body must be a JSON object: got {type(fields).__name__}.")
    try:
        return kind(**{name: value for name, value in fields.items() if name not in without_effect})
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            hint = did_you_mean(name, (*kind.model_fields, *without_effect))
            raise BadRequestError(f"{name} is not a field that this server knows.{hint}", field=name) from None
        raise BadRequestError(f"{name}: {fault['msg']}: got {fault['input']!r:.100}.", field=name) from None


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    messages: list[Any] = Field(min_length=1)  # read by `chat`
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=128)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def read(cls, body: bytes) -> ChatRequest:
        """Raises BadRequestError that names the field."""
        request = read_request(cls, body, _WITHOUT_EFFECT)
        request.check()
        return request

    def as_chat(self) -> ChatRequest:
        return self

    def answer(self, completion: Completion) -> Completion:
        return completion

    def events(self, head: Head, tokenizer: Any) -> ChatEvents:
        return ChatEvents(self, head, tokenizer)

    @staticmethod
    def failure(body: dict[str, Any]) -> dict[str, Any]:
        """The error object that a client reads."""
        return body

    def check(self) -> None:
        """Raises BadRequestError for what cannot be sampled on-policy, or at all."""
        kind = (self.response_format or {}).get("type", "text")
        refused = {
            "response_format": (kind != "text", f"{kind} needs constrained sampling, which this server does not do"),
            "tool_choice": (
                self.tool_choice not in (None, "auto", "none", "required") and self.chosen_tool not in self._names(),
                f"must be auto, none, required, or one of the request's tools: got {self.tool_choice!r}",
            ),
            "parallel_tool_calls": (
                self.parallel_tool_calls is False and bool(self.tools),
                "a model that may call one tool at a time needs constrained sampling: leave it out",
            ),
            "top_logprobs": (bool(self.top_logprobs), "only the sampled tokens have log-probs: leave it out or use 0"),
            "frequency_penalty": (bool(self.frequency_penalty), "penalties are not sampled with: leave it out"),
            "presence_penalty": (bool(self.presence_penalty), "penalties are not sampled with: leave it out"),
            "chat_template_kwargs": (
                bool(self.chat_template_kwargs),
                "the template's variables are those of the server: set them where it is started",
            ),
        }
        for name, (wrong, reason) in refused.items():
            if wrong:
                raise BadRequestError(f"{name}: {reason}.", field=name)
        if self.is_forced and not self.tools:
            raise BadRequestError("tool_choice: a call is required, but the request has no tools.", field="tool_choice")

    def _names(self) -> list[Any]:
        return [tool.get("function", tool).get("name") for tool in self.tools or ()]

    @property
    def is_forced(self) -> bool:
        """If only an answer with a call will do."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def chosen_tool(self) -> Any:
        """The name of the tool that must be called; None: any."""
        choice = self.tool_choice
        return choice.get("function", choice).get("name") if isinstance(choice, dict) else None

    def accepts(self, message: Mapping[str, Any]) -> bool:
        """If the answer has the calls that the request demands."""
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        return not self.is_forced or (bool(names) if self.chosen_tool is None else set(names) == {self.chosen_tool})

    def chat(self) -> list[dict[str, Any]]:
        """The messages as a template reads them. Raises BadRequestError for parts that are not text."""
        columns = plain_columns(self.messages)
        if columns is not None and _TEMPLATE_ROLES.issuperset(columns[0]):
            return self.messages
        return [_message(message, number) for number, message in enumerate(self.messages)]

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return self.tools if self.tool_choice != "none" else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer and are not part of its text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, given: SamplingParams, *, fixed: bool) -> tuple[SamplingParams, list[str]]:
        """The sampling parameters, and the names of the request's that were overridden: ``fixed`` allows none that
        changes the distribution, because training needs rows of one policy.
        """
        asked = {"temperature": self.temperature, "top_p": self.top_p}
        asked = {name: value for name, value in asked.items() if value is not None and value != getattr(given, name)}
        limit = self.max_completion_tokens or self.max_tokens
        changes: dict[str, Any] = {} if fixed else asked
        if limit is not None:
            changes["max_new_tokens"] = min(limit, given.max_new_tokens)
        if self.stops:
            changes["stop_strings"] = (*given.stop_strings, *self.stops)
        overridden = list(asked) if fixed else []
        if not changes:
            return given, overridden
        try:
            return replace(given, **changes), overridden
        except ConfigError as error:
            raise BadRequestError(str(error)) from None


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequestError(f"messages[{number}]: must be an object: got {message!r:.100}.", field="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise BadRequestError(f"messages[{number}].role: must be one of {roles}: got {role!r}.", field="messages")
    found = {"role": _ROLES[role], "content": content if type(content) is str else text_of(content, number)}
    if len(message) == 2 and "content" in message:  # not an answer of calls alone, whose null content is left out
        return found
    for name, value in message.items():
        if not value or name in found:  # null and empty say nothing
            continue
        if name not in _READ:
            known = ", ".join(("role", "content", *_READ))
            raise BadRequestError(f"messages[{number}].{name}: is not read here; known: {known}.", field="messages")
        found[_READ[name]] = value
    return found


def text_of(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not isinstance(part.get("text", part.get("refusal")), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequestError(f"messages[{number}].content: only text is read: got {kind}.", field="messages")
        parts.append(part.get("text", part.get("refusal")))
    return "".join(parts)


def answer_message(turn: SampledTurn, form: CallFormat, prefix: str) -> dict[str, Any]:
    """The answer as the client gets it, with its calls apart from the text; ``prefix`` makes the ids of calls.

    A call that cannot be read stays in the text, so that the client sees what the model wrote.
    """
    content, tools = turn.message.get("content") or "", turn.tools
    message: dict[str, Any] = {"role": "assistant", "content": content}
    calls = turn.message.get("tool_calls") or []
    if tools and not calls:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        parsed = [call for call in form.parse(content, schemas) if call.error is None]
        calls = [structured_call(call.name, call.arguments, call.id or "") for call in parsed]
        for start, end in reversed(sorted({call.span for call in parsed})):
            content = content[:start] + content[end:]
    if calls:
        message["content"] = content.rstrip() or None
        message["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{prefix}_{number}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _json(call["function"]["arguments"])},
            }
            for number, call in enumerate(calls)
        ]
    if thought := turn.message.get("reasoning_content") or turn.message.get("thinking"):
        message["reasoning_content"] = thought
    return message


def without_stop(message: dict[str, Any], stops: Sequence[str]) -> None:
    """Ends the message's content before the first of these strings."""
    content = message.get("content") or ""
    places = [place for stop in stops if (place := content.find(stop)) >= 0]
    if places:
        message["content"] = content[: min(places)]


def to_json(body: Mapping[str, Any]) -> bytes:
    """JSON, in which ids may be an array of numpy: that is ten times as fast as a list."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class Head(NamedTuple):
    """What an answer has from its beginning on."""

    id: str
    created: int

    @classmethod
    def new(cls) -> Head:
        return cls(uuid.uuid4().hex, int(time.time()))


@dataclass
class Completion:
    """The answers to one request, with their messages, as the client gets them; ``rest``: what its stream lacks."""

    request: ChatRequest
    head: Head
    turns: Sequence[SampledTurn]
    messages: Sequence[Mapping[str, Any]]
    rest: Sequence[Piece]
    tokenizer: Any

    def body(self) -> dict[str, Any]:
        """The JSON object of an answer that is not streamed."""
        request = self.request
        choices = [
            {
                "index": number,
                "message": message,
                "finish_reason": self.finish(turn, message),
                "logprobs": _log_probs(request, self.tokenizer, turn.ids.tolist(), turn.log_probs.tolist()),
                **({"token_ids": turn.ids.tolist()} if request.return_token_ids else {}),
            }
            for number, (turn, message) in enumerate(zip(self.turns, self.messages, strict=True))
        ]
        body = {**_head(request, self.head, "chat.completion"), "choices": choices, "usage": self.usage()}
        return body | _prompt(request, self.turns[0].prompt_ids)

    def finish(self, turn: SampledTurn, message: Mapping[str, Any]) -> Literal["stop", "length", "tool_calls"]:
        if message.get("tool_calls"):
            return "tool_calls"
        return "stop" if turn.stop_reason.natural else "length"

    def usage(self) -> dict[str, int]:
        prompt, sampled = len(self.turns[0].prompt_ids), sum(len(turn.ids) for turn in self.turns)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


@dataclass
class ChatEvents:
    """Server-sent events: each answer's role, its text with its ids, calls, end; then the usage."""

    request: ChatRequest
    head: Head
    tokenizer: Any

    def begin(self, prompt_ids: Tensor) -> Iterator[str]:
        for number in range(self.request.n or 1):
            prompt = {} if number else _prompt(self.request, prompt_ids)
            yield self._chunk(number, {"role": "assistant", "content": ""}, **prompt)

    def piece(self, piece: Piece) -> Iterator[str]:
        # All ids come here: a client that puts them together must also get those of calls.
        values = {"token_ids": piece.ids} if self.request.return_token_ids else {}
        log_probs = _log_probs(self.request, self.tokenizer, piece.ids, piece.log_probs)
        if piece.texts or (piece.ids and (values or log_probs)):
            yield self._chunk(piece.row, piece.texts, choice={"logprobs": log_probs, **values})

    def end(self, completion: Completion) -> Iterator[str]:
        for piece, turn, message in zip(completion.rest, completion.turns, completion.messages, strict=True):
            yield from self.piece(piece)
            for place, call in enumerate(message.get("tool_calls") or ()):
                yield self._chunk(piece.row, {"tool_calls": [{"index": place, **call}]})
            yield self._chunk(piece.row, {}, choice={"finish_reason": completion.finish(turn, message)})
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield self._data({"choices": [], "usage": completion.usage()})
        yield "data: [DONE]"

    def _chunk(
        self, number: int, delta: Mapping[str, Any], choice: Mapping[str, Any] = MappingProxyType({}), **more: Any
    ) -> str:
        whole = {"index": number, "delta": delta, "finish_reason": None, **choice}
        return self._data({"choices": [whole], **more})

    def _data(self, fields: Mapping[str, Any]) -> str:
        return f"data: {to_json({**_head(self.request, self.head, 'chat.completion.chunk'), **fields}).decode()}"


def _head(request: ChatRequest, head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "created": head.created, "model": request.model, "object": kind}


def _prompt(request: ChatRequest, ids: Tensor) -> dict[str, Any]:
    return {"prompt_token_ids": ids.numpy()} if request.return_token_ids else {}


def _log_probs(
    request: ChatRequest, tokenizer: Any, ids: Sequence[int], values: Sequence[float]
) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    entries = []
    for token, value in zip(ids, values, strict=True):
        text = tokenizer.decode([token])
        shown = f"token_id:{token}" if request.return_tokens_as_token_ids else text
        entries.append({"token": shown, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}
