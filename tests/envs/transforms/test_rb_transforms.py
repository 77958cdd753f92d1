"""Transforms for replay buffers: n-step rows, next observations rebuilt from slices, random windows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from llmrl.data.postprocs import MultiStep
from llmrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers.samplers import SliceSampler
from llmrl.envs.transforms.crop import RandomCropTensorDict
from llmrl.envs.transforms.rb_transforms import MultiStepTransform, NextStateReconstructor
from llmrl.errors import ConfigError, MissingKeyError, ShapeError
from tests.support.refusals import refusals


def stream(steps, ends=(), streams=None):
    shape = [steps] if streams is None else [streams, steps]
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    done[..., list(ends), :] = True
    obs = torch.arange(math.prod(shape)).view(shape)
    following = TensorDict(obs=obs + 1, reward=(obs + 1.0).unsqueeze(-1), done=done, batch_size=shape)
    return TensorDict(obs=obs, next=following, batch_size=shape)


def assert_equal(left, right):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=1e-5)


@settings(max_examples=50)
@given(
    steps=st.integers(1, 20),
    ends=st.sets(st.integers(0, 19)),
    n_steps=st.integers(1, 6),
    cuts=st.lists(st.integers(1, 6), max_size=20),
    streams=st.sampled_from([None, 1, 3]),
)
def test_a_stream_in_pieces_gives_the_numbers_of_the_whole(steps, ends, n_steps, cuts, streams):
    whole = stream(steps, [end for end in ends if end < steps], streams)
    dim = whole.batch_dims - 1
    transform = MultiStepTransform(n_steps, 0.9)
    out, start = [], 0
    for cut in [*cuts, steps]:
        piece = whole.narrow(dim, start, min(cut, steps - start)) if dim == 0 else whole[:, start : start + cut]
        start += cut
        if piece.numel():
            out.append(transform.inv(piece))
        if start >= steps:
            break
    out.append(transform.flush())
    assert_equal(torch.cat([piece for piece in out if piece is not None], dim), MultiStep(0.9, n_steps)(whole))


def test_nothing_is_written_until_a_window_is_complete_and_flush_loses_no_row():
    transform = MultiStepTransform(4, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform)
    rows = stream(6)
    assert len(buffer.extend(rows[:2])) == 0  # fewer rows than the window, in the first batch
    assert (len(buffer.extend(rows[2:3])), buffer.extend(rows[3:]).tolist()) == (0, [0, 1, 2])
    assert buffer.extend(transform.flush()).tolist() == [3, 4, 5]
    assert transform.flush() is None
    assert buffer[:]["next", "reward"].flatten().tolist() == [10, 14, 18, 15, 11, 6]
    assert len(buffer.extend(rows[:3])) == 0  # a new stream


def test_a_stream_goes_on_after_its_state_was_saved_and_loaded():
    rows = stream(8, ends=[4])
    first, second = MultiStepTransform(3, 0.5), MultiStepTransform(3, 0.5)
    head = first.inv(rows[:5])
    state = first.state_dict()
    second.load_state_dict(state)
    state["held"].zero_()
    tail = torch.cat([second.inv(rows[5:]), second.flush()])
    assert_equal(torch.cat([head, tail]), MultiStep(0.5, 3)(rows))


def test_what_is_held_back_is_a_copy():
    rows = stream(4)
    transform = MultiStepTransform(3, 1.0)
    transform.inv(rows[:2])
    rows["next", "reward"].zero_()
    assert transform.flush()["next", "reward"].flatten().tolist() == [3, 2]


def test_rows_that_cannot_go_on_the_stream_are_refused_and_the_stream_stays():
    transform = MultiStepTransform(3, 1.0)
    transform.inv(stream(2, streams=2))
    with pytest.raises(ShapeError, match=r"\[3, 2\] after \[2, 2\].*flush"):
        transform.inv(stream(2, streams=3))
    with pytest.raises(MissingKeyError, match="same entries"):
        transform.inv(stream(2, streams=2).exclude("obs"))
    assert transform.inv(stream(2, streams=2)).batch_size == (2, 2)


def compact_rows():
    """Two trajectories of four, the first of which never ends in done."""
    return TensorDict(
        {
            "observation": torch.arange(8, dtype=torch.float32).view(8, 1),
            ("next", "reward"): torch.zeros(8, 1),
            ("next", "done"): torch.tensor([[False]] * 7 + [[True]]),
            ("collector", "traj_ids"): torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        },
        batch_size=[8],
    )


def same(left, right):
    return all(a == b or (a != a and b != b) for a, b in zip(left, right, strict=True))


nan = math.nan
WHOLE, TWICE = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("picked", "ends", "options", "expected"),
    [
        (WHOLE, [3, 7], {}, [1, 2, 3, nan, 5, 6, 7, nan]),  # slices of two trajectories
        (TWICE, [3, 7], {}, [1, 2, 3, nan, 1, 2, 3, nan]),  # two slices of one unfinished trajectory
        (WHOLE, [], {}, [1, 2, 3, nan, 5, 6, 7, nan]),
        ([2, 0, 1, 5, 6], [], {"step_count_key": ("collector", "step_count")}, [nan, 1, nan, 6, nan]),
        (WHOLE, [], {"traj_key": None}, [1, 2, 3, 4, 5, 6, 7, nan]),
    ],
)
def test_the_next_observation_is_that_of_the_next_step_of_the_trajectory_else_nan(picked, ends, options, expected):
    rows = compact_rows()
    rows["collector", "step_count"] = torch.tensor([0, 1, 2, 3] * 2).unsqueeze(-1)
    rows = rows[torch.tensor(picked)]
    if ends:
        rows["slice_end"] = torch.zeros(8, dtype=torch.bool).index_fill(0, torch.tensor(ends), True)
    out = NextStateReconstructor(**options)(rows)
    assert same(out["next", "observation"].flatten().tolist(), expected)
    assert ("next", "observation") not in rows.keys(True)  # what is given is not changed


def test_a_plain_buffer_with_a_slice_sampler_never_crosses_a_join():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=8,
    )
    buffer.extend(compact_rows())
    joins = set()
    for _ in range(40):
        sample = buffer.sample()
        first, second = sample["observation"].view(2, 4).tolist()
        assert same(sample["next", "observation"].flatten().tolist(), [*first[1:], nan, *second[1:], nan])
        joins.add((first[0], second[0]))
    assert joins == {(0, 0), (0, 4), (4, 0), (4, 4)}


def test_integers_need_a_fill_value():
    rows = compact_rows()
    rows["count"] = torch.arange(8)
    with pytest.raises(TypeError, match="fill_value=0"):
        NextStateReconstructor(["count"])(rows)
    out = NextStateReconstructor(["count"], fill_value=-1)(rows)
    assert out["next", "count"].tolist() == [1, 2, 3, -1, 5, 6, 7, -1]


def test_a_marker_that_is_missing_is_an_error_or_with_strict_false_left_out():
    rows = compact_rows().exclude("collector")
    with pytest.raises(MissingKeyError, match=r"'collector', 'traj_ids'.*keys present: 'next', 'observation'"):
        NextStateReconstructor()(rows)
    out = NextStateReconstructor(strict=False)(rows)["next", "observation"].flatten().tolist()
    assert same(out, [1, 2, 3, 4, 5, 6, 7, nan])
    with pytest.raises(MissingKeyError, match="observation"):
        NextStateReconstructor(strict=False)(compact_rows().exclude("observation"))


def test_every_window_is_drawn_equally_often_the_last_one_too():
    generator = torch.Generator().manual_seed(0)
    crop = RandomCropTensorDict(3, generator=generator)
    batch = TensorDict(step=torch.arange(5).expand(6000, 5), batch_size=[6000, 5])
    starts = crop(batch)["step"][:, 0].bincount()
    assert len(starts) == 3
    assert (starts - 2000).abs().max() < 150  # four standard deviations


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_the_dimension_that_is_given_is_cut_and_the_entries_of_a_step_stay_together(dim):
    shape = [4, 5, 6]
    cells = torch.arange(120).view(shape)
    pair = TensorDict(c=cells.unsqueeze(-1).expand(4, 5, 6, 2), batch_size=shape)
    batch = TensorDict(a=cells, b=pair, batch_size=shape)
    out = RandomCropTensorDict(3, dim)(batch)
    shape[dim] = 3
    assert out.batch_size == torch.Size(shape)
    assert out["b"].batch_size == torch.Size(shape)
    assert (out["a"].unsqueeze(-1) == out["b", "c"]).all()
    assert (out["a"].diff(dim=dim) == cells.stride(dim)).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 4), left=st.booleans())
def test_a_masked_window_lies_in_the_valid_part(seed, width, left):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(width, 8, (5,), generator=generator)
    mask = torch.arange(7) < lengths.unsqueeze(-1)
    mask = mask.flip(-1) if left else mask
    batch = TensorDict(mask=mask, text=[["x"] * 7] * 5, batch_size=[5, 7])
    out = RandomCropTensorDict(width, mask_key="mask", generator=generator)(batch)
    assert out["mask"].all()
    assert out.batch_size == (5, width)


MASK = torch.tensor([[True] * 3, [True, False, True]])
SHORT = TensorDict(step=torch.arange(6).view(2, 3), mask=MASK, batch_size=[2, 3])
test_rows_and_settings_that_cannot_be_used_are_refused = refusals(
    (ShapeError, "4 steps in a row: got a batch of 3", lambda: RandomCropTensorDict(4)(SHORT)),
    (ShapeError, "'mask' leaves less", lambda: RandomCropTensorDict(2, mask_key="mask")(SHORT)),
    (ShapeError, "sample_dim", lambda: RandomCropTensorDict(2)(TensorDict())),
    (MissingKeyError, "'valid'", lambda: RandomCropTensorDict(2, mask_key="valid")(SHORT)),
    (ConfigError, "sub_seq_len .*at least 1: got 0", lambda: RandomCropTensorDict(0)),
    (ShapeError, "flat", lambda: NextStateReconstructor()(compact_rows().reshape(2, 4))),
    (ConfigError, "list of keys", lambda: NextStateReconstructor("observation")),
)


def test_a_crop_that_is_saved_draws_the_same_windows_again():
    batch = TensorDict(step=torch.arange(50).expand(4, 50), batch_size=[4, 50])
    crop = RandomCropTensorDict(2, generator=torch.Generator().manual_seed(1))
    state = crop.state_dict()
    first = crop(batch)["step"]
    crop.load_state_dict(state)
    assert (crop(batch)["step"] == first).all()


@pytest.mark.parametrize(("rows", "shape"), [([99, 50], (128, 10, 1)), ([99], (10, 50, 1))])
def test_rows_of_a_buffer_are_cropped_at_reading_along_the_last_dim_of_the_sample(rows, shape):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    buffer.extend(TensorDict({"obs": torch.randn(99, 50, 1)}, rows))
    buffer.append_transform(RandomCropTensorDict(sub_seq_len=10))
    assert buffer.sample(128)["obs"].shape == shape
