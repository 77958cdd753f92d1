"""The lengths of the rows that a run trains on, the micro-batches that an update makes of them, and their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmrl.modules.llm.packing import WORTH_PACKING, Packing, lay_out

_DRAWS = 4  # updates whose largest micro-batch is taken


def microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups rows of similar length, at most ``budget`` padded tokens per part; a longer row gets its own part.

    >>> microbatches([3, 9, 4, 8], 18)
    [[0, 2], [3, 1]]
    """
    parts: list[list[int]] = []
    # Ascending, so that the row being added is the longest of its part and determines the padding.
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        if parts and (len(parts[-1]) + 1) * lengths[row] <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


@dataclass(frozen=True)
class RowLengths:
    """Lengths in tokens of the rows of the data; each is drawn ``alike`` times at once, as in a group of answers."""

    lengths: tuple[int, ...]
    alike: int = 1

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @lru_cache(maxsize=512)  # noqa: B019  of a few objects per process
    def most_at_once(self, rows: int, budget: int, packing: Packing) -> tuple[int, bool]:
        """The tokens, with padding, of the largest micro-batch of some updates on ``rows`` rows drawn at random; and
        whether it has several rows.

        >>> RowLengths((100, 40)).most_at_once(8, 400, "off")
        (400, True)
        """
        chance, found = random.Random(0), [(self.longest, False)]
        for _ in range(_DRAWS if len(self.lengths) > 1 else 1):
            draws = chance.choices(self.lengths, k=-(-rows // self.alike))
            drawn = [length for length in draws for _ in range(self.alike)][:rows]
            for part in microbatches(drawn, budget):
                own = [drawn[row] for row in part]
                padded = len(own) * max(own)
                packed = padded if packing == "off" else lay_out(own).num_tokens
                is_packed = packing == "on" or packed <= WORTH_PACKING * padded
                found.append((packed if is_packed else padded, len(own) > 1))
        return max(found)
