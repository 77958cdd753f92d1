"""Plain containers for the input and the output of a language model."""

from __future__ import annotations

from functools import wraps
from typing import Any, TypeVar

from tensordict import TensorClass
from torch import Tensor

from llmrl.data.ragged.tensordicts import column

C = TypeVar("C", bound=type)


def _with_lists(cls: C) -> C:
    """Turns lists given to ``__init__`` into columns of one value per row, so that they are indexed with the batch."""
    init, fields = cls.__init__, cls.__annotations__

    @wraps(init)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        # Only fields: ``batch_size`` stays a list.
        lists = {name: column(v) for name, v in options.items() if name in fields and isinstance(v, list)}
        init(self, *[column(v) if isinstance(v, list) else v for v in values], **options | lists)

    cls.__init__ = __init__
    return cls


@_with_lists
class LLMInput(TensorClass["nocast"]):
    """The input of a language model. ``token_list`` and ``text`` hold one value per row.

    >>> import torch
    >>> rows = LLMInput(tokens=torch.tensor([[5, 6], [7, 0]]), token_list=[[5, 6], [7]], batch_size=[2])
    >>> list(rows[1].token_list)
    [7]
    """

    tokens: Tensor
    attention_mask: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None


@_with_lists
class LLMOutput(TensorClass["nocast"]):
    """The output of a language model: ``tokens`` with the prompt, ``tokens_response`` without it."""

    tokens: Tensor | None = None
    tokens_response: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[int] | list[list[int]] | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    text: str | list[str] | None = None


@_with_lists
class LLMData(TensorClass["nocast"]):
    """Input and output of a language model in one batch; every field may be missing."""

    tokens: Tensor | None = None
    tokens_response: Tensor | None = None
    attention_mask: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[int] | list[list[int]] | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    text: str | list[str] | None = None
    text_response: str | list[str] | None = None
