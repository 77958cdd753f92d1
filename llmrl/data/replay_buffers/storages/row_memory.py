"""Which rows keep alive the memory that rows of one write share.

Rows that are written together share one block of memory per entry, because one copy is much faster than many. The block
lives as long as any of its rows: a writer that keeps one row of every batch would keep all batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_LEFT = 4  # a block is given up once less than a quarter of its rows is left: memory is bounded, and copies are rare


class _Block:
    __slots__ = ("left", "size", "where")

    def __init__(self, where: Sequence[int]) -> None:
        self.where = where
        self.size = self.left = len(where) if isinstance(where, range) else len(set(where))


class Blocks:
    """Notes what was written together, and says which rows to copy again."""

    def __init__(self) -> None:
        self._of: list[_Block | None] = []  # of the row at each position

    def write(self, where: Sequence[int]) -> list[int]:
        """Notes one write, at positions that leave no gap; returns those of rows that hold on to too much memory.

        They are to be copied again: each then has memory of its own.
        """
        of = self._of
        block = _Block(where) if len(where) > 1 else None
        if isinstance(where, range):
            of.extend([None] * (where.start - len(of)))  # rows of a loaded state were not written here
            replaced = of[where.start : where.stop]
            of[where.start : where.stop] = [block] * len(where)
        else:
            of.extend([None] * (max(where, default=-1) + 1 - len(of)))
            replaced = [of[position] for position in set(where)]
            for position in where:
                of[position] = block
        sparse: list[int] = []
        for old, count in Counter(replaced).items():
            if old is None:
                continue
            old.left -= count
            if 0 < old.left * _LEFT < old.size:
                sparse += {position for position in old.where if of[position] is old}
        for position in sparse:
            of[position] = None
        return sparse
