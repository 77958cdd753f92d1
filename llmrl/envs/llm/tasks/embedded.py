"""The tasks whose problems come with the package, by ``env.name``: problems, demonstrations, and the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llmrl.envs.llm.tasks.arithmetic import arithmetic_demonstrations, arithmetic_problems, arithmetic_reward
from llmrl.envs.llm.tasks.colours import colours_demonstrations, colours_problems, colours_reward
from llmrl.envs.llm.tasks.sums import (
    big_sums_demonstrations,
    big_sums_problems,
    sums_demonstrations,
    sums_problems,
    sums_reward,
)


class EmbeddedTask(NamedTuple):
    """``problems`` and ``demonstrations`` of a split, and the reward of a completion, given "answer"."""

    problems: Callable[[str], list[dict[str, Any]]]
    demonstrations: Callable[[str], list[dict[str, Any]]]
    reward: Callable[[str, str], float]


EMBEDDED_TASKS = {
    "sums": EmbeddedTask(sums_problems, sums_demonstrations, sums_reward),
    "big_sums": EmbeddedTask(big_sums_problems, big_sums_demonstrations, sums_reward),
    "colours": EmbeddedTask(colours_problems, colours_demonstrations, colours_reward),
    "arithmetic": EmbeddedTask(arithmetic_problems, arithmetic_demonstrations, arithmetic_reward),
}
