"""The lengths of the rows that a run trains on, the micro-batches that an update makes of them, and their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmrl.modules.llm.packing import WORTH_PACKING, Layout, Packing, lay_out
from llmrl.modules.llm.shared_prefixes import GROUP_WIDTH

_DRAWS = 4  # updates whose largest micro-batch is taken
_LEAST_TOKENS = 256  # of a pass on a CPU
_PASS_FLOPS = 8e11  # of a pass on a CPU: larger passes need more memory, and were at most a tenth faster


def tokens_at_once(most: int, parameters: int, *, on_gpu: bool) -> int:
    """The padded tokens of a forward pass of a model: ``most``; on a CPU fewer for a large model, by `_PASS_FLOPS`.

    >>> tokens_at_once(16384, 134_515_008, on_gpu=False), tokens_at_once(16384, 1_000_000, on_gpu=False)
    (991, 16384)
    """
    return most if on_gpu else min(most, max(_LEAST_TOKENS, int(_PASS_FLOPS / (6 * parameters))))


def microbatches(
    lengths: Sequence[int],
    budget: int,
    prompts: Sequence[tuple[int, ...]] | None = None,
    *,
    without_filling: bool = False,
) -> list[list[int]]:
    """Groups rows of similar length, at most ``budget`` padded tokens per part; a longer row gets its own part.

    prompts  of the rows, for a model that computes common beginnings once: rows of one prompt then stay together and
             count it once, if at least a fifth of the tokens are those of a prompt that came before
    without_filling  rows are packed end to end, so the budget is of their own tokens

    >>> microbatches([3, 9, 4, 8], 18)
    [[0, 2], [3, 1]]
    >>> microbatches([3, 9, 4, 8], 15, prompts=[(7, 7, 7), (8, 8, 8), (8, 8, 8), (7, 7, 7)])
    [[0, 3], [2, 1]]
    >>> microbatches([3, 9, 4, 8], 18, without_filling=True)
    [[0, 2, 3], [1]]
    """
    order = {row: (length, row) for row, length in enumerate(lengths)}
    repeated = 0 if prompts is None else sum(map(len, prompts)) - sum(map(len, set(prompts)))
    shares = prompts is not None and repeated >= (1 - WORTH_PACKING) * sum(lengths)
    if shares:
        longest = {prompt: 0 for prompt in prompts}
        for prompt, length in zip(prompts, lengths, strict=True):
            longest[prompt] = max(longest[prompt], length)
        order = {row: (longest[prompts[row]], prompts[row], *own) for row, own in order.items()}
    parts: list[list[int]] = []
    padded = widest = answers = 0  # of the last part: rows that are padded, and tokens of those that only add an answer
    for row in sorted(order, key=order.__getitem__):
        common = shares and parts and prompts[parts[-1][-1]] == prompts[row]
        more = lengths[row] - len(prompts[row]) if common else 0
        wider = max(widest, lengths[row])
        size = (padded + (not common)) * wider + answers + more
        if without_filling and parts and not shares:
            size = sum(lengths[other] for other in parts[-1]) + lengths[row]
        if parts and size <= budget:
            parts[-1].append(row)
            padded, widest, answers = padded + (not common), wider, answers + more
        else:
            parts.append([row])
            padded, widest, answers = 1, lengths[row], 0
    return parts


@dataclass(frozen=True)
class RowLengths:
    """Lengths in tokens of the rows of the data; each is drawn ``alike`` times at once, as in a group of answers.

    ``prompts``  how many of a row's first tokens are those of the rows drawn with it; (): none
    """

    lengths: tuple[int, ...]
    alike: int = 1
    prompts: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @lru_cache(maxsize=512)  # noqa: B019  of a few objects per process
    def most_at_once(
        self, rows: int, budget: int, packing: Packing, shares: bool = False, by_row: bool = False
    ) -> tuple[int, int]:
        """The tokens, with padding, of the largest micro-batch of some updates on ``rows`` rows drawn at random; and
        the length of its attention mask, 0 if it needs none, as a single row does.

        shares  True for a model that computes common beginnings once
        by_row  True for one that computes the attention of packs row by row

        >>> RowLengths((100, 40)).most_at_once(8, 400, "off")
        (400, 100)
        >>> RowLengths((100,), alike=8, prompts=(80,)).most_at_once(8, 1000, "auto", shares=True)
        (240, 240)
        >>> RowLengths((100,)).most_at_once(8, 400, "on", by_row=True)
        (400, 0)
        """
        chance, found = random.Random(0), [(self.longest, 0)]
        common = self.prompts if shares and packing != "off" else ()
        for _ in range(_DRAWS if len(self.lengths) > 1 else 1):
            draws = chance.choices(range(len(self.lengths)), k=-(-rows // self.alike))
            draw_of = [draw for draw in range(len(draws)) for _ in range(self.alike)][:rows]
            drawn = [self.lengths[draws[draw]] for draw in draw_of]
            begin = [(draw,) * common[draws[draw]] for draw in draw_of] if common else None
            for part in microbatches(drawn, budget, begin, without_filling=by_row and packing == "on"):
                own = [drawn[row] for row in part]
                several = len(own) > 1
                if begin and (layout := _shared(own, [begin[row] for row in part])):
                    found.append((layout.num_tokens, layout.width * several))
                    continue
                padded = len(own) * max(own)
                packed = padded if packing == "off" else sum(own) if by_row else lay_out(own).num_tokens
                is_packed = packing == "on" or packed <= WORTH_PACKING * padded
                has_mask = several and not (is_packed and by_row)
                found.append((packed if is_packed else padded, max(own) * has_mask))
        return max(found)


def _shared(lengths: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> Layout | None:
    """The packs of rows of these lengths, each prompt computed once; None if that saves less than a fifth."""
    sizes: list[int] = []
    last = None
    for length, prompt in zip(lengths, prompts, strict=True):
        own = length - len(prompt)
        if prompt == last and sizes[-1] + own <= GROUP_WIDTH:
            sizes[-1] += own
        else:
            sizes.append(length)
        last = prompt
    layout = lay_out(sizes)
    return layout if layout.num_tokens <= WORTH_PACKING * sum(lengths) else None
