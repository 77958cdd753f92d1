"""Rows of numbers for buffers, states handed from one to another, and buffers that other processes use."""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from llmrl.errors import DataError


def rows(*numbers: int) -> TensorDict:
    return TensorDict(a=torch.tensor(numbers), batch_size=[len(numbers)])


def numbered(first: int, count: int) -> TensorDict:
    """Rows with the numbers ``first``, ``first + 1``, ..., whose rewards are half of them."""
    number = torch.arange(first, first + count)
    return TensorDict(number=number, next=TensorDict(reward=number / 2, batch_size=[count]), batch_size=[count])


def holding(data: Any, storage: Any = None, kind: type[ReplayBuffer] = ReplayBuffer, **arguments: Any) -> ReplayBuffer:
    """A buffer that was extended by the data once."""
    buffer = kind(storage=LazyTensorStorage(10) if storage is None else storage, **arguments)
    buffer.extend(data)
    return buffer


def steps(ids: list[int], **entries: Any) -> TensorDict:
    """A row per id of an episode, with its place in the list."""
    return TensorDict(episode=torch.tensor(ids), step=torch.arange(len(ids)), **entries, batch_size=[len(ids)])


def restore(other: Any, saved: Any, folder: Path | None) -> None:
    """Gives ``other`` the state of ``saved``, through files in ``folder``, or in memory without one."""
    if folder is None:
        other.load_state_dict(saved.state_dict())
    else:
        saved.dumps(folder)
        other.loads(folder)


def through_files(checkpointer: Any, storage: Any, other: Any, folder: Path | str) -> None:
    """Loads into ``other``, by a new checkpointer, what this one writes of ``storage``; rows need not be steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpointer.dumps(storage, folder)
    type(checkpointer)().loads(other, folder)


def bits(value: torch.Tensor) -> bytes:
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy().tobytes()


def assert_same(left: TensorDict, right: TensorDict) -> None:
    """Equal in keys, shapes, dtypes, batch sizes, and bit for bit in values."""
    assert left.batch_size == right.batch_size
    assert left.keys() == right.keys()
    for key, value in left.items():
        other = right.get(key)
        if isinstance(value, TensorDict):
            assert_same(value, other)
        else:
            assert value.dtype == other.dtype, key
            assert value.shape == other.shape, key
            assert bits(value) == bits(other), key


def damage(file: Path) -> Iterator[None]:
    """Flips a bit of the file, cuts it in half, removes it; at the end it is whole again."""
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:middle], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        yield
        file.write_bytes(whole)


class Counting:
    """A transform with a state: how often it ran."""

    seen: Any = 0

    def __call__(self, batch: Any) -> Any:
        self.seen += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def refusals_after_fork(*uses: Callable[[], object]) -> list[str]:
    """What each use raises in a forked process, "went through" where it raises no RuntimeError."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:  # the child ends without the clean-up of its parent
        try:
            for use in uses:
                try:
                    use()
                    os.write(writer, b"went through;")
                except RuntimeError as error:
                    os.write(writer, f"{error};".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answers = pipe.read().split(";")
    os.waitpid(pid, 0)
    return answers


def check_proxy(buffer: Any, folder: Path) -> dict[str, Any]:
    """Writes, reads and restores rows 0 to 6 by a proxy of a buffer that passes over them in batches of 4."""
    assert buffer.extend(numbered(0, 6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.add(numbered(6, 1)[0]) == 6
    assert (len(buffer), buffer.write_count, buffer.batch_size) == (7, 7, 4)
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["number"], info["index"])
    assert torch.equal(batch["next", "reward"], batch["number"] / 2)
    batch["number"].fill_(-1)  # a batch is the caller's
    assert len(buffer.sample()) == 3  # the rest of the pass
    assert sorted(torch.cat([batch["number"] for batch in buffer]).tolist()) == list(range(7))
    assert len(buffer.next()) == 4
    buffer[0] = numbered(70, 1)[0]
    assert buffer[0]["number"] == buffer["number"][0] == 70
    assert buffer[:2]["number"].tolist() == [70, 1]
    buffer.dumps(folder)
    state = buffer.state_dict()
    buffer.empty()
    assert len(buffer) == 0
    buffer.loads(folder)
    assert buffer["number"].tolist() == [70, 1, 2, 3, 4, 5, 6]
    return state


def check_errors_of_proxies(make: Callable[..., Any]) -> tuple[Any, str]:
    """Errors of the buffer are raised here; returns a proxy of three rows, and the note on one of its errors."""
    for storage, error, match in (
        (functools.partial(dict), TypeError, "storage must be"),
        (LazyTensorStorage(3), RuntimeError, "builds its own"),
    ):
        with pytest.raises(error, match=match):
            make(storage=storage)
    buffer = make(storage=functools.partial(LazyTensorStorage, 10))
    buffer.extend(numbered(0, 3))
    with pytest.raises(DataError, match="unknown key 'more'") as caught:
        buffer.extend(numbered(0, 3).set("more", torch.zeros(3)))
    for read in (buffer.sample, iter(buffer).__next__):
        with pytest.raises(RuntimeError, match="batch_size"):
            read()
    assert len(buffer) == 3
    assert "_fix_schema" in caught.value.__notes__[0]
    return buffer, caught.value.__notes__[0]


def check_priorities_of_proxies(buffer: Any) -> None:
    """Writes ragged rows by a proxy of a buffer with the masses p, and sets their priorities from here."""
    buffer.extend(lazy_stack([TensorDict(ids=torch.arange(size), text="a" * size) for size in (3, 1, 5)]))
    batch = buffer.sample()
    assert [len(ids) for ids in batch.get("ids", as_list=True)] == [len(text) for text in batch.get("text").tolist()]
    batch = buffer[:]  # a sample might miss a row, which would keep its priority
    batch["td_error"] = (batch["index"] == 2).float()
    buffer.update_tensordict_priority(batch)
    batch = buffer.sample()
    assert {len(ids) for ids in batch.get("ids", as_list=True)} == {5}
    assert batch["priority_weight"].tolist() == [1.0] * 6
    buffer.update_priority(torch.tensor([0, 1, 2]), torch.tensor([0.0, 2.0, 0.0]))
    assert {len(ids) for ids in buffer.sample().get("ids", as_list=True)} == {1}
