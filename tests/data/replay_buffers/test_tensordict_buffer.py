import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict

from llmrl.data.ragged.stack import set_entry, with_entry
from llmrl.data.replay_buffers import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from llmrl.errors import DataError, MissingKeyError
from tests.support.buffers import rows

pytestmark = pytest.mark.filterwarnings("ignore:.* rows were written at once")  # longer than the storage on purpose


class Marking(RandomSampler):
    """Says something about each row, and remembers the priorities that it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        last = torch.zeros(batch_size, 1, dtype=torch.bool)
        last[-1] = True
        return index, {**info, "priority_weight": index / 10, ("next", "truncated"): last, "note": "a word"}

    def update_priority(self, index, priority):
        self.told.append((index.tolist(), priority.tolist()))


def test_priorities_come_with_the_data_by_default():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=Marking())
    data = rows(1, 2).set("td_error", torch.tensor([0.5, 0.25]))
    buffer.extend(data)
    buffer.extend(data, update_priority=False)
    buffer.add(data[1])
    assert buffer.sampler.told == [([0, 1], [0.5, 0.25]), ([0], [0.25])]


def test_priorities_are_updated_from_a_batch():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=Marking(), priority_key=("loss", "error"))
    buffer.extend(rows(*range(8)))
    for index, error, told in (
        ([3, 5], [1.0, 2.0], ([3, 5], [1.0, 2.0])),
        # one position per row, expanded to its steps: the sampler reduces the several numbers of a row
        ([[3, 3], [5, 5]], [[1.0, 2.0], [3.0, 4.0]], ([3, 5], [[1.0, 2.0], [3.0, 4.0]])),
        # slices that were reshaped after sampling: every step has a position of its own
        ([[3, 4], [5, 6]], [[1.0, 2.0], [3.0, 4.0]], ([3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0])),
    ):
        index = torch.tensor(index)
        batch = TensorDict(index=index, batch_size=index.shape).set(("loss", "error"), torch.tensor(error))
        buffer.update_tensordict_priority(batch)
        assert buffer.sampler.told.pop() == told
    with pytest.raises(MissingKeyError, match=r"\('loss', 'error'\)"):
        buffer.update_tensordict_priority(rows(1))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage, ListStorage])
def test_a_list_of_tensordicts_is_written_row_by_row_with_positions_and_priorities(storage):
    buffer = TensorDictReplayBuffer(storage=storage(3), sampler=Marking(), batch_size=3)
    given = [TensorDict(a=torch.tensor(n), td_error=torch.tensor(n / 4)) for n in range(4)]
    assert buffer.extend(given).tolist() == [0, 1, 2, 0]
    assert all("index" not in row for row in given)
    assert [(int(row["a"]), int(row["index"])) for row in (buffer[i] for i in range(3))] == [(3, 0), (1, 1), (2, 2)]
    assert buffer.sampler.told == [([0, 1, 2, 0], [0.0, 0.25, 0.5, 0.75])]
    with pytest.raises(DataError, match="tensordicts: got a Tensor"):
        buffer.extend([given[0], torch.zeros(())])
    assert buffer.write_count == 4


def test_an_allocation_without_positions_takes_writes_and_samples_carry_them():
    allocation = TensorDict(a=torch.zeros(4), batch_size=[4])
    buffer = TensorDictReplayBuffer(storage=TensorStorage(allocation, filled=False), batch_size=8)
    assert buffer.extend(rows(0, 1, 2).float()).tolist() == [0, 1, 2]
    assert buffer.add(TensorDict(a=torch.tensor(3.0))) == 3
    assert buffer.extend([TensorDict(a=torch.tensor(40.0))]).tolist() == [0]
    batch = buffer.sample()
    assert torch.equal(batch["a"], torch.tensor([40.0, 1.0, 2.0, 3.0])[batch["index"]])
    buffer[batch["index"][:1]] = batch[:1]  # rows that were sampled replace their own
    assert set(buffer[:].keys()) == {"a"}
    grid = TensorStorage(TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3]), ndim=2, filled=False)
    buffer = TensorDictReplayBuffer(storage=grid, batch_size=2)
    buffer.extend(TensorDict(a=torch.arange(6.0).view(3, 2), batch_size=[3, 2]))
    batch = buffer.sample()
    assert torch.equal(batch["a"], batch["index"][:, 0] + 2 * batch["index"][:, 1].float())


def test_an_entry_is_set_as_a_tensordict_would_set_it():
    """``set_entry`` and ``with_entry`` skip the checks where they would find nothing."""
    value = torch.arange(2)
    plain = TensorDict(a=torch.zeros(2), next=TensorDict(b=torch.zeros(2), batch_size=[2]), batch_size=[2])
    for key in ("index", ("next", "index"), ("new", "index")):
        set_entry(plain, key, value)
        assert torch.equal(plain[key], value)
    assert plain["new"].batch_size == (2,)
    named = TensorDict(a=torch.zeros(2), batch_size=[2], names=["time"])
    locked = TensorDict(a=torch.zeros(2), batch_size=[2]).lock_()
    lazy = LazyStackedTensorDict(TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2)))
    elsewhere = TensorDict(a=torch.zeros(2), batch_size=[2], device="meta")
    for batch in (plain, named, locked, lazy, elsewhere):
        keys = set(batch.keys())
        other = with_entry(batch, "number", value)
        assert set(batch.keys()) == keys
        assert set(other.keys()) == {*keys, "number"}
        assert other["number"].device == (batch.device or value.device)
        assert other.names == batch.names
    with pytest.raises(RuntimeError, match="lock"):
        set_entry(locked, "number", value)
    with pytest.raises(RuntimeError, match="shape"):
        set_entry(plain, "number", torch.arange(3))


def test_only_tensordicts_are_taken():
    class Row(TensorClass):
        a: torch.Tensor

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    for data in (torch.zeros(2), {"a": torch.zeros(2)}, Row(a=torch.zeros(2), batch_size=[2])):
        for write in (buffer.extend, buffer.add):
            with pytest.raises(DataError, match="tensordicts"):
                write(data)
    with pytest.raises(TypeError, match="priority_kye"):
        TensorDictReplayBuffer(priority_kye="a")


def test_positions_and_the_info_of_the_sampler_are_expanded_to_the_batch():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=Marking(), batch_size=4)
    given = TensorDict(a=torch.arange(5).unsqueeze(1).expand(5, 7), batch_size=[5, 7])
    buffer.extend(given)
    assert isinstance(buffer.writer, TensorDictRoundRobinWriter)
    batch = buffer.sample()
    assert "index" not in given
    assert "note" not in batch
    assert torch.equal(batch["priority_weight"], batch["index"] / 10)
    assert batch.batch_size == (4, 7)
    for key in ("index", "priority_weight", ("next", "truncated")):
        assert batch[key].shape[:2] == (4, 7)
    assert torch.equal(batch["index"], batch["a"])
