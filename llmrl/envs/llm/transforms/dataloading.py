"""Starts conversations from a dataset: pulls one row per resetting slot, repeats it, and numbers the draws.

A source of rows is an endless stream addressed by one integer: position ``p`` is prompt ``p % N`` of epoch ``p // N``,
in that epoch's order. The position is the only state, so a saved position restores the stream exactly. Rank r of w
reads positions r, r + w, r + 2w, ...: together the ranks read the stream of a single process. `ChatEnv` turns a row
into a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column, new_tensordict
from llmrl.data.specs import Composite, NonTensor, Unbounded
from llmrl.envs.specs import EnvSpecs
from llmrl.envs.td_ops import fill_missing
from llmrl.envs.transforms.base import Transform, innermost
from llmrl.errors import CheckpointError, ConfigError, DataError, LLMRLError, MissingKeyError, did_you_mean
from llmrl.modules.llm.engines.sampling import GOLDEN, mix64
from llmrl.modules.llm.policies.columns import RESERVED, refuse_reserved
from llmrl.modules.llm.policies.containers import CONTAINERS

Row = Mapping[str, Any]

# In an env that is not a `ChatEnv`, which may have its prompt under any name.
RESERVED_IN_ANY = {name: what for name, what in RESERVED.items() if name not in CONTAINERS}


class EndOfData(LLMRLError, EOFError):
    """No prompts are left: all epochs have been read. Collectors stop on it; it is not an error."""


class DataLoadingPrimer(Transform):
    """Loads one row of a dataset into every conversation that starts.

    Reads   ``dataloader``: a sequence of rows (dicts), a ``datasets.Dataset``, a DataLoader, or any iterable of rows or
            of batches that can be iterated repeatedly; or ``dataloader_factory()``, called once
    Writes  every column of the row  NonTensor [B] (a tensor stays a tensor)   at reset; steps pass them on
            "group_id"  int64[B]   the number of the draw, shared only by the ``repeats`` copies of one prompt
            "seed"      int64[B]   if ``seed`` is given: the sampling seed of this row at this turn
    Raises  EndOfData at a reset after ``epochs`` epochs (None: never); the reset before it may return fewer rows
            DataError for an empty dataset or a row that is not a mapping, MissingKeyError for a row without a column of
            the first row, or of ``primers``, both with its number; DataError for a row with more columns than the
            first, and for a column that has the name of an entry of the env (`RESERVED`), as soon as it is known;
            ConfigError for contradictory settings

    ``repeats=G`` returns every prompt G times in a row. With ``group_repeats=True`` an environment built around the
    primer has G slots per prompt (``batch_size`` counts prompts), so each batch contains whole groups.

    Row n of rank r of w is copy ``n % G`` of draw ``(n // G) * w + r``. The draw and ``seed`` determine its group, its
    order in the epoch and its seed, so runs with one rank, with several ranks and after a resume agree. ``shuffle``
    shuffles the order per epoch; a DataLoader keeps its own order.

    >>> primer = DataLoadingPrimer([{"query": "2 + 2?"}, {"query": "3 + 3?"}], repeats=2)
    >>> rows = primer.pull(4)
    >>> rows.get("query").tolist(), rows["group_id"].tolist()
    (['2 + 2?', '2 + 2?', '3 + 3?', '3 + 3?'], [0, 0, 1, 1])
    """

    def __init__(
        self,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        primers: Any | None = None,
        stack_method: Callable[[list[Any]], Any] | None = None,
        batch_size: int | Sequence[int] | None = None,
        repeats: int | None = None,
        device: torch.device | str | None = None,
        group_repeats: bool = False,
        use_ray_service: bool = False,
        shuffle: bool = False,
        seed: int | None = None,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        super().__init__()
        if (dataloader is None) == (dataloader_factory is None):
            raise ConfigError("DataLoadingPrimer: give exactly one of dataloader and dataloader_factory.")
        if use_ray_service:
            raise ConfigError(
                "DataLoadingPrimer: use_ray_service must be False: every rank reads its own part of the data by rank "
                "and world_size, without a shared data process."
            )
        for name, value in (("repeats", repeats), ("epochs", epochs), ("world_size", world_size)):
            if value is not None and value < 1:
                raise ConfigError(f"DataLoadingPrimer: {name} must be at least 1: got {value}.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"DataLoadingPrimer: rank must be within [0, {world_size}), the world size: got {rank}.")
        self.repeats = repeats or 1
        self.group_repeats = group_repeats
        self.epochs = epochs
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = torch.device(device) if device is not None else None
        self.stack_method = stack_method
        self.primers = primers
        loader = dataloader if dataloader is not None else dataloader_factory()  # type: ignore[misc]
        self._source = row_source(loader, shuffle=shuffle, seed=seed or 0)
        if batch_size is None:
            batch_size = getattr(loader, "batch_size", None) or 1
        prompts = batch_size if isinstance(batch_size, int) else int(torch.Size(batch_size).numel())
        self.batch_size = torch.Size([prompts * (self.repeats if group_repeats else 1)])
        self._names: tuple[str, ...] | None = None  # of the columns, once they are known
        self._handed_out = 0  # rows pulled on this rank: the only state
        self._assigned: tuple[list[int], list[int], list[int]] | None = None  # of the next pull, see `assign`

    def assign(self, draws: Sequence[int], copies: Sequence[int], positions: Sequence[int]) -> None:
        """Names the rows of the next `pull`, for an env that numbers the draws of several sources itself.

        ``draws`` and ``copies`` set "group_id" and "seed"; ``positions`` are increasing, in this stream of rows.
        """
        self._assigned = list(draws), list(copies), list(positions)

    def pull(self, count: int) -> TensorDictBase:
        """The next ``count`` rows as a batch; fewer if the data end.

        Raises  EndOfData if no rows are left; MissingKeyError, DataError for an invalid row: the position then stays
                unchanged
        """
        if self._assigned is not None:
            (draws, copies, positions), self._assigned = self._assigned, None
            distinct = list(dict.fromkeys(positions))
            by_position = dict(zip(distinct, self._source.rows(distinct), strict=True))
            return self._numbered(self._columns(positions, by_position), draws, copies)
        first = self._handed_out
        numbers = range(first, first + count)
        draws = self._within_limit([(n // self.repeats) * self.world_size + self.rank for n in numbers])
        # The copies of a prompt share one row, which is read once.
        distinct = list(dict.fromkeys(draws))
        by_draw = dict(zip(distinct, self._source.rows(distinct), strict=True))
        draws = self._within_limit(draws)  # reading may have shown where an iterable's epoch ends
        count = len(draws)
        if count == 0:
            self._source.close()
            raise EndOfData(f"DataLoadingPrimer: all {self.epochs} epochs were read ({first} rows on this rank).")
        batch = self._columns(draws, by_draw)
        self._handed_out = first + count
        return self._numbered(batch, draws, [n % self.repeats for n in numbers[:count]])

    def _numbered(self, batch: dict[str, Any], draws: list[int], copies: list[int]) -> TensorDictBase:
        batch["group_id"] = torch.tensor(draws, device=self.device)
        if self.seed is not None:
            batch["seed"] = row_seeds(self.seed, draws, copies).to(self.device)
        return new_tensordict(batch, [len(draws)], self.device)

    def set_container(self, container: EnvSpecs) -> None:
        super().set_container(container)
        refuse_reserved(self.columns or (), "dataset", self._reserved())

    def _reserved(self) -> Mapping[str, str]:
        """The entries that the env, its policy and its transforms have under the name of what they are."""
        if self.container is None:
            return {name: RESERVED[name] for name in ("group_id", "seed")}
        return getattr(innermost(self.container), "reserved_columns", RESERVED_IN_ANY)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: resumes at exactly the next row, also with a different number of ranks."""
        return {
            "rows": self._handed_out * self.world_size,
            "repeats": self.repeats,
            "seed": self.seed,
            "epoch_size": self._source.epoch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of ``state``. Raises CheckpointError if the data or their order differ."""
        for name, mine in (("repeats", self.repeats), ("seed", self.seed), ("epoch_size", self._source.epoch_size)):
            if state[name] != mine and None not in (state[name], mine):
                raise CheckpointError(
                    f"DataLoadingPrimer: the data must be those of the checkpoint: {name} was {state[name]}, is {mine}."
                )
        # The state counts the rows of all ranks, so a different number of ranks can resume from it.
        rows, rest = divmod(state["rows"], self.world_size)
        if rest:
            raise CheckpointError(
                f"DataLoadingPrimer: {state['rows']} rows were read; {self.world_size} ranks cannot share them equally."
            )
        self._handed_out = rows

    @property
    def source(self) -> IndexedRows | IteratedRows:
        """The rows that it reads, whose ``pick`` may choose another order."""
        return self._source

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that it loads; None for an iterable that has not been read yet."""
        if self._names is None and self.primers is not None:
            self._names = tuple(self.primers.keys())
        elif self._names is None and isinstance(self._source, IndexedRows):
            self._names = self._names_of(self._source.first(), 0)
        return self._names

    def reset_dataloader(self) -> None:
        """Starts again at the first row of the first epoch."""
        self._handed_out = 0

    def close(self) -> None:
        """Ends the workers of a DataLoader; a later `pull` starts them again."""
        self._source.close()

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase:
        if td is None:
            return self.pull(self.batch_size.numel() if self.container is None else self.container.batch_size.numel())
        rows = self.pull(td.batch_size.numel())
        if rows.batch_size == td.batch_size:
            fill_missing(rows, td)
        return rows

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        if (seeds := td.get("seed", None)) is not None:
            next_td.set("seed", next_seeds(seeds))
        return next_td

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """The entries that a conversation starts from: every known column, "group_id" and "seed"."""
        shape, device = state_spec.shape, state_spec.device
        row = self._source.first() if isinstance(self._source, IndexedRows) else {}
        for name in self.columns or ():
            value = row.get(name)
            state_spec[name] = (
                Unbounded(shape=(*shape, *value.shape), dtype=value.dtype, device=device)
                if isinstance(value, Tensor) and self.stack_method is None
                else NonTensor(shape=shape)
            )
        for name in ("group_id", "seed") if self.seed is not None else ("group_id",):
            state_spec[name] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        return state_spec

    def _within_limit(self, draws: list[int]) -> list[int]:
        if self.epochs is None or self._source.epoch_size is None:
            return draws
        # Drops a tail that is too short for all ranks on every rank, so that all ranks end together.
        limit = self.epochs * self._source.epoch_size // self.world_size * self.world_size
        return [draw for draw in draws if draw < limit]

    def _columns(self, draws: list[int], by_draw: Mapping[int, Any]) -> dict[str, Any]:
        if self.columns is None:
            self._names = self._names_of(by_draw[draws[0]], draws[0])
        refuse_reserved(self._names, "dataset", self._reserved())
        for draw, row in by_draw.items():
            present = self._names_of(row, draw)
            if missing := [name for name in self._names if name not in present]:
                had = f"row {self._source.number(draw)} has {', '.join(map(str, present))}"
                hint = did_you_mean(missing[0], present)
                raise MissingKeyError(f"DataLoadingPrimer: every row must have the column {missing[0]!r}: {had}.{hint}")
            if self.primers is None and (more := [name for name in present if name not in self._names]):
                raise DataError(
                    f"DataLoadingPrimer: every row must have the columns of the first: row {self._source.number(draw)} "
                    f"also has {', '.join(map(repr, more))}; give the others None there."
                )
        return {name: self._column([by_draw[draw][name] for draw in draws]) for name in self._names}

    def _names_of(self, row: Any, draw: int) -> tuple[str, ...]:
        if not hasattr(row, "keys"):
            raise DataError(
                "DataLoadingPrimer: a row must be a mapping of its columns, as {'query': 'What is 2+2?'}: row "
                f"{self._source.number(draw)} is a {type(row).__name__}."
            )
        return tuple(row.keys())

    def _column(self, values: list[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return column(values)
        if self.stack_method is not None:
            return self.stack_method(values)
        if any(value.shape != values[0].shape for value in values):
            raise DataError(
                "DataLoadingPrimer: tensors of one column must have the same shape, or a stack_method must batch "
                f"them: got {tuple(values[0].shape)} and others."
            )
        return torch.stack(values)


def primers_of(env: EnvSpecs | None) -> list[DataLoadingPrimer]:
    """The primers that start the conversations of an env, if any, and whose columns are known."""
    leaves = () if env is None else env.transform.leaves()
    found = [leaf for leaf in leaves if isinstance(leaf, DataLoadingPrimer)]
    return [primer for primer in found if primer.columns is not None]


class IndexedRows:
    """Rows of an indexable dataset with a length, in an order that depends only on (seed, epoch).

    ``pick``  if it is set, returns the indices of the rows at some positions instead
    Raises  DataError for an empty dataset

    >>> stream = IndexedRows(["a", "b", "c"], shuffle=True, seed=0)
    >>> sorted(stream.rows([0, 1, 2])) == sorted(stream.rows([3, 4, 5])) == ["a", "b", "c"]
    True
    """

    def __init__(self, dataset: Sequence[Row], *, shuffle: bool, seed: int):
        if len(dataset) == 0:
            raise DataError("DataLoadingPrimer: a dataset must have at least one row: got an empty one.")
        self.dataset = dataset
        self.epoch_size: int | None = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.pick: Callable[[Sequence[int]], list[int]] | None = None
        self._order: tuple[int, list[int]] = (-1, [])  # the last epoch's permutation

    def rows(self, positions: Sequence[int]) -> list[Row]:
        """The rows at increasing positions of the stream."""
        return self._read(self._indices(positions))

    def first(self) -> Row:
        """The first row of the order by (seed, epoch)."""
        return self._read([self.in_order(0)])[0]

    def _read(self, indices: list[int]) -> list[Row]:
        if hasattr(self.dataset, "column_names"):  # datasets.Dataset: one read for all rows, as columns
            columns = self.dataset[indices]
            return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [self.dataset[index] for index in indices]

    def number(self, position: int) -> int:
        """The number, from 1, of the row at this position, for messages."""
        return self._indices([position])[0] + 1

    def close(self) -> None:
        """Does nothing: no resource stays open between reads."""

    def _indices(self, positions: Sequence[int]) -> list[int]:
        return [self.in_order(position) for position in positions] if self.pick is None else self.pick(positions)

    def in_order(self, position: int) -> int:
        """The index of the row at this position of the order by (seed, epoch)."""
        epoch, offset = divmod(position, len(self.dataset))
        if not self.shuffle:
            return offset
        # Caches the permutation of one epoch: positions increase, and a batch seldom spans two epochs.
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(int(row_seeds(self.seed, [epoch])[0]))
            self._order = (epoch, torch.randperm(len(self.dataset), generator=generator).tolist())
        return self._order[1][offset]


class IteratedRows:
    """Rows of an iterable (a DataLoader, an object with ``__iter__``), which is restarted at every epoch.

    Reading an earlier position (after a resume) restarts the iterable and skips rows. The order is the iterable's own;
    a shuffling DataLoader resumes exactly only if its generator has the same seed.
    Raises  DataError if an epoch yields nothing
    """

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self.epoch_size: int | None = None  # until the first epoch has been read to its end
        self._batched = bool(getattr(loader, "batch_size", None))
        self._iterator: Generator[Row] | None = None
        self._next = 0

    def rows(self, positions: Sequence[int]) -> list[Row]:
        found: list[Row] = []
        for position in positions:
            # An iterable cannot go back: it is restarted, and earlier rows are skipped.
            if self._iterator is None or position < self._next:
                self._iterator, self._next = self._stream(), 0
            found.append(next(islice(self._iterator, position - self._next, None)))
            self._next = position + 1
        return found

    def number(self, position: int) -> int:
        return (position if self.epoch_size is None else position % self.epoch_size) + 1

    def close(self) -> None:
        """Stops reading the current epoch, which ends the workers of a DataLoader."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _stream(self) -> Generator[Row]:
        while True:
            count = 0
            for element in self.loader:
                for row in self._split(element):
                    count += 1
                    yield row
            if count == 0:
                raise DataError(
                    "DataLoadingPrimer: an epoch must yield at least one row: the dataloader yielded none. An "
                    "iterator that can be read once only cannot be used: pass an object that can be iterated "
                    "repeatedly, such as a list or a DataLoader."
                )
            # Known after the first epoch: numbers the rows of later epochs, and shows where the last one ends.
            self.epoch_size = count

    def _split(self, element: Any) -> Iterable[Row]:
        if isinstance(element, TensorDictBase):
            rows = element.unbind(0) if element.batch_dims else [element]
            return [row.to_dict() for row in rows]
        if isinstance(element, Mapping):
            columns = list(element.values())
            are_columns = all(isinstance(c, list | tuple) or (isinstance(c, Tensor) and c.ndim) for c in columns)
            if (
                are_columns
                and len({len(c) for c in columns}) == 1
                and (self._batched or all(isinstance(item, str) for column in columns for item in column))
            ):
                return [dict(zip(element, values, strict=True)) for values in zip(*columns, strict=True)]
            return [element]
        return element  # a list of rows


def row_source(dataloader: Any, *, shuffle: bool, seed: int) -> IndexedRows | IteratedRows:
    """`IndexedRows` if the data can be indexed, else `IteratedRows`."""
    if hasattr(dataloader, "__getitem__") and hasattr(dataloader, "__len__"):
        return IndexedRows(dataloader, shuffle=shuffle, seed=seed)
    if not hasattr(dataloader, "__iter__"):
        raise DataError(f"DataLoadingPrimer: the data must be an iterable of rows: got {type(dataloader).__name__}.")
    if shuffle:
        raise DataError(
            f"DataLoadingPrimer: shuffle=True needs rows that can be indexed: got {type(dataloader).__name__}, which "
            "sets its own order; shuffle there, or pass a list or a datasets.Dataset."
        )
    return IteratedRows(dataloader)


def row_seeds(base: int, *parts: Sequence[int]) -> Tensor:
    """One seed per row, from a base seed and the row's identity; independent of batch composition, rank and process.

    Returns  int64[B], not negative
    Source   the finaliser of splitmix64 (Steele, Lea, Flood 2014), applied once per part

    >>> row_seeds(0, [3, 4]).tolist() == [int(row_seeds(0, [3])), int(row_seeds(0, [4]))]
    True
    """
    mixed = torch.tensor((base + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64)  # the last 64 bits, signed
    for part in parts:
        mixed = mix64(mixed + GOLDEN * (torch.as_tensor(part, dtype=torch.int64) + 1))
    return mixed & 0x7FFF_FFFF_FFFF_FFFF


def next_seeds(seeds: Tensor) -> Tensor:
    """The seeds of the next turn of the same conversations, int64[B]."""
    return mix64(seeds + GOLDEN) & 0x7FFF_FFFF_FFFF_FFFF
