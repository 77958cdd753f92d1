"""Deals rows to steps, and those of a step over the ranks by cost, so that none waits long for another at its end."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.train.model_shape import model_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmrl.train.distributed import Session
    from llmrl.train.settings import SFTConfig


def deal_epochs(num_rows: int, config: SFTConfig) -> ReplayBuffer:
    """A buffer of row numbers: `sample` deals out those of a step, each once per epoch, in another order each time."""
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

    A forward pass of T tokens takes about 2 P T operations in P parameters, of a mixture those of the chosen experts,
    and 2 L H T^2 in causal attention, of L layers and H = heads x head size.

    >>> from llmrl.testing import tiny_model
    >>> 0 < attention_share(tiny_model()) < 1e-2
    True
    """
    shape = model_shape(model)
    return shape.num_blocks * shape.query_width / (shape.multiplied + shape.vocabulary * shape.hidden)


def row_costs(lengths: Sequence[int], share: float) -> list[float]:
    """The cost of rows of these lengths, in tokens without attention; ``share`` as of `attention_share`."""
    return [length + share * length**2 for length in lengths]


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The rows of each rank, ascending: the most expensive row first, always to the rank that has least.

    >>> deal([1.0, 6.0, 5.0, 2.0, 3.0, 1.0], 2)
    [[0, 1, 3], [2, 4, 5]]
    """
    # Longest processing time first: at most a third above the best distribution, and near it for many rows.
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    least = [(0.0, rank) for rank in range(num_ranks)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        total, rank = heapq.heappop(least)
        ranks[rank].append(row)
        heapq.heappush(least, (total + costs[row], rank))
    return [sorted(rows) for rows in ranks]


def imbalance(costs: Sequence[float], ranks: Sequence[Sequence[int]]) -> float:
    """The cost of the rank with most over the mean; 1 if all have the same.

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

    Reads   ("tokens", "full") for the lengths; rows keep all of their entries, such as group id and advantage
    Returns on the session's device; None for a rank that gets no row

    batch       None: no row of this rank
    everywhere  every rank has the same batch, of all rows, so none is sent
    """
    if session.world_size == 1:
        return None if batch is None else batch.to(session.device), 1.0
    # Every rank gets all rows and computes the same distribution, so that only rows are sent, no decisions.
    if not everywhere:
        parts = [part for part in session.gather([None if batch is None else batch.cpu()]) if part is not None]
        batch = cat_rows(parts) if parts else None
    if batch is None:
        return None, 1.0
    costs = row_costs([len(ids) for ids in batch.get(("tokens", "full"), as_list=True)], share)
    groups = deal(costs, session.num_groups)
    mine = groups[session.group]
    return batch[torch.tensor(mine)].to(session.device) if mine else None, imbalance(costs, groups)
