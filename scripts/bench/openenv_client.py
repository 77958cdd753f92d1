"""OpenEnv's own client, for bench_openenv.py: reads [address, sessions, steps] a line, writes seconds of all steps.

No sessions: one, with the client's methods for programs without an event loop.
"""

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


def play_one(url: str, steps: int) -> float:
    with GenericEnvClient(base_url=url).sync() as client:
        client.reset(seed=0)
        began = time.perf_counter()
        for _ in range(steps):
            client.step({"guess": 0})
        return time.perf_counter() - began


if __name__ == "__main__":
    for line in sys.stdin:
        url, sessions, steps = json.loads(line)
        print(asyncio.run(play(url, sessions, steps)) if sessions else play_one(url, steps), flush=True)
