"""The clients of bench_endpoint.py. Reads [address, keys, turns, number at once] as JSON, writes what they see."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx


async def ask(url: str, keys: list[str], turns: int, at_once: int) -> list[list[dict[str, Any]]]:
    """What the clients see: for each key its calls, with seconds and ids."""
    slots, limits = asyncio.Semaphore(at_once), httpx.Limits(max_connections=at_once)

    async def agent(client: httpx.AsyncClient, key: str) -> list[dict[str, Any]]:
        messages: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
        seen = []
        async with slots:
            for _ in range(turns):
                body = {"model": "m", "messages": messages, "return_token_ids": True}
                began = time.perf_counter()
                answer = await client.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key})
                seconds = time.perf_counter() - began
                body = answer.raise_for_status().json()
                [choice] = body["choices"]
                seen.append({"s": seconds - body.get("s", 0.0), "ids": choice["token_ids"]})
                messages += [choice["message"], {"role": "user", "content": "And one more?"}]
        return seen

    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        return await asyncio.gather(*(agent(client, key) for key in keys))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(*json.loads(sys.stdin.read())))))
