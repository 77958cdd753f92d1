"""Time of the collectors over their floors: the same policy and env in a loop written by hand.

    python scripts/bench/bench_collectors.py

The floor of `SyncDataCollector` resets, acts, steps and keeps every tensor in a list that is stacked at the end. Two
workers of `MultiaSyncDataCollector` are compared with one, on an env whose step takes a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from table import Row, benchmark
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from timing import best
from torch import nn

from llmrl.collectors import MultiaSyncDataCollector, SyncDataCollector
from llmrl.envs import EnvBase, GymEnv

FRAMES = 1000


class Greedy(nn.Module):
    """Chooses the action of CartPole with the larger score, as one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


def cart_pole() -> EnvBase:
    return GymEnv("CartPole-v1")


def by_hand(env: EnvBase, policy: Callable[[TensorDict], TensorDict]) -> Callable[[], None]:
    """Collects frames in lists of tensors, then stacks them; resets when the env is done."""

    @torch.no_grad()
    def run() -> None:
        td = env.reset()
        rows: dict[str, list[torch.Tensor]] = {}
        for _ in range(FRAMES):
            td = env.step(policy(td))
            following = td["next"]
            for key in ("observation", "action", "done", "terminated", "truncated"):
                rows.setdefault(key, []).append(td[key])
            for key in ("observation", "reward", "done", "terminated", "truncated"):
                rows.setdefault(f"next_{key}", []).append(following[key])
            td = env.reset() if following["done"].item() else following.exclude("reward")
        {key: torch.stack(values) for key, values in rows.items()}

    return run


def sync(repeats: int) -> list[Row]:
    torch.manual_seed(0)
    policy = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    collector = SyncDataCollector(cart_pole(), policy, frames_per_batch=FRAMES)
    hand = by_hand(cart_pole(), policy)
    ours_ms, floor_ms = best(collector.next, hand, repeats=repeats)
    print(f"CartPole: {1e3 * FRAMES / ours_ms:.0f} frames/s, by hand {1e3 * FRAMES / floor_ms:.0f}")
    return [Row("SyncDataCollector, CartPole / loop by hand", ours_ms / floor_ms, 1.5, unit="x")]


class SlowEnv(EnvBase):
    """An env whose step takes a millisecond without using the processor."""

    def _reset(self, td: TensorDict | None) -> TensorDict:
        return TensorDict(observation=torch.zeros(4))

    def _step(self, td: TensorDict) -> TensorDict:
        time.sleep(1e-3)
        return TensorDict(observation=td["observation"] + 1, reward=torch.ones(1))


def workers(repeats: int) -> list[Row]:
    """Measures one worker and two in turn; the idle workers are two batches ahead, and wait."""
    collectors = {
        count: MultiaSyncDataCollector([SlowEnv] * count, lambda td: td, frames_per_batch=100) for count in (1, 2)
    }
    fastest = dict.fromkeys(collectors, float("inf"))
    for _ in range(repeats):
        for count, collector in collectors.items():
            for _ in range(2 * count):  # skip batches that were collected ahead
                collector.next()
            start = time.perf_counter()
            for _ in range(4 * count):
                collector.next()
            fastest[count] = min(fastest[count], 1e3 * (time.perf_counter() - start) / (400 * count))
    for collector in collectors.values():
        collector.shutdown()
    print(f"an env of 1 ms: a frame in {fastest[1]:.2f} ms with one worker, {fastest[2]:.2f} ms with two")
    return [Row("MultiaSyncDataCollector, a frame with two workers / one", fastest[2] / fastest[1], 1 / 1.6, unit="x")]


def main(repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    return [*sync(repeats), *workers(repeats)]


if __name__ == "__main__":
    benchmark(main, __doc__, repeats=10)
