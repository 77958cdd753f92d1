"""Deals rows to steps, and the rows of a step to ranks by cost, so that ranks finish at about the same time."""

from __future__ import annotations

import hashlib
import heapq
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.data.replay_buffers.storages.row_list import Row, from_rows, to_rows
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
    rows: list[Row] = []
    lengths = _lengths(batch)
    if not everywhere:
        rows = [] if batch is None else to_rows(batch.cpu())
        parts = session.gather([(lengths, _layout_of(rows))])
        lengths, first = [length for part, _ in parts for length in part], sum(len(p) for p, _ in parts[: session.rank])
        layouts = {layout for part, layout in parts if part}
        if len(layouts) > 1 or None in layouts:  # such as images: only columns of all ranks are kept
            batch = cat_rows(
                [part for part in session.gather([None if batch is None else batch.cpu()]) if part is not None]
            )
            everywhere = True
    costs = row_costs(lengths, share)
    groups = deal(costs, session.num_groups)  # every rank computes the same
    mine, balance = groups[session.group], imbalance(costs, groups)
    if not lengths or everywhere:
        return batch[torch.tensor(mine)].to(session.device) if mine else None, balance
    # Each rank receives its own rows alone.
    messages = []
    for rank in range(session.world_size):
        group = groups[rank * session.num_groups // session.world_size]
        messages.append(_packed([rows[row - first] for row in group if first <= row < first + len(rows)]))
    received = [row for message in session.exchange(messages) for row in _unpacked(message)]
    return from_rows(received).to(session.device) if received else None, balance


def _lengths(batch: TensorDictBase | None) -> list[int]:
    return [] if batch is None else [len(ids) for ids in batch.get(("tokens", "full"), as_list=True)]


def _layout_of(rows: Sequence[Row]) -> str | None:
    """The layout that all rows share, the same text on every rank; None if there is none."""
    layout = rows[0].layout if rows else None
    if layout is None or any(row.layout is not layout for row in rows):
        return None
    return hashlib.sha256(_text_of(layout).encode()).hexdigest()


def _text_of(value: Any) -> str:
    if isinstance(value, Mapping):  # in no order that ranks share
        value = sorted((key, _text_of(part)) for key, part in value.items())
    return f"{type(value).__name__}({', '.join(map(_text_of, value))})" if isinstance(value, tuple) else repr(value)


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: torch's own form is larger than a row's number, and much slower."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        data = bytearray(value.contiguous().view(-1).view(torch.uint8).numpy())
        return _tensor_of, (data, value.dtype, tuple(value.shape))


def _tensor_of(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _packed(rows: Sequence[Row]) -> bytes:
    written = io.BytesIO()
    if rows:
        _Pickler(written, pickle.HIGHEST_PROTOCOL).dump((rows[0].layout, [row.leaves for row in rows]))
    return written.getvalue()


def _unpacked(message: bytes) -> list[Row]:
    layout, rows = pickle.loads(message) if message else (None, [])
    return [Row(layout, leaves, None) for leaves in rows]
