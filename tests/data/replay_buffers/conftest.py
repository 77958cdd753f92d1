"""What the tests of buffers share: a disk that is nearly full, and a ring of two trajectories."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which files may grow to so many bytes only."""
    return _largest_file


@pytest.fixture
def ring_of_eight() -> TensorDictReplayBuffer:
    """Two trajectories of five steps in a ring of eight: t [1,1,0,0,0,1,1,1], s [8,9,2,3,4,5,6,7], cursor 2."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=3)
    for part in (slice(0, 4), slice(4, 10)):
        data = TensorDict(t=torch.tensor([0] * 5 + [1] * 5), s=torch.arange(10), batch_size=[10])
        buffer.extend(data[part])
    assert buffer[:]["s"].tolist() == [8, 9, 2, 3, 4, 5, 6, 7]
    assert buffer.writer.cursor == 2
    return buffer
