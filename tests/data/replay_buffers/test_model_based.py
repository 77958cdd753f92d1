"""Any sequence of operations on a buffer, for every storage, sampler and number of dimensions, against lists.

The oracle is a list of row numbers, one per cell, and two counters; every entry of a row is a function of its number.
What is written is overwritten afterwards, and so is everything that is read: memory that a buffer shared with anyone
would show as a wrong row. How likely rows and slices are is tested elsewhere; here it is which rows they may be.
"""

import itertools
import random
import shutil
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* rows were written at once")  # longer than the storage on purpose

STREAMS = {1: (), 2: (2,), 3: (2, 2)}
CAPACITY = {1: 7, 2: 8, 3: 16}  # cells, a multiple of the streams
SLICE = {"slice_len": 2, "traj_key": "trajectory", "strict_length": False}
PRIORITIES = {"alpha": 0.7, "beta": 0.5}

SAMPLERS = {
    "random": lambda size: RandomSampler(),
    "epochs": lambda size: SamplerWithoutReplacement(),
    "prioritized": lambda size: PrioritizedSampler(size, **PRIORITIES),
    "slices": lambda size: SliceSampler(**SLICE),
    "slice epochs": lambda size: SliceSamplerWithoutReplacement(**SLICE),
    "prioritized slices": lambda size: PrioritizedSliceSampler(size, **PRIORITIES, **SLICE),
}


class Rows:
    """Makes rows from numbers: what is in row ``n`` follows from ``n``, but for the trajectory that it is a step of."""

    def __init__(self, ragged: bool) -> None:
        self.ragged = ragged
        self.trajectory: dict[int, int] = {}

    def one(self, number: int) -> TensorDict:
        row = self._dense([number])[0]
        return row.set("wide", torch.full((number % 4,), 2.0 * number)) if self.ragged else row

    def many(self, numbers: list[int]) -> TensorDict:
        return lazy_stack([self.one(number) for number in numbers]) if self.ragged else self._dense(numbers)

    def _dense(self, numbers: list[int]) -> TensorDict:
        number, size = torch.tensor(numbers), [len(numbers)]
        return TensorDict(
            number=number,
            wide=(number.unsqueeze(1) * torch.arange(1, 4)).float(),
            trajectory=torch.tensor([self.trajectory[each] for each in numbers]),
            next=TensorDict(check=number * 31 % 1_000_003, done=(number % 3 == 0).unsqueeze(1), batch_size=size),
            batch_size=size,
        )

    def check(self, data: TensorDict, numbers: list[int]) -> None:
        assert len(data) == len(numbers)
        if self.ragged:
            pairs = [(row, self.one(number)) for row, number in zip(data.unbind(0), numbers, strict=True)]
        else:
            pairs = [(data, self.many(numbers))]
        for got, expected in pairs:
            for key in expected.keys(include_nested=True, leaves_only=True):
                if key != ("next", "done"):  # which the slice samplers change in what they hand out
                    assert torch.equal(got.get(key), expected.get(key)), (key, numbers)


class Counters:
    """The oracle: a row number per cell, in the order of cells, and the counters."""

    def __init__(self, capacity: int, columns: int) -> None:
        self.capacity, self.columns = capacity, columns
        self.cells: list[int] = []
        self.cursor = self.written = 0
        self.left: set[int] = set()  # cells that the pass over all rows has still to give

    def write(self, numbers: list[int]) -> list[int]:
        where = []
        for number in numbers:
            cell = self.cursor
            self.cells[cell : cell + 1] = [number]
            self.left.discard(cell)
            self.cursor = (cell + 1) % self.capacity
            self.written += 1
            where.append(cell)
        return where

    def stream(self, column: int) -> list[int]:
        """The cells of one stream, from the oldest to the newest step."""
        steps = list(range(column, len(self.cells), self.columns))
        start = self.cursor // self.columns if len(self.cells) == self.capacity else 0
        return steps[start:] + steps[:start]


class Model:
    """A buffer and its oracle; ``step`` does one thing to both and compares them."""

    def __init__(self, storage: str, sampler: str, ndim: int, tells_positions: bool = False) -> None:
        torch.manual_seed(0)
        self.kind, self.sampler, self.ndim, self.tells_positions = storage, sampler, ndim, tells_positions
        self.rows = Rows(ragged=storage == "lazy stack")
        self.streams = STREAMS[ndim]
        self.columns = max(1, len(list(itertools.product(*map(range, self.streams)))))
        self.counters = Counters(CAPACITY[ndim], self.columns)
        self.buffer = self.build()
        self.numbers = itertools.count(1)
        self.trajectories = [itertools.count(1000 * column) for column in range(self.columns)]
        self.current = [next(ids) for ids in self.trajectories]

    def build(self) -> ReplayBuffer:
        size = CAPACITY[self.ndim]
        if self.kind == "tensor":
            rows = Rows(ragged=False)
            rows.trajectory[0] = 0
            shape = (size // self.columns, *self.streams)
            storage = TensorStorage(rows.one(0).expand(*shape).clone(), ndim=self.ndim, filled=False)
        elif self.kind in ("list", "lazy stack"):
            storage = {"list": ListStorage, "lazy stack": LazyStackStorage}[self.kind](size)
        else:
            # one cell less than the grid has: it is rounded up to whole time steps
            asked = size if self.ndim == 1 else size - 1
            storage = {"lazy": LazyTensorStorage, "memmap": LazyMemmapStorage}[self.kind](asked, ndim=self.ndim)
        kind = TensorDictReplayBuffer if self.tells_positions else ReplayBuffer
        return kind(storage=storage, sampler=SAMPLERS[self.sampler](size))

    # --- the operations ---

    def step(self, name: str, a: int, b: int) -> None:
        if name == "add":
            self.write(1, add=True)
        elif name == "extend":
            self.write(1 + a % (CAPACITY[self.ndim] // self.columns + 3), add=False)
        elif name == "empty":
            self.buffer.empty(empty_write_count=bool(a % 2))
            written = 0 if a % 2 else self.counters.written
            self.counters = Counters(self.counters.capacity, self.columns)
            self.counters.written = written
        elif not self.counters.cells:
            with pytest.raises(RuntimeError):
                self.buffer.sample(2)
        elif name == "set":
            self.replace(a, b)
        elif name == "read":
            cells = [(a + 3 * step) % len(self.counters.cells) for step in range(1 + b % 4)]
            self.check_rows(self.buffer[self.index(cells)], cells)
        elif name == "prioritize" and "prioritized" in self.sampler:
            cells = sorted({a % len(self.counters.cells), b % len(self.counters.cells)})
            self.buffer.update_priority(self.index(cells), torch.tensor([0.25 + cell for cell in cells]))
        elif name == "sample":
            self.sample(2 * (1 + a % 3) if "slice" in self.sampler else 1 + a % 5)
        elif name in ("load", "reload"):
            self.load(name)
        self.check_counters()

    def write(self, steps: int, add: bool) -> None:
        by_step = []
        for _ in range(steps):
            numbers = [next(self.numbers) for _ in range(self.columns)]
            for column, number in enumerate(numbers):
                if number % 3 == 0:
                    self.current[column] = next(self.trajectories[column])
                self.rows.trajectory[number] = self.current[column]
            by_step.append(numbers)
        flat = list(itertools.chain(*by_step))
        given = self.rows.many(flat)
        if self.ndim == 1:
            given = self.rows.one(flat[0]) if add else given
        else:  # [T, *streams] to [*streams, T], as batches come; one step has no T
            given = given.reshape(steps, *self.streams).permute(*range(1, self.ndim), 0).clone()
            given = given[..., 0].clone() if add else given
        self.last = "add" if add else "extend", given.clone()
        index = self.buffer.add(given) if add else self.buffer.extend(given)
        expected = self.index(self.counters.write(flat))
        assert torch.equal(torch.as_tensor(index).reshape(expected.shape), expected)
        spoil(given)

    def replace(self, a: int, b: int) -> None:
        cells = sorted({a % len(self.counters.cells), b % len(self.counters.cells)})
        numbers = [next(self.numbers) for _ in cells]
        for number, cell in zip(numbers, cells, strict=True):
            self.rows.trajectory[number] = self.rows.trajectory[self.counters.cells[cell]]
        given = self.rows.many(numbers)
        self.buffer[self.index(cells)] = given
        spoil(given)
        for cell, number in zip(cells, numbers, strict=True):
            self.counters.cells[cell] = number

    def sample(self, size: int) -> None:
        data, info = self.buffer.sample(size, return_info=True)
        cells = self.cells(info["index"])
        # Before the rows are overwritten, which may hold the same tensors:
        ends = info["slice_end"].tolist() if "slice" in self.sampler else []
        weights = info["priority_weight"].tolist() if "prioritized" in self.sampler else []
        if self.tells_positions:
            assert torch.equal(data["index"], info["index"])
        self.check_rows(data, cells)
        if self.sampler == "epochs":
            ring = self.counters
            if not ring.left:
                ring.left = set(range(len(ring.cells)))
            assert len(set(cells)) == len(cells) == min(size, len(ring.left))
            assert ring.left >= set(cells)
            ring.left -= set(cells)
            assert self.buffer.sampler.ran_out == (not ring.left)
        elif "slice" in self.sampler:
            self.check_slices(cells, ends, size)
        else:
            assert len(cells) == size
        if "prioritized" in self.sampler:
            assert len(weights) == len(cells)
            assert all(0 < weight <= 1.0001 for weight in weights)
        for value in info.values():
            spoil(value)

    def load(self, name: str) -> None:
        other = self.build()
        write, rows = self.last
        getattr(other, write)(rows)  # rows that loading must forget
        if name == "reload":
            state = self.buffer.state_dict()
            other.load_state_dict(state)
            spoil(state)
        else:
            folder = tempfile.mkdtemp()
            try:
                self.buffer.dumps(folder)
                other.loads(folder)
            finally:
                shutil.rmtree(folder)
        (_, first), (_, second) = self.buffer.sample(2, return_info=True), other.sample(2, return_info=True)
        assert torch.equal(first["index"], second["index"])
        if self.sampler == "epochs":
            self.counters.left = self.counters.left or set(range(len(self.counters.cells)))
            self.counters.left -= set(self.cells(first["index"]))
        self.check_content()
        self.buffer = other

    # --- the comparisons ---

    def index(self, cells: list[int]) -> torch.Tensor:
        """Cells as the buffer names them: positions, or coordinates with time first."""
        if self.ndim == 1:
            return torch.tensor(cells)
        sizes = (CAPACITY[self.ndim] // self.columns, *self.streams)
        return torch.stack(torch.unravel_index(torch.tensor(cells), sizes), -1)

    def cells(self, index: torch.Tensor) -> list[int]:
        if self.ndim == 1:
            return index.tolist()
        cells = torch.zeros(len(index), dtype=torch.int64)
        for part, size in zip(index.unbind(-1), (1, *self.streams), strict=True):
            cells = cells * size + part
        return cells.tolist()

    def check_rows(self, data: TensorDict, cells: list[int]) -> None:
        self.rows.check(data, [self.counters.cells[cell] for cell in cells])
        if self.tells_positions and self.kind != "tensor":  # whose schema has no entry for them
            assert torch.equal(data["index"], self.index(cells))
        spoil(data)

    def check_slices(self, cells: list[int], ends: list[bool], size: int) -> None:
        """Every slice is two steps of a trajectory in the order of time, or a whole trajectory of one.

        In a pass over trajectories, they are as they were when it began: what was one step then is one step.
        """
        assert ends[-1]
        assert len(cells) <= size
        slices, begin = [], 0
        for position, end in enumerate(ends):
            if end:
                slices.append(cells[begin : position + 1])
                begin = position + 1
        runs = []
        for cut in slices:
            steps = self.counters.stream(cut[0] % self.columns)
            ids = [self.rows.trajectory[self.counters.cells[cell]] for cell in steps]
            first = steps.index(cut[0])
            assert cut == steps[first : first + len(cut)]
            assert len(set(ids[first : first + len(cut)])) == 1
            start = max([at + 1 for at in range(first) if ids[at] != ids[first]], default=0)
            end = min([at for at in range(first, len(ids)) if ids[at] != ids[first]], default=len(ids))
            assert len(cut) == min(2, end - start) or (self.sampler == "slice epochs" and len(cut) == 1)
            runs.append(steps[start])
        if self.sampler == "slice epochs":
            assert len(set(runs)) == len(runs)

    def check_counters(self) -> None:
        assert len(self.buffer) == len(self.counters.cells)
        assert self.buffer.write_count == self.counters.written
        assert self.buffer.writer.cursor == self.counters.cursor

    def check_content(self) -> None:
        if self.counters.cells:
            content = self.buffer.storage[:].reshape(-1) if self.ndim > 1 else self.buffer[:]
            self.check_rows(content if not isinstance(content, list) else lazy_stack(content), self.all_cells())
            self.check_rows(self.buffer[self.index(self.all_cells())], self.all_cells())

    def all_cells(self) -> list[int]:
        return list(range(len(self.counters.cells)))


def spoil(value) -> None:
    """Overwrites all tensors in place."""
    if isinstance(value, torch.Tensor):
        value.copy_(value == 0)
    elif isinstance(value, LazyStackedTensorDict):
        spoil(value.tensordicts)
    elif isinstance(value, dict | TensorDict | list | tuple):
        for part in value if isinstance(value, list | tuple) else value.values():
            spoil(part)


STORAGES = [("list", 1), ("lazy stack", 1), *itertools.product(("tensor", "lazy", "memmap"), (1, 2, 3))]
COMMON = ["add", "extend", "extend", "sample", "sample", "sample", "set", "read", "prioritize", "reload", "empty"]

operations = st.lists(st.tuples(st.sampled_from(COMMON), st.integers(0, 50), st.integers(0, 50)), max_size=14)


@pytest.mark.parametrize(("storage", "ndim"), STORAGES)
@settings(max_examples=10, deadline=None)
@given(sampler=st.sampled_from(sorted(SAMPLERS)), tells_positions=st.booleans(), operations=operations)
def test_any_sequence_of_operations_agrees_with_lists(storage, ndim, sampler, tells_positions, operations):
    model = Model(storage, sampler, ndim, tells_positions)
    for operation in [("extend", 2, 0), *operations]:
        model.step(*operation)
    model.check_content()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_dumped_buffer_continues_as_it_was(sampler):
    model = Model("lazy", sampler, 2)
    for operation in [("extend", 4, 0), ("prioritize", 1, 5), ("sample", 1, 0), ("load", 0, 0), ("sample", 2, 0)]:
        model.step(*operation)
    model.check_content()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("storage", "ndim"), STORAGES)
def test_a_thousand_operations_agree_with_lists(storage, ndim, sampler):
    model, draw = Model(storage, sampler, ndim), random.Random(f"{storage}{ndim}{sampler}")
    names = 9 * COMMON[:-1] + ["empty", "load"]  # empty seldom, and a dump costs what a disk does
    for step in range(1000):
        model.step(draw.choice(names), draw.randrange(50), draw.randrange(50))
        if step % 50 == 0:
            model.check_content()
    model.check_content()


def test_the_only_row_may_be_replaced_under_a_slice_sampler():
    """It has no neighbours to compare it with: an IndexError of the storage for ragged rows."""
    for storage in (LazyStackStorage, ListStorage, LazyTensorStorage):
        buffer = ReplayBuffer(storage=storage(8), sampler=SliceSampler(slice_len=1, traj_key="trajectory"))
        rows = Rows(ragged=False)
        rows.trajectory |= {1: 0, 2: 0}
        buffer.add(rows.one(1))
        assert buffer.sample(1)["number"].tolist() == [1]
        buffer[torch.tensor([0])] = rows.many([2])
        assert buffer.sample(1)["number"].tolist() == [2]


def test_versions_of_rows_that_were_written_one_by_one_are_read():
    """They come back as a list of tensors; of a ragged entry the oldest part counts."""
    for versions in ([torch.tensor(version) for version in (1, 2, 5)], [torch.tensor(v) for v in ([5, 1], [2], [5])]):
        buffer = ReplayBuffer(storage=LazyStackStorage(4), sampler=SamplerWithoutReplacement(max_age=3), batch_size=3)
        buffer.extend(lazy_stack([TensorDict(n=n, policy_version=version) for n, version in enumerate(versions)]))
        assert sorted(buffer.sample()["n"].tolist()) == [1, 2]


def test_slices_of_rows_that_were_written_one_by_one_carry_their_marks():
    """Their flags come back as a list of tensors, which was no tensor to set marks in."""
    sampler = SliceSampler(slice_len=2, traj_key="trajectory")
    buffer = ReplayBuffer(storage=LazyStackStorage(8), sampler=sampler, batch_size=4)
    rows = Rows(ragged=True)
    for number in range(1, 7):
        rows.trajectory[number] = number // 4
        buffer.add(rows.one(number))
    _, info = buffer.sample(return_info=True)
    assert info["next", "truncated"].tolist() == [[False], [True]] * 2
    assert info["next", "done"][1::2].tolist() == [[True]] * 2
