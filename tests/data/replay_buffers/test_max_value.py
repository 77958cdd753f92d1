"""Writers that rank rows, and one that refuses them."""

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from llmrl.errors import DataError, MissingKeyError
from tests.support.buffers import holding, refusals_after_fork, restore
from tests.support.refusals import refusals


def scored(*scores: float) -> TensorDict:
    return TensorDict(score=torch.tensor(scores), row=torch.tensor(scores).clone(), batch_size=[len(scores)])


def build(capacity: int = 3, storage=LazyTensorStorage, **arguments) -> TensorDictReplayBuffer:
    writer = TensorDictMaxValueWriter(**({"rank_key": "score"} | arguments))
    return TensorDictReplayBuffer(storage=storage(capacity), writer=writer, batch_size=2)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(st.integers(-3, 6), min_size=1, max_size=7), max_size=8), single=st.booleans())
def test_the_best_rows_stay_and_of_equal_ones_the_first(batches, single):
    buffer, oracle = build(4), []  # (rank, number of the write)
    number = 0
    for ranks in batches:
        first = number
        numbers = torch.arange(first, first + len(ranks))
        data = TensorDict(score=torch.tensor(ranks), number=numbers, batch_size=[len(ranks)])
        index = [buffer.add(row) for row in data] if single else buffer.extend(data).tolist()
        oracle += [(rank, first + i) for i, rank in enumerate(ranks)]
        oracle = sorted(oracle, key=lambda row: (-row[0], row[1]))[:4]
        number += len(ranks)
        content = buffer[:]
        assert sorted(content["number"].tolist()) == sorted(row[1] for row in oracle)
        assert content["index"].tolist() == list(range(len(oracle)))
        if not single:
            kept = {row[1] for row in oracle}
            for i, position in enumerate(index):
                assert (position >= 0) == (first + i in kept)
                assert position < 0 or int(content["number"][position]) == first + i


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", [2, 0]), ("max", [1, 2]), ("min", [2, 0]), ("mean", [2, 0]), ("median", [2, 0])]
)
def test_ranks_of_several_numbers_are_reduced(reduction, expected):
    rewards = torch.tensor([[0.0, 1.0, 5.0], [-9.0, 1.0, 7.0], [3.0, 3.0, 4.0]]).view(3, 3, 1)
    if reduction == "max":
        rewards[2] = 6.0
    buffer = build(2, reduction=reduction, rank_key=("next", "reward"))
    data = TensorDict(row=torch.arange(3), next=TensorDict(reward=rewards, batch_size=[3, 3]), batch_size=[3])
    buffer.extend(data)
    assert sorted(buffer[:]["row"].tolist()) == sorted(expected)


@pytest.mark.parametrize("by_file", [False, True])
def test_ranks_are_part_of_the_state(by_file, tmp_path):
    first, second = build(), build()
    first.extend(scored(4, 4, 2, 3, 1, 4))
    restore(second, first, tmp_path if by_file else None)
    assert first.write_count == second.write_count
    for batch in (scored(3, 5, 4), scored(9), scored(4, 5, 6)):
        assert first.extend(batch).tolist() == second.extend(batch).tolist()
        assert first[:]["row"].tolist() == second[:]["row"].tolist()


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (TensorDict(scor=torch.ones(2), batch_size=[2]), MissingKeyError, "'score'.* Did you mean 'scor'"),
        (scored(9, float("nan")), DataError, "NaN in 'score' of row 1"),
        (TensorDict(score=torch.ones(0), batch_size=[0]), RuntimeError, "at least one row"),
    ],
)
def test_rows_without_a_rank_are_refused_and_nothing_changes(data, error, match):
    buffer = build()
    buffer.extend(scored(1, 2, 3))
    with pytest.raises(error, match=match):
        buffer.extend(data)
    assert (buffer[:]["score"].tolist(), buffer.write_count) == ([1, 2, 3], 3)


UNRANKED = ReplayBuffer(storage=ListStorage(3), writer=TensorDictMaxValueWriter())
RANKED = {"writer": TensorDictMaxValueWriter()}
test_what_cannot_be_ranked_is_refused = refusals(
    (RuntimeError, "tensordicts.*got Tensor", lambda: UNRANKED.add(torch.zeros(2))),
    (RuntimeError, "tensordicts.*got Tensor", lambda: UNRANKED.extend(torch.zeros(2))),
    (ValueError, "ndim=2", lambda: ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), **RANKED)),
    (ValueError, "Did you mean 'median'", lambda: TensorDictMaxValueWriter(reduction="meadian")),
)


def test_ranks_do_not_go_to_another_process():
    process = multiprocessing.get_context("spawn").Process(target=print, args=(TensorDictMaxValueWriter(),))
    with pytest.raises(RuntimeError, match="one process"):
        process.start()
    buffer = build()
    assert "process" in refusals_after_fork(lambda: buffer.extend(scored(1, 2)))[0]


def test_a_row_that_replaces_another_has_a_rank_of_its_own():
    buffer = build(3)
    buffer.extend(scored(1.0, 2, 3))
    buffer[0] = scored(9.0)[0]
    buffer[1:2] = scored(0.5)
    assert buffer.extend(scored(4.0)).tolist() == [1]  # the lowest now, though it was not written as the lowest
    assert buffer["score"].tolist() == [9, 4, 3]
    for bad, error in ((scored(float("nan"))[0], DataError), (TensorDict(row=torch.tensor(1.0)), MissingKeyError)):
        with pytest.raises(error, match="TensorDictMaxValueWriter"):
            buffer[0] = bad
    assert buffer["score"].tolist() == [9, 4, 3]


def test_a_data_set_is_read_and_never_written():
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(5)), writer=ImmutableDatasetWriter(), batch_size=2)
    for write in (
        lambda: buffer.add(torch.tensor(1)),
        lambda: buffer.extend(torch.arange(2)),
        lambda: buffer.__setitem__(0, torch.tensor(9)),
        buffer.empty,
    ):
        with pytest.raises(RuntimeError, match="not written"):
            write()
    assert (buffer[:].tolist(), buffer.sample().shape) == ([0, 1, 2, 3, 4], (2,))


def test_rows_that_were_there_before_the_writer_are_ranked():
    buffer = holding(scored(5, 1, 4), LazyTensorStorage(3), kind=TensorDictReplayBuffer, batch_size=2)
    buffer.set_writer(TensorDictMaxValueWriter(rank_key="score"))
    assert buffer.extend(scored(0, 2)).tolist() == [-1, 1]


def test_an_emptied_buffer_takes_any_row_again():
    buffer = build(2)
    buffer.extend(scored(8, 9))
    buffer.empty()
    assert buffer.extend(scored(1, 2)).tolist() == [0, 1]
