"""The lengths of the rows that a run trains on, the micro-batches that an update makes of them, and their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmrl.modules.llm.packing import WORTH_PACKING, Packing, lay_out

_DRAWS = 4  # updates whose largest micro-batch is taken


def microbatches(
    lengths: Sequence[int], budget: int, prompts: Sequence[tuple[int, ...]] | None = None
) -> list[list[int]]:
    """Groups rows of similar length, at most ``budget`` padded tokens per part; a longer row gets its own part.

    prompts  of the rows, for a model that computes common beginnings once: rows of one prompt then stay together, if
             at least a fifth of the tokens are those of a prompt that came before

    >>> microbatches([3, 9, 4, 8], 18)
    [[0, 2], [3, 1]]
    >>> microbatches([3, 9, 4, 8], 18, prompts=[(7, 7, 7), (8, 8, 8), (8, 8, 8), (7, 7, 7)])
    [[0, 3], [2, 1]]
    """
    order = {row: (length, row) for row, length in enumerate(lengths)}
    repeated = 0 if prompts is None else sum(map(len, prompts)) - sum(map(len, set(prompts)))
    if prompts is not None and repeated >= (1 - WORTH_PACKING) * sum(lengths):
        longest = {prompt: 0 for prompt in prompts}
        for prompt, length in zip(prompts, lengths, strict=True):
            longest[prompt] = max(longest[prompt], length)
        order = {row: (longest[prompts[row]], prompts[row], *own) for row, own in order.items()}
    parts: list[list[int]] = []
    widest = 0  # of the last part
    for row in sorted(order, key=order.__getitem__):
        widest = max(widest, lengths[row])
        if parts and (len(parts[-1]) + 1) * widest <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
            widest = lengths[row]
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
