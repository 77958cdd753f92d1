"""Transforms for replay buffers: n-step returns on write, next observations rebuilt on sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from llmrl.data.postprocs import MultiStep
from llmrl.data.ragged.tensordicts import required
from llmrl.data.ted_utils import expand_right, leaf_keys
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, MissingKeyError, ShapeError

__all__ = ["MultiStepTransform", "NextStateReconstructor"]


class MultiStepTransform(Transform):
    """`MultiStep` on the stream of rows written to a buffer; the result does not depend on the batch sizes.

    Reads    the batches given to ``buffer.extend``: [*B, T], time last, each continuing the previous; ``add``: one step
    Writes   the entries that `MultiStep` writes; see there for the keys and arguments
    Returns  the rows whose window is complete: all but the last ``n_steps - 1``, or None if there are none yet

    Held-back rows are completed by the next call, are part of ``state_dict``, and are returned by ``flush`` when the
    stream ends. ``buffer.extend(transform.flush())`` writes them: rows that have ``"steps_to_next_obs"`` are already
    processed and pass unchanged. Samples from the buffer pass unchanged too.

    Raises   ShapeError or MissingKeyError, with nothing changed, for rows that cannot continue the stream

    >>> from tensordict import TensorDict
    >>> from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
    >>> transform = MultiStepTransform(n_steps=3, gamma=1.0)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=transform)
    >>> rows = TensorDict(
    ...     next=TensorDict(reward=torch.ones(4, 1), done=torch.zeros(4, 1, dtype=torch.bool), batch_size=[4]),
    ...     batch_size=[4],
    ... )
    >>> len(buffer.extend(rows)), len(buffer.extend(transform.flush()))
    (2, 2)
    >>> buffer[:]["next", "reward"].flatten().tolist()
    [3.0, 3.0, 2.0, 1.0]
    """

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = "mask",
    ) -> None:
        super().__init__()
        self.n_steps = n_steps
        self._look_ahead = MultiStep(
            gamma,
            n_steps,
            reward_keys=reward_keys,
            done_key="done" if done_key is None else done_key,
            done_keys=done_keys,
            mask_key=mask_key,
        )
        self._held: TensorDictBase | None = None

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        if "steps_to_next_obs" in td.keys():
            return td
        rows = td if td.batch_dims else td.unsqueeze(0)
        time = rows.batch_dims - 1
        if self._held is not None:
            if self._held.batch_size[:time] != rows.batch_size[:time]:
                raise ShapeError(
                    "MultiStepTransform: all batches of a stream must have the same size but in time: got "
                    f"{list(rows.batch_size)} after {list(self._held.batch_size)}; call flush() when a stream ends."
                )
            if leaf_keys(self._held) != leaf_keys(rows):
                got = f"{leaf_keys(rows)} after {leaf_keys(self._held)}"
                raise MissingKeyError(f"MultiStepTransform: batches of a stream must have the same entries: got {got}.")
            rows = torch.cat([self._held, rows], time)
        # The last n - 1 rows are held until later rows arrive, as a copy: the caller may reuse its memory.
        complete = max(rows.batch_size[time] - (self.n_steps - 1), 0)
        out = self._look_ahead(rows)[(slice(None),) * time + (slice(0, complete),)] if complete else None
        self._held = rows[(slice(None),) * time + (slice(complete, None),)].clone()
        return out

    def flush(self) -> TensorDictBase | None:
        """Returns the held-back rows with their incomplete windows; the next row starts a new stream.

        Returns  None if there are none
        """
        held, self._held = self._held, None
        return self._look_ahead(held) if held is not None and held.batch_size.numel() else None

    def state_dict(self) -> dict[str, Any]:
        return {"held": None if self._held is None else self._held.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = None if state["held"] is None else state["held"].clone()


class NextStateReconstructor(Transform):
    """Rebuilds ``("next", key)`` in a sample from the following rows, for rows that were stored without it.

    Reads    a flat batch [N]: ``keys``, and the entries that show that row i + 1 is the next step of row i: the same
             ``traj_key``, ``done_key`` False, ``step_count_key`` larger by 1, ``end_key`` False (True ends a slice)
    Writes   ``("next", key)``: the entry of row i + 1, or ``fill_value`` if that is not the next step
    Returns  a shallow copy; the given batch is not changed
    Raises   ShapeError for a batch of more than one dimension; MissingKeyError for an absent key (with ``strict``;
             else its test is skipped); TypeError for NaN in an entry of integers: give a fill_value

    ``traj_key``, ``done_key``, ``step_count_key`` and ``end_key`` may be None: then they are not read. Slice samplers
    write ``end_key``; only it separates adjacent slices of one unfinished trajectory.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict(observation=torch.tensor([1.0, 2.0, 5.0]), batch_size=[3])
    >>> batch["collector", "traj_ids"] = torch.tensor([0, 0, 1])
    >>> NextStateReconstructor(done_key=None)(batch)["next", "observation"]
    tensor([2., nan, nan])
    """

    def __init__(
        self,
        keys: Sequence[NestedKey] = ("observation",),
        *,
        traj_key: NestedKey | None = ("collector", "traj_ids"),
        done_key: NestedKey | None = ("next", "done"),
        step_count_key: NestedKey | None = None,
        end_key: NestedKey | None = "slice_end",
        fill_value: float = float("nan"),
        strict: bool = True,
    ) -> None:
        if isinstance(keys, str) or not len(keys):
            raise ConfigError(f"NextStateReconstructor: keys must be a list of keys: got {keys!r}.")
        super().__init__(in_keys=keys, out_keys=[unravel_key(("next", key)) for key in keys])
        self.traj_key, self.done_key, self.step_count_key = traj_key, done_key, step_count_key
        self.end_key, self.fill_value, self.strict = end_key, fill_value, strict

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if td.batch_dims != 1:
            raise ShapeError(
                "NextStateReconstructor: a sample must be flat, one row after the other: got batch size "
                f"{list(td.batch_size)}; reshape(-1) before, or append the transform that reshapes after this one."
            )
        goes_on = self._goes_on(td)
        out = td.copy()
        for key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = required(td, key, "NextStateReconstructor")
            if self.fill_value != self.fill_value and not (value.is_floating_point() or value.is_complex()):
                hint = "give a fill_value, for instance fill_value=0"
                raise TypeError(f"NextStateReconstructor: {key!r} is {value.dtype} and cannot hold NaN; {hint}.")
            fill = torch.full_like(value, self.fill_value)
            out.set(out_key, torch.where(expand_right(goes_on, value.ndim), value.roll(-1, 0), fill))
        return out

    def _goes_on(self, td: TensorDictBase) -> Tensor:
        """Returns bool[N]: True where row i + 1 is the next step of row i."""
        device = required(td, self.in_keys[0], "NextStateReconstructor").device
        goes_on = torch.ones(td.batch_size, dtype=torch.bool, device=device)
        goes_on[-1:] = False  # no row follows the last; ``roll`` in forward() would take the first
        if (ids := self._read(td, self.traj_key)) is not None:
            goes_on[:-1] &= _per_row(ids[:-1] == ids[1:]).all(-1)
        if (done := self._read(td, self.done_key)) is not None:
            goes_on &= ~_per_row(done.to(torch.bool)).any(-1)
        if (count := self._read(td, self.step_count_key)) is not None:
            goes_on[:-1] &= _per_row(count[:-1] + 1 == count[1:]).all(-1)
        if self.end_key is not None and (end := td.get(self.end_key, None)) is not None:
            goes_on &= ~_per_row(end.to(torch.bool)).any(-1)
        return goes_on

    def _read(self, td: TensorDictBase, key: NestedKey | None) -> Tensor | None:
        if key is None or not self.strict:
            return None if key is None else td.get(key, None)
        return required(td, key, "NextStateReconstructor")


def _per_row(value: Tensor) -> Tensor:
    """Reshapes [N, ...] to [N, M]."""
    return expand_right(value, 2).flatten(1)
