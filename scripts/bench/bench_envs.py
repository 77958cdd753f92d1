"""Times a step of CartPole in four processes, and a rollout in one, against gymnasium and loops written by hand.

    python scripts/bench/bench_envs.py [--steps 300] [--repeats 10]

`ParallelEnv` resets the rows that are done, as `AsyncVectorEnv` does, and both get actions as tensors. For gymnasium
they are converted to an array, and its results to tensors, since a policy reads and writes tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import gymnasium
import torch
from table import Row, benchmark
from tensordict.nn import TensorDictModule
from timing import best
from torch import nn

from llmrl.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv

NAME, NUM_ENVS = "CartPole-v1", 4


def ours(env: SerialEnv | ParallelEnv, steps: int) -> Callable[[], None]:
    actions = torch.randint(2, (steps, NUM_ENVS))
    env.set_seed(0)

    def run() -> None:
        td = env.reset()
        for step in range(steps):
            _, td = env.step_and_maybe_reset(td.set("action", actions[step]))

    return run


def theirs(envs: gymnasium.vector.VectorEnv, steps: int) -> Callable[[], None]:
    actions = torch.randint(2, (steps, NUM_ENVS))

    def run() -> None:
        envs.reset(seed=0)
        for step in range(steps):
            results = envs.step(actions[step].numpy())
            for result in results[:4]:  # observation, reward, terminated, truncated
                torch.from_numpy(result)

    return run


def by_hand(policy: nn.Module, steps: int) -> Callable[[], None]:
    """Computes the same result as `rollout`: stacked observations, actions, rewards and flags of all steps."""
    env = gymnasium.make(NAME)

    @torch.no_grad()
    def run() -> None:
        rows: list[tuple[torch.Tensor, ...]] = []
        observation = torch.from_numpy(env.reset(seed=0)[0])
        for _ in range(steps):
            action = policy(observation)
            after, reward, terminated, truncated, _ = env.step(int(action.argmax()))
            after, done = torch.from_numpy(after), terminated or truncated
            flags = torch.tensor([terminated, truncated, done])
            rows.append((observation, action, after, torch.tensor([reward]), flags))
            observation = torch.from_numpy(env.reset()[0]) if done else after
        for column in zip(*rows, strict=True):
            torch.stack(column)

    return run


def by_hand_in_env(env: GymEnv, policy: TensorDictModule, steps: int) -> Callable[[], None]:
    """The same loop with llmrl's env and policy: reset, act, step, then stack the steps."""

    @torch.no_grad()
    def run() -> None:
        rows, td = [], env.reset()
        for _ in range(steps):
            td, root = env.step_and_maybe_reset(policy(td))
            rows.append(td)
            td = root
        torch.stack(rows)

    return run


def main(steps: int, repeats: int) -> list[Row]:
    torch.manual_seed(0)

    def make() -> GymEnv:
        return GymEnv(NAME, categorical_action_encoding=True)

    parallel, serial = ParallelEnv(NUM_ENVS, make), SerialEnv(NUM_ENVS, make)
    transformed = ParallelEnv(NUM_ENVS, lambda: TransformedEnv(make()))  # its processes exchange tensordicts
    asynchronous = gymnasium.make_vec(NAME, NUM_ENVS, vectorization_mode="async")
    sides = ours(parallel, steps), theirs(asynchronous, steps), ours(serial, steps), ours(transformed, steps)
    ms = best(*sides, repeats=repeats)
    for env in (parallel, transformed, asynchronous):
        env.close()
    names = ("ParallelEnv", "AsyncVectorEnv", "SerialEnv", "ParallelEnv of transformed envs")
    print(", ".join(f"{name} {1e3 * each / steps:.0f} us" for name, each in zip(names, ms, strict=True)), "a step")

    network = nn.Linear(4, 2)
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    env = GymEnv(NAME)
    env.set_seed(0)
    rolled, looped, stepped = best(
        lambda: env.rollout(steps, policy, break_when_any_done=False),
        by_hand(network, steps),
        by_hand_in_env(env, policy, steps),
        repeats=repeats,
    )
    print(f"rollout {1e3 * rolled / steps:.0f} us, by hand {1e3 * looped / steps:.0f} us a step")
    return [
        Row(f"a step of ParallelEnv({NUM_ENVS}), of AsyncVectorEnv({NUM_ENVS})", ms[0] / ms[1], 1.2),
        Row(f"a step of SerialEnv({NUM_ENVS}), of AsyncVectorEnv({NUM_ENVS})", ms[2] / ms[1]),
        Row(f"a step of ParallelEnv({NUM_ENVS}) of transformed envs, of AsyncVectorEnv({NUM_ENVS})", ms[3] / ms[1]),
        Row("env.rollout with a linear policy, the loop by hand with gymnasium and plain tensors", rolled / looped),
        Row("env.rollout with a linear policy, the loop by hand with the same env and policy", rolled / stepped, 1.0),
    ]


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        benchmark(main, __doc__, steps=300, repeats=10)
