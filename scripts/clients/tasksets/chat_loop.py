"""A harness that asks in the process of verifiers, and calls the tools of MCP servers: no program is installed."""

import json
from contextlib import AsyncExitStack

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

MOST = 4  # calls of tools
CLIENT = httpx.AsyncClient(timeout=600)  # rollouts share it: to make one takes as long as all that verifiers does


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        messages += [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in given]
        async with AsyncExitStack() as stack:
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, places, connections = await connect_mcp(servers, stack)
            for _ in range(MOST):
                asked = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                keys = {"authorization": f"Bearer {secret}"}
                answer = await CLIENT.post(f"{endpoint}/chat/completions", json=asked, headers=keys)
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                calls = message.get("tool_calls") or []
                for call in calls:
                    function = call["function"]
                    said = await call_mcp(connections, places, function["name"], json.loads(function["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
                if not calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatLoop"]
