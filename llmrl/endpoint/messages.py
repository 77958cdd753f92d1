"""Messages: Anthropic's API, as a translation to chat completions and back. Fields are those of its reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from llmrl.endpoint.chat import BadRequestError, ChatRequest, Completion, read_request, text_of
from llmrl.modules.llm.engines.base import StopReason

# Accepted without effect: they are about Anthropic's service, or ask for what a model without such a setting cannot do.
_WITHOUT_EFFECT = ("metadata", "service_tier", "thinking", "output_config", "cache_control", "betas", "inference_geo")
_WITHOUT_EFFECT += ("context_management",)
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class MessagesRequest(BaseModel):
    """The body of ``POST /v1/messages``."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int = Field(ge=1)
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stream: bool | None = None

    @classmethod
    def read(cls, body: bytes) -> MessagesRequest:
        """Raises BadRequestError that names the field."""
        return read_request(cls, body, _WITHOUT_EFFECT)

    def as_chat(self) -> ChatRequest:
        """The same request for chat completions. Raises BadRequestError for what chat completions cannot say."""
        choice = self.tool_choice or {"type": "auto"}
        request = ChatRequest(
            **{name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream", "max_tokens")},
            messages=list(self._messages()),
            stop=self.stop_sequences or None,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_CHOICES.get(choice.get("type"), "required"),
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        )
        request.check()
        return request

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": text_of(self.system, -1)}
        for number, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
            texts, calls, thoughts = [], [], []
            for block in blocks:
                match block.get("type"):
                    case "tool_use":
                        function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                        calls.append({"id": block.get("id"), "type": "function", "function": function})
                    case "tool_result":  # a message of its own, before the user's text
                        result = text_of(block.get("content"), number)
                        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
                    case "thinking":
                        thoughts.append(block.get("thinking") or "")
                    case _:
                        texts.append(block)
            if texts or calls or thoughts or not blocks:
                more = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
                yield {"role": role, "content": text_of(texts, number), **more}

    def answer(self, completion: Completion) -> Message:
        return Message(self, completion)

    @staticmethod
    def failure(body: dict[str, Any]) -> dict[str, Any]:
        error = body["error"]
        return {"type": "error", "error": {"type": error["type"], "message": error["message"]}}


class CountTokensRequest(MessagesRequest):
    """The body of ``POST /v1/messages/count_tokens``: a request that is not sampled."""

    max_tokens: int = 1


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise BadRequestError(f"tools: only tools that the client calls: got {tool.get('type')!r}.", field="tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {},
    }
    return {"type": "function", "function": function}


@dataclass
class Message:
    """The answer to one request."""

    request: MessagesRequest
    completion: Completion

    def body(self) -> dict[str, Any]:
        """The JSON object of an answer that is not streamed."""
        [turn], [message] = self.completion.turns, self.completion.messages
        usage, asked = self.completion.usage(), self.request
        finish = self.completion.finish(turn, message)
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[finish]
        if reason == "end_turn" and turn.stop_reason is StopReason.STOP_STRING:
            reason = "stop_sequence"
        only = asked.stop_sequences[0] if reason == "stop_sequence" and len(asked.stop_sequences or ()) == 1 else None
        return {
            "id": f"msg_{self.completion.id}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": list(self._blocks(message)),
            "stop_reason": reason,
            "stop_sequence": only,
            "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
        }

    def _blocks(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if thought := message.get("reasoning_content"):
            yield {"type": "thinking", "thinking": thought, "signature": ""}
        if message.get("content") or not message.get("tool_calls"):
            yield {"type": "text", "text": message.get("content") or ""}
        for call in message.get("tool_calls") or ():
            named = {"id": call["id"], "name": call["function"]["name"]}
            yield {"type": "tool_use", **named, "input": json.loads(call["function"]["arguments"] or "{}")}

    def events(self) -> Iterator[str]:
        """The server-sent events."""
        for kind, fields in self._events():
            yield f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}"

    def _events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        body = self.body()
        usage = {**body["usage"], "output_tokens": 0}
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield "message_start", {"message": {**body, **nothing}}
        for place, block in enumerate(body["content"]):
            if block["type"] == "tool_use":
                empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            else:
                field = block["type"]  # "text" or "thinking", as the field is named too
                empty, delta = {field: ""}, {"type": f"{field}_delta", field: block[field]}
            yield "content_block_start", {"index": place, "content_block": {**block, **empty}}
            yield "content_block_delta", {"index": place, "delta": delta}
            yield "content_block_stop", {"index": place}
        ends = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        yield "message_delta", {"delta": ends, "usage": {"output_tokens": body["usage"]["output_tokens"]}}
        yield "message_stop", {}
