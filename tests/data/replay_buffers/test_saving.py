"""A whole buffer on disk: damage to any of its files, and states that do not fit, leave a buffer as it was.

So does a process that is killed while it saves.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
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
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from llmrl.data.replay_buffers.checkpointers import FlatStorageCheckpointer
from llmrl.data.replay_buffers.directory import current_directory
from llmrl.errors import CheckpointError, DataError
from tests.support.buffers import Counting, damage


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


# For every number on stdin: forks a child, which saves the rows number + 1, number + 2, ... until it is killed.
SAVER = """
import os, sys, torch
from tensordict import TensorDict
from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers.checkpointers import FlatStorageCheckpointer

def save(path, number):
    buffer = ReplayBuffer(storage=LazyTensorStorage(64))
    buffer.storage.checkpointer = FlatStorageCheckpointer()
    step = torch.arange(64)
    while True:
        number += 1
        now, then = (torch.stack([torch.full((64,), number), t], -1) for t in (step, step + 1))
        following = TensorDict(obs=then, done=torch.zeros(64, 1, dtype=torch.bool), batch_size=[64])
        buffer.extend(TensorDict(obs=now, next=following, batch_size=[64]))
        buffer.dumps(path)
        os.write(1, f"saved {number}\\n".encode())

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        save(sys.argv[1], int(line))
    os.write(1, f"child {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead 0\\n")
"""


@pytest.mark.slow
def test_a_buffer_that_is_killed_in_mid_save_50_times_always_loads(tmp_path):
    chance = random.Random(0)
    path = tmp_path / "buffer"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = threading.Timer(300, process.kill)
    deadline.start()
    cut_short, saved = 0, 0
    try:
        for _ in range(50):
            print(saved, file=process.stdin, flush=True)
            child = None
            first = saved
            while child is None or saved == first:
                word, number = process.stdout.readline().split()
                child = int(number) if word == "child" else child
                saved = int(number) if word == "saved" else saved
            time.sleep(chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            while (word := (line := process.stdout.readline().split())[0]) != "dead":
                saved = int(line[1]) if word == "saved" else saved
            cut_short += any(".draft" in entry.name for entry in path.iterdir())

            buffer = ReplayBuffer(storage=LazyTensorStorage(64))
            buffer.storage.checkpointer = FlatStorageCheckpointer()
            buffer.loads(path)
            found = buffer[:]["obs"][:, 0].unique().tolist()
            assert found in ([saved], [saved + 1])  # the rows of one save: the last that was reported, or the next
            assert buffer[:]["next", "obs"][:, 1].tolist() == list(range(1, 65))
            saved = found[0]
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()
    assert cut_short > 10  # most kills come in the middle of a save
    assert current_directory(path).name.startswith("checkpoint.")
