"""Storages: which rows they take, in which form they come back, what their files hold; and grids of rows."""

import errno
import gc
import pickle
import shutil

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict, lazy_stack

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorStorage,
)
from llmrl.data.replay_buffers.checkpointers.base import default_for
from llmrl.data.replay_buffers.samplers import PrioritizedSampler
from llmrl.errors import CheckpointError, DataError, ShapeError, UnsupportedError
from tests.support.buffers import holding
from tests.support.conversation_rows import Tokens

pytestmark = pytest.mark.filterwarnings("ignore:.* rows were written at once")  # longer than the storage on purpose


def test_a_storage_of_conversations_refuses_what_is_not_a_tensordict():
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    with pytest.raises(DataError, match="got a str"):
        buffer.add("text")
    with pytest.raises(DataError, match="batch dimension"):
        buffer.extend(TensorDict(a=torch.zeros(2)))


def test_positions_leave_no_gap_and_end_at_the_size():
    for make, row in ((ListStorage, 1), (LazyStackStorage, TensorDict()), (LazyTensorStorage, torch.ones(()))):
        storage = make(3)
        with pytest.raises(RuntimeError, match="without gaps"):
            storage.set(1, row)
        for position in range(3):
            storage.set(position, row)
        with pytest.raises(RuntimeError, match="max_size=3"):
            storage.set(3, row)
        assert storage.contains(2)
        assert not storage.contains(3)
        assert storage.contains(torch.tensor([-3, -4, 2, 3])).tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="at least 1"):
        ListStorage(0)


def test_the_schema_is_fixed_by_the_first_write_and_a_breach_writes_nothing():
    storage = LazyTensorStorage(5)
    storage.set(0, TensorDict(a=torch.zeros(2), next=TensorDict(b=torch.tensor(0))))
    a, b = torch.ones(2), torch.tensor(1)
    breaches = {
        r"unknown key \('next', 'c'\)": {"a": a, "next": {"b": b, "c": b}},
        "missing key 'next'": {"a": a},
        r"'a': got float64\[2\].* expected float32\[2\]": {"a": a.double(), "next": {"b": b}},
        r"'b'\): got int64\[1\].* expected int64\[\]": {"a": a, "next": {"b": b.view(1)}},
    }
    for message, row in breaches.items():
        with pytest.raises(DataError, match=message):
            storage.set(0, TensorDict(row))
    ragged = [TensorDict(a=torch.zeros(n), next=TensorDict(b=b)) for n in (1, 2)]
    with pytest.raises(DataError, match="LazyStackStorage"):
        LazyTensorStorage(5).set(slice(0, 2), lazy_stack(ragged))
    assert storage.get(0)["a"].tolist() == [0.0, 0.0]
    storage.set(1, TensorDict(next=TensorDict(b=torch.tensor(7)), a=torch.ones(2)))  # the order of keys is free
    assert storage.get(1)["next", "b"] == 7


def test_tensor_storages_keep_python_values_and_tensorclasses():
    storage = LazyTensorStorage(5)
    batch = TensorDict(tokens=Tokens(prompt=torch.zeros(2, 1), full=torch.ones(2, 3), batch_size=[2]), batch_size=[2])
    batch["query"] = ["first", "second"]
    storage.set(slice(0, 2), batch)
    storage.set(2, batch[1])
    read = storage.get(torch.tensor([1, 0, 2]))
    assert list(read["query"]) == ["second", "first", "second"]
    assert isinstance(read["tokens"], Tokens)
    assert read["tokens"].full.shape == (3, 3)


def test_a_given_tensor_storage_keeps_its_schema_and_size():
    container = TensorDict(a=torch.zeros(4, 2), batch_size=[4])
    storage = TensorStorage(container)
    storage.set(1, TensorDict(a=torch.ones(2)))
    assert container["a"][1].tolist() == [1.0, 1.0]
    with pytest.raises(DataError, match="unknown key 'b'"):
        storage.set(1, TensorDict(b=torch.ones(2)))
    with pytest.raises(ValueError, match="expected 4"):
        TensorStorage(container, max_size=5)
    with pytest.raises(CheckpointError, match="same size"):
        LazyTensorStorage(5).load_state_dict(storage.state_dict())
    with pytest.raises(IndexError, match="the 0 rows"):
        LazyTensorStorage(5).get(0)


def test_lists_copy_tensors_wherever_they_are_and_keep_objects():
    thing = object()
    given = {"a": [torch.zeros(1), (torch.zeros(1),)], "b": thing}
    storage = ListStorage(3)
    storage.set(0, given)
    given["a"][0].fill_(1)
    storage.get(0)["a"][1][0].fill_(1)
    read = storage.get(0)
    assert (read["a"][0], read["a"][1][0]) == (0, 0)
    assert read["b"] is thing
    storage.set(slice(1, 3), (torch.tensor([1, 2]), torch.tensor([3, 4])))
    assert [tuple(map(int, row)) for row in storage.get(slice(1, 3))] == [(1, 3), (2, 4)]


def test_few_rows_and_many_are_written_alike():
    """Small writes go through numpy, large ones through torch: gradients, strides, views and subclasses of tensors."""
    wide = torch.rand(6, 1 << 17, requires_grad=True)  # two rows are a MiB
    data = TensorDict(
        a=wide,
        b=torch.rand(3, 6).t(),
        c=torch.arange(6).expand(2, 6).t(),
        d=MemoryMappedTensor.from_tensor(torch.arange(6)),
        e=torch.rand(6, dtype=torch.complex64).conj(),
        f=torch.rand(6, 2).bfloat16(),
        g=torch.arange(6) % 2 == 0,
        batch_size=[6],
    )
    many, few, single, picked = (LazyTensorStorage(6) for _ in range(4))
    many.set(slice(0, 6), data)
    order = torch.tensor([1, 0])
    for start in (0, 2, 4):
        few.set(slice(start, start + 2), data[start : start + 2])
        picked.set(start + order, data[start + order])
    for position in range(6):
        single.set(position, data[position])
    for storage in (many, few, single, picked):
        read = storage.get(slice(0, 6))
        for key in data.keys():
            assert torch.equal(read[key], data[key])
            assert not read[key].requires_grad
    one_cell = TensorStorage(torch.zeros(1).expand(4))
    with pytest.raises(RuntimeError, match="single memory location"):
        one_cell.set(slice(0, 2), torch.ones(2))


@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage, LazyTensorStorage])
@pytest.mark.parametrize("row", [TensorDict(), TensorDict(a=TensorDict()), TensorDict(a=1, b=TensorDict())])
def test_tensordicts_without_entries_come_back(make, row, tmp_path):
    storage, by_state, by_file = make(4), make(4), make(4)
    storage.set(0, row)
    storage.set(slice(1, 3), torch.stack([row, row]))
    by_state.load_state_dict(storage.state_dict())
    default_for(storage).dumps(storage, tmp_path)
    default_for(by_file).loads(by_file, tmp_path)
    for one in (storage, by_state, by_file):
        assert len(one) == 3
        for found in (one.get(2), one.get(slice(0, 3))[0], one.get(torch.tensor([1, 2]))[1]):
            assert set(found.keys(include_nested=True)) == set(row.keys(include_nested=True))
            assert found.batch_size == torch.Size([])


@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage, LazyTensorStorage, LazyMemmapStorage])
def test_rows_are_set_and_read_by_every_kind_of_index(make):
    def rows(*numbers):
        return TensorDict(a=torch.tensor(numbers, dtype=torch.float32), batch_size=[len(numbers)])

    def read(index):
        return [float(row["a"]) for row in storage.get(index)]

    storage = make(8)
    mask = torch.tensor([True, False, False, True, False, False])
    storage.set(range(3), rows(0, 1, 2), set_cursor=False)
    storage.set([3, 4], rows(3, 4))
    storage[5] = rows(5)[0]
    for index, expected in (
        (range(1, 6, 2), [1, 3, 5]), ([4, -6], [4, 0]), (torch.tensor([5, 1]), [5, 1]), (mask, [0, 3]),
        (mask.tolist(), [0, 3]), (slice(None, None, 2), [0, 2, 4]), (slice(-2, None), [4, 5]), ([2], [2]),
    ):  # fmt: skip
        assert read(index) == expected
        storage.set(index, rows(*[value + 10 for value in expected]))
        assert read(index) == [value + 10 for value in expected]
        storage.set(index, rows(*expected))
    storage.set(-1, rows(50)[0])
    assert (float(storage.get(5)["a"]), float(storage.get(-1)["a"]), len(storage)) == (50, 50, 6)
    assert [index in storage for index in (5, 6, -6)] == [True, False, True]
    for index in (6, -7, [0, 6], torch.tensor([-7])):
        with pytest.raises(IndexError, match="6 rows"):
            storage.get(index)
    with pytest.raises(IndexError, match="6 rows"):
        storage.set(-7, rows(1)[0])
    for wrong in (storage.get, lambda index: storage.set(index, rows(*range(7)))):
        with pytest.raises(IndexError, match="one entry per row"):
            wrong(torch.ones(7, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="without gaps"):
        storage.set([7], rows(1))
    assert storage.counters.cursor == 0


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_a_list_holds_rows_also_of_tuples_and_dicts(make):
    for row in (
        lambda n: (torch.tensor(n), torch.full((2,), n)),
        lambda n: {"a": torch.tensor(n), "b": [torch.full((2,), n)]},
        lambda n: (TensorDict(a=torch.tensor(n), device="cpu"), {"b": torch.tensor(n)}),
    ):
        buffer = ReplayBuffer(storage=make(5))
        assert buffer.extend([row(n) for n in range(3)]).tolist() == [0, 1, 2]
        assert str(buffer[1]) == str(row(1))
    with pytest.raises(DataError, match="a list must hold rows"):
        make(5).set(slice(0, 2), [(torch.zeros(1),), {"a": torch.zeros(1)}])


# --- rows in files ---
def rows(*numbers: int) -> TensorDict:
    return TensorDict({"a": torch.tensor(numbers), "b.c": torch.tensor(numbers) / 2}, batch_size=[len(numbers)])


def test_rows_are_in_the_files_of_the_directory(tmp_path):
    buffer = holding(rows(1, 2, 3, 4, 5), LazyMemmapStorage(4, scratch_dir=tmp_path / "rows"))
    assert (buffer["a"].tolist(), buffer["b.c"].tolist()) == ([5, 2, 3, 4], [2.5, 1.0, 1.5, 2.0])
    on_disk = [path.read_bytes() for path in sorted((tmp_path / "rows").glob("buffer.column_*"))]
    assert torch.frombuffer(bytearray(on_disk[0]), dtype=torch.int64).tolist() == [5, 2, 3, 4]
    del buffer
    gc.collect()
    assert (tmp_path / "rows" / "buffer.column_0.bin").exists()


def test_files_in_a_temporary_directory_go_with_the_storage_and_others_only_if_asked(tmp_path):
    temporary = LazyMemmapStorage(4)
    temporary.set(slice(0, 2), rows(1, 2))
    folder = temporary._folder.path
    assert folder.exists()
    asked = LazyMemmapStorage(4, scratch_dir=tmp_path / "asked", auto_cleanup=True)
    asked.set(slice(0, 2), rows(1, 2))
    (tmp_path / "asked" / "notes").write_text("mine")
    kept = LazyMemmapStorage(4, auto_cleanup=False)
    kept_folder = kept._folder.path
    del temporary, asked, kept
    gc.collect()
    assert not folder.exists()
    assert [path.name for path in (tmp_path / "asked").iterdir()] == ["notes"]
    assert kept_folder.exists()
    shutil.rmtree(kept_folder)


def test_a_directory_with_files_is_refused_unless_they_may_be_replaced(tmp_path):
    first = LazyMemmapStorage(4, scratch_dir=tmp_path)
    first.set(slice(0, 2), rows(1, 2))
    with pytest.raises(RuntimeError, match="existsok=True"):
        LazyMemmapStorage(4, scratch_dir=tmp_path)
    second = LazyMemmapStorage(4, scratch_dir=tmp_path, existsok=True)
    assert len(second) == 0
    second.set(slice(0, 2), rows(7, 8))
    assert second[:]["a"].tolist() == [7, 8]
    assert first[:]["a"].tolist() == [1, 2]  # who mapped the files that were replaced keeps them
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="must be a directory"):
        LazyMemmapStorage(4, scratch_dir=tmp_path / "file")


def test_a_disk_that_is_too_small_is_an_error_at_the_first_write_and_nothing_is_left(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**13, scratch_dir=tmp_path))
    with pytest.raises(OSError, match="smaller max_size or another scratch_dir"):
        buffer.extend(rows(1, 2))
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert not list(tmp_path.glob("buffer.column_*"))


def test_a_disk_that_fills_up_meanwhile_is_an_error_too(tmp_path, largest_file):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=tmp_path))
    with largest_file(100_000), pytest.raises(OSError, match="has no room") as error:
        buffer.extend(rows(1, 2))
    assert error.value.errno == errno.EFBIG
    assert len(buffer) == 0
    buffer.extend(rows(1, 2))  # once there is room, it goes on
    assert buffer["a"].tolist() == [1, 2]


def test_what_files_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device='cuda'"):
        LazyMemmapStorage(4, device="cuda")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    with_text = rows(1, 2)
    with_text["text"] = ["a", "b"]
    with pytest.raises(UnsupportedError, match="LazyStackStorage"):
        buffer.extend(with_text)
    assert len(buffer) == 0
    buffer.extend(rows(1, 2))
    assert len(buffer) == 2
    with pytest.raises(ValueError, match="ndim"):
        LazyMemmapStorage(4, ndim=0)
    with pytest.raises(ValueError, match="LazyTensorStorage allocates"):
        TensorStorage(None)


@pytest.mark.parametrize("cleanup", [True, False])
def test_shared_memory_is_given_back_with_its_owner_unless_it_is_to_stay(cleanup):
    storage = LazyTensorStorage(4, shared_init=True, cleanup_memmap=cleanup)
    storage.set(0, rows(7)[0])
    folder, other = storage.folder, pickle.loads(pickle.dumps(storage))
    assert folder.is_dir()
    del storage
    gc.collect()
    try:
        assert folder.is_dir() is not cleanup
        if not cleanup:
            other.set(1, rows(8)[0])
            assert other.get(0)["a"].tolist() == rows(7)[0]["a"].tolist()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert LazyTensorStorage(4).folder is None


# --- grids ---
def steps(num_streams: int, first: int, last: int) -> TensorDict:
    """[E, T]: 100 * stream + time."""
    value = 100 * torch.arange(num_streams).unsqueeze(1) + torch.arange(first, last)
    return TensorDict(a=value, next=TensorDict(b=value.unsqueeze(-1).expand(-1, -1, 2)), batch_size=value.shape)


def test_priorities_in_the_order_of_the_batch_are_refused_with_the_order_of_the_positions():
    buffer = holding(steps(2, 0, 5), LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12, 1.0, 1.0))
    positions = torch.cartesian_prod(torch.arange(5), torch.arange(2))
    with pytest.raises(RuntimeError, match=r"time is first: pass priority.movedim\(time, 0\)"):
        buffer.update_priority(positions, torch.rand(2, 5))
    buffer.update_priority(positions, torch.rand(2, 5).movedim(1, 0).flatten(0, 1))


def test_indexing_the_buffer_is_indexing_what_it_shows():
    buffer = holding(steps(2, 0, 5), LazyTensorStorage(12, ndim=2))
    shown = buffer[:]["a"]
    mask = shown % 2 == 0
    for index in (0, slice(1, 2), (0, 3), (slice(None), slice(1, 4)), (slice(None), -1), mask, torch.tensor([1, 0, 1])):
        assert torch.equal(buffer[index]["a"], shown[index])
    positions = torch.tensor([[3, 1], [0, 0]])
    assert buffer[positions]["a"].tolist() == [103, 0]
    with pytest.raises(IndexError):
        buffer[:, 5]
    with pytest.raises(IndexError, match="grid"):
        buffer[torch.tensor([[5, 0]])]
    buffer[:, 1] = TensorDict(a=torch.tensor([-1, -2]), next=TensorDict(b=torch.zeros(2, 2).long()), batch_size=[2])
    assert (buffer[:]["a"][:, 1].tolist(), len(buffer)) == ([-1, -2], 10)
    buffer[:, 2:4] = TensorDict(a=torch.tensor([7, 8]), next=TensorDict(b=torch.zeros(2, 2).long()), batch_size=[2])
    assert buffer[:]["a"][:, 2:4].tolist() == [[7, 8]] * 2, "rows for one dim are written along the other"
    with pytest.raises(ShapeError, match=r"rows of shape \[3\] for positions of shape \[2, 2\]"):
        buffer[:, 2:4] = TensorDict(a=torch.ones(3).long(), batch_size=[3])
    buffer[1, 2] = steps(2, 0, 5)[1, 2]
    single = buffer[1, 2]
    assert (single.batch_size, single["a"]) == ((), 102)


def test_another_number_of_streams_or_dimensions_is_refused():
    buffer = holding(steps(2, 0, 2), LazyTensorStorage(10, ndim=2))
    with pytest.raises(DataError, match=r"got \[3\], expected \[2\]"):
        buffer.extend(steps(3, 0, 2))
    with pytest.raises(ShapeError, match="2 dimensions"):
        buffer.extend(TensorDict(a=torch.arange(3), batch_size=[3]))
    assert len(buffer) == 4
    assert torch.equal(buffer["a"], steps(2, 0, 2)["a"])


def test_time_may_come_first():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), dim_extend=0)
    data = steps(2, 0, 4).transpose(0, 1)
    buffer.extend(data)
    assert torch.equal(buffer[:]["a"], data["a"])
    with pytest.raises(RuntimeError, match="set once"):
        buffer.dim_extend = 1
    with pytest.raises(ValueError, match="dim_extend"):
        ReplayBuffer(dim_extend=-1)
    other = holding(steps(2, 0, 4), dim_extend=1)
    assert (len(other), other[0]["a"].tolist()) == (4, [0, 100])


def test_a_grid_is_written_by_its_places():
    storage = LazyTensorStorage(6, ndim=2)
    ReplayBuffer(storage=storage).extend(torch.zeros(2, 3))
    storage[1, 1] = torch.tensor(5.0)
    storage[0] = torch.tensor([1.0, 2.0])
    assert storage[:].tolist() == [[1, 2], [0, 5], [0, 0]]
