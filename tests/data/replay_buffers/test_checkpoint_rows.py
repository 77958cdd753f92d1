"""Which rows storages on disk give back: Python values, conversations, trees, every dtype and name; and which not."""

import os
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from llmrl.data.llm import History
from llmrl.data.replay_buffers import LazyStackStorage, LazyTensorStorage, ListStorage
from llmrl.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    TensorStorageCheckpointer,
)
from llmrl.data.replay_buffers.directory import current_directory
from llmrl.errors import CheckpointError
from tests.support.buffers import through_files


def same_value(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray | np.generic):
        return type(left) is type(right) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and left.keys() == right.keys()
            and all(same_value(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, TensorDict):
        return left.batch_size == right.batch_size and same_value(left.to_dict(), right.to_dict())
    return type(left) is type(right) and (left == right or left != left)


@dataclass
class Point:
    x: Any

    def __post_init__(self):
        assert self.x != "of a file", "a constructor is called"


class Pair(NamedTuple):
    first: Any
    second: Any


class Color(Enum):
    RED = 1


class Opaque:
    pass


leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.builds(lambda n, k: torch.arange(n * k).view(n, k), st.integers(0, 3), st.integers(1, 2)),
    st.builds(lambda n: torch.full((n,), 0.5, dtype=torch.bfloat16), st.integers(0, 2)),
    st.builds(lambda n: TensorDict(ids=torch.arange(n), word="a" * n), st.integers(1, 3)),
    st.sampled_from([1j, b"", frozenset(), frozenset({b"", 1}), {1, None}, torch.int8, torch.device("cpu")]),
    st.sampled_from([np.float32(0.5), np.arange(4).reshape(2, 2).T, np.array(["a", "bc"]), np.datetime64("2020")]),
    st.builds(Point, st.integers(0, 3)), st.builds(Pair, st.integers(0, 3), st.binary(max_size=2)),
)  # fmt: skip
rows = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.builds(lambda value: OrderedDict(b=value, a=1), inner), st.builds(lambda value: {1: value, None: 2}, inner),
    ),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=50)
@given(content=st.lists(rows, max_size=8))
def test_python_values_in_a_list_come_back(content):
    with tempfile.TemporaryDirectory() as path:
        storage, other = ListStorage(10), ListStorage(10)
        if content:
            storage.set(slice(0, len(content)), content)
        through_files(ListStorageCheckpointer(), storage, other, path)
        assert same_value(other[:] if content else [], content)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Opaque(), r"test_checkpoint_rows\.Opaque"), (Color.RED, r"test_checkpoint_rows\.Color"),
        (lambda: 1, "<lambda>"), (np.array([Opaque()]), r"numpy\.ndarray"), (os.path.join, "join"),
        (type("Local", (NamedTuple("Base", x=int),), {})(1), "Local"),
    ],
    ids=["object", "enum", "function", "array", "library", "class"],
)  # fmt: skip
def test_objects_that_are_not_data_are_refused_when_they_are_dumped(value, name, tmp_path):
    for row in (value, {"a": [torch.ones(2), value]}, TensorDict(a=NonTensorData((value, torch.ones(1))))):
        storage = ListStorage(2)
        storage.checkpointer = ListStorageCheckpointer()
        storage.set(slice(0, 1), ["first"])
        storage.dumps(tmp_path)
        storage.set(slice(1, 2), [row])
        with pytest.raises(CheckpointError, match=name):
            storage.dumps(tmp_path)
        other = ListStorage(2)
        ListStorageCheckpointer().loads(other, tmp_path)
        assert other[:] == ["first"]
        other.load_state_dict(storage.state_dict())  # in memory, anything goes
        assert len(other) == 2


def test_conversations_come_back_through_the_storage_for_ragged_rows(tmp_path):
    def row(words):
        history = History(role=["user", "assistant"], content=["hi", " ".join(words)])
        return TensorDict(history=history, ids=torch.arange(len(words)), mask=torch.ones(len(words), dtype=torch.bool))

    storage, other = LazyStackStorage(), LazyStackStorage()
    storage.set(slice(0, 3), LazyStackedTensorDict(*[row(["w"] * size) for size in (1, 4, 2)]))
    through_files(TensorStorageCheckpointer(), storage, other, tmp_path)
    assert not list(current_directory(tmp_path).glob("*.pt"))
    assert other.get(1)["history"].content == ["hi", "w w w w"]
    storage.set(3, TensorDict(ids=torch.zeros(2, 2), other="text"))  # a row of another form
    through_files(TensorStorageCheckpointer(), storage, other, tmp_path)
    for position in range(3):
        assert other.get(position)["history"].content == storage.get(position)["history"].content
        assert other.get(position)["ids"].tolist() == storage.get(position)["ids"].tolist()
    assert other.get(3)["other"] == "text"


@pytest.mark.parametrize("make", [TensorStorageCheckpointer, H5StorageCheckpointer])
def test_trees_text_and_every_dtype_come_back(make, tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    td = TensorDict({str(dtype): torch.arange(12).view(4, 3).to(dtype) for dtype in dtypes}, [4])
    td["text"] = ["a", "b\ud800", "", "d"]
    td["scalar"], td["none"] = torch.arange(4), torch.zeros(4, 0)
    for content in (td, {"x": torch.ones(4, 2), "y": (torch.zeros(4), td.exclude("text"))}, torch.arange(4)):
        storage, other = LazyTensorStorage(6), LazyTensorStorage(6)
        storage.set(slice(0, 4), content)
        through_files(make(), storage, other, tmp_path)
        assert same_value(other[:], storage[:])


def steps(draw, size):
    """Rows [T] or [T, E] in TED with flags [*size], at the root, under "next", in a group, or in several of these."""
    shape = [draw(st.integers(1, 6)), *draw(st.sampled_from([[], [2]]))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    obs = torch.rand(*shape, 2, generator=generator)
    td = TensorDict(obs=obs, next=TensorDict(obs=obs.roll(-1, 0), batch_size=shape), batch_size=shape)
    for name in ("done", draw(st.sampled_from(["terminated", "end"]))):
        group = draw(st.sampled_from([(), (), ("agents",), ("a", "b")]))
        at = draw(st.sampled_from(["next", "both", "root"]))
        flags = torch.rand(*shape, *size, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))
        if at != "root":
            td[("next", *group, name)] = flags
        if at != "next":
            td[(*group, name)] = flags.roll(draw(st.integers(0, 1)), 0)
    return td


@pytest.mark.parametrize(
    "make", [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]
)
@settings(max_examples=25)
@given(data=st.data(), size=st.sampled_from([(), (1,), (2,), (2, 1), (0,)]))
def test_every_layout_gives_back_steps_with_flags_of_any_shape_and_place(make, size, data):
    rows = steps(data.draw, size)
    full, dims = data.draw(st.booleans()), rows.batch_dims
    storage, other = (LazyTensorStorage(rows.numel() + (not full) * 4, ndim=dims) for _ in "ab")
    storage.prepare(tuple(rows.batch_size[1:]))
    storage.set(slice(0, rows.numel()), rows.flatten(0, dims - 1))
    if full:
        storage.counters.cursor = data.draw(st.integers(0, 5)) % rows.batch_size[0] * storage.columns
    names = {} if make is TensorStorageCheckpointer else {"done_keys": data.draw(st.sampled_from([None, ["end"]]))}
    with tempfile.TemporaryDirectory() as path:
        through_files(make(**names), storage, other, path)
    assert same_value(other[:], storage[:])
    assert other.counters.state() == storage.counters.state()


def test_keys_with_dots_slashes_and_case_never_share_a_file(tmp_path):
    names = ["a.b", "A.b", "a/b", "a%b", "..", "next", "manifest.json", "a~2", "x" * 300]
    td = TensorDict({name: torch.full((2,), number) for number, name in enumerate(names)}, [2])
    td["a", "b"] = torch.full((2,), 99)
    storage, other = LazyTensorStorage(2), LazyTensorStorage(2)
    storage.set(slice(0, 2), td)
    through_files(TensorStorageCheckpointer(), storage, other, tmp_path)
    assert (other[:] == td).all()
    assert {file.parent for file in tmp_path.rglob("*.memmap")} == {current_directory(tmp_path)}
