"""Conversations as rows of a batch: ragged ids, messages, numbers and text."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict

from llmrl.data.llm.chat import History


class Tokens(TensorClass["nocast"]):
    prompt: torch.Tensor
    full: torch.Tensor
    padded: bool = False


def conversations(*lengths: int, first: int = 0) -> TensorDict:
    """A dense batch with ragged containers: row i holds the ids 0 .. length - 1."""
    count = len(lengths)
    singles = [TensorDict(prompt=torch.arange(n - 1), full=torch.arange(n)) for n in lengths]
    batch = TensorDict(
        {
            "tokens": Tokens._from_tensordict(LazyStackedTensorDict(*singles), {"padded": False}),
            "history": History.from_chats(
                [[{"role": "user", "content": f"question {first + i}"}] * (1 + i % 2) for i in range(count)]
            ),
            "group_id": torch.arange(first, first + count),
            "next": TensorDict(reward=torch.arange(first, first + count).view(-1, 1, 1) / 2, batch_size=[count]),
        },
        batch_size=[count],
    )
    batch["query"] = [f"question {first + i}" for i in range(count)]
    return batch


def ids(batch: TensorDict) -> list[list[int]]:
    return [row.tolist() for row in batch.get(("tokens", "full"), as_list=True)]
