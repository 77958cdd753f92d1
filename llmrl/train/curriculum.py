"""`Curriculum`: prompts are drawn more or less often by the rewards that their last groups had.

The order of the data stays that of a run without a curriculum: epoch by epoch, shuffled. Each prompt is drawn when its
place comes, or passed over until the next epoch, with a chance that is the weight of its pool over the largest weight
of any prompt. So a prompt is drawn at most once in an epoch, and how often is in proportion to its weight.

What is drawn in a step depends on the seed and on the groups of the steps before it alone: all ranks draw by the same
rewards, and change them at the same draw.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer, IndexedRows, row_seeds
from llmrl.errors import CheckpointError, ConfigError, RolloutError
from llmrl.objectives.metric import Metric
from llmrl.run.metrics import METRICS
from llmrl.train.data.record import add_to_digest
from llmrl.train.distributed import Session
from llmrl.train.settings.curriculum import UNSEEN, CurriculumSettings

MOVED = Metric("curriculum/moved", METRICS["curriculum/moved"], label="moved")
_CHOICE = 1 << 40  # apart from the copies of a draw, whose seeds are numbered from 0
_MOST_AT_ONCE = 4096  # places of an epoch that are looked at together


class PooledOrder:
    """The rows of one source, drawn by the weights of their pools; rows of equal content are one prompt.

    ``lag``  the number of steps after which no draw of a step is in progress any more

    >>> rows = IndexedRows([{"query": text} for text in "abcd"], shuffle=False, seed=0)
    >>> order = PooledOrder(rows, CurriculumSettings(pools={"easy": {"above": 0.5, "weight": 0.02}, "other": {}}))
    >>> order.pick(range(5))  # nothing is known: as without a curriculum
    [0, 1, 2, 3, 0]
    >>> order.observe([(1, 1.0), (3, 0.25)])  # the rewards of draws 1 and 3, the rows "b" and "d"
    0
    >>> order.counts(), order.pick(range(5, 10))
    ({'unseen': 2, 'easy': 1, 'other': 1}, [2, 3, 0, 2, 3])
    """

    def __init__(self, rows: IndexedRows, settings: CurriculumSettings, *, seed: int = 0, lag: int = 2):
        self._rows, self._settings, self._seed = rows, settings, seed
        self.names = [UNSEEN, *settings.names]
        self._weights = torch.tensor([1.0, *(settings.pools[n].weight for n in settings.names)], dtype=torch.float64)
        numbers: dict[int, int] = {}
        self._prompt_of = [numbers.setdefault(_key(row), len(numbers)) for row in rows.dataset]
        self._keys = list(numbers)
        self._prompts = torch.tensor(self._prompt_of)  # int64[rows]
        self._copies = torch.bincount(self._prompts).tolist()  # the rows of each prompt
        self._pools = torch.zeros(len(numbers), dtype=torch.int64)  # of each prompt, a place in ``names``
        self._levels = _levels_of(rows.dataset, settings, self._prompt_of)  # of each prompt, from 0
        self._sizes = torch.zeros(int(self._levels.max()) + 1, len(self.names), dtype=torch.int64)  # rows of each pool
        self._sizes[:, 0] = torch.bincount(self._levels, torch.bincount(self._prompts).double()).long()
        self.level, self._of_level = 0, []  # the level that is drawn, and the means of its groups since it began
        self._means: dict[int, list[float]] = {}  # of the last groups of each prompt that has been seen
        self._next = 0  # place in the endless order of rows, behind the last one that was drawn
        self._first, self._drawn = 0, []  # the rows of the draws from ``_first`` on
        self._asked = 0
        self._lows: deque[int] = deque(maxlen=lag)
        self._lock = threading.Lock()  # a step that is sampled ahead draws in its own thread
        rows.pick = self.pick

    def pick(self, draws: Sequence[int]) -> list[int]:
        """The rows of these draws."""
        with self._lock:
            self._asked = max(self._asked, max(draws) + 1)
            self._extend(self._asked)
            return [self._row(draw) for draw in draws]

    @property
    def progress(self) -> tuple[int, int]:
        """The number of draws that this rank has decided, and of those it has asked for."""
        return self._first + len(self._drawn), self._asked

    def agree(self, progress: Sequence[tuple[int, int]]) -> None:
        """Decides as many draws as any rank has, of which this is the ``progress``, and forgets those that ended."""
        with self._lock:
            self._extend(max(decided for decided, _ in progress))
            self._lows.append(min(asked for _, asked in progress))
            if len(self._lows) == self._lows.maxlen and (ended := self._lows[0] - self._first) > 0:
                self._first, self._drawn = self._first + ended, self._drawn[ended:]

    def observe(self, rewards: Sequence[tuple[int, float]]) -> int:
        """Takes the mean reward of the group of each draw, in the order of the draws.

        Returns  how many prompts changed their pool, but for those that were unseen
        """
        moved = 0
        for draw, mean in rewards:
            prompt = self._prompt(draw)
            known = self._means.setdefault(prompt, [])
            known[:] = [*known, mean][-self._settings.window :]
            before = int(self._pools[prompt])
            self._place(prompt)
            moved += before not in (0, int(self._pools[prompt]))
            if int(self._levels[prompt]) == self.level:
                self._of_level.append(mean)
                self._move_level()
        return moved

    @property
    def num_levels(self) -> int:
        return len(self._sizes)

    def _move_level(self) -> None:
        rule = self._settings.levels
        if rule is None or len(self._of_level) < rule.window:
            return
        mean = math.fsum(self._of_level[-rule.window :]) / rule.window
        by = int(mean > rule.above) - int(mean < rule.below)
        if 0 <= self.level + by < len(self._sizes) and by:
            self.level, self._of_level = self.level + by, []
        else:
            self._of_level = self._of_level[-rule.window :]

    @property
    def _chances(self) -> Tensor:
        """float64[levels, pools]: the weights of prompts."""
        rule, levels = self._settings.levels, torch.arange(len(self._sizes))
        if rule is None:
            return self._weights.expand(len(self._sizes), -1)
        factors = torch.where(levels < self.level, rule.easier, (levels == self.level).double())
        return factors[:, None] * self._weights

    def pool(self, draw: int) -> str:
        """The name of the pool that the prompt of this draw is in now."""
        return self.names[self._pools[self._prompt(draw)]]

    def counts(self) -> dict[str, int]:
        """The number of rows in each pool."""
        return dict(zip(self.names, self._sizes.sum(0).tolist(), strict=True))

    def _place(self, prompt: int) -> None:
        known = self._means[prompt]
        was, pool = int(self._pools[prompt]), self.names.index(self._settings.pool_of(math.fsum(known) / len(known)))
        self._pools[prompt] = pool
        level = int(self._levels[prompt])
        self._sizes[level, was] -= self._copies[prompt]
        self._sizes[level, pool] += self._copies[prompt]

    def _prompt(self, draw: int) -> int:
        with self._lock:
            return self._prompt_of[self._row(draw)]

    def _row(self, draw: int) -> int:
        if draw < self._first:
            raise RolloutError(f"curriculum: a draw must be one that has not ended: got {draw}, before {self._first}.")
        self._extend(draw + 1)
        return self._drawn[draw - self._first]

    def _extend(self, end: int) -> None:
        """Decides the draws before ``end``, and none beyond: those may be decided by later rewards."""
        missing = end - self._first - len(self._drawn)
        if missing <= 0:
            return
        sizes, weights = self._sizes, self._chances
        most = weights[sizes > 0].max()
        share = float((weights * sizes).sum() / (most * sizes.sum()))  # of the places that are drawn
        while missing > 0:
            size = len(self._prompt_of)
            count = min(max(16, math.ceil(1.5 * missing / share)), _MOST_AT_ONCE, size - self._next % size)
            places = range(self._next, self._next + count)
            rows = [self._rows.in_order(place) for place in places]
            prompts = self._prompts[rows]
            chances = weights[self._levels[prompts], self._pools[prompts]] / most
            uniform = row_seeds(self._seed, places, [_CHOICE]).double() / 2.0**63
            taken = (uniform < chances).nonzero().flatten()[:missing].tolist()
            self._drawn += [rows[at] for at in taken]
            missing -= len(taken)
            self._next += count if missing else taken[-1] + 1

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            window = self._settings.window
            means = [self._means[prompt] + [math.nan] * (window - len(self._means[prompt])) for prompt in self._means]
            return {
                "keys": torch.tensor([self._keys[prompt] for prompt in self._means], dtype=torch.int64),
                "means": torch.tensor(means, dtype=torch.float64).view(len(means), window),
                "next": self._next,
                "first": self._first,
                "drawn": torch.tensor(self._drawn, dtype=torch.int64),
                "lows": list(self._lows),
                "level": self.level,
                "of_level": list(self._of_level),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a state of other rows."""
        prompts = {key: prompt for prompt, key in enumerate(self._keys)}
        keys, means = state["keys"].tolist(), state["means"].tolist()
        if unknown := sum(key not in prompts for key in keys):
            raise CheckpointError(
                f"curriculum: the prompts must be those of the checkpoint: {unknown} of the {len(keys)} that it has "
                "rewards of are not among them."
            )
        self._means = {
            prompts[key]: [mean for mean in row if not math.isnan(mean)] for key, row in zip(keys, means, strict=True)
        }
        for prompt in self._means:
            self._place(prompt)
        self._next, self._first, self._drawn = state["next"], state["first"], state["drawn"].tolist()
        self._asked = self._first
        self._lows.extend(state["lows"])
        self.level, self._of_level = state.get("level", 0), list(state.get("of_level", ()))


class Curriculum:
    """The orders of all sources of a run, and the rewards of each step that they are drawn by.

    ``primers``  by source, of which a run without ``env.mix`` has one, ""
    ``place``    the source of a draw, and the number of the draw among those of its source
    Raises       ConfigError for rows that cannot be read in another order
    """

    def __init__(
        self,
        settings: CurriculumSettings,
        session: Session,
        primers: Mapping[str, DataLoadingPrimer],
        place: Callable[[int], tuple[str, int]],
        *,
        seed: int,
        max_staleness: int = 0,
    ):
        self._session, self._place = session, place
        for primer in primers.values():
            if not isinstance(primer.source, IndexedRows):
                raise ConfigError(
                    "curriculum: prompts must be rows that can be read in any order: the environment reads an "
                    "iterable; give it a list, or leave curriculum out."
                )
        options = {"seed": seed, "lag": max_staleness + 4}
        self._orders = {name: PooledOrder(primer.source, settings, **options) for name, primer in primers.items()}
        if settings.levels and not any(order.num_levels > 1 for order in self._orders.values()):
            raise ConfigError(
                f"curriculum.levels: prompts must have several levels in a column {settings.levels.column!r}: they "
                "have not; set curriculum.levels.column, or levels in env.options of reasoning_gym."
            )

    def observe(self, data: TensorDictBase) -> dict[str, float]:
        """Takes the rewards of this rank's groups of a step; a collective. Draws after it are by the new pools.

        Returns  "curriculum/<pool>/prompts", rows in the pool from now on, and "curriculum/<pool>/drawn", groups of the
                 step that were drawn from it, with the source before the pool in a mix; "curriculum/level", of the next
                 draws; "curriculum/moved"
        """
        own = (_group_means(data), {name: order.progress for name, order in self._orders.items()})
        ranks = self._session.gather([own])
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in self._orders}
        for draw, mean in sorted(pair for means, _ in ranks for pair in means.items()):
            source, position = self._place(draw)
            found[source].append((position, mean))
        metrics: dict[str, float] = {}
        moved = 0
        for name, order in self._orders.items():
            order.agree([progress[name] for _, progress in ranks])
            drawn = [order.pool(draw) for draw, _ in found[name]]
            moved += order.observe([(draw, mean) for draw, mean in found[name] if math.isfinite(mean)])
            if order.num_levels > 1:
                metrics["/".join(filter(None, ("curriculum", name, "level")))] = order.level
            for pool, count in order.counts().items():
                label = "/".join(filter(None, ("curriculum", name, pool)))
                metrics |= {f"{label}/prompts": count, f"{label}/drawn": drawn.count(pool)}
        return metrics | {MOVED.name: moved}

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, but for draws that only some have decided: the others decide them in the same way."""
        return {name: order.state_dict() for name, order in self._orders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, order in self._orders.items():
            order.load_state_dict(state[name])


def _group_means(data: TensorDictBase) -> dict[int, float]:
    """The mean reward of each group by its number, NaN if all its conversations failed."""
    done = data.get(("next", "done")).flatten()
    rewards: dict[int, list[float]] = {}
    totals = data.get(("next", "reward")).double().flatten(1).sum(1)
    for group, reward in zip(data.get("group_id")[done].tolist(), totals[done].tolist(), strict=True):
        rewards.setdefault(group, []).append(reward)
    finite = {group: [reward for reward in own if math.isfinite(reward)] for group, own in rewards.items()}
    return {group: math.fsum(own) / len(own) if own else math.nan for group, own in finite.items()}


def _levels_of(rows: Sequence[Any], settings: CurriculumSettings, prompt_of: Sequence[int]) -> Tensor:
    """int64[prompts]: the level of each, from 0, the numbers in the column in order; 0 if no row has the column."""
    column, found = settings.levels.column if settings.levels else "", {}
    if not any(column in row for row in rows):
        return torch.zeros(max(prompt_of) + 1, dtype=torch.int64)
    for row, prompt in zip(rows, prompt_of, strict=True):
        level = row.get(column)
        if isinstance(level, bool) or not isinstance(level, int | float) or not math.isfinite(level):
            raise ConfigError(
                f"curriculum.levels: every row must have a number in the column {column!r}: got {level!r} in a row "
                f"with {', '.join(row)}."
            )
        found[prompt] = level
    places = {level: place for place, level in enumerate(sorted(set(found.values())))}
    return torch.tensor([places[found[prompt]] for prompt in range(len(found))])


def _key(row: Any) -> int:
    """A number by which a row is known wherever it stands, of its content."""
    digest = hashlib.blake2b(digest_size=8)
    add_to_digest(digest, row)
    return int.from_bytes(digest.digest(), "little", signed=True)
