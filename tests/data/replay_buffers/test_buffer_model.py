"""Random sequences of operations on a buffer, against an oracle made of a list and a dict."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

CAPACITY = 7


def fixed_row(number: int) -> TensorDict:
    return TensorDict(a=torch.tensor(number), next=TensorDict(b=torch.full((2,), float(number))))


def ragged_row(number: int) -> TensorDict:
    return TensorDict(a=torch.tensor(number), next=TensorDict(b=torch.full((number % 4,), float(number))))


def number_of(row: TensorDict, make) -> int:
    number = int(row["a"])
    expected = make(number)
    assert torch.equal(row["next", "b"], expected["next", "b"])
    return number


KINDS = {
    "list": (ListStorage, fixed_row, list),
    "ragged": (LazyStackStorage, ragged_row, lazy_stack),
    "tensor": (LazyTensorStorage, fixed_row, torch.stack),
    "memmap": (LazyMemmapStorage, fixed_row, torch.stack),
}


class Oracle:
    """A ring as a list, and which rows the current pass has still to give."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.cursor = 0
        self.written = 0
        self.left: set[int] = set()

    def write(self, number: int) -> int:
        position = self.cursor
        if position < len(self.rows):
            self.rows[position] = number
        else:
            self.rows.append(number)
        self.left.discard(position)
        self.cursor = (position + 1) % CAPACITY
        self.written += 1
        return position


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add")),
        st.tuples(st.just("extend"), st.integers(1, 10)),
        st.tuples(st.just("set"), st.integers(-CAPACITY, CAPACITY - 1)),
        st.tuples(st.just("sample"), st.integers(1, 4)),
        st.tuples(st.just("read"), st.integers(-CAPACITY, CAPACITY - 1)),
        st.tuples(st.just("reload")),
        st.tuples(st.just("empty")),
    ),
    max_size=25,
)


@pytest.mark.parametrize("epochs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(operations=operations)
def test_any_sequence_of_operations_agrees_with_a_list(kind, epochs, operations):
    storage, make, join = KINDS[kind]

    def build() -> ReplayBuffer:
        sampler = SamplerWithoutReplacement() if epochs else RandomSampler()
        return ReplayBuffer(storage=storage(CAPACITY), sampler=sampler)

    buffer, oracle, numbers = build(), Oracle(), iter(range(10_000))
    for name, *arguments in operations:
        if name == "add":
            number = next(numbers)
            given_row = make(number)
            assert buffer.add(given_row) == oracle.write(number)
            given_row["a"].fill_(-1)
        elif name == "extend":
            batch = [next(numbers) for _ in range(arguments[0])]
            given_rows = join([make(number) for number in batch])
            assert buffer.extend(given_rows).tolist() == [oracle.write(number) for number in batch]
            for row in given_rows:
                row["a"].fill_(-1)
        elif name == "set":
            if -len(oracle.rows) <= arguments[0] < len(oracle.rows):
                number = next(numbers)
                buffer[arguments[0]] = make(number)
                oracle.rows[arguments[0]] = number
            else:
                with pytest.raises(IndexError):
                    buffer[arguments[0]] = make(0)
        elif name == "read":
            if -len(oracle.rows) <= arguments[0] < len(oracle.rows):
                row = buffer[arguments[0]]
                assert number_of(row, make) == oracle.rows[arguments[0]]
                row["a"].fill_(-1)
        elif name == "sample" and oracle.rows:
            data, info = buffer.sample(arguments[0], return_info=True)
            index = info["index"].tolist()
            assert [number_of(row, make) for row in data] == [oracle.rows[position] for position in index]
            for row in data:
                row["a"].fill_(-1)
                row["next", "b"].fill_(-1)
            if epochs:
                if not oracle.left:
                    oracle.left = set(range(len(oracle.rows)))
                assert len(set(index)) == len(index) == min(arguments[0], len(oracle.left))
                assert oracle.left >= set(index)
                oracle.left -= set(index)
                assert buffer.sampler.ran_out == (not oracle.left)
        elif name == "reload":
            state, buffer = buffer.state_dict(), build()
            buffer.load_state_dict(state)
        elif name == "empty":
            buffer.empty()
            oracle = Oracle()
        assert len(buffer) == len(oracle.rows)
        assert buffer.write_count == oracle.written
        assert buffer.writer.cursor == oracle.cursor
    if oracle.rows:
        assert [number_of(row, make) for row in buffer[:]] == oracle.rows
