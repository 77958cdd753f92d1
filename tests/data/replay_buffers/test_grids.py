"""Storages with several dimensions: [T, E] inside, [E, T] outside."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage
from llmrl.data.replay_buffers.grid_index import coordinates, flat_cells
from llmrl.data.replay_buffers.samplers import PrioritizedSampler
from llmrl.errors import DataError, ShapeError
from tests.support.buffers import holding

STORAGES = [LazyTensorStorage, LazyMemmapStorage]


def steps(num_streams: int, first: int, last: int) -> TensorDict:
    """[E, T]: 100 * stream + time."""
    value = 100 * torch.arange(num_streams).unsqueeze(1) + torch.arange(first, last)
    return TensorDict(a=value, next=TensorDict(b=value.unsqueeze(-1).expand(-1, -1, 2)), batch_size=value.shape)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_size_is_rounded_up_to_whole_steps_and_time_comes_last(storage):
    buffer = ReplayBuffer(storage=storage(100, ndim=2))
    index = buffer.extend(steps(3, 0, 22))
    assert buffer.storage.max_size == 102
    assert (len(buffer), buffer.writer.cursor, buffer.storage.columns) == (66, 66, 3)
    assert index.shape == (66, 2)
    assert index[:4].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert (buffer[:].shape, buffer.storage[:].shape) == ((3, 22), (22, 3))
    assert torch.equal(buffer[:]["a"], steps(3, 0, 22)["a"])
    assert torch.equal(buffer.storage[:]["a"], steps(3, 0, 22)["a"].T)
    assert buffer["next", "b"].shape == (3, 22, 2)


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


def test_three_dimensions_and_trees_of_tensors():
    data = torch.arange(2 * 3 * 4).view(2, 3, 4)
    buffer = holding({"x": data, "y": (data.unsqueeze(-1) * 2,)}, LazyTensorStorage(48, ndim=3))
    assert torch.equal(buffer[:]["x"], data)
    assert (buffer.storage[:]["y"][0].shape, buffer.storage.max_size) == ((4, 2, 3, 1), 48)
    cells = torch.arange(24)
    assert torch.equal(flat_cells(coordinates(cells, (2, 3)), (2, 3)), cells)
    assert coordinates(torch.tensor([23]), (2, 3)).tolist() == [[3, 1, 2]]


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


def test_a_given_grid_is_used_in_place():
    container = TensorDict(a=torch.zeros(4, 2), batch_size=[4, 2])
    storage = TensorStorage(container, ndim=2, filled=False)
    buffer = ReplayBuffer(storage=storage)
    assert (len(buffer), storage.max_size, storage.columns) == (0, 8, 2)
    buffer.extend(TensorDict(a=torch.ones(2, 3), batch_size=[2, 3]))
    assert container["a"].tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
