"""Storages: which rows they take, where, and in which form they come back."""

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict, lazy_stack

from llmrl.data.llm.chat import History
from llmrl.data.ragged.padding import pad_rows
from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from llmrl.data.replay_buffers.checkpointers.base import default_for
from llmrl.errors import CheckpointError, DataError
from tests.support.conversation_rows import Tokens


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
    assert storage.get(0)["a"].tolist() == [0.0, 0.0]
    storage.set(1, TensorDict(next=TensorDict(b=torch.tensor(7)), a=torch.ones(2)))  # the order of keys is free
    assert storage.get(1)["next", "b"] == 7


def test_ragged_rows_are_refused_by_tensor_storages_and_even_ones_are_not():
    storage = LazyTensorStorage(5)
    with pytest.raises(DataError, match="LazyStackStorage keeps ragged rows"):
        storage.set(slice(0, 2), lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))]))
    storage.set(slice(0, 2), lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))]))
    storage.set(slice(2, 4), [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))])
    assert storage.get(slice(0, 4))["a"][:, 0].tolist() == [0, 1, 0, 1]


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


def test_a_grid_is_written_by_its_places():
    storage = LazyTensorStorage(6, ndim=2)
    ReplayBuffer(storage=storage).extend(torch.zeros(2, 3))
    storage[1, 1] = torch.tensor(5.0)
    storage[0] = torch.tensor([1.0, 2.0])
    assert storage[:].tolist() == [[1, 2], [0, 5], [0, 0]]


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


def test_a_batch_of_single_rows_is_what_the_rows_were_when_it_was_drawn():
    def row(length, history=True):
        nested = TensorDict(full=torch.arange(length), mask=torch.ones(length, dtype=torch.bool))
        return TensorDict(tokens=nested, history=History.from_chats([[{"role": "user", "content": "x" * length}]])[0])

    buffer = TensorDictReplayBuffer(storage=LazyStackStorage(4), batch_size=4, sampler=SamplerWithoutReplacement())
    for length in (2, 3, 5):
        buffer.add(row(length))  # the second and third have the layout of the first
    buffer.extend([row(4)])
    batches = [buffer.sample() for _ in range(3)]
    for length in range(4):
        buffer[length] = row(1)
    buffer.empty()
    by_index = [2, 3, 5, 4]
    expected = [pad_rows([torch.arange(by_index[i]) for i in b["index"].tolist()], value=-1) for b in batches]
    for batch, padded in zip(batches, expected, strict=True):
        assert batch.batch_size == (4,)
        got = batch.get(("tokens", "full"), as_padded_tensor=True, padding_value=-1)
        assert torch.equal(got, padded)
        got.zero_()
        assert torch.equal(batch.get(("tokens", "full"), as_padded_tensor=True, padding_value=-1), padded)
        assert [len(one["history"].content[0]) for one in batch.unbind(0)] == [by_index[i] for i in batch["index"]]
        assert torch.equal(batch.get(("tokens", "full"), as_padded_tensor=True, padding_value=-1), padded)
        batch[0]["tokens", "full"].zero_()
    batch.set(("tokens", "more"), torch.zeros(4, 1))
    assert batch["tokens", "more"].shape == (4, 1)
