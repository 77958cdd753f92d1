"""Batches of a tokenised dataset, each row once per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from llmrl.data.replay_buffers import ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from llmrl.errors import DataError

T = TypeVar("T")


def create_infinite_iterator(iterator: Iterable[T]) -> Iterator[T]:
    """Repeats an iterable forever.

    Raises  DataError for a pass without items: the iterable is empty, or can be iterated only once

    >>> from itertools import islice
    >>> list(islice(create_infinite_iterator([1, 2]), 5))
    [1, 2, 1, 2, 1]
    """
    passes = 0
    while True:
        empty = True
        for item in iterator:
            empty = False
            yield item
        if empty:
            why = "it gives one pass only, as a generator does; pass a list or a loader" if passes else "it is empty"
            raise DataError(
                f"create_infinite_iterator: every pass must give an item: pass {passes + 1} did not: {why}."
            )
        passes += 1


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: type,
    device: torch.device | str,
    dataset_name: str | Path | None = None,
    infinite: bool = True,
    prefetch: int = 0,
    split: str = "train",
    root_dir: str | Path | None = None,
    from_disk: bool = False,
    num_workers: int | None = None,
    **options: Any,
) -> Iterable[Any]:
    """Batches of ``tensorclass_type.from_dataset(...)`` on ``device``, drawn without replacement.

    The last batch of an epoch has the remaining rows. Without ``infinite``: a ``ReplayBuffer``; a loop is one epoch.

    block_size  ``max_length`` of the rows
    prefetch    batches that threads prepare ahead
    options     further arguments of ``from_dataset``, such as ``tokenizer``
    """
    data = tensorclass_type.from_dataset(
        split=split,
        dataset_name=dataset_name,
        max_length=block_size,
        root_dir=root_dir,
        from_disk=from_disk,
        num_workers=num_workers,
        **options,
    )
    buffer = ReplayBuffer(
        storage=TensorStorage(data),
        sampler=SamplerWithoutReplacement(),
        batch_size=batch_size,
        prefetch=prefetch or None,
        transform=lambda batch: batch.to(device),
    )
    return create_infinite_iterator(buffer) if infinite else buffer
