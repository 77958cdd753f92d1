"""Random windows of the trajectories in a batch, for buffers whose rows are whole trajectories."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import required
from llmrl.data.ted_utils import expand_right
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ShapeError, check_at_least

__all__ = ["RandomCropTensorDict"]


class RandomCropTensorDict(Transform):
    """Cuts ``sub_seq_len`` steps out of every row of a batch; all windows of a row are equally likely.

    Reads    a batch [*A, T, *B], where ``sample_dim`` is the index of T in the batch size, and ``mask_key`` bool
             [*A, T, *B] if given: only windows in which it is True everywhere are taken
    Returns  the batch [*A, sub_seq_len, *B], with a separate window for every row
    Raises   ShapeError if the batch has no such dimension, or a row has no such window; MissingKeyError for the mask

    ``generator`` draws the windows (default: torch's global one); its state is part of ``state_dict``.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict(step=torch.arange(10).expand(3, 10), batch_size=[3, 10])
    >>> steps = RandomCropTensorDict(sub_seq_len=4)(batch)["step"]
    >>> steps.shape, bool((steps.diff(dim=-1) == 1).all())
    (torch.Size([3, 4]), True)
    """

    def __init__(
        self,
        sub_seq_len: int,
        sample_dim: int = -1,
        mask_key: NestedKey | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_at_least("RandomCropTensorDict", 1, sub_seq_len=sub_seq_len)
        self.sub_seq_len, self.sample_dim, self.mask_key = sub_seq_len, sample_dim, mask_key
        self.generator = generator

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if not -td.batch_dims <= self.sample_dim < td.batch_dims:
            got = f"{self.sample_dim}, batch size {list(td.batch_size)}"
            raise ShapeError(f"RandomCropTensorDict: sample_dim must be a dimension of the batch: got {got}.")
        dim = self.sample_dim % td.batch_dims
        start = self._starts(td, dim)
        where = (start.unsqueeze(-1) + torch.arange(self.sub_seq_len, device=start.device)).movedim(-1, dim)
        # Windows as flat row indices, so that one index works for all entries and any sample_dim.
        grid = torch.arange(td.batch_size.numel(), device=where.device).view(td.batch_size)
        return td.reshape(-1)[grid.gather(dim, where).reshape(-1)].reshape(where.shape)

    def _starts(self, td: TensorDictBase, dim: int) -> Tensor:
        """Returns the first step of every row's window, int64[*A, *B]."""
        length, width = td.batch_size[dim], self.sub_seq_len
        rows = td.batch_size[:dim] + td.batch_size[dim + 1 :]
        allowed = torch.ones(*rows, max(length - width + 1, 0), dtype=torch.bool, device=td.device)
        if self.mask_key is not None:
            mask = required(td, self.mask_key, "RandomCropTensorDict")
            valid = mask.reshape(td.batch_size).movedim(dim, -1).to(torch.int64)
            # A start is allowed if its whole window is valid.
            if length >= width:
                allowed = valid.unfold(-1, width, 1).sum(-1) == width
        count = allowed.sum(-1)
        if not bool((count > 0).all()):
            raise ShapeError(
                f"RandomCropTensorDict: every row must have {width} steps in a row: got a batch of {length} steps"
                + (f", and {self.mask_key!r} leaves less." if self.mask_key is not None else ".")
            )
        # One draw per row, float64 so that every start of a very long row can be drawn; argmax finds that start.
        drawn = torch.rand(rows, dtype=torch.float64, generator=self.generator).to(count.device)
        number = (drawn * count).long().clamp(max=count - 1)  # index among the allowed starts
        return (allowed.cumsum(-1) > expand_right(number, allowed.ndim)).int().argmax(-1)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.generator is not None:
            self.generator.set_state(state["generator"])
