"""Rows of any length: they come back as they were written, and share no memory with what was written or read."""

import copy
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from llmrl.data.ragged.padding import pad_rows
from llmrl.data.replay_buffers import LazyStackStorage, ListStorage, ReplayBuffer
from llmrl.data.replay_buffers.storages import row_list
from llmrl.errors import ShapeError
from llmrl.modules.llm.policies import containers
from tests.support.buffers import holding
from tests.support.conversation_rows import Tokens, conversations, ids


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
    storage.set(5, conversations(6)[0])  # one row of a layout that is known
    assert ids(storage.get(slice(5, 6))) == [[0, 1, 2, 3, 4, 5]]
    assert len(storage.get(5)["history"].to_chats()) == 1
    row = storage.get(3)
    assert (row.batch_size, row["tokens"].full.tolist(), row["query"]) == ((), [0, 1], "question 3")


def test_mixed_layouts_come_back_as_a_lazy_stack_whatever_is_drawn():
    storage = LazyStackStorage(10)
    storage.set(slice(0, 2), conversations(3, 1))
    assert type(storage.get(slice(0, 2))) is TensorDict
    other = conversations(2)
    other["next", "reward"] = torch.zeros(1, 4, 1)  # one reward per turn
    storage.set(slice(2, 3), other)
    for index in (slice(0, 2), slice(0, 3)):
        assert isinstance(batch := storage.get(index), LazyStackedTensorDict)
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


def test_a_row_like_the_first_is_added_fast_also_after_an_odd_one(monkeypatch):
    """Regression: rows were compared with the layout of the odd row, and took the way of unknown ones."""
    storage = LazyStackStorage(4)
    for number, key in enumerate("ab"):
        storage.set(number, TensorDict({key: torch.zeros(2)}))
    monkeypatch.setattr(row_list, "to_rows", lambda *arguments: pytest.fail("the row is known"))
    storage.set(2, TensorDict(a=torch.ones(2)))
    assert storage.get(2)["a"].tolist() == [1.0, 1.0]


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
    assert (single["tokens"].full.tolist(), single["text"].full) == ([0, 1, 2], "three")


def ragged_buffer() -> ReplayBuffer:
    numbers = [torch.arange(3), torch.arange(1), torch.arange(5)]
    tokens = containers.Tokens.from_rows({"full": numbers})
    log_probs = containers.LogProbs.from_rows({"full": [number / 2 for number in numbers]})
    buffer = holding(TensorDict({"tokens": tokens, "log_probs": log_probs}, batch_size=[3]), LazyStackStorage(4))
    return buffer


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return value
    if value.batch_dims:
        return [leaf for row in value.unbind(0) for leaf in tensors_of(row)]
    return [leaf for leaf in value.values(True, True) if isinstance(leaf, torch.Tensor)]


def _through_another(batch):
    other = LazyStackStorage(4)
    other.set(slice(0, 3), batch)
    return other.get(slice(0, 3))


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
    "another buffer": _through_another,
    "select": lambda batch: batch.select("tokens"),
    "apply": lambda batch: batch.apply(lambda leaf: leaf),
}


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


def test_what_is_written_into_a_batch_stays_in_it_and_a_row_drawn_twice_is_two_rows():
    batch = ragged_buffer()[torch.tensor([0, 0, 2])]
    rows = batch["tokens"].rows("full")
    rows[0].fill_(7)
    assert ids(batch) == [[7, 7, 7], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert ids(batch[:1]) == [[7, 7, 7]]
    assert batch.get(("tokens", "full"), as_padded_tensor=True)[0].tolist() == [7, 7, 7, 0, 0]
