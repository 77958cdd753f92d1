"""Messages: Anthropic's API, as a translation to chat completions and back. Fields are those of its reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from llmrl.endpoint.chat import BadRequestError, ChatRequest, Completion, Head, read_request, text_of, to_json
from llmrl.endpoint.streams import Piece
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
            tool_choice=choice if choice.get("type") == "tool" else _CHOICES.get(choice.get("type"), choice),
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

    def events(self, head: Head, tokenizer: Any) -> MessageEvents:
        return MessageEvents(self, head)

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
        stop = None
        if reason == "end_turn" and turn.stop_reason is StopReason.STOP_STRING:
            said = turn.message.get("content") or ""  # the answer with the string that ended it
            stop = next((given for given in asked.stop_sequences or () if given in said), None)
            reason = reason if stop is None else "stop_sequence"
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return _body(asked, self.completion.head, list(self._blocks(message)), reason, stop, counts)

    def _blocks(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if thought := message.get("reasoning_content"):
            yield {"type": "thinking", "thinking": thought, "signature": ""}
        if message.get("content") or not message.get("tool_calls"):
            yield {"type": "text", "text": message.get("content") or ""}
        for call in message.get("tool_calls") or ():
            named = {"id": call["id"], "name": call["function"]["name"]}
            yield {"type": "tool_use", **named, "input": json.loads(call["function"]["arguments"] or "{}")}


class MessageEvents:
    """Server-sent events."""

    def __init__(self, request: MessagesRequest, head: Head) -> None:
        self._request, self._head = request, head
        self._sent = ""  # of the text

    def begin(self, prompt_ids: Tensor) -> Iterator[str]:
        usage = {"input_tokens": len(prompt_ids), "output_tokens": 0}
        yield _event("message_start", message=_body(self._request, self._head, [], None, None, usage))

    def piece(self, piece: Piece) -> Iterator[str]:
        if not (text := piece.texts.get("content")):
            return
        if not self._sent:
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._sent += text
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, completion: Completion) -> Iterator[str]:
        body = Message(self._request, completion).body()
        for place, block in enumerate(body["content"]):
            kind = block["type"]
            if kind == "tool_use":
                yield _event("content_block_start", index=place, content_block={**block, "input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=place, delta=delta)
            else:  # "text" or "thinking", as the field is named too
                sent = self._sent if kind == "text" else ""
                if not sent:
                    yield _event("content_block_start", index=place, content_block={**block, kind: ""})
                if rest := block[kind][len(sent) :]:
                    yield _event("content_block_delta", index=place, delta={"type": f"{kind}_delta", kind: rest})
            yield _event("content_block_stop", index=place)
        ends = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        yield _event("message_delta", delta=ends, usage={"output_tokens": body["usage"]["output_tokens"]})
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields}).decode()}"


def _body(
    asked: MessagesRequest,
    head: Head,
    content: list[dict[str, Any]],
    reason: str | None,
    stop: str | None,
    usage: Mapping[str, int],
) -> dict[str, Any]:
    body = {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": asked.model, "content": content}
    return {**body, "stop_reason": reason, "stop_sequence": stop, "usage": usage}
