"""The TED codecs: every pair is an identity, and the files it makes hold each observation once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from llmrl.data.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from llmrl.errors import DataError
from tests.support.buffers import assert_same

PAIRS = {
    "flat": (TED2Flat(), Flat2TED()),
    "nested": (TED2Nested(), Nested2TED()),
    "h5": (lambda td, **ring: H5Split()(TED2Nested()(td, **ring)), lambda td: Nested2TED()(H5Combine()(td))),
}


def column(obs, following, done=None):
    """Rows [T] in TED with the given observations."""
    size = [len(obs)]
    flags = torch.tensor(done or [False] * len(obs)).unsqueeze(-1)
    after = TensorDict(obs=torch.tensor(following), reward=torch.ones(*size, 1), done=flags, batch_size=size)
    now = {"obs": torch.tensor(obs), "action": torch.arange(*size), "done": torch.zeros_like(flags)}
    return TensorDict({**now, "next": after}, batch_size=size)


@st.composite
def ted_rows(draw):
    """Rows as a storage of 1 or 2 dimensions keeps them: trajectories with and without marks, nan, jumps, a ring."""
    steps, streams = draw(st.integers(1, 9)), draw(st.sampled_from([None, 1, 2]))
    shape = [steps] if streams is None else [steps, streams]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def flags(probability):
        return torch.rand(shape, generator=generator) < probability

    def normal(*size, dtype=torch.float32):
        return (torch.randn(*shape, *size, generator=generator) * 3).to(dtype)

    ends = flags(0.3)
    ends[-1] = True
    marked = (ends & flags(draw(st.sampled_from([0.0, 0.5, 1.0])))).unsqueeze(-1)
    td = TensorDict(batch_size=shape)
    for key, size, dtype in (("obs", (2,), torch.float32), ("count", (), torch.int64), ("small", (1,), torch.bfloat16)):
        now, fresh = normal(*size, dtype=dtype), normal(*size, dtype=dtype)
        if dtype.is_floating_point and draw(st.booleans()):
            now[flags(0.3)] = math.nan
        follows = draw(st.sampled_from([True, True, False]))
        td[key] = now
        td["next", key] = torch.where(ends.view(*shape, *[1] * len(size)), fresh, now.roll(-1, 0)) if follows else fresh
    pos = normal(2, 1)
    td["agents"] = TensorDict(pos=pos, batch_size=[*shape, 2])
    td["next", "agents"] = TensorDict(pos=pos.roll(-1, 0), reward=normal(2, 1), batch_size=[*shape, 2])
    td["action"] = normal(3)
    td["next", "reward"], td["next", "extra"] = normal(1), normal()
    for name in ("done", "terminated"):
        td["next", name], td[name] = marked.clone(), torch.zeros_like(marked)
    if draw(st.booleans()):
        td["done"] = marked.roll(1, 0)
    if draw(st.booleans()):
        td["reward"] = normal(1)
    if draw(st.booleans()):
        return td, {}
    shift = draw(st.integers(0, steps - 1))
    return td.apply(lambda value: value.roll(shift, 0)), {"shift": shift, "is_full": True}


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=30)
@given(case=ted_rows())
def test_decoding_gives_back_what_was_encoded_bit_for_bit(pair, case):
    rows, ring = case
    before = rows.clone()
    encode, decode = PAIRS[pair]
    assert_same(decode(encode(rows, **ring)), rows)
    assert_same(rows, before)


@pytest.mark.parametrize(
    ("obs", "following", "ring", "stored"),
    [
        # two trajectories, of which the first ends without done
        ([0, 1, 2, 10, 11, 12], [1, 2, 3, 11, 12, 13], {}, [0, 1, 2, 3, 10, 11, 12, 13]),
        # a full ring with the cursor at 2 begins with its oldest row
        ([13, 14, 10, 11, 12], [14, 15, 11, 12, 13], {"shift": 2, "is_full": True}, [10, 11, 12, 13, 14, 15]),
        # a NaN follows a NaN; -0.0 is not 0.0, which begins another trajectory
        ([0.0, math.nan, 2.0], [math.nan, 2.0, math.nan], {}, [0.0, math.nan, 2.0, math.nan]),
        ([1.0, 0.0, 2.0, 3.0, 4.0], [-0.0, 2.0, 3.0, 4.0, 5.0], {}, [1.0, -0.0, 0.0, 2.0, 3.0, 4.0, 5.0]),
    ],
)
def test_each_observation_is_stored_once_and_comes_back(obs, following, ring, stored):
    rows = column(obs, following)
    flat = TED2Flat()(rows, **ring)
    assert str(flat["obs"].tolist()) == str(stored)
    assert (flat["shift"], flat["is_full"]) == (ring.get("shift", 0), "is_full" in ring)
    assert flat["_ted"]["ends_without_done"] == len(stored) - len(obs) - 1
    assert_same(Flat2TED()(flat), rows)


def test_an_entry_whose_next_is_something_else_is_kept_twice():
    rows = column([0, 1, 2, 3], [1, 2, 3, 4])
    rows["noise"], rows["next", "noise"] = torch.arange(4), torch.arange(4) + 100
    flat = TED2Flat()(rows)
    assert flat["_ted"]["kept_twice"] == [["noise"]]
    assert [len(flat[key]) for key in ("obs", "noise", ("next", "noise"))] == [5, 4, 4]
    assert_same(Flat2TED()(flat), rows)


def test_ends_are_kept_where_no_entry_with_one_flag_per_row_marks_them():
    rows = column([0, 1, 2, 3], [1, 2, 3, 4])  # one trajectory: nothing ends but the last row
    several = rows.clone()
    several["next", "done"] = torch.ones(4, 2, dtype=torch.bool)
    several["done"] = torch.zeros(4, 2, dtype=torch.bool)
    for encode, decode in PAIRS.values():
        assert_same(decode(encode(several)), several)
    for name in ("done", "other"):  # ends marked by an entry that is an observation, or has another name
        renamed = rows.clone()
        renamed["next", name] = torch.tensor([[False], [True], [False], [True]])
        renamed[name] = renamed["next", name].roll(1, 0)
        for names in (["other"], ["terminated"]):
            codec = TED2Flat(done_key=("next", name), done_keys=names)
            assert_same(Flat2TED()(codec(renamed)), renamed)


def test_flat_entries_of_other_origin_are_read_by_their_sizes_and_done():
    flat = TensorDict(
        pixels=torch.tensor([0, 1, 2, 3, 10, 11]),
        finished=torch.tensor([False, False, True, False]).unsqueeze(-1),
        bonus=torch.arange(4.0),
        action=torch.arange(4),
    )
    rows = Flat2TED(done_key="finished", done_keys=["finished"], reward_keys=["bonus"])(flat)
    assert (rows["pixels"].tolist(), rows["next", "pixels"].tolist()) == ([0, 1, 2, 10], [1, 2, 3, 11])
    assert rows["next", "bonus"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert rows["next", "finished"].flatten().tolist() == [False, False, True, False]
    assert rows["action"].tolist() == [0, 1, 2, 3]


def test_flat_entries_that_do_not_fit_are_refused_by_name():
    with pytest.raises(DataError, match=r"4 rows .* or 6 .*\[5\] for \('pixels',\)"):
        Flat2TED()(TensorDict(pixels=torch.arange(5), done=torch.tensor([False, True, False, False])))
    with pytest.raises(DataError, match="must mark the ends"):
        Flat2TED()(TensorDict(pixels=torch.arange(5)))


@pytest.mark.parametrize("codec", [TED2Flat(), TED2Nested()])
def test_what_is_not_ted_is_refused(codec):
    for rows in (torch.zeros(3), TensorDict(obs=torch.zeros(3), batch_size=[3]), TensorDict(next=TensorDict())):
        with pytest.raises(DataError, match="rows in TED"):
            codec(rows)
    with pytest.raises(DataError, match="at least one row"):
        codec(column([0], [1])[:0])
    with pytest.raises(DataError, match=r"uses these names.*'shift'"):
        codec(column([0], [1]).set("shift", torch.zeros(1)))
    with pytest.raises(DataError, match="overlap"):
        codec(column([0], [1]).set(("reward", "part"), torch.zeros(1)))
    with pytest.raises(DataError, match="dense tensor"):
        codec(column([0], [1]).set("text", ["hello"]))
