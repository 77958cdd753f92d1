"""Responses: OpenAI's second API, as a translation to chat completions and back. Fields are those of its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from llmrl.endpoint.chat import BadRequestError, ChatRequest, Completion, Head, read_request, text_of, to_json
from llmrl.endpoint.streams import Piece

# Accepted without effect: they are about OpenAI's service, or what is included of tools that this server does not have.
_WITHOUT_EFFECT = ("store", "metadata", "reasoning", "include", "truncation", "user", "service_tier", "max_tool_calls")
_WITHOUT_EFFECT += (
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "stream_options",
    "context_management",
)


class ResponsesRequest(BaseModel):
    """The body of ``POST /v1/responses``."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    @classmethod
    def read(cls, body: bytes) -> ResponsesRequest:
        """Raises BadRequestError that names the field."""
        request = read_request(cls, body, _WITHOUT_EFFECT)
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(request, name):
                reason = "nothing is stored here: send the whole conversation as input"
                raise BadRequestError(f"{name}: {reason}.", field=name)
        return request

    def as_chat(self) -> ChatRequest:
        """The same request for chat completions. Raises BadRequestError for what chat completions cannot say."""
        given = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream", "top_logprobs")}
        given |= {"tool_choice": self.tool_choice, "parallel_tool_calls": self.parallel_tool_calls}
        kind = ((self.text or {}).get("format") or {"type": "text"}).get("type")
        request = ChatRequest(
            **given,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            response_format={"type": kind},
        )
        request.check()
        return request

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages: an assistant's reasoning, text and calls that follow each other are one."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        found = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if not items:
            raise BadRequestError("input: must have at least one item.", field="input")
        for number, item in enumerate(items):
            kind = item.get("type", "message")
            if kind == "function_call_output":
                output = text_of(item.get("output"), number)
                found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
                continue
            role = item.get("role") if kind == "message" else "assistant"
            if role != "assistant":
                found.append({"role": role, "content": text_of(item.get("content"), number)})
                continue
            follows = found and found[-1]["role"] == "assistant" and not (kind == "message" and found[-1]["content"])
            if not follows:
                found.append({"role": "assistant", "content": ""})
            if kind == "message":
                found[-1]["content"] += text_of(item.get("content"), number)
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
            elif kind == "reasoning":
                found[-1]["reasoning_content"] = text_of(item.get("content") or item.get("summary"), number)
            else:
                raise BadRequestError(
                    f"input[{number}].type: {kind!r} is not an item that this server reads.", field="input"
                )
        return found

    def answer(self, completion: Completion) -> Response:
        return Response(self, completion)

    def events(self, head: Head, tokenizer: Any) -> ResponseEvents:
        return ResponseEvents(self, head)

    @staticmethod
    def failure(body: dict[str, Any]) -> dict[str, Any]:
        return body


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequestError(
            f"tools: only functions, which the client calls: got {tool.get('type')!r}.", field="tools"
        )
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
    }


@dataclass
class Response:
    """The answer to one request."""

    request: ResponsesRequest
    completion: Completion

    def __post_init__(self) -> None:
        [turn], [message] = self.completion.turns, self.completion.messages
        self._cut = self.completion.finish(turn, message) == "length"
        self.items = list(self._output(message))

    def _output(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        head = self.completion.head
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            yield {
                "type": "reasoning",
                "id": f"rs_{head.id}",
                "summary": [],
                "content": content,
                "status": "completed",
            }
        calls = message.get("tool_calls") or ()
        if message.get("content") or not calls:
            status = "incomplete" if self._cut else "completed"
            yield _message_item(head, message.get("content") or "", status)
        for number, call in enumerate(calls):
            named = {"call_id": call["id"], **call["function"], "status": "completed"}
            yield {"type": "function_call", "id": f"fc_{head.id}_{number}", **named}

    def body(self) -> dict[str, Any]:
        """The JSON object of an answer that is not streamed."""
        ended = "incomplete" if self._cut else "completed"
        return _body(self.request, self.completion.head, ended, self.items, self.completion.usage())


def _message_item(head: Head, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{head.id}", "role": "assistant", "status": status, "content": [part]}


def _body(
    asked: ResponsesRequest, head: Head, status: str, items: list[dict[str, Any]], usage: Mapping[str, int] | None
) -> dict[str, Any]:
    counts: dict[str, Any] | None = None
    if usage is not None:
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        counts |= {"total_tokens": usage["total_tokens"], "input_tokens_details": {"cached_tokens": 0}}
        counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.instructions,
        "metadata": {},
        "model": asked.model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "usage": counts,
    }


class ResponseEvents:
    """Server-sent events, each with its number."""

    def __init__(self, request: ResponsesRequest, head: Head) -> None:
        self._request, self._head = request, head
        self._number = 0
        self._sent = ""  # of the message's text
        self._item: dict[str, Any] | None = None  # the message, once it is begun

    def begin(self, prompt_ids: Tensor) -> Iterator[str]:
        response = _body(self._request, self._head, "in_progress", [], None)
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=response)

    def piece(self, piece: Piece) -> Iterator[str]:
        if not (text := piece.texts.get("content")):
            return
        if self._item is None:
            self._item = _message_item(self._head, "", "in_progress")
            yield from self._open(0, self._item)
        self._sent += text
        yield self._event("output_text.delta", **self._at(0, self._item), content_index=0, delta=text, logprobs=[])

    def end(self, completion: Completion) -> Iterator[str]:
        response = Response(self._request, completion)
        for place, item in enumerate(response.items):
            at = self._at(place, item)
            is_begun = self._item is not None and item["id"] == self._item["id"]
            if not is_begun:
                yield from self._open(place, item)
            if item["type"] == "function_call":
                yield self._event("function_call_arguments.delta", **at, delta=item["arguments"])
                named = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("function_call_arguments.done", **at, **named)
            else:
                [part] = item["content"]
                kind, more = part["type"], {"logprobs": []} if part["type"] == "output_text" else {}
                if rest := part["text"][len(self._sent) if is_begun else 0 :]:
                    yield self._event(f"{kind}.delta", **at, content_index=0, delta=rest, **more)
                yield self._event(f"{kind}.done", **at, content_index=0, text=part["text"], **more)
                yield self._event("content_part.done", **at, content_index=0, part=part)
            yield self._event("output_item.done", output_index=place, item=item)
        body = response.body()
        yield self._event(body["status"], response=body)

    def _open(self, place: int, item: Mapping[str, Any]) -> Iterator[str]:
        empty = {"arguments": ""} if "arguments" in item else {"content": []}
        yield self._event("output_item.added", output_index=place, item={**item, "status": "in_progress", **empty})
        for part in item.get("content") or ():
            part = {**part, "text": ""}
            yield self._event("content_part.added", **self._at(place, item), content_index=0, part=part)

    def _at(self, place: int, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": place}

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: response.{kind}\ndata: {to_json(data).decode()}"
