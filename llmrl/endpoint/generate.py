"""Generate: ids in, ids with log-probs out, for clients that render conversations themselves. The wire is vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from llmrl.endpoint.chat import BadRequestError, ChatRequest, Completion, read_request
from llmrl.modules.llm.engines.base import SamplingParams

# Accepted without effect: they are about vLLM's scheduler and cache.
_WITHOUT_EFFECT = ("cache_salt", "priority", "request_id", "session_id")
_NEUTRAL = {"top_k": (None, 0, -1), "min_p": (None, 0), "repetition_penalty": (None, 1)}
_NEUTRAL |= {"frequency_penalty": (None, 0), "presence_penalty": (None, 0)}


class Sampling(BaseModel):
    """The section ``sampling_params``."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = Field(None, ge=0, le=1)  # the sampled token's, which are always given
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    routed_experts_prompt_start: int | None = None  # about routed experts, which are not given


class IdsRequest(ChatRequest):
    """A request that is sampled from ids in place of messages."""

    token_ids: list[int]
    stop_token_ids: list[int]

    def chat(self) -> Tensor:
        return torch.tensor(self.token_ids)

    def params(self, given: SamplingParams, *, fixed: bool) -> tuple[SamplingParams, list[str]]:
        params, overridden = super().params(given, fixed=fixed)
        return replace(params, stop_token_ids=(*params.stop_token_ids, *self.stop_token_ids)), overridden


class GenerateRequest(BaseModel):
    """The body of ``POST /inference/v1/generate``."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Sampling()
    return_token_ids: bool | None = None
    stream: bool | None = None
    features: Any = None
    content_parts: Any = None

    @classmethod
    def read(cls, body: bytes) -> GenerateRequest:
        """Raises BadRequestError that names the field."""
        request = read_request(cls, body, _WITHOUT_EFFECT)
        for name in ("stream", "features", "content_parts"):
            if getattr(request, name):
                raise BadRequestError(f"{name}: an answer is one JSON object of text: leave it out.", field=name)
        for name, values in _NEUTRAL.items():
            if (value := getattr(request.sampling_params, name)) not in values:
                raise BadRequestError(f"sampling_params.{name}: is not sampled with: got {value}.", field=name)
        return request

    def as_chat(self) -> ChatRequest:
        given = self.sampling_params.model_dump(include={"max_tokens", "temperature", "top_p", "n", "seed", "stop"})
        stops = self.sampling_params.stop_token_ids or []
        return IdsRequest(**given, messages=[{}], token_ids=self.token_ids, stop_token_ids=stops, model=self.model)

    def answer(self, completion: Completion) -> Generated:
        return Generated(self, completion)

    @staticmethod
    def failure(body: dict[str, Any]) -> dict[str, Any]:
        return body


@dataclass
class Generated:
    """The answer to one request; `GenerateRequest.read` refuses a stream."""

    request: GenerateRequest
    completion: Completion

    def body(self) -> dict[str, Any]:
        choices = []
        for number, turn in enumerate(self.completion.turns):
            ids, values = turn.ids.tolist(), turn.log_probs.tolist()
            entries = [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in zip(ids, values, strict=True)
            ]
            ended = "stop" if turn.stop_reason.natural else "length"
            choices.append(
                {"index": number, "token_ids": ids, "finish_reason": ended, "logprobs": {"content": entries}}
            )
        prompt = self.request.token_ids if self.request.return_token_ids else None
        body = {"request_id": f"gen-{self.completion.head.id}", "choices": choices, "prompt_token_ids": prompt}
        return {**body, "usage": self.completion.usage()}
