"""A whole buffer on disk: damage to any of its files, and states that do not fit, leave a buffer as it was."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from llmrl.data.replay_buffers.checkpointers import ListStorageCheckpointer
from llmrl.data.replay_buffers.checkpointers.base import default_for
from llmrl.data.replay_buffers.directory import current_directory
from llmrl.errors import CheckpointError, DataError
from tests.support.buffers import Counting, damage, restore


def buffer_of(storage=LazyTensorStorage, **parts: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(20), batch_size=4, transform=Counting(), **parts)


BUFFERS = {
    "passes": lambda: buffer_of(sampler=SamplerWithoutReplacement()),
    "priorities": lambda: buffer_of(sampler=PrioritizedSampler(20, 0.7, 0.5)),
    "trajectories": lambda: buffer_of(sampler=SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")),
    "ranks": lambda: buffer_of(LazyStackStorage, writer=TensorDictMaxValueWriter(rank_key="score")),
}


def filled(make: str, first: int, count: int) -> ReplayBuffer:
    buffer = BUFFERS[make]()
    numbers = torch.arange(first, first + count)
    buffer.extend(TensorDict(score=numbers.float(), episode=numbers // 3, index=numbers, batch_size=[count]))
    buffer.sample()
    return buffer


def flat(state: Any) -> list[Any]:
    leaves = pytree.tree_leaves(state)
    return [leaf.tolist() if isinstance(leaf, torch.Tensor | np.ndarray) else leaf for leaf in leaves]


@pytest.mark.parametrize("make", BUFFERS)
def test_a_damaged_file_is_named_and_the_buffer_stays(make, tmp_path):
    filled(make, 0, 12).dumps(tmp_path)
    buffer = filled(make, 50, 8)
    rows = flat(buffer[:].to_dict())
    before, seen = flat(buffer.state_dict()), buffer.transforms[0].seen
    folder = current_directory(tmp_path)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    parts = {"manifest.json", "sampler", "storage", "transform.t", "writer"}
    assert {file.relative_to(folder).parts[0] for file in files} == parts
    for file in files:
        for _ in damage(file):
            with pytest.raises(CheckpointError, match=file.name):
                buffer.loads(tmp_path)
            assert flat(buffer.state_dict()) == before
    assert flat(buffer[:].to_dict()) == rows
    assert buffer.transforms[0].seen == seen + 1
    buffer.loads(tmp_path)
    assert buffer["score"].tolist() == [float(number) for number in range(12)]
    assert buffer.transforms[0].seen == 2  # by the sample before the dump, and by the read above


def damaged(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The state without one of its entries, at any depth above the rows."""
    for key, value in state.items():
        yield {name: state[name] for name in state if name != key}
        if isinstance(value, dict):
            yield from ({**state, key: part} for part in damaged(value))


@pytest.mark.parametrize("make", BUFFERS)
def test_a_state_that_lacks_something_leaves_the_buffer_as_it_was(make):
    state, buffer = filled(make, 0, 12).state_dict(), filled(make, 50, 8)
    before = flat(buffer.state_dict())
    broken_ones = list(damaged(state))
    assert len(broken_ones) > 15
    for broken in broken_ones:
        with pytest.raises(CheckpointError):
            buffer.load_state_dict(broken)
        assert flat(buffer.state_dict()) == before
    with pytest.raises(CheckpointError, match="not a buffer state"):
        buffer.load_state_dict({"model": {}})
    state["storage"]["content"] = state["storage"]["content"][:5]
    with pytest.raises(CheckpointError, match="got 5, expected 12"):
        buffer.load_state_dict(state)
    assert flat(buffer.state_dict()) == before


def with_rows(buffer: ReplayBuffer, **entries: torch.Tensor) -> ReplayBuffer:
    buffer.extend(TensorDict(entries, batch_size=[8]))
    buffer.sample()
    return buffer


@pytest.mark.parametrize(
    ("saved", "make", "match"),
    [
        ("passes", lambda: with_rows(BUFFERS["passes"](), other=torch.arange(8)), "unknown key 'episode'"),
        (
            "priorities",
            lambda: with_rows(buffer_of(sampler=PrioritizedSampler(8, 0.7, 0.5)), score=torch.ones(8)),
            "max_capacity=8",
        ),
        ("passes", lambda: filled("priorities", 50, 8), "SamplerWithoutReplacement"),
        ("passes", lambda: filled("trajectories", 50, 8), "SamplerWithoutReplacement"),
        ("passes", lambda: filled("ranks", 50, 8), "LazyTensorStorage"),
        ("passes", lambda: BUFFERS["passes"]().append_transform(abs), "parts and transforms"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(saved, make, match, tmp_path):
    source, buffer = filled(saved, 0, 12), make()
    source.dumps(tmp_path)
    before = flat(buffer.state_dict())
    for load in (lambda: buffer.loads(tmp_path), lambda: buffer.load_state_dict(source.state_dict())):
        with pytest.raises((CheckpointError, DataError), match=match):
            load()
        assert flat(buffer.state_dict()) == before


def test_rows_of_a_stack_along_another_dimension_are_saved_and_loaded(tmp_path):
    rows = [TensorDict(ids=torch.arange(2 * size).view(2, size), batch_size=[2]) for size in (3, 4)]
    for folder in (tmp_path, None):
        storage, other = LazyStackStorage(4, stack_dim=1), LazyStackStorage(4, stack_dim=1)
        storage.checkpointer = other.checkpointer = ListStorageCheckpointer()
        storage.set(slice(0, 2), rows)
        restore(other, storage, folder)
        assert other.get(slice(0, 2)).batch_size == (2, 2)
        for number, row in enumerate(rows):
            assert torch.equal(other.get(number)["ids"], row["ids"])


def test_a_grid_of_a_dict_or_tuple_is_restored(tmp_path):
    obs, reward = torch.arange(24.0).view(2, 6, 2), torch.arange(12).view(2, 6)
    for number, batch in enumerate(({"obs": obs, "reward": reward}, (obs, {"reward": reward}))):
        buffer, other = (ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=1) for _ in range(2))
        buffer.extend(batch)
        restore(other, buffer, tmp_path / str(number))
        assert flat(other.storage[:]) == flat(buffer.storage[:])
        assert flat(other[:]) == flat(batch)
        assert other.storage.shape == (6, 2)


@pytest.mark.parametrize("make", [LazyStackStorage, ListStorage, LazyTensorStorage])
def test_restoring_fewer_rows_than_there_are_forgets_the_others(make, tmp_path):
    few, many = make(10), make(10)
    few.set(slice(0, 2), TensorDict(a=torch.tensor([1, 2]), batch_size=[2]))
    many.set(slice(0, 6), TensorDict(a=torch.arange(10, 16), batch_size=[6]))
    default_for(few).dumps(few, tmp_path)
    default_for(many).loads(many, tmp_path)
    assert len(many) == 2
    many.set(2, TensorDict(a=torch.tensor(3)))
    assert len(many) == 3
    assert [int(many.get(position)["a"]) for position in range(3)] == [1, 2, 3]
    if make is LazyStackStorage:  # the layout of rows that are gone does not count
        other = make(10)
        other.set(slice(0, 2), TensorDict(b=torch.zeros(2, 5), batch_size=[2]))
        default_for(other).loads(other, tmp_path)
        assert type(other.get(slice(0, 2))) is TensorDict


@pytest.mark.parametrize("make", [LazyStackStorage, ListStorage])
def test_rows_that_cannot_be_restored_leave_those_that_are_there(make):
    storage = make(4)
    storage.set(slice(0, 3), TensorDict(a=torch.arange(3), batch_size=[3]))
    ring = {"length": 2, "cursor": 2, "write_count": 2, "max_size": 4, "ndim": 1, "trailing": []}
    with pytest.raises(CheckpointError, match="got 3, expected 2"):
        storage.restore(TensorDict(a=torch.arange(3), batch_size=[3]), ring)
    assert [int(storage.get(position)["a"]) for position in range(3)] == [0, 1, 2]


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors, without views and mapped files."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._alive: list[torch.Tensor] = []  # so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(args) if torch.is_tensor(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if not torch.is_tensor(leaf) or "from_file" in str(func):
                continue
            if leaf.untyped_storage().data_ptr() not in known:
                self.num_bytes += leaf.untyped_storage().nbytes()
                self._alive.append(leaf)
        return out


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_memmap_is_saved_and_loaded_without_a_copy_in_memory(ndim, tmp_path):
    buffer, other = (ReplayBuffer(storage=LazyMemmapStorage(1000, ndim=ndim)) for _ in range(2))
    data = TensorDict(obs=torch.rand(1000, 250), next=TensorDict(obs=torch.rand(1000, 250), batch_size=[1000]))
    data.batch_size = [1000]
    buffer.extend(data if ndim == 1 else data.reshape(4, 250))
    with Allocations() as copied:
        buffer[:]
    assert copied.num_bytes >= 2_000_000  # what one copy of all rows takes
    with Allocations() as saved:
        buffer.dumps(tmp_path)
    with Allocations() as loaded:
        other.loads(tmp_path)
    assert saved.num_bytes < 100_000
    assert loaded.num_bytes < 100_000
    assert torch.equal(other.storage[:]["next", "obs"], buffer.storage[:]["next", "obs"])
