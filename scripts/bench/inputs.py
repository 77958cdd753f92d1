"""Inputs shared by benchmarks: transitions of six keys, conversations of random words, copies of tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDict

__all__ = ["TRAJECTORY", "chats_of_words", "copying", "gather", "leaves", "transitions"]

TRAJECTORY = 100
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "12", "34", "+", "=", "then", "é", "done")


def transitions(count: int) -> TensorDict:
    """Rows of six keys: 16 + 16 floats of observation, 8 of action, the trajectory's number, a reward and a flag."""
    done = (torch.arange(count) % TRAJECTORY == TRAJECTORY - 1).unsqueeze(1)
    return TensorDict(
        {
            "observation": torch.rand(count, 16),
            "action": torch.rand(count, 8),
            "episode": torch.arange(count) // TRAJECTORY,
            "next": TensorDict(
                observation=torch.rand(count, 16), reward=torch.rand(count, 1), done=done, batch_size=[count]
            ),
        },
        batch_size=[count],
    )


def leaves(data: TensorDict) -> dict[object, torch.Tensor]:
    return dict(data.items(include_nested=True, leaves_only=True))


def gather(store: dict[object, torch.Tensor], index: torch.Tensor) -> dict[object, torch.Tensor]:
    return {key: value.index_select(0, index) for key, value in store.items()}


def copying(weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """A function that copies the tensors once inside this process."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    return copy


def chats_of_words(num: int, turns: int, words: int = 40) -> list[list[dict[str, str]]]:
    draw = random.Random(0)
    return [
        [
            {"role": ("user", "assistant")[turn % 2], "content": " ".join(draw.choices(WORDS, k=words))}
            for turn in range(turns)
        ]
        for _ in range(num)
    ]
