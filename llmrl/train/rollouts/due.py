"""The groups that a step takes of those that all ranks have begun, and the rank that trains each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Begun(NamedTuple):
    """A group that is begun and not taken.

    number   position in the order in which its rank has drawn it
    rank     that samples it
    version  of the weights when sampling began; infinity: it waits for a thread
    """

    number: int
    rank: int
    version: float
    is_finished: bool


def due(groups: Sequence[Begun], version: int, count: int, max_staleness: int) -> list[Begun] | None:
    """The ``count`` groups of the step that trains the weights ``version``, in the order of begin; None: it must wait.

    Groups begun by weights up to ``version - max_staleness + later`` must be trained in this step or the next ``later``
    ones. The step takes those that these cannot hold, and waits for them; all others are the first that are finished.
    With a ``max_staleness`` of 0 it waits for none.

    >>> slow, *fast = [Begun(number, 0, 0, number > 1) for number in (1, 2, 3, 4)]
    >>> [group.number for group in due([slow, *fast], version=0, count=2, max_staleness=2)]
    [2, 3]
    >>> due([slow, Begun(5, 0, 1, True)], version=2, count=1, max_staleness=2)  # later the slow one would be too old
    """
    ready = sorted(group for group in groups if group.is_finished)
    if len(ready) < count:
        return None
    taken: dict[Begun, None] = {}
    for later in range(max_staleness):
        latest = version - max_staleness + later
        old = sum(group.version <= latest for group in groups)
        missing = min(count, old - later * count) - sum(group.version <= latest for group in taken)
        more = [group for group in ready if group.version <= latest and group not in taken][: max(0, missing)]
        if len(more) < missing:
            return None
        taken |= dict.fromkeys(more)
    taken |= dict.fromkeys([group for group in ready if group not in taken][: count - len(taken)])
    return sorted(taken)


def trained_by(groups: Sequence[Begun], num_ranks: int) -> dict[Begun, int]:
    """The rank that trains each group: the one that sampled it, unless others have fewer; all train equally many.

    >>> found = trained_by([Begun(1, 0, 0, True), Begun(2, 0, 0, True), Begun(3, 0, 0, True), Begun(1, 1, 0, True)], 2)
    >>> [(group.rank, rank) for group, rank in found.items()]
    [(0, 0), (0, 0), (1, 1), (0, 1)]
    """
    share, own = len(groups) // num_ranks, Counter[int]()
    ranks: dict[Begun, int] = {}
    spare: list[Begun] = []
    for group in groups:
        own[group.rank] += 1
        if own[group.rank] > share:
            spare.append(group)
        else:
            ranks[group] = group.rank
    short = [rank for rank in range(num_ranks) for _ in range(share - own[rank])]
    return ranks | dict(zip(spare, short, strict=True))
