"""The part of a row that the row itself trains, where a conversation is spread over several rows.

A turn's row holds the conversation so far, and its assistant mask every token that was sampled in it. In a batch of
turns each sampled token is in the rows of all later turns as well; ``("masks", "trained_from")`` says where the part
begins that belongs to this row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.stack import RaggedStack
from llmrl.modules.llm.policies.containers import entries, is_ragged

__all__ = ["TRAINED_FROM", "mark_turn", "mark_whole_record", "own_part", "response_part"]

TRAINED_FROM = ("masks", "trained_from")


def mark_turn(td: TensorDictBase) -> None:
    """Writes ("masks", "trained_from") int64[B]: the place in ("tokens", "full") where the turn's response begins.

    A batch [B] without the masks or the prompt of a turn is left as it is.
    """
    prompt = td.get(("tokens", "prompt"), None, as_list=True)
    if prompt is not None and td.get(("masks", "all_assistant_mask"), None, as_list=True) is not None:
        lengths = [row.shape[-1] for row in prompt]
        _mark(td, torch.tensor(lengths))


def mark_whole_record(td: TensorDictBase) -> None:
    """Writes ("masks", "trained_from") 0: the row stands for every turn that it holds."""
    if td.get(TRAINED_FROM, None, as_list=True) is not None:
        _mark(td, torch.zeros(td.batch_size[0], dtype=torch.int64))


def own_part(td: TensorDictBase, like_BT: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """bool[B, T]: True from where the part of each row begins that it trains itself.

    Reads   ("masks", "trained_from")  int64[B]; where a batch has none, a row stands for every turn that it holds
            lengths                    of the rows of a ragged batch, padded on the right here; None for a dense batch
    """
    starts = td.get(TRAINED_FROM, None, as_list=True)
    if starts is None:
        return torch.ones_like(like_BT, dtype=torch.bool)
    return _from(starts if isinstance(starts, Tensor) else torch.stack(list(starts)), like_BT)


def response_part(
    td: TensorDictBase,
    like_BT: Tensor,
    lengths: Sequence[int] | None,
    response_key: NestedKey = ("tokens", "response"),
) -> Tensor | None:
    """bool[B, T]: True from the first token of each row's response on; None where the batch has no responses."""
    response = td.get(response_key, None, as_list=True)
    if response is None:
        return None
    if lengths is None:
        starts = [like_BT.shape[1] - response.shape[1]] * len(like_BT)
    else:
        starts = [length - len(row) for length, row in zip(lengths, response, strict=True)]
    return _from(torch.tensor(starts), like_BT)


def _from(start_B: Tensor, like_BT: Tensor) -> Tensor:
    places_T = torch.arange(like_BT.shape[1], device=like_BT.device)
    return places_T >= start_B.reshape(-1, 1).to(like_BT.device)


def _mark(td: TensorDictBase, start_B: Tensor) -> None:
    masks = td.get("masks")
    inner = entries(masks)
    columns = inner.own_columns() if isinstance(inner, RaggedStack) else None
    if columns is not None:
        inner = RaggedStack.from_columns({**columns, "trained_from": start_B}, len(start_B))
    else:
        inner = inner.copy()
        for row, start in zip(inner.unbind(0), start_B, strict=True) if is_ragged(inner) else ():
            row.set("trained_from", start)
        if not is_ragged(inner):
            inner.set("trained_from", start_B)
    td.set(
        "masks",
        inner
        if isinstance(masks, TensorDictBase)
        else type(masks)._from_tensordict(inner, dict(masks._non_tensordict)),
    )
