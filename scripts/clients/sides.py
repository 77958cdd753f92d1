"""The clients' side of check.py: one function per check, run by the environment that has its packages.

Each prints what the client saw, call by call: its text; ids and log-probs if it keeps them; the tokens it was told.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

QUESTION: dict[str, Any] = {"role": "user", "content": "What is 2 + 2?"}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
IDS = {"return_token_ids": True}


def openai_chat() -> list[dict[str, Any]]:
    import openai

    client, messages, seen = openai.OpenAI(), [QUESTION], []
    for stream in (False, True):
        given: dict[str, Any] = {"model": "m", "messages": messages, "logprobs": True, "extra_body": IDS}
        saw: dict[str, Any] = {"text": "", "ids": [], "log_probs": []}
        if not stream:
            answer = client.chat.completions.create(**given)
            [choice] = answer.choices
            saw = {
                "text": choice.message.content or "",
                "ids": choice.token_ids,
                "count": answer.usage.completion_tokens,
            }
            saw["log_probs"] = [entry.logprob for entry in choice.logprobs.content]
        else:
            for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given):
                for choice in chunk.choices:
                    saw["text"] += choice.delta.content or ""
                    saw["ids"] += getattr(choice, "token_ids", None) or []
                    saw["log_probs"] += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
                if chunk.usage:
                    saw["count"] = chunk.usage.completion_tokens
        seen.append(saw)
        messages = [*messages, {"role": "assistant", "content": saw["text"]}, QUESTION]
    given = {"model": "m", "messages": messages, "stop": ["a"], "n": 2, "extra_body": IDS}
    for choice in client.chat.completions.create(**given).choices:
        seen.append({"text": choice.message.content or "", "ids": choice.token_ids, "stop": "a"})
    return seen


def agents(api: str, streamed: bool) -> list[dict[str, Any]]:
    """A function tool, then another agent takes over."""
    from agents import Agent, Runner, function_tool, set_default_openai_api

    set_default_openai_api(api)
    called = []

    @function_tool
    def add(a: int, b: int) -> int:
        called.append((a, b))
        return a + b

    helper = Agent(name="helper", instructions="You say the answer.")
    first = Agent(name="first", instructions="You add.", tools=[add], handoffs=[helper])

    async def run() -> Any:
        if not streamed:
            return await Runner.run(first, "What is 2 + 2?")
        running = Runner.run_streamed(first, "What is 2 + 2?")
        async for _ in running.stream_events():
            pass
        return running

    result = asyncio.run(run())
    assert called == [(2, 2)], called
    assert result.last_agent.name == "helper", result.last_agent.name
    counts = [response.usage.output_tokens for response in result.raw_responses]
    seen: list[dict[str, Any]] = [{"count": count} if count else {} for count in counts]  # 0: it did not ask
    seen[-1]["text"] = result.final_output
    return seen


def litellm() -> list[dict[str, Any]]:
    from litellm import acompletion, stream_chunk_builder

    async def run() -> list[dict[str, Any]]:
        messages, seen = [QUESTION], []
        for stream in (False, True):
            given: dict[str, Any] = {"model": "openai/m", "messages": messages, "stream": stream, "extra_body": IDS}
            answer = await acompletion(**given)
            if stream:
                answer = stream_chunk_builder([chunk async for chunk in answer], messages=messages)
            [choice] = answer.choices
            text = choice.message.content or ""
            fields = getattr(choice, "provider_specific_fields", None) or {}
            ids = getattr(choice, "token_ids", None) or fields.get("token_ids")
            seen.append({"text": text} | ({"ids": ids} if ids else {}))
            messages = [*messages, {"role": "assistant", "content": text}, QUESTION]
        return seen

    return asyncio.run(run())


def anthropic() -> list[dict[str, Any]]:
    import anthropic

    client, messages, seen = anthropic.Anthropic(), [QUESTION], []
    tools = [{"name": "add", "input_schema": ADD}]
    for stream in (False, True):
        given: dict[str, Any] = {"model": "m", "messages": messages, "tools": tools, "system": "Be brief."}
        counted = client.messages.count_tokens(**given).input_tokens
        if stream:
            with client.messages.stream(max_tokens=100, **given) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(max_tokens=100, **given)
        assert counted == answer.usage.input_tokens, (counted, answer.usage)
        text = "".join(block.text for block in answer.content if block.type == "text")
        seen.append({"text": text, "count": answer.usage.output_tokens})
        messages = [*messages, {"role": "assistant", "content": text or "-"}, QUESTION]
    return seen


def openenv() -> list[dict[str, Any]]:
    """OpenEnv's capture server in front: what it would train must be what llmrl's rows train."""
    import httpx
    from openenv.core.harness.capture.runner import CaptureServer

    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = CaptureServer(llm_url=url, model="llmrl", port=port, api_key=key)
    server.start()
    try:
        session, messages = server.registry.create(), [QUESTION]
        for _ in range(3):
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json={"model": "m", "messages": messages},
                headers={"authorization": f"Bearer {session.session_id}"},
                timeout=60,
            )
            message = answer.raise_for_status().json()["choices"][0]["message"]
            messages = [*messages, {"role": "assistant", "content": message["content"]}, QUESTION]
        [sequence] = session.graph.sequences()
        nodes = session.graph.nodes()
        assert [token for node in nodes for token in node.sampled_ids] == [
            token for token, own in zip(sequence.input_ids, sequence.loss_mask, strict=True) if own
        ]
        return [{"ids": node.sampled_ids, "log_probs": node.sampled_logprobs} for node in nodes]
    finally:
        server.stop()


def openenv_grade() -> list[dict[str, Any]]:
    """OpenEnv's own judgement of the endpoint, by calls that it makes."""
    from openenv.core.harness.capture import validate_llm

    report = validate_llm(os.environ["OPENAI_BASE_URL"], "llmrl", api_key=os.environ["OPENAI_API_KEY"])
    print(report, file=sys.stderr)
    assert report.capture_level == "tokens", report.findings
    return []


CHECKS = {
    "openai": openai_chat,
    "agents-responses": lambda: agents("responses", False),
    "agents-responses-streamed": lambda: agents("responses", True),
    "agents-chat": lambda: agents("chat_completions", False),
    "agents-chat-streamed": lambda: agents("chat_completions", True),
    "litellm": litellm,
    "anthropic": anthropic,
    "openenv": openenv,
    "openenv-grade": openenv_grade,
}

if __name__ == "__main__":
    print("\n" + json.dumps(CHECKS[sys.argv[1]]()))
