"""Slices of trajectories, against a list of all windows over all runs of rows; their order, marks and boundaries."""

import itertools
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from llmrl.data.replay_buffers.samplers.slices import Cut, every_slice
from llmrl.data.replay_buffers.trajectory_index import TrajectoryIndex
from llmrl.errors import MissingKeyError
from tests.support.buffers import holding
from tests.support.buffers import steps as rows

pytestmark = pytest.mark.filterwarnings("ignore:.* rows were written at once")  # longer than the storage on purpose

CUTS = [
    Cut(length, left, right, strict)
    for length in (1, 2, 3, 5)
    for left in {0, 1, length - 1}
    for right in {0, 1, length - 1}
    for strict in (True, False)
    if max(left, right) < length
]


def all_windows(runs: list[list[int]], cut: Cut) -> Counter:
    """Every slice as the tuple of its rows; ``runs`` are the rows of the trajectories in order."""
    found = Counter()
    for run in runs:
        if cut.strict and len(run) < cut.length:
            continue
        here = Counter()
        for start in range(-cut.length, len(run) + 1):
            stop = start + cut.length
            piece = run[max(start, 0) : max(stop, 0)]
            if piece and -start <= cut.left and stop - len(run) <= cut.right:
                here[tuple(piece)] += 1
        found += here or Counter([tuple(run)])
    return found


def runs_of(ids: list[int], cells: list[int]) -> list[list[int]]:
    return [[cells[i] for i in group] for _, group in itertools.groupby(range(len(ids)), key=lambda i: ids[i])]


def pieces(index: TrajectoryIndex, cut: Cut, size: int) -> Counter:
    last, lengths = every_slice(index, cut)
    return Counter(
        tuple((cell - back * index.streams) % size for back in range(length - 1, -1, -1))
        for cell, length in zip(last.tolist(), lengths.tolist(), strict=True)
    )


def partitions(length: int) -> list[list[int]]:
    """All ways to cut so many rows into trajectories, as ids."""
    cuts = itertools.product([0, 1], repeat=length - 1)
    return [list(itertools.accumulate((0, *cut))) for cut in cuts]


END = torch.ones(2)
KINDS = [SliceSampler, SliceSamplerWithoutReplacement, partial(PrioritizedSliceSampler, 10, 1.0, 1.0)]
BOTH = ({"traj_key": "episode"}, {"end_key": ("next", "done")})


def check_exhaustively(capacity: int, lengths: range, cuts: list[Cut], keys=BOTH) -> None:
    """Every length of the ring, every cursor, every partition, every cut; boundaries by every key."""
    indices = [TrajectoryIndex("test", **key) for key in keys]
    for length in lengths:
        storage = LazyTensorStorage(capacity)
        cursors = range(capacity) if length == capacity else [length]
        for ids in partitions(length):
            expected = {cut: all_windows(runs_of(ids, list(range(length))), cut) for cut in cuts}
            ends = [time + 1 < length and ids[time + 1] != ids[time] for time in range(length)]
            for cursor in cursors:
                oldest = cursor if length == capacity else 0
                time = [(cell - oldest) % capacity for cell in range(length)]
                done = torch.tensor([[ends[t]] for t in time])
                storage.set(slice(0, length), rows([ids[t] for t in time], next=TensorDict(done=done)))
                storage.counters.cursor = cursor % capacity
                for index in indices:
                    index.forget()
                    index.update(storage)
                    for cut in cuts:
                        found = Counter()
                        for piece, count in pieces(index, cut, capacity).items():
                            found[tuple(time[cell] for cell in piece)] += count
                        assert found == expected[cut], (ids, cursor, cut)


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 7))])
def test_the_slices_of_every_small_ring_are_those_of_a_list(capacity):
    check_exhaustively(capacity, range(1, capacity + 1), CUTS)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [8, 12])
def test_the_slices_of_every_full_ring_are_those_of_a_list(capacity):
    cuts = [Cut(3, 0, 0, True), Cut(4, 2, 3, True), Cut(5, 1, 0, False)]
    check_exhaustively(capacity, range(capacity, capacity + 1), cuts, keys=BOTH[:1])


@pytest.mark.parametrize("streams", [1, 3])
def test_the_index_follows_any_writes_as_if_it_were_made_anew(streams):
    generator = torch.Generator().manual_seed(streams)

    def number(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for _ in range(30):
        capacity = 4 + number(6)
        sampler = SliceSampler(slice_len=2, traj_key="episode", strict_length=False, truncated_key=None)
        storage = LazyTensorStorage(capacity * streams, ndim=2 if streams > 1 else 1)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        history: list[list[int]] = [[] for _ in range(streams)]
        for _ in range(12):
            count = 1 + number(capacity + 2)
            ids = [[column[-1] if column else 0] for column in history]
            for column in ids:
                for _ in range(count):
                    column.append(column[-1] + (number(3) == 0))
            batch = torch.tensor([column[1:] for column in ids])
            shape = [streams, count] if streams > 1 else [count]
            buffer.extend(TensorDict(episode=batch.view(shape), batch_size=shape))
            for column, new in zip(history, ids, strict=True):
                column.extend(new[1:])
            if number(3) == 0:
                continue  # the index has to catch up with several writes at once
            if number(4) == 0:
                position = number(len(buffer) // streams)
                written = len(history[0])
                time = written - min(written, capacity) + (position - written % capacity) % capacity
                time = position if written <= capacity else time
                fresh = 100 + number(3)
                buffer[position if streams == 1 else (0, position)] = TensorDict(episode=torch.tensor(fresh))
                history[0][time] = fresh
            buffer.sample()
            for cut in (Cut(2, 0, 0, True), Cut(3, 2, 1, False)):
                expected = Counter()
                for stream, column in enumerate(history):
                    first = max(0, len(column) - capacity)
                    cells = [time % capacity * streams + stream for time in range(first, len(column))]
                    expected += all_windows(runs_of(column[first:], cells), cut)
                assert pieces(sampler._index, cut, capacity * streams) == expected


def test_what_is_read_between_two_samples_is_what_was_written():
    sampler = SliceSampler(slice_len=5, traj_key="episode", truncated_key=None)
    storage = LazyTensorStorage(2000)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=20)
    read = 0
    original = storage.entry

    def entry(key, index):
        nonlocal read
        read += index.numel()
        return original(key, index)

    storage.entry = entry
    buffer.extend(rows([time // 10 for time in range(2000)]))
    buffer.sample()
    assert read < 2100
    for number in range(20):
        read = 0
        buffer.extend(rows([1000 + number] * 30))
        buffer.sample()
        assert read == 31  # the new rows and the one before them
        read = 0
        buffer.sample()
        assert read == 0


# --- golden values ---


def two_of_five(**arguments) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=SliceSampler(slice_len=3, traj_key="episode", **arguments),
        batch_size=3000,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(rows([0] * 5 + [1] * 5))
    return buffer


def test_each_slice_is_as_likely_as_any_other():
    buffer = two_of_five()
    steps = buffer.sample()["step"].view(-1, 3)
    starts = torch.bincount(steps[:, 0], minlength=10)[[0, 1, 2, 5, 6, 7]].double()
    assert starts.sum() == 1000
    chi_square = ((starts - 1000 / 6) ** 2 / (1000 / 6)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: 0.1 %


def test_starts_are_uniform_where_few_rows_can_be_one():
    """Of 5000 rows only ten begin a slice: proposing is given up, all slices are listed."""
    sampler = SliceSampler(slice_len=5, traj_key="episode")
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(5000), sampler=sampler, batch_size=5000, generator=torch.Generator().manual_seed(1)
    )
    ids = list(range(2486)) + [9000] * 14 + list(range(3000, 5500))
    buffer.extend(rows(ids))
    starts = torch.bincount(buffer.sample()["step"].view(-1, 5)[:, 0], minlength=5000)
    assert starts.nonzero().flatten().tolist() == list(range(2486, 2496))
    assert ((starts[2486:2496] - 100.0) ** 2 / 100).sum() < 27.9  # 9 degrees of freedom: 0.1 %


def test_a_span_of_rows_counts_on_both_sides():
    """A pair of numbers used to work on the left only."""
    sampler = SliceSampler(slice_len=3, traj_key="episode", span=(1, 1), truncated_key=None)
    buffer = holding(rows([0] * 5), sampler=sampler, batch_size=3)
    drawn = {tuple(buffer.sample()["step"].tolist()) for _ in range(300)}
    assert drawn == {(0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4)}


# --- errors ---
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, TypeError, "num_slices and slice_len.*got neither"),
        ({"num_slices": 2, "slice_len": 2}, TypeError, "got both"),
        ({"slice_len": 0}, ValueError, "at least 1"),
        ({"slice_len": 2, "traj_key": "a", "trajectory_key": "b"}, TypeError, "another name of traj_key"),
        ({"slice_len": 2, "ends": END, "cache_values": False}, RuntimeError, "cache_values=True"),
        ({"slice_len": 2, "ends": END, "trajectories": END, "cache_values": True}, TypeError, "both"),
        ({"slice_len": 2, "ends": END, "traj_key": "a", "cache_values": True}, TypeError, "got both"),
        ({"slice_len": 2, "span": -1}, ValueError, "span"),
        ({"slice_len": 2, "max_age": 1}, TypeError, "max_age"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_contradict_each_other_are_refused(kind, arguments, error, match):
    with pytest.raises(error, match=match):
        kind(**arguments)


def test_a_batch_is_a_whole_number_of_slices():
    buffer = two_of_five()
    with pytest.raises(RuntimeError, match=r"slice_len=3: got 4; take 3"):
        buffer.sampler.sample(buffer.storage, 4)
    with pytest.raises(RuntimeError, match="num_slices=4: got 6"):
        SliceSampler(num_slices=4, traj_key="episode").sample(buffer.storage, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_if_no_trajectory_is_long_enough_the_longest_is_named(kind):
    buffer = two_of_five()
    buffer.set_sampler(kind(slice_len=6, traj_key="episode"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the longest of 2 has 5"):
            buffer.sampler.sample(buffer.storage, 6)


def test_more_slices_than_trajectories_are_refused_with_drop_last():
    buffer = two_of_five()
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", drop_last=True)
    with pytest.raises(ValueError, match="got 3 slices, 2 trajectories"):
        sampler.sample(buffer.storage, 6)


def test_a_pickled_sampler_reads_the_storage_anew():
    buffer = two_of_five()
    buffer.sample()
    copy = pickle.loads(pickle.dumps(buffer.sampler))
    for sampler in (buffer.sampler, copy):
        sampler.set_rng(torch.Generator().manual_seed(5))
    assert torch.equal(copy.sample(buffer.storage, 9)[0], buffer.sampler.sample(buffer.storage, 9)[0])


def test_rows_without_an_entry_that_tells_boundaries_are_refused():
    flags = holding(TensorDict(end=torch.zeros(5, 2, dtype=torch.bool), batch_size=[5]))
    with pytest.raises(RuntimeError, match="one value per row"):
        SliceSampler(slice_len=2, end_key="end").sample(flags.storage, 2)
    buffer = holding(TensorDict(a=torch.arange(5), batch_size=[5]), sampler=SliceSampler(slice_len=2), batch_size=2)
    with pytest.raises(MissingKeyError, match="traj_key or end_key"):
        buffer.sample()
    buffer.set_sampler(SliceSampler(slice_len=2, traj_key="b"))
    with pytest.raises(MissingKeyError, match="'b'"):
        buffer.sample()
    plain = ReplayBuffer(storage=ListStorage(10), sampler=SliceSampler(slice_len=2, traj_key="a"), batch_size=2)
    plain.extend([torch.zeros(2), torch.ones(2)])
    with pytest.raises(MissingKeyError, match="'a'"):
        plain.sample()


def test_given_boundaries_are_for_rows_that_do_not_change():
    ids = torch.tensor([0, 0, 0, 1, 1])
    sampler = SliceSampler(slice_len=2, trajectories=ids, cache_values=True)
    buffer = ReplayBuffer(storage=TensorStorage(rows(ids.tolist())), sampler=sampler, batch_size=2)
    buffer.sample()
    buffer.extend(rows([7]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rows were written since"):
            buffer.sample()
    short = SliceSampler(slice_len=2, ends=torch.zeros(4), cache_values=True)
    with pytest.raises(RuntimeError, match="got 4 for 5"):
        short.sample(buffer.storage, 2)


# --- once per pass ---
def test_a_pass_has_one_slice_of_every_trajectory():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
    lengths = [2, 5, 3, 1, 4, 2, 7, 3]  # seven have two rows or more
    buffer.extend(rows([number for number, length in enumerate(lengths) for _ in range(length)]))
    pieces, orders = set(), set()
    for _ in range(40):
        batches = [batch for batch in buffer]
        assert [len(batch) for batch in batches] == [6, 6, 2]
        ids = torch.cat([batch["episode"] for batch in batches]).view(-1, 2)
        assert torch.equal(ids[:, 0], ids[:, 1])
        assert sorted(ids[:, 0].tolist()) == [0, 1, 2, 4, 5, 6, 7]
        orders.add(tuple(ids[:, 0].tolist()))
        pieces |= {tuple(pair) for batch in batches for pair in batch["step"].view(-1, 2).tolist()}
    assert len(orders) > 30
    starts = [0, *range(2, 6), *range(7, 9), *range(11, 14), 15, *range(17, 23), *range(24, 26)]
    assert pieces == {(start, start + 1) for start in starts}


# --- by priority ---
def prioritized(**arguments) -> ReplayBuffer:
    arguments = {"slice_len": 3, "traj_key": "episode", "truncated_key": None} | arguments
    return ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PrioritizedSliceSampler(10, alpha=1.0, beta=1.0, eps=0.0, **arguments),
        batch_size=3000,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("rare", [False, True])
def test_starts_are_drawn_by_priority_among_the_rows_that_can_be_one(rare):
    buffer = prioritized()
    buffer.extend(rows([0] * 5 + [1] * 5))
    priority = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 0.0, 4.0, 2.0, 5.0, 5.0])
    if rare:  # nearly all of the mass is where no slice begins
        priority[[3, 4, 8, 9]] = 1e9
    buffer.update_priority(torch.arange(10), priority)
    batch, info = buffer.sample(return_info=True)
    steps = batch["step"].view(-1, 3)
    assert torch.equal(steps, steps[:, :1] + torch.arange(3))
    starts = torch.bincount(steps[:, 0], minlength=10)
    legal = [0, 1, 2, 6, 7]
    assert starts.sum() == starts[legal].sum() == 1000
    expected = priority[legal] / priority[legal].sum() * 1000
    assert ((starts[legal] - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom: 0.1 %
    weights = info["priority_weight"].view(-1, 3)
    assert torch.allclose(weights, (1 / priority[steps[:, :1]]).expand(-1, 3))


def test_prioritized_slices_may_end_after_their_trajectory_but_not_begin_before_it():
    with pytest.warns(UserWarning, match="left side"):
        both_sides = prioritized(span=True)
    whole = {(0, 1, 2), (1, 2, 3)}
    for buffer, cut in ((both_sides, {(2, 3), (3,)}), (prioritized(span=(False, 1)), {(2, 3)})):
        buffer.extend(rows([0] * 4))
        seen = {tuple(buffer.sampler.sample(buffer.storage, 3)[0].tolist()) for _ in range(200)}
        assert seen == whole | cut


# --- marks ---
def stored(count: int) -> TensorDict:
    flags = torch.zeros(count, 1, dtype=torch.bool)
    done = flags.clone()
    done[4] = done[-1] = True
    return TensorDict(
        step=torch.arange(count),
        next=TensorDict(done=done, terminated=done.clone(), truncated=flags, batch_size=[count]),
        batch_size=[count],
    )


def test_the_end_of_every_slice_is_marked_in_the_form_of_the_stored_flags():
    buffer = holding(stored(10), kind=TensorDictReplayBuffer, sampler=SliceSampler(slice_len=3), batch_size=6)
    for _ in range(20):
        batch = buffer.sample()
        ends = torch.tensor([[False], [False], [True]] * 2)
        assert torch.equal(batch["next", "truncated"], ends)
        assert torch.equal(batch["next", "done"], ends)
        assert torch.equal(batch["next", "terminated"], (batch["step"] % 5 == 4).unsqueeze(1))
        assert torch.equal(batch["slice_end"], ends.squeeze(1))
        assert batch["index"].shape == (6,)  # as with any other sampler
    assert not buffer[:]["next", "truncated"].any()


def test_without_a_key_for_truncation_the_flags_are_as_stored():
    sampler = SliceSampler(slice_len=2, truncated_key=None)
    buffer = holding(stored(10), kind=TensorDictReplayBuffer, sampler=sampler, batch_size=6)
    batch, info = buffer.sample(return_info=True)
    assert set(info) == {"index", "slice_end"}
    assert torch.equal(batch["next", "done"], (batch["step"] % 5 == 4).unsqueeze(1))


def test_rows_that_store_no_flags_get_them():
    sampler = SliceSampler(slice_len=2, traj_key="episode", truncated_key=("a", "truncated"))
    buffer = holding(rows([0] * 5), kind=TensorDictReplayBuffer, sampler=sampler, batch_size=4)
    batch = buffer.sample()
    assert batch["a", "truncated"].tolist() == batch["a", "done"].tolist() == [[False], [True]] * 2
    assert not batch["a", "terminated"].any()


# --- where boundaries come from ---
def same_draws(buffers: list[ReplayBuffer]) -> bool:
    for buffer in buffers:
        buffer.set_rng(torch.Generator().manual_seed(3))
    drawn = [[buffer.sample()["step"].tolist() for _ in range(10)] for buffer in buffers]
    return all(steps == drawn[0] for steps in drawn)


def test_ids_ends_and_keys_name_the_same_trajectories():
    ids = [4, 4, 4, 4, 7, 7, 7, 4, 4, 4]
    ends = torch.tensor([False] * 3 + [True] + [False] * 2 + [True] + [False] * 3)
    data = rows(ids, collector=TensorDict(traj_ids=torch.tensor(ids)), next=TensorDict(done=ends.unsqueeze(1)))
    samplers = [
        SliceSampler(slice_len=3, traj_key="episode"),
        SliceSampler(slice_len=3, trajectory_key="episode"),
        SliceSampler(slice_len=3, end_key=("next", "done")),
        SliceSampler(slice_len=3, ends=ends, cache_values=True),
        SliceSampler(slice_len=3, trajectories=torch.tensor(ids), cache_values=True),
        SliceSampler(num_slices=2, traj_key=("collector", "traj_ids"), cache_values=True, compile=True, use_gpu=True),
        SliceSampler(num_slices=2),
    ]
    buffers = [ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=6) for sampler in samplers]
    for buffer in buffers:
        buffer.extend(data)
    assert same_draws(buffers)


def test_a_pass_is_resumed_in_its_middle():
    def build() -> ReplayBuffer:
        sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        return ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, batch_size=4, prefetch=2)

    first, second = build(), build()
    first.extend(rows([time // 4 for time in range(40)]))
    for _ in range(2):
        first.sample()
    second.load_state_dict(first.state_dict())
    for _ in range(8):
        assert first.sample()["step"].tolist() == second.sample()["step"].tolist()
        assert first.sampler.ran_out == second.sampler.ran_out
    first.close()
    second.close()
