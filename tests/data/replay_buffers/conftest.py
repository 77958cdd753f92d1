"""What the tests of buffers share: files that need not reach the disk, and a ring of two trajectories."""

import os

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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
