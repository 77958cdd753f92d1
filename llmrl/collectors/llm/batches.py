"""Concatenation of batches whose columns may be ragged containers, which are handled as a whole, by type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from llmrl.data.llm.history import History
from llmrl.data.ragged.tensordicts import new_tensordict, stack_cells
from llmrl.errors import ShapeError
from llmrl.modules.llm.policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens

_CONTAINERS = (ChatHistory, LogProbs, Masks, Text, Tokens)


def cat_rows(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Batches [B1], [B2], ... as one batch [B1 + B2 + ...].

    A root entry that not all batches have is a leftover of an earlier turn, such as a reward, and is omitted.
    Raises  ShapeError if one batch lacks an entry of ``"next"`` that another one has

    >>> from llmrl.data.ragged.tensordicts import column
    >>> parts = [TensorDict(q=column(["x"]), batch_size=[1]), TensorDict(q=column(["y", "z"]), batch_size=[2])]
    >>> cat_rows(parts).get("q").tolist()
    ['x', 'y', 'z']
    """
    if len(batches) == 1:
        return batches[0]
    keys = [key for key in batches[0].keys() if all(key in batch.keys() for batch in batches)]
    if "next" in keys:
        nexts = [set(batch.get("next").keys()) for batch in batches]
        if differing := sorted(map(repr, set.union(*nexts) - set.intersection(*nexts))):
            raise ShapeError(
                "LLMCollector: every turn must write the same entries to 'next': only some have "
                f"{', '.join(differing)}; write NaN if there is no value."
            )
    count = sum(batch.batch_size[0] for batch in batches)
    out = {key: _cat([batch.get(key) for batch in batches]) for key in keys}
    return new_tensordict(out, [count], batches[0].device)


def _cat(values: list[Any]) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        if len({value.shape[1:] for value in values}) == 1:
            return torch.cat(values)
        raise ShapeError(
            "LLMCollector: a dense entry must have one shape in every turn: got "
            f"{', '.join(str(tuple(v.shape)) for v in values)}; write it per row, in a ragged container."
        )
    if isinstance(first, (NonTensorStack, NonTensorData)):
        return stack_cells([cell for value in values for cell in value.unbind(0)])
    if type(first) is TensorDict:
        return cat_rows(values)
    if isinstance(first, _CONTAINERS) and not any(getattr(value, "padded", False) for value in values):
        fields = [field for field in type(first).__expected_keys__ if all(v.rows(field) is not None for v in values)]
        return type(first).from_rows({field: _field(values, field) for field in fields if field != "padded"})
    # Other values, such as padded containers, cannot be concatenated as a whole.
    return lazy_stack([row for value in values for row in value.unbind(0)])


def _field(containers: list[Any], field: str) -> Any:
    if isinstance(containers[0], ChatHistory):
        return History.stack([row for value in containers for row in value.get(field).unbind(0)])
    return [row for value in containers for row in value.rows(field)]
