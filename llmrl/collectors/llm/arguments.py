"""Checks of `LLMCollector`'s arguments, and the version tracker that it adds to an env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrl.envs.base import EnvBase
from llmrl.envs.llm.chat import ChatEnv
from llmrl.envs.llm.transforms.policy_version import PolicyVersion
from llmrl.envs.transforms.base import Transform
from llmrl.envs.transforms.trajectory import StepCounter
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, ShapeError, check_at_least


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises ConfigError or ShapeError for arguments of the collector that are invalid or exclude each other."""
    self, env = given["self"], given["env"]
    if (given["policy"] is None) == (given["policy_factory"] is None):
        raise ConfigError("LLMCollector: give exactly one of policy and policy_factory.")
    if len(env.batch_size) != 1:
        raise ShapeError(f"LLMCollector: the env must have one batch dimension: got {tuple(env.batch_size)}.")
    if self.yield_only_last_steps and given["yield_completed_trajectories"] is False:
        raise ConfigError(
            "LLMCollector: yield_only_last_steps is a form of yield_completed_trajectories, which is False."
        )
    at_least_1 = ("dialog_turns_per_batch", "max_dialog_turns", "concurrency")
    check_at_least("LLMCollector", 1, **{name: given[name] for name in at_least_1})
    check_at_least("LLMCollector", 0, retries=given["retries"])
    total = given["total_dialog_turns"]
    if total < 1 and total != -1:
        raise ConfigError(f"LLMCollector: total_dialog_turns must be positive, or -1 for no limit: got {total}.")
    if self.yield_completed_trajectories and given["max_dialog_turns"] is None:
        _check_can_end(env)
    if self.yield_completed_trajectories and given["reset_at_each_iter"]:
        raise ConfigError(
            "LLMCollector: finished conversations restart at each iteration anyway: drop reset_at_each_iter."
        )
    apart = "concurrency" if given["concurrency"] is not None else "async_envs" if given["async_envs"] else None
    if apart and (not self.yield_completed_trajectories or env.batch_locked):
        raise ConfigError(
            f"LLMCollector: {apart} runs whole conversations, each on its own: it needs yield_only_last_steps "
            f"or yield_completed_trajectories, and an env with batch_locked=False: got {type(env).__name__}."
        )
    if given["replay_buffer"] is not None and given["flatten_data"] is False:
        raise ConfigError("LLMCollector: a replay buffer holds one row per turn: drop flatten_data=False.")


def _check_can_end(env: EnvBase) -> None:
    base = env.base_env if isinstance(env, TransformedEnv) else env
    limited = any(isinstance(t, StepCounter) and t.max_steps is not None for t in _transforms(env))
    if isinstance(base, ChatEnv) and not limited:
        raise ConfigError(
            "LLMCollector: finished conversations were requested, but this env may never finish one: a ChatEnv does "
            "not by itself; add StepCounter(max_steps=...) to it, or pass max_dialog_turns."
        )


def with_tracker(env: EnvBase, track: bool | PolicyVersion) -> tuple[EnvBase, PolicyVersion | None]:
    """The env and its `PolicyVersion`, which is added if ``track`` is set and the env has none."""
    tracker = next((transform for transform in _transforms(env) if isinstance(transform, PolicyVersion)), None)
    if tracker is not None or track is False:
        return env, tracker
    tracker = PolicyVersion() if track is True else track
    return env.append_transform(tracker), tracker


def _transforms(env: EnvBase) -> list[Transform]:
    return list(env.transform.leaves()) if isinstance(env, TransformedEnv) else []
