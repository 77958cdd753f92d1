from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorClass, TensorDict, lazy_stack

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
from llmrl.data.replay_buffers.checkpointers import default_for
from llmrl.data.replay_buffers.layout import put_rows_together, put_together, take_apart
from llmrl.errors import CheckpointError, DataError, ShapeError
from llmrl.modules.llm.policies import containers


class Tokens(TensorClass["nocast"]):
    prompt: torch.Tensor
    full: torch.Tensor
    padded: bool = False


def conversations(*lengths: int, first: int = 0) -> TensorDict:
    """A dense batch with ragged containers: row i holds the ids 0 .. length - 1."""
    count = len(lengths)
    singles = [TensorDict(prompt=torch.arange(n - 1), full=torch.arange(n)) for n in lengths]
    batch = TensorDict(
        {
            "tokens": Tokens._from_tensordict(LazyStackedTensorDict(*singles), {"padded": False}),
            "history": History.from_chats(
                [[{"role": "user", "content": f"question {first + i}"}] * (1 + i % 2) for i in range(count)]
            ),
            "group_id": torch.arange(first, first + count),
            "next": TensorDict(reward=torch.arange(first, first + count).view(-1, 1, 1) / 2, batch_size=[count]),
        },
        batch_size=[count],
    )
    batch["query"] = [f"question {first + i}" for i in range(count)]
    return batch


def ids(batch: TensorDict) -> list[list[int]]:
    return [row.tolist() for row in batch.get(("tokens", "full"), as_list=True)]


def test_a_batch_of_conversations_comes_back_in_the_form_it_was_written():
    storage = LazyStackStorage(10)
    storage.set(slice(0, 3), conversations(3, 1, 5))
    storage.set(slice(3, 5), conversations(2, 4, first=3))
    batch = storage.get(torch.tensor([4, 0, 2]))
    assert type(batch) is TensorDict
    assert batch.batch_size == (3,)
    assert isinstance(batch["tokens"], Tokens)
    assert batch["tokens"].padded is False
    assert ids(batch) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert batch["group_id"].tolist() == [4, 0, 2]
    assert batch["next", "reward"].flatten().tolist() == [2.0, 0.0, 1.0]
    assert list(batch["query"]) == ["question 4", "question 0", "question 2"]
    assert batch["history"].to_chats()[0] == [{"role": "user", "content": "question 4"}] * 2
    assert ids(batch[torch.tensor([True, False, True])]) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    row = storage.get(3)
    assert row.batch_size == ()
    assert row["tokens"].full.tolist() == [0, 1]
    assert row["query"] == "question 3"


def test_single_rows_come_back_as_one_lazy_stack():
    storage = LazyStackStorage(10)
    for position, length in enumerate((3, 1, 5)):
        storage.set(position, conversations(length, first=position)[0])
    batch = storage.get(slice(0, 3))
    assert isinstance(batch, LazyStackedTensorDict)
    assert ids(batch) == [[0, 1, 2], [0], [0, 1, 2, 3, 4]]
    assert list(batch["query"]) == ["question 0", "question 1", "question 2"]


def test_mixed_layouts_come_back_as_a_lazy_stack_whatever_is_drawn():
    storage = LazyStackStorage(10)
    storage.set(slice(0, 2), conversations(3, 1))
    assert type(storage.get(slice(0, 2))) is TensorDict
    other = conversations(2)
    other["next", "reward"] = torch.zeros(1, 4, 1)  # one reward per turn
    storage.set(slice(2, 3), other)
    for index in (slice(0, 2), slice(0, 3)):
        batch = storage.get(index)
        assert isinstance(batch, LazyStackedTensorDict)
    assert ids(batch) == [[0, 1, 2], [0], [0, 1]]
    assert [row.shape for row in batch.get(("next", "reward"), as_list=True)] == [(1, 1), (1, 1), (4, 1)]
    restored = LazyStackStorage(10)
    restored.load_state_dict(storage.state_dict())
    assert isinstance(restored.get(slice(0, 2)), LazyStackedTensorDict)
    storage.empty()
    storage.set(slice(0, 2), conversations(3, 1))
    assert type(storage.get(slice(0, 2))) is TensorDict


def test_rows_with_different_keys_can_be_stored_side_by_side():
    storage = LazyStackStorage()
    storage.set(slice(0, 2), [TensorDict(a=torch.zeros(1)), TensorDict(a=torch.ones(2), b=torch.ones(1))])
    batch = storage.get(slice(0, 2))
    assert [sorted(row.keys()) for row in batch.unbind(0)] == [["a"], ["a", "b"]]
    trajectories = lazy_stack([TensorDict(x=torch.rand(n, 2), batch_size=[n]) for n in (2, 5)])
    other = LazyStackStorage(4, stack_dim=1)
    other.set(slice(0, 2), lazy_stack([TensorDict(x=torch.rand(3), batch_size=[3])] * 2))
    assert other.get(slice(0, 2)).batch_size == (3, 2)
    plain = LazyStackStorage(4)
    plain.set(slice(0, 2), trajectories)
    assert [row.batch_size for row in plain.get(slice(0, 2)).unbind(0)] == [(2,), (5,)]


def test_what_was_written_and_what_was_read_share_no_memory_with_the_rows():
    given = conversations(3, 1)
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    buffer.extend(given)
    for batch in (given, buffer[:], buffer.sample(2)):
        for row in batch.get(("tokens", "full"), as_list=True):
            row.fill_(-1)
        batch["group_id"].fill_(-1)
        batch["next", "reward"].fill_(-1)
        batch["extra"] = torch.zeros(2)
        batch["history"].append(History(role=["user"] * 2, content=["more"] * 2), inplace=True)
    single = buffer[0]
    single["tokens"].full.fill_(-1)
    batch = buffer[:]
    assert ids(batch) == [[0, 1, 2], [0]]
    assert batch["group_id"].tolist() == [0, 1]
    assert batch["next", "reward"].flatten().tolist() == [0.0, 0.5]
    assert "extra" not in batch
    assert [len(chat) for chat in batch["history"].to_chats()] == [1, 2]


def test_rows_that_are_kept_whole_are_copies_too():
    def rows() -> list[TensorDict]:
        first, second = TensorDict(x=torch.zeros(1)), TensorDict(x=torch.zeros(1), y=torch.zeros(1))
        return [TensorDict(part=first), TensorDict(part=second)]

    given = rows()
    storage = LazyStackStorage(4)
    storage.set(slice(0, 2), lazy_stack(given))
    for row in (*given, *storage.get(slice(0, 2)).unbind(0)):
        row["part", "x"].fill_(-1)
    read = storage.get(slice(0, 2))
    assert [float(row["part", "x"]) for row in read.unbind(0)] == [0.0, 0.0]
    assert [sorted(row["part"].keys()) for row in read.unbind(0)] == [["x"], ["x", "y"]]


def test_containers_that_hold_columns_stay_columns():
    tokens = containers.Tokens.from_rows({"full": [torch.arange(3), torch.arange(1)]})
    text = containers.Text.from_rows({"full": ["three", "one"]})
    given = TensorDict({"tokens": tokens, "text": text}, batch_size=[2])
    storage = LazyStackStorage(4)
    storage.set(slice(0, 2), given)
    batch = storage.get(torch.tensor([1, 0]))
    assert ids(batch) == [[0], [0, 1, 2]]
    assert batch["text"].rows("full") == ["one", "three"]
    assert batch["tokens"].padded is False
    for stack in (given["tokens"]._tensordict, batch["tokens"]._tensordict):
        assert stack.own_columns() is not None  # no row was built on the way in or out
    ids(given)[0].clear()
    given.get(("tokens", "full"), as_list=True)[0].fill_(-1)
    batch.get(("tokens", "full"), as_list=True)[0].fill_(-1)
    assert ids(storage.get(slice(0, 2))) == [[0, 1, 2], [0]]
    single = storage.get(0)
    assert single["tokens"].full.tolist() == [0, 1, 2]
    assert single["text"].full == "three"


def ragged_buffer() -> ReplayBuffer:
    columns = {"full": [torch.arange(3), torch.arange(1), torch.arange(5)]}
    values = {"full": [torch.arange(3) / 2, torch.arange(1) / 2, torch.arange(5) / 2]}
    tokens, log_probs = containers.Tokens.from_rows(columns), containers.LogProbs.from_rows(values)
    buffer = ReplayBuffer(storage=LazyStackStorage(4))
    buffer.extend(TensorDict({"tokens": tokens, "log_probs": log_probs}, batch_size=[3]))
    return buffer


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return value
    if value.batch_dims:
        return [leaf for row in value.unbind(0) for leaf in tensors_of(row)]
    return [leaf for leaf in value.values(True, True) if isinstance(leaf, torch.Tensor)]


READS = {
    "a list": lambda batch: batch.get(("tokens", "full"), as_list=True),
    "padded": lambda batch: batch.get(("tokens", "full"), as_padded_tensor=True),
    "padded left": lambda batch: batch.get(("tokens", "full"), as_padded_tensor=True, padding_side="left"),
    "padded, then a list": lambda batch: (batch["tokens"].get("full", as_padded_tensor=True), batch)[1],
    "rows of a container": lambda batch: batch["tokens"].rows("full"),
    "one row": lambda batch: batch[0],
    "a slice": lambda batch: batch[1:],
    "a mask": lambda batch: batch[torch.tensor([True, False, True])],
    "unbind": lambda batch: batch.unbind(0)[2],
    "values": lambda batch: batch["tokens"]._tensordict,
    "a clone": lambda batch: batch.clone(),
    "a shallow copy": lambda batch: batch.copy(),
    "a stack": lambda batch: torch.stack([batch, batch]).unbind(0)[0],
    "a concatenation": lambda batch: torch.cat([batch, batch]),
    "a pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "a deep copy": lambda batch: copy.deepcopy(batch),
    "a copied container": lambda batch: copy.copy(batch["tokens"]._tensordict),
    "another buffer": lambda batch: _through_another(batch),
    "select": lambda batch: batch.select("tokens"),
    "apply": lambda batch: batch.apply(lambda leaf: leaf),
}


def _through_another(batch):
    other = LazyStackStorage(4)
    other.set(slice(0, 3), batch)
    return other.get(slice(0, 3))


@pytest.mark.parametrize("read", READS)
def test_rows_that_are_copied_when_they_are_read_never_show_the_storage(read):
    buffer = ragged_buffer()
    batch = buffer[:]
    written = [tensor for row in buffer.storage._rows for tensor in row.leaves if isinstance(tensor, torch.Tensor)]
    stored = {tensor.untyped_storage().data_ptr() for tensor in written}
    for value in (READS[read](batch), batch):
        tensors = tensors_of(value)
        assert tensors
        for tensor in tensors:
            assert tensor.untyped_storage().data_ptr() not in stored
            tensor.fill_(-1)
    assert [row.tolist() for row in buffer[:]["tokens"].rows("full")] == [[0, 1, 2], [0], [0, 1, 2, 3, 4]]
    assert [row.tolist() for row in buffer[:]["log_probs"].rows("full")] == [[0, 0.5, 1], [0], [0, 0.5, 1, 1.5, 2]]


def test_a_batch_keeps_what_it_read_whatever_is_written_later():
    buffer = ragged_buffer()
    batch, padded = buffer[:], buffer[:]
    again = containers.Tokens.from_rows({"full": [torch.arange(9)] * 4})
    buffer.extend(TensorDict({"tokens": again, "log_probs": again}, batch_size=[4]))
    buffer.empty()
    assert ids(batch) == [[0, 1, 2], [0], [0, 1, 2, 3, 4]]
    assert padded.get(("tokens", "full"), as_padded_tensor=True, padding_value=-1, padding_side="left").tolist() == [
        [-1, -1, 0, 1, 2],
        [-1, -1, -1, -1, 0],
        [0, 1, 2, 3, 4],
    ]


def test_what_is_written_into_a_batch_stays_in_it_and_a_row_drawn_twice_is_two_rows():
    batch = ragged_buffer()[torch.tensor([0, 0, 2])]
    rows = batch["tokens"].rows("full")
    rows[0].fill_(7)
    assert ids(batch) == [[7, 7, 7], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert ids(batch[:1]) == [[7, 7, 7]]
    assert batch.get(("tokens", "full"), as_padded_tensor=True)[0].tolist() == [7, 7, 7, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_straight_from_the_storage_is_padding_the_copies(dtype, shape, side):
    rows = [(torch.rand(n, *shape) * 9).to(dtype) for n in (3, 0, 4)]
    buffer = ReplayBuffer(storage=LazyStackStorage(4))
    buffer.extend(TensorDict(tokens=containers.Tokens.from_rows({"full": rows}), batch_size=[3]))
    for value in (0, 1):
        padded = buffer[:].get(("tokens", "full"), as_padded_tensor=True, padding_side=side, padding_value=value)
        assert padded.dtype is dtype
        assert torch.equal(padded, pad_rows(rows, value=value, side=side))
    buffer.extend(TensorDict(tokens=containers.Tokens.from_rows({"full": [torch.zeros(2, 3)]}), batch_size=[1]))
    with pytest.raises(ShapeError, match="differ in nothing but"):
        buffer[:].get(("tokens", "full"), as_padded_tensor=True)


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_one_number_per_row_comes_back_exactly(storage):
    columns = {
        "float": torch.tensor([0.1, float("nan"), float("-inf"), -0.0]),
        "double": torch.tensor([[0.1], [1e300], [5e-324], [-1.0]], dtype=torch.float64),
        "long": torch.tensor([2**62 + 1, -(2**63), 0, 7]).view(4, 1, 1),
        "byte": torch.tensor([0, 255, 3, 4], dtype=torch.uint8),
        "flag": torch.tensor([True, False, True, True]),
        "half": torch.tensor([0.1, 65504.0, 6e-8, 1.0], dtype=torch.float16),
        "brain": torch.tensor([0.1, 3e38, 1e-38, 1.0], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j, 0j, 3j, 1]),
    }
    kept = storage(4)
    kept.set(slice(0, 4), TensorDict(columns, batch_size=[4]))
    index = torch.tensor([2, 0, 1, 3])
    batch = kept.batch(index)
    for name, column in columns.items():
        assert batch[name].dtype is column.dtype
        assert torch.equal(batch[name].nan_to_num(), column[index].nan_to_num()), name
        assert torch.equal(kept.get(3)[name], column[3]), name
    assert batch["float"][2].isnan()
    assert batch["float"][3].signbit()
    batch["float"].fill_(9)
    assert kept.get(3)["float"] == 0


def test_gradients_are_not_kept():
    value = torch.ones(2, 3, requires_grad=True) * 2
    for storage in (LazyStackStorage(4), LazyTensorStorage(4)):
        storage.set(slice(0, 2), TensorDict(a=value, batch_size=[2]))
        assert not storage.get(slice(0, 2))["a"].requires_grad
    listed = ListStorage(4)
    listed.set(0, {"a": value})
    assert not listed.get(0)["a"].requires_grad


def test_conversations_survive_a_file():
    storage = LazyStackStorage(10)
    storage.set(slice(0, 3), conversations(3, 1, 5))
    file = io.BytesIO()
    torch.save(storage.state_dict(), file)
    file.seek(0)
    other = LazyStackStorage(10)
    other.load_state_dict(torch.load(file, weights_only=False))
    assert ids(other.get(slice(0, 3))) == ids(storage.get(slice(0, 3)))
    assert other.get(slice(0, 3))["history"].to_chats() == storage.get(slice(0, 3))["history"].to_chats()


def test_a_storage_of_conversations_refuses_what_is_no_tensordict():
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    with pytest.raises(DataError, match="got a str"):
        buffer.add("text")
    with pytest.raises(DataError, match="batch dimension"):
        buffer.extend(TensorDict(a=torch.zeros(2)))


def test_positions_leave_no_gap_and_end_at_the_size():
    for storage, row in (
        (ListStorage(3), 1),
        (LazyStackStorage(3), TensorDict()),
        (LazyTensorStorage(3), torch.ones(())),
    ):
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
    breaches = {
        r"unknown key \('next', 'c'\)": TensorDict(
            a=torch.ones(2), next=TensorDict(b=torch.tensor(1), c=torch.tensor(1))
        ),
        "missing key 'next'": TensorDict(a=torch.ones(2)),
        r"'a': got float64\[2\] per row, expected float32\[2\]": TensorDict(
            a=torch.ones(2).double(), next=TensorDict(b=torch.tensor(1))
        ),
        r"'b'\): got int64\[1\] per row, expected int64\[\]": TensorDict(
            a=torch.ones(2), next=TensorDict(b=torch.ones(1, dtype=torch.int64))
        ),
    }
    for message, row in breaches.items():
        with pytest.raises(DataError, match=message):
            storage.set(0, row)
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
    assert read["a"][0] == 0
    assert read["a"][1][0] == 0
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


def test_taking_apart_and_putting_together_are_inverse_without_copies():
    batch = conversations(3, 1, 5)
    layout, columns = take_apart(batch)
    again = put_together(layout, columns, 3)
    assert take_apart(again)[0] == layout
    assert ids(again) == ids(batch)
    assert again["next", "reward"].data_ptr() == batch["next", "reward"].data_ptr()
    singles = put_rows_together(layout, columns, 3)
    assert [row["tokens"].full.tolist() for row in singles] == ids(batch)
    assert isinstance(singles[0].get("query"), NonTensorData)


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
    assert 5 in storage
    assert 6 not in storage
    assert -6 in storage
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
