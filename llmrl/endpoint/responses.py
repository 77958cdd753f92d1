"""Responses: OpenAI's second API, as a translation to chat completions and back. Fields are those of its reference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from llmrl.endpoint.chat import BadRequestError, ChatRequest, Completion, read_request, text_of

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
        self._id, self._created = self.completion.id, int(time.time())
        [turn], [message] = self.completion.turns, self.completion.messages
        self._cut = self.completion.finish(turn, message) == "length"
        self._items = list(self._output(message))

    def _output(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            yield {
                "type": "reasoning",
                "id": f"rs_{self._id}",
                "summary": [],
                "content": content,
                "status": "completed",
            }
        calls = message.get("tool_calls") or ()
        if message.get("content") or not calls:
            part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
            status = "incomplete" if self._cut else "completed"
            yield {"type": "message", "id": f"msg_{self._id}", "role": "assistant", "status": status, "content": [part]}
        for number, call in enumerate(calls):
            named = {"call_id": call["id"], **call["function"], "status": "completed"}
            yield {"type": "function_call", "id": f"fc_{self._id}_{number}", **named}

    def body(self) -> dict[str, Any]:
        """The JSON object of an answer that is not streamed."""
        ended = "incomplete" if self._cut else "completed"
        return self._body(ended, self._items, self.completion.usage())

    def _body(self, status: str, items: list[dict[str, Any]], usage: Mapping[str, int] | None) -> dict[str, Any]:
        asked, counts = self.request, None
        if usage is not None:
            counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
            counts |= {"total_tokens": usage["total_tokens"], "input_tokens_details": {"cached_tokens": 0}}
            counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
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

    def events(self) -> Iterator[str]:
        """The server-sent events, each with its number."""
        for number, (kind, fields) in enumerate(self._events()):
            data = {"type": f"response.{kind}", "sequence_number": number, **fields}
            yield f"event: response.{kind}\ndata: {json.dumps(data)}"

    def _events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for kind in ("created", "in_progress"):
            yield kind, {"response": self._body("in_progress", [], None)}
        for place, item in enumerate(self._items):
            at = {"item_id": item["id"], "output_index": place}
            empty = {"arguments": ""} if "arguments" in item else {"content": []}
            yield "output_item.added", {"output_index": place, "item": {**item, "status": "in_progress", **empty}}
            if item["type"] == "function_call":
                yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
                yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
            else:
                [part] = item["content"]
                at, kind = {**at, "content_index": 0}, part["type"]
                more = {"logprobs": []} if kind == "output_text" else {}
                yield "content_part.added", {**at, "part": {**part, "text": ""}}
                yield f"{kind}.delta", {**at, "delta": part["text"], **more}
                yield f"{kind}.done", {**at, "text": part["text"], **more}
                yield "content_part.done", {**at, "part": part}
            yield "output_item.done", {"output_index": place, "item": item}
        body = self.body()
        yield body["status"], {"response": body}
