"""Ragged rows: padding, and stacks that build their rows when one is read."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.data.ragged.stack import MessageStack, RaggedStack
from llmrl.data.replay_buffers.serialization import decode
from llmrl.errors import ShapeError
from tests.support.refusals import refusals

ROWS = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    side=st.sampled_from(["left", "right"]),
    more=st.integers(0, 2),
)
def test_the_mask_of_padded_rows_finds_them(lengths, side, more):
    rows = [torch.rand(n, 2) for n in lengths]
    width = max(lengths) + more
    padded = pad_rows(rows, value=-1, side=side, length=width)
    assert padded.shape == (len(rows), width, 2)
    mask = lengths_mask(lengths, width, side)
    assert torch.equal(mask, padded[..., 0] >= 0)
    assert all(torch.equal(row, other) for row, other in zip(rows, padded[mask].split(lengths), strict=True))


test_rows_that_do_not_fit_and_unknown_sides_are_refused = refusals(
    (ShapeError, "at least one row", lambda: pad_rows([])),
    (ShapeError, "a row of 3", lambda: pad_rows(ROWS, length=2)),
    (ShapeError, "differ in nothing but", lambda: pad_rows([torch.zeros(1, 2), torch.zeros(1, 3)])),
    (ShapeError, "float64", lambda: pad_rows([torch.zeros(1), torch.zeros(1).double()])),
    (ValueError, "'middle'", lambda: pad_rows(ROWS, side="middle")),
    (ShapeError, "T=3", lambda: lengths_mask([4], 3)),
)


@pytest.mark.parametrize(
    "stack",
    [
        RaggedStack.from_columns({"ids": ROWS, "role": ["a", "b", "c"]}, 3),
        MessageStack.from_messages([{"role": role, "content": None} for role in "abc"]),
    ],
    ids=["columns", "messages"],
)
def test_a_stack_answers_without_building_rows_and_becomes_an_ordinary_one(stack):
    stack.lock_()
    assert (stack.is_locked, stack.batch_size, stack.names, stack.device) == (True, (3,), [None], None)
    assert "role" in stack.keys()
    assert stack[1:].source is not None
    assert stack.source is not None, "a row was built"
    assert [row.is_locked for row in stack.tensordicts] == [True] * 3
    assert stack.source is None
    stack.unlock_()
    stack.tensordicts[0].set("x", torch.ones(()))
    assert stack.get("role").tolist() == ["a", "b", "c"]
    assert pickle.loads(pickle.dumps(stack)).get("role").tolist() == ["a", "b", "c"]


def test_dumps_of_before_name_the_same_classes():
    names = {"llmrl.data.llm.message_stack:MessageStack": MessageStack}
    names["llmrl.data.ragged.stack:RaggedStack"] = RaggedStack
    assert {name: decode({"class": name}, lambda node: None) for name in names} == names
