"""`MixedEnv`: several environments as one, whose conversations start in them in proportion to weights.

Which environment a draw is of follows from its number and the seed alone, so runs of any number of processes deal the
same prompts, and a resumed one needs only the number of its draws. Each environment reads its own rows in its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.ragged.tensordicts import column, column_values, new_tensordict
from llmrl.data.specs import Composite, NonTensor
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.chat import DatasetChatEnv
from llmrl.envs.llm.transforms.dataloading import row_seeds
from llmrl.envs.td_ops import shallow_copy
from llmrl.errors import CheckpointError
from llmrl.modules.llm.policies.containers import CONTAINERS

SOURCE = "env_source"  # the column with the name of a row's environment
_BLOCK = 4096  # draws whose sources are chosen together


class Shares:
    """The source of each draw, with a chance in proportion to its weight, and the position in that source's rows.

    >>> shares = Shares([3, 1], seed=0)
    >>> [shares.at(draw) for draw in range(5)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3)]
    """

    def __init__(self, weights: Sequence[float], seed: int):
        self._seed, self._bounds = seed, torch.tensor(weights, dtype=torch.float64).cumsum(0)
        self._before = [torch.zeros(len(weights), dtype=torch.int64)]  # draws of each source before each block
        self._block: tuple[int, list[tuple[int, int]]] = (-1, [])  # the last one that was read

    def at(self, draw: int) -> tuple[int, int]:
        """The number of the source, and the position in its stream of rows."""
        number, place = divmod(draw, _BLOCK)
        while len(self._before) <= number:  # without the blocks before it, a position is not known
            chosen = self._choose(len(self._before) - 1)
            self._before.append(self._before[-1] + torch.bincount(chosen, minlength=len(self._bounds)))
        if self._block[0] != number:
            next_of = self._before[number].tolist()
            found = []
            for source in self._choose(number).tolist():
                found.append((source, next_of[source]))
                next_of[source] += 1
            self._block = (number, found)
        return self._block[1][place]

    def _choose(self, block: int) -> Tensor:
        generator = torch.Generator().manual_seed(int(row_seeds(self._seed, [block])[0]))
        uniform = torch.rand(_BLOCK, generator=generator, dtype=torch.float64)
        return torch.bucketize(uniform * self._bounds[-1], self._bounds, right=True).clamp(max=len(self._bounds) - 1)


class MixedEnv(EnvBase):
    """Environments by name: a group starts in one of them, and each conversation goes on in its own.

    Writes  "env_source"  NonTensor [B]: the name of the row's environment
            all columns and results of any of them; where a row has none: NaN, 0, False or None
    Raises  CheckpointError for a state of other environments, weights or rows

    ``weights``  of prompts; the other arguments are those that the environments were made with
    """

    def __init__(
        self,
        envs: Mapping[str, DatasetChatEnv],
        weights: Mapping[str, float],
        *,
        repeats: int = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        super().__init__(batch_size=next(iter(envs.values())).batch_size, batch_locked=False)
        self.envs, self.weights = dict(envs), dict(weights)
        self.repeats, self.seed, self.rank, self.world_size = repeats, seed, rank, world_size
        self._shares = Shares([self.weights[name] for name in self.envs], seed)
        self._handed_out = 0  # rows that were started on this rank: the only state
        for part in ("observation", "state", "action", "reward"):
            spec = {name: value for env in self.envs.values() for name, value in env._get_spec(part).clone().items()}
            self._set_spec(part, Composite(spec, shape=self.batch_size))
        columns = {name: set(env.primer.columns or ()) for name, env in self.envs.items()}
        every = set().union(*columns.values())
        self._foreign = {name: every - own for name, own in columns.items()}  # columns that only others have
        self._columns = {name: self.full_state_spec[name] for name in every if name not in CONTAINERS}
        results = {**self.full_observation_spec, **self.full_reward_spec}
        self._results = {name: spec for name, spec in results.items() if name not in (*CONTAINERS, *every)}

    def place(self, draw: int) -> tuple[str, int]:
        """The source of a draw, and its number among the draws of that source."""
        source, position = self._shares.at(draw)
        return list(self.envs)[source], position

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        first, count = self._handed_out, (self.batch_size if td is None else td.batch_size).numel()
        numbers = range(first, first + count)
        draws = [(n // self.repeats) * self.world_size + self.rank for n in numbers]
        places = [self._shares.at(draw) for draw in draws]
        parts: list[tuple[list[int], TensorDictBase]] = []
        for source, (name, env) in enumerate(self.envs.items()):
            rows = [row for row, (chosen, _) in enumerate(places) if chosen == source]
            if rows:
                copies = [numbers[row] % self.repeats for row in rows]
                env.primer.assign([draws[row] for row in rows], copies, [places[row][1] for row in rows])
                started = env.reset(new_tensordict({}, [len(rows)]))
                # By source, not by draw: a row is known by its group, and to sort a batch costs more than to start it.
                start = sum(len(before) for before, _ in parts)
                own = list(range(start, start + len(rows)))
                parts.append((own, started.set(SOURCE, column([name] * len(rows)))))
        self._handed_out = first + count
        return _joined(parts, self._columns)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        names = column_values(td, SOURCE)
        parts = []
        for name in dict.fromkeys(names):
            rows = [row for row, own in enumerate(names) if own == name]
            own = shallow_copy(td if len(rows) == len(names) else td[rows], without=tuple(self._foreign[name]))
            parts.append((rows, self.envs[name]._transition(own)))
        return _joined(parts, self._results)

    def _blank(self, old: TensorDictBase, new: TensorDictBase) -> None:
        next(iter(self.envs.values()))._blank(old, new)

    def state_dict(self) -> dict[str, Any]:
        """The position in the draws, from which a different number of ranks can resume too; weights, and the envs."""
        envs = {name: env.state_dict() for name, env in self.envs.items()}
        return {"rows": self._handed_out * self.world_size, "weights": dict(self.weights), "envs": envs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows, rest = divmod(state["rows"], self.world_size)
        if state["weights"] != self.weights:
            raise CheckpointError(
                f"MixedEnv: sources and weights must be those of the checkpoint: got {self.weights}, expected "
                f"{state['weights']}."
            )
        if rest:
            raise CheckpointError(
                f"MixedEnv: {state['rows']} rows were read; {self.world_size} ranks cannot share them equally."
            )
        for name, env in self.envs.items():
            env.load_state_dict(state["envs"][name])  # which compares the number of rows, the repeats and the seed
        self._handed_out = rows

    def close(self) -> None:
        for env in self.envs.values():
            env.close()
        super().close()


def _joined(parts: Sequence[tuple[list[int], TensorDictBase]], always: Mapping[str, Any]) -> TensorDictBase:
    """The rows of all parts in their places, each with every entry of any of them and of ``always`` (specs)."""
    forms = {name: value for _, td in reversed(parts) for name, value in td.items()} | dict(always)
    for _, td in parts:
        for name, form in forms.items():
            if name not in td.keys():
                td.set(name, _nothing(form, len(td)))
    places = [row for rows, _ in parts for row in rows]
    order = sorted(range(len(places)), key=places.__getitem__)
    joined = cat_rows([td for _, td in parts])
    return joined if order == places else joined[order]


def _nothing(form: Any, count: int) -> Any:
    """``count`` values in place of those of another source: NaN, 0, False or None; ``form`` is a value or a spec."""
    if isinstance(form, (Composite, TensorDict)):
        return TensorDict({name: _nothing(part, count) for name, part in form.items()}, batch_size=[count])
    if isinstance(form, NonTensor) or getattr(form, "dtype", None) is None:
        return column([None] * count)
    fill = torch.nan if form.dtype.is_floating_point else 0
    return torch.full((count, *form.shape[1:]), fill, dtype=form.dtype)
