"""Uniform draws with replacement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmrl.data.replay_buffers.samplers.base import Sampler
from llmrl.data.replay_buffers.storages import Storage


class RandomSampler(Sampler):
    """Every row is as likely as any other at every draw. It has no passes: iterating over it does not end."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        return torch.randint(self._length(storage), (batch_size,), generator=self.generator), {}
