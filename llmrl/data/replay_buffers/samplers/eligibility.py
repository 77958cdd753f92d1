"""A filter for samplers: leaves out rows of too old a policy, and rows that were drawn often enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmrl.data.replay_buffers.storages import Storage
from llmrl.errors import DataError

if TYPE_CHECKING:
    from llmrl.data.replay_buffers.samplers.base import WriteJournal


class Eligibility:
    """``max_age`` in policy versions and ``max_uses`` per row; None sets no limit.

    A row's age is the current version less its entry ``version_key``. The current version is what was last set, or
    else the newest of any row written so far. A row that is overwritten starts again with no uses; one that is replaced
    in place keeps them.
    """

    def __init__(
        self,
        who: str,
        max_age: int | None,
        max_uses: int | None,
        version_key: str | tuple[str, ...],
        journal: WriteJournal,
    ) -> None:
        if max_age is not None and max_age < 0:
            raise ValueError(f"{who}: max_age counts policy versions and must not be negative: got {max_age}.")
        if max_uses is not None and max_uses < 1:
            raise ValueError(f"{who}: max_uses must be at least 1: got {max_uses}.")
        self._who = who
        self.max_age = max_age
        self.max_uses = max_uses
        self.version_key = version_key
        self.journal = journal
        self.version: int | None = None
        self._newest: int | None = None
        self._uses = np.zeros(0, dtype=np.int64)
        self._versions = np.zeros(0, dtype=np.int64)
        self._loaded = False  # the uses are those of a loaded state: the next look at the storage keeps them

    @property
    def current_version(self) -> int | None:
        return self._newest if self.version is None else self.version

    def mask(self, storage: Storage) -> np.ndarray:
        """True for rows that may be drawn, bool[len(storage)]."""
        try:
            self._take_note(storage)
        except BaseException:
            self.journal.forget()
            self._loaded = True  # the uses are right, the versions are to be read again
            raise
        return ~(self._too_old(len(storage)) | self._used_up(len(storage)))

    def uses_left(self, positions: np.ndarray) -> np.ndarray:
        """The draws that each row has left; for use with ``max_uses``."""
        return self.max_uses - self._uses[positions]

    def use(self, positions: np.ndarray) -> None:
        """The rows were drawn."""
        if self.max_uses is not None:
            np.add.at(self._uses, positions, 1)

    def nothing_left(self, storage: Storage) -> RuntimeError:
        length = len(storage)
        old, used = self._too_old(length), self._used_up(length)
        reasons = []
        if self.max_age is not None:
            reasons.append(f"{int(old.sum())} too old (max_age={self.max_age} at version {self.current_version})")
        if self.max_uses is not None:
            reasons.append(f"{int((used & ~old).sum())} used up (max_uses={self.max_uses})")
        return RuntimeError(
            f"{self._who}: there must be a row that may be drawn: got none of {length}: {', '.join(reasons)}; write "
            "new rows."
        )

    def empty(self) -> None:
        self.journal.forget()
        self._uses, self._versions, self._loaded = self._uses[:0], self._versions[:0], False

    def state_dict(self) -> dict[str, Any]:
        return {"uses": torch.from_numpy(self._uses.copy()), "version": self.version, "newest": self._newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.empty()
        self._uses = state["uses"].numpy().copy()
        self.version, self._newest = state["version"], state["newest"]
        self._loaded = True

    def bookmark(self) -> np.ndarray:
        return self._uses.copy()

    def go_back(self, bookmark: np.ndarray) -> None:
        self._uses = bookmark

    def _take_note(self, storage: Storage) -> None:
        length, changes = len(storage), self.journal.take(storage)
        if changes is None:
            keep = self._uses[:length] if self._loaded else self._uses[:0]
            self._uses = _resized(keep, length)
            self._versions = _resized(self._versions[:0], length)
            self._read_versions(storage, np.arange(length))
        else:
            written, replaced = changes
            if length > self._uses.size:
                self._uses, self._versions = _resized(self._uses, 2 * length), _resized(self._versions, 2 * length)
            self._uses[written] = 0
            self._read_versions(storage, np.unique(np.concatenate([written, replaced])))
        self._loaded = False

    def _read_versions(self, storage: Storage, positions: np.ndarray) -> None:
        if self.max_age is None or not positions.size:
            return
        versions = storage.entry(self.version_key, torch.from_numpy(positions))
        parts = versions if isinstance(versions, list) else [versions]  # a list: rows written one by one, or ragged
        for part in parts:
            if not isinstance(part, Tensor) or part.is_floating_point() or part.dtype is torch.bool:
                found = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise DataError(
                    f"{self._who}: max_age needs whole numbers in {self.version_key!r}: got {found}; version_key names "
                    "another entry."
                )
        if parts is versions:
            oldest = torch.stack([part.amin() for part in parts])
        else:
            oldest = versions.reshape(positions.size, -1).amin(1)  # of a row with several: its oldest part
        self._versions[positions] = oldest.cpu().numpy()
        newest = max(int(part.max()) for part in parts)
        self._newest = newest if self._newest is None else max(self._newest, newest)

    def _too_old(self, length: int) -> np.ndarray:
        if self.max_age is None:
            return np.zeros(length, dtype=bool)
        return self._versions[:length] < self.current_version - self.max_age

    def _used_up(self, length: int) -> np.ndarray:
        if self.max_uses is None:
            return np.zeros(length, dtype=bool)
        return self._uses[:length] >= self.max_uses


def _resized(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, dtype=values.dtype)
    out[: values.size] = values
    return out
