"""Slices of trajectories, against a list of all windows over all runs of rows."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from llmrl.data.replay_buffers.samplers.slicer import Cut, Slicer
from llmrl.errors import MissingKeyError

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
    for rows in runs:
        if cut.strict and len(rows) < cut.length:
            continue
        here = Counter()
        for start in range(-cut.length, len(rows) + 1):
            stop = start + cut.length
            piece = rows[max(start, 0) : max(stop, 0)]
            if piece and -start <= cut.left and stop - len(rows) <= cut.right:
                here[tuple(piece)] += 1
        found += here or Counter([tuple(rows)])
    return found


def runs_of(ids: list[int], cells: list[int]) -> list[list[int]]:
    return [[cells[i] for i in group] for _, group in itertools.groupby(range(len(ids)), key=lambda i: ids[i])]


def slicer(**arguments) -> Slicer:
    given = dict.fromkeys(
        ["num_slices", "slice_len", "end_key", "traj_key", "trajectory_key", "ends", "trajectories", "truncated_key"]
    )
    given |= {"cache_values": True, "strict_length": True, "span": False, "slice_len": 2}
    return Slicer("test", **(given | arguments))


def pieces(parts: Slicer, cut: Cut, size: int) -> Counter:
    last, lengths = parts.every(cut)
    streams = parts.index.streams
    return Counter(
        tuple((cell - back * streams) % size for back in range(length - 1, -1, -1))
        for cell, length in zip(last.tolist(), lengths.tolist(), strict=True)
    )


def rows(ids: list[int], **entries) -> TensorDict:
    return TensorDict(episode=torch.tensor(ids), step=torch.arange(len(ids)), **entries, batch_size=[len(ids)])


def partitions(length: int) -> list[list[int]]:
    """All ways to cut so many rows into trajectories, as ids."""
    cuts = itertools.product([0, 1], repeat=length - 1)
    return [list(itertools.accumulate((0, *cut))) for cut in cuts]


BOTH = ({"traj_key": "episode"}, {"end_key": ("next", "done")})


def check_exhaustively(capacity: int, lengths: range, cuts: list[Cut], keys=BOTH) -> None:
    """Every length of the ring, every cursor, every partition, every cut; boundaries by every key."""
    sources = [slicer(**key) for key in keys]
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
                storage.ring.cursor = cursor % capacity
                for parts in sources:
                    parts.index.forget()
                    parts.index.update(storage)
                    parts._all = None
                    for cut in cuts:
                        found = Counter()
                        for piece, count in pieces(parts, cut, capacity).items():
                            found[tuple(time[cell] for cell in piece)] += count
                        assert found == expected[cut], (ids, cursor, cut)


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_the_slices_of_every_small_ring_are_those_of_a_list(capacity):
    check_exhaustively(capacity, range(1, capacity + 1), CUTS)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [5, 6, 7])
def test_the_slices_of_every_larger_ring_are_those_of_a_list(capacity):
    check_exhaustively(capacity, range(1, capacity + 1), CUTS)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [8, 12])
def test_the_slices_of_every_full_ring_are_those_of_a_list(capacity):
    cuts = [Cut(3, 0, 0, True), Cut(4, 2, 3, True), Cut(5, 1, 0, False)]
    check_exhaustively(capacity, range(capacity, capacity + 1), cuts, keys=BOTH[:1])


def test_a_slice_of_a_trajectory_is_given_by_its_number():
    for cut, length in itertools.product(CUTS, range(1, 9)):
        expected = all_windows([list(range(length))], cut)
        count = int(cut.count(torch.tensor([length]).numpy())[0])
        assert count == expected.total()
        numbers = torch.arange(count).numpy()
        last, lengths = cut.piece(torch.full((count,), length).numpy(), numbers)
        found = Counter(
            tuple(range(end - size, end)) for end, size in zip(last.tolist(), lengths.tolist(), strict=True)
        )
        assert found == expected, (cut, length)


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
                if streams == 1:
                    buffer[position] = TensorDict(episode=torch.tensor(fresh))
                else:
                    buffer[0, position] = TensorDict(episode=torch.tensor(fresh))
                history[0][time] = fresh
            buffer.sample()
            for cut in (Cut(2, 0, 0, True), Cut(3, 2, 1, False)):
                expected = Counter()
                for stream, column in enumerate(history):
                    first = max(0, len(column) - capacity)
                    cells = [time % capacity * streams + stream for time in range(first, len(column))]
                    expected += all_windows(runs_of(column[first:], cells), cut)
                assert pieces(sampler._slicer, cut, capacity * streams) == expected


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


def ring_of_eight() -> TensorDictReplayBuffer:
    """Two trajectories of five steps in a ring of eight: t [1,1,0,0,0,1,1,1], s [8,9,2,3,4,5,6,7], cursor 2."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=3)
    for part in (slice(0, 4), slice(4, 10)):
        data = TensorDict(t=torch.tensor([0] * 5 + [1] * 5), s=torch.arange(10), batch_size=[10])
        buffer.extend(data[part])
    assert buffer[:]["s"].tolist() == [8, 9, 2, 3, 4, 5, 6, 7]
    assert buffer.writer.cursor == 2
    return buffer


def test_slices_join_at_the_end_of_the_ring_and_stop_at_the_cursor():
    buffer = ring_of_eight()
    buffer.set_sampler(SliceSampler(slice_len=3, traj_key="t"))
    drawn = {tuple(buffer.sample()["s"].tolist()) for _ in range(200)}
    assert drawn == {(2, 3, 4), (5, 6, 7), (6, 7, 8), (7, 8, 9)}


def test_short_trajectories_come_whole_unless_the_length_is_strict():
    buffer = ring_of_eight()
    buffer.set_sampler(SliceSampler(num_slices=1, traj_key="t", strict_length=False))
    with pytest.warns(UserWarning, match="overrules"):
        drawn = {tuple(buffer.sample(4)["s"].tolist()) for _ in range(200)}
    assert drawn == {(2, 3, 4), (5, 6, 7, 8), (6, 7, 8, 9)}
    buffer.set_sampler(SliceSampler(num_slices=1, traj_key="t"))
    with pytest.warns(UserWarning, match="overrules"):
        drawn = {tuple(buffer.sample(4)["s"].tolist()) for _ in range(200)}
    assert drawn == {(5, 6, 7, 8), (6, 7, 8, 9)}


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
    visits = torch.bincount(steps.flatten() % 5, minlength=5).double()
    assert torch.allclose(visits / visits.sum(), torch.tensor([1, 2, 3, 2, 1]).double() / 9, atol=0.01)
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


def test_with_a_full_span_every_row_is_in_as_many_slices_as_any_other():
    buffer = two_of_five(span=True, truncated_key=None)
    visits = torch.zeros(10)
    for _ in range(20):
        visits += torch.bincount(buffer.sample()["step"], minlength=10)
    assert ((visits / visits.mean() - 1).abs() < 0.06).all()


def test_slices_that_span_the_right_end_are_never_empty():
    """They used to have no rows at all now and then, and a batch of only such slices failed."""
    buffer = two_of_five(span=(False, True), truncated_key=None)
    for _ in range(300):
        index, info = buffer.sampler.sample(buffer.storage, 3)
        assert 1 <= index.numel() <= 3
        assert info["slice_end"].tolist() == [False] * (index.numel() - 1) + [True]


def test_a_span_of_rows_counts_on_both_sides():
    """A pair of numbers used to work on the left only."""
    sampler = SliceSampler(slice_len=3, traj_key="episode", span=(1, 1), truncated_key=None)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
    buffer.extend(rows([0] * 5))
    drawn = {tuple(buffer.sample()["step"].tolist()) for _ in range(300)}
    assert drawn == {(0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4)}


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
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3), batch_size=6)
    buffer.extend(stored(10))
    for _ in range(20):
        batch = buffer.sample()
        ends = torch.tensor([[False], [False], [True]] * 2)
        assert torch.equal(batch["next", "truncated"], ends)
        assert torch.equal(batch["next", "done"], ends)
        assert torch.equal(batch["next", "terminated"], (batch["step"] % 5 == 4).unsqueeze(1))
        assert torch.equal(batch["slice_end"], ends.squeeze(1))
        assert batch["index"].shape == (6,)  # as with any other sampler
    assert not buffer[:]["next", "truncated"].any()


def test_transforms_of_a_plain_buffer_see_where_slices_end():
    """Two slices of one unfinished trajectory lie back to back: nothing else in the rows tells them apart."""
    seen = []

    def look(batch: TensorDict) -> TensorDict:
        seen.append(batch["slice_end"].tolist())
        return batch

    sampler = SliceSampler(slice_len=4, traj_key="episode", truncated_key=None)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=8, transform=look)
    buffer.extend(rows([0] * 4))
    assert buffer.sample()["step"].tolist() == [0, 1, 2, 3] * 2
    assert seen == [([False] * 3 + [True]) * 2]
    assert "slice_end" not in buffer.storage[:].keys()


def test_without_a_key_for_truncation_the_flags_are_as_stored():
    sampler = SliceSampler(slice_len=2, truncated_key=None)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=6)
    buffer.extend(stored(10))
    batch, info = buffer.sample(return_info=True)
    assert set(info) == {"index", "slice_end"}
    assert torch.equal(batch["next", "done"], (batch["step"] % 5 == 4).unsqueeze(1))


def test_rows_that_store_no_flags_get_them():
    sampler = SliceSampler(slice_len=2, traj_key="episode", truncated_key=("a", "truncated"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    buffer.extend(rows([0] * 5))
    batch = buffer.sample()
    assert batch["a", "truncated"].tolist() == batch["a", "done"].tolist() == [[False], [True]] * 2
    assert ("a", "terminated") not in batch.keys(True)


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


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_lists_of_rows_have_slices_too(storage):
    dense = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2), batch_size=4)
    other = ReplayBuffer(storage=storage(20), sampler=SliceSampler(slice_len=2), batch_size=4)
    for buffer in (dense, other):
        buffer.extend(stored(10))
    assert same_draws([dense, other])


def test_streams_of_a_grid_are_kept_apart():
    sampler = SliceSampler(slice_len=3, traj_key="episode", truncated_key=None)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(16, ndim=2), sampler=sampler, batch_size=6)
    for start in range(0, 12, 2):  # two streams, in a ring of eight steps
        time = torch.arange(start, start + 2).expand(2, 2)
        stream = torch.tensor([[0, 0], [1, 1]])
        buffer.extend(TensorDict(time=time, stream=stream, episode=time // 6, batch_size=[2, 2]))
    seen = set()
    for _ in range(200):
        batch = buffer.sample()
        for time, stream in zip(batch["time"].view(2, 3).tolist(), batch["stream"].view(2, 3).tolist(), strict=True):
            assert stream in ([0] * 3, [1] * 3)
            seen.add((stream[0], *time))
    starts = (6, 7, 8, 9)  # of the first trajectory two steps are left, of the second all six
    assert seen == {(stream, t, t + 1, t + 2) for stream in (0, 1) for t in starts}


def test_unbounded_storages_have_slices():
    buffer = ReplayBuffer(
        storage=ListStorage(None), sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=2
    )
    for number in range(5):
        buffer.extend(rows([number] * 3))
    assert len({tuple(buffer.sample()["episode"].tolist()) for _ in range(100)}) == 5


def test_a_filled_buffer_takes_another_sampler_and_an_emptied_one_starts_again():
    buffer = ring_of_eight()
    buffer.set_sampler(SliceSampler(slice_len=3, traj_key="t"))
    buffer.sample()
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample()
    buffer.extend(TensorDict(t=torch.zeros(3, dtype=torch.int64), s=torch.arange(20, 23), batch_size=[3]))
    assert buffer.sample()["s"].tolist() == [20, 21, 22]


def test_a_loaded_buffer_goes_on_with_the_same_slices(tmp_path):
    def build() -> ReplayBuffer:
        sampler = SliceSampler(slice_len=3, traj_key="t")
        return ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=6)

    first, by_state, by_file = build(), build(), build()
    first.extend(ring_of_eight()[:].exclude("index"))
    first.extend(TensorDict(t=torch.tensor([2, 2, 2]), s=torch.arange(3), batch_size=[3]))
    first.sample()
    by_state.load_state_dict(first.state_dict())
    first.dumps(tmp_path / "dump")
    by_file.loads(tmp_path / "dump")
    for _ in range(5):
        batch = first.sample()["s"].tolist()
        assert by_state.sample()["s"].tolist() == by_file.sample()["s"].tolist() == batch


def test_a_pickled_sampler_reads_the_storage_anew():
    buffer = ring_of_eight()
    buffer.set_sampler(SliceSampler(slice_len=3, traj_key="t"))
    buffer.set_rng(torch.Generator().manual_seed(0))
    buffer.sample()
    sampler = buffer.sampler
    copy = pickle.loads(pickle.dumps(sampler))
    for one in (sampler, copy):
        one.set_rng(torch.Generator().manual_seed(5))
    assert torch.equal(copy.sample(buffer.storage, 9)[0], sampler.sample(buffer.storage, 9)[0])


# --- once per pass ---


def test_a_pass_has_one_slice_of_every_trajectory():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
    lengths = [2, 5, 3, 1, 4, 2, 7, 3]  # seven have two rows or more
    buffer.extend(rows([number for number, length in enumerate(lengths) for _ in range(length)]))
    pieces = set()
    orders = set()
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


def test_without_shuffling_trajectories_come_in_the_order_of_time():
    sampler = SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode", shuffle=False, drop_last=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    buffer.extend(rows([5, 5, 3, 3, 8, 8, 1, 1, 2, 2]))
    assert [batch["episode"].tolist() for batch in buffer] == [[5, 5, 3, 3], [8, 8, 1, 1]]


def test_trajectories_that_are_overwritten_leave_the_pass_and_new_ones_join_the_next():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False, truncated_key=None)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=2)
    buffer.extend(rows([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    assert buffer.sample()["episode"].tolist() == [0, 0]
    buffer.extend(rows([3, 3, 3, 3, 3]))  # over all of 0 and two rows of 1, which has one left: too short
    assert buffer.sample()["episode"].tolist() == [2, 2]
    assert sampler.ran_out
    assert buffer.sample()["episode"].tolist() == [2, 2]
    assert buffer.sample()["episode"].tolist() == [3, 3]
    assert sampler.ran_out


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_pass_is_resumed_in_its_middle(prefetch):
    def build() -> ReplayBuffer:
        sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        return ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, batch_size=4, prefetch=prefetch)

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


def test_priorities_of_rows_are_updated_by_the_positions_of_a_batch():
    buffer = prioritized()
    buffer.extend(rows([0] * 5 + [1] * 5))
    _, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], torch.rand(len(info["index"]), 1))
    assert (buffer.sampler.probabilities() > 0).all()


def test_a_short_trajectory_comes_whole_by_the_priority_of_its_first_row():
    buffer = prioritized(strict_length=False)
    buffer.extend(rows([0] * 2 + [1] * 4))
    buffer.update_priority(torch.arange(6), torch.tensor([3.0, 9.0, 1.0, 1.0, 9.0, 9.0]))
    batch, info = buffer.sample(return_info=True)
    drawn, piece = Counter(), []
    for step, end in zip(batch["step"].tolist(), info["slice_end"].tolist(), strict=True):
        piece.append(step)
        if end:
            drawn[tuple(piece)] += 1
            piece = []
    assert set(drawn) == {(0, 1), (2, 3, 4), (3, 4, 5)}
    assert drawn[0, 1] / drawn.total() == pytest.approx(0.6, abs=0.05)


def test_prioritized_slices_may_end_behind_their_trajectory_but_not_begin_before_it():
    with pytest.warns(UserWarning, match="left side"):
        buffer = prioritized(span=True)
    buffer.extend(rows([0] * 4))
    seen = {tuple(buffer.sampler.sample(buffer.storage, 3)[0].tolist()) for _ in range(200)}
    assert seen == {(0, 1, 2), (1, 2, 3), (2, 3), (3,)}
    buffer = prioritized(span=(False, 1))
    buffer.extend(rows([0] * 4))
    seen = {tuple(buffer.sampler.sample(buffer.storage, 3)[0].tolist()) for _ in range(200)}
    assert seen == {(0, 1, 2), (1, 2, 3), (2, 3)}


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, TypeError, "exactly one of num_slices and slice_len is needed: got neither"),
        ({"num_slices": 2, "slice_len": 2}, TypeError, "got both"),
        ({"slice_len": 0}, ValueError, "at least 1"),
        ({"slice_len": 2, "traj_key": "a", "trajectory_key": "b"}, TypeError, "another name of traj_key"),
        ({"slice_len": 2, "ends": torch.ones(2), "cache_values": False}, RuntimeError, "cache_values=True"),
        (
            {"slice_len": 2, "ends": torch.ones(2), "trajectories": torch.ones(2), "cache_values": True},
            TypeError,
            "both",
        ),
        ({"slice_len": 2, "ends": torch.ones(2), "traj_key": "a", "cache_values": True}, TypeError, "got both"),
        ({"slice_len": 2, "span": -1}, ValueError, "span"),
        ({"slice_len": 2, "max_age": 1}, TypeError, "max_age"),
    ],
)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_arguments_that_contradict_each_other_are_refused(kind, arguments, error, match):
    first = (10, 1.0, 1.0) if kind is PrioritizedSliceSampler else ()
    with pytest.raises(error, match=match):
        kind(*first, **arguments)


def test_a_batch_is_a_whole_number_of_slices():
    buffer = two_of_five()
    with pytest.raises(RuntimeError, match=r"multiple of slice_len=3: got 4; take 3"):
        buffer.sampler.sample(buffer.storage, 4)
    sampler = SliceSampler(num_slices=4, traj_key="episode")
    with pytest.raises(RuntimeError, match="multiple of num_slices=4: got 6"):
        sampler.sample(buffer.storage, 6)


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_if_no_trajectory_is_long_enough_the_longest_is_named(kind):
    first = (10, 1.0, 1.0) if kind is PrioritizedSliceSampler else ()
    buffer = two_of_five()
    buffer.set_sampler(kind(*first, slice_len=6, traj_key="episode"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the longest of 2 has 5"):
            buffer.sampler.sample(buffer.storage, 6)


def test_more_slices_than_trajectories_are_refused_with_drop_last():
    buffer = two_of_five()
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", drop_last=True)
    with pytest.raises(ValueError, match="got 3 slices, 2 trajectories"):
        sampler.sample(buffer.storage, 6)


def test_rows_without_an_entry_that_tells_boundaries_are_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2), batch_size=2)
    buffer.extend(TensorDict(a=torch.arange(5), batch_size=[5]))
    with pytest.raises(MissingKeyError, match="traj_key or end_key"):
        buffer.sample()
    buffer.set_sampler(SliceSampler(slice_len=2, traj_key="b"))
    with pytest.raises(MissingKeyError, match="'b'"):
        buffer.sample()
    plain = ReplayBuffer(storage=ListStorage(10), sampler=SliceSampler(slice_len=2, traj_key="a"), batch_size=2)
    plain.extend([torch.zeros(2), torch.ones(2)])
    with pytest.raises(MissingKeyError, match="'a'"):
        plain.sample()


def test_an_end_has_one_value_per_row():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2, end_key="end"), batch_size=2)
    buffer.extend(TensorDict(end=torch.zeros(5, 2, dtype=torch.bool), batch_size=[5]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="one value per row"):
            buffer.sample()


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
