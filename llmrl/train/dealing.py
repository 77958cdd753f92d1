"""Deals rows to steps, and the rows of a step to ranks by cost, so that ranks finish at about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.train.models.shape import model_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmrl.train.distributed import Session
    from llmrl.train.settings.sft import SFTConfig


def deal_epochs(num_rows: int, config: SFTConfig) -> ReplayBuffer:
    """A buffer of row numbers: `sample` returns those of a step, each once per epoch, reshuffled every epoch."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(num_rows),
        sampler=SamplerWithoutReplacement(),
        batch_size=config.batch_size,
        generator=torch.Generator().manual_seed(config.seed),
    )
    buffer.extend(torch.arange(num_rows))
    return buffer


def attention_share(model: PreTrainedModel) -> float:
    """The cost of attention between two tokens over that of one token in all other layers.

    A forward pass of T tokens takes about 2 P T operations in P parameters (in a mixture those of the chosen experts),
    and 2 L H T^2 in causal attention, with L layers and H = heads x head size.

    >>> from llmrl.testing import tiny_model
    >>> 0 < attention_share(tiny_model()) < 1e-2
    True
    """
    shape = model_shape(model)
    return shape.num_blocks * shape.query_width / (shape.multiplied + shape.vocabulary * shape.hidden)


def row_costs(lengths: Sequence[int], share: float) -> list[float]:
    """The cost of rows of these lengths, in units of one token without attention; ``share``: `attention_share`."""
    return [length + share * length**2 for length in lengths]


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The rows of each rank, ascending; dealt from the most expensive row on, always to the least loaded rank.

    >>> deal([1.0, 6.0, 5.0, 2.0, 3.0, 1.0], 2)
    [[0, 1, 3], [2, 4, 5]]
    """
    # Longest processing time first: at most a third above the optimum, and close to it for many rows.
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    least = [(0.0, rank) for rank in range(num_ranks)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        total, rank = heapq.heappop(least)
        ranks[rank].append(row)
        heapq.heappush(least, (total + costs[row], rank))
    return [sorted(rows) for rows in ranks]


def imbalance(costs: Sequence[float], ranks: Sequence[Sequence[int]]) -> float:
    """The largest cost of a rank over the mean cost; 1 if all are equal.

    >>> imbalance([1.0, 3.0], [[0], [1]])
    1.5
    """
    totals = [sum(costs[row] for row in rows) for rows in ranks]
    return max(totals) * len(totals) / sum(totals) if any(totals) else 1.0


def deal_batch(
    session: Session, batch: TensorDictBase | None, share: float, *, everywhere: bool = False
) -> tuple[TensorDictBase | None, float]:
    """This rank's part of the rows of all ranks, dealt by cost, and the `imbalance` of the parts.

    Ranks that split sequences among each other get the same part.

    Reads    ("tokens", "full") for the lengths; rows keep all their entries, such as group id and advantage
    Returns  the part on the session's device, None for a rank without rows; and the imbalance

    batch       None: this rank has no rows
    everywhere  every rank has the same batch, of all rows, so no rows are sent
    """
    if session.world_size == 1:
        return None if batch is None else batch.to(session.device), 1.0
    # Every rank gets all rows and computes the same distribution, so only rows need to be sent.
    if not everywhere:
        parts = [part for part in session.gather([None if batch is None else batch.cpu()]) if part is not None]
        batch = cat_rows(parts) if parts else None
    if batch is None:
        return None, 1.0
    costs = row_costs([len(ids) for ids in batch.get(("tokens", "full"), as_list=True)], share)
    groups = deal(costs, session.num_groups)
    mine = groups[session.group]
    return batch[torch.tensor(mine)].to(session.device) if mine else None, imbalance(costs, groups)
