"""OpenEnv's own client, for bench_openenv.py: reads [address, sessions, steps] a line, writes seconds of all steps."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from openenv.core.generic_client import GenericEnvClient


async def play(url: str, sessions: int, steps: int) -> float:
    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    await asyncio.gather(*(client.connect() for client in clients))
    await asyncio.gather(*(client.reset(seed=seed) for seed, client in enumerate(clients)))

    async def episode(client: GenericEnvClient) -> None:
        for _ in range(steps):
            await client.step({"guess": 0})

    began = time.perf_counter()
    await asyncio.gather(*map(episode, clients))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(client.close() for client in clients))
    return seconds


if __name__ == "__main__":
    for line in sys.stdin:
        print(asyncio.run(play(*json.loads(line))), flush=True)
