"""Ensembles: batches of several buffers, their form, their errors, and that a saved one goes on exactly."""

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterEnsemble,
)
from tests.support.buffers import holding, restore
from tests.support.buffers import numbered as rows


def members(sizes=(6, 9), buffer=TensorDictReplayBuffer, **arguments) -> list[ReplayBuffer]:
    """Member i holds the numbers 100 i, 100 i + 1, ..."""
    out = []
    for number, size in enumerate(sizes):
        out.append(buffer(storage=LazyTensorStorage(10), **{k: make() for k, make in arguments.items()}))
        if size:
            out[-1].extend(rows(100 * number, size))
    return out


def check(batch: TensorDict, index: TensorDict) -> None:
    """Every row is the one that the index names."""
    assert torch.equal(batch["number"], 100 * index["buffer_ids"] + index["index"])
    assert torch.equal(batch["next", "reward"], batch["number"] / 2)


def test_members_are_drawn_with_their_probabilities_and_rows_of_one_part_come_from_one_member():
    ensemble = ReplayBufferEnsemble(*members((6, 9, 4)), p=[0.5, 0.0, 1.5], num_buffer_sampled=4)
    ensemble.set_rng(torch.Generator().manual_seed(0))
    counts = torch.zeros(3)
    for _ in range(250):
        ids = ensemble.sample(8)["index", "buffer_ids"]
        assert ids.shape == (4, 2)
        assert torch.equal(ids[:, 0], ids[:, 1])
        counts += ids[:, 0].bincount(minlength=3)
    assert counts[1] == 0
    # 1000 draws of probability 1/4: the standard deviation is 13.7
    assert abs(counts[0] - 250) < 60


def test_the_form_of_a_batch_depends_on_the_members_and_never_on_the_draw():
    def member(storage=LazyTensorStorage, more=None, **arguments):
        return holding(rows(100, 3).update(more or {}), storage(10), TensorDictReplayBuffer, **arguments)

    for second, kind in [
        (members()[1], TensorDict),
        (member(more={"more": torch.zeros(3)}), LazyStackedTensorDict),
        (member(transform=lambda batch: batch), LazyStackedTensorDict),
        (member(storage=LazyStackStorage), LazyStackedTensorDict),
        (member(sampler=SliceSampler(slice_len=1, traj_key="number")), LazyStackedTensorDict),
    ]:
        for p in ([1, 0], [0, 1], [1, 1]):
            ensemble = ReplayBufferEnsemble(members((6,))[0], second, p=p)
            batch, info = ensemble.sample(6, return_info=True)
            assert type(batch) is kind
            assert batch.shape == (2, 3)
            check(batch, batch["index"])
            check(batch, info["index"])


def test_member_transforms_run_on_their_part_and_the_outer_one_on_the_whole():
    seen = []

    def member_transform(batch):
        seen.append(("member", batch.shape))
        return batch.set("number", batch["number"] + 1)

    def outer_transform(batch):
        seen.append(("outer", batch.shape))
        return batch.set("twice", 2 * batch["number"])

    first, second = members()
    first.append_transform(member_transform)
    ensemble = ReplayBufferEnsemble(first, second, transform=outer_transform, sample_from_all=True)
    batch = ensemble.sample(4)
    assert seen == [("member", (2,)), ("outer", (2, 2))]
    ids, positions = batch["index", "buffer_ids"], batch["index", "index"]
    assert torch.equal(batch["number"], 100 * ids + positions + (ids == 0))
    assert torch.equal(batch["twice"], 2 * batch["number"])


def test_tensors_and_trees_are_joined_too():
    tensors = [ReplayBuffer(storage=TensorStorage(torch.arange(first, first + 5))) for first in (0, 100)]
    batch, info = ReplayBufferEnsemble(*tensors).sample(6, return_info=True)
    assert torch.equal(batch, 100 * info["index", "buffer_ids"] + info["index", "index"])
    trees = [ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
    for number, member in enumerate(trees):
        member.extend({"a": (torch.arange(5) + 100 * number, torch.zeros(5, 2))})
    batch, info = ReplayBufferEnsemble(*trees).sample(6, return_info=True)
    assert torch.equal(batch["a"][0], 100 * info["index", "buffer_ids"] + info["index", "index"])
    assert batch["a"][1].shape == (2, 3, 2)
    lists = [ReplayBuffer(storage=ListStorage(5)) for _ in range(2)]
    for member in lists:
        member.extend(["a", "b", 3])
    parts = ReplayBufferEnsemble(*lists).sample(4)
    assert [len(part) for part in parts] == [2, 2]


def test_indices_name_members_and_then_rows():
    given = members((6, 9, 4))
    ensemble = ReplayBufferEnsemble(*given, p=[0.25, 0.5, 0.25])
    assert len(ensemble) == 3
    assert ensemble[1] is ensemble[-2] is ensemble[torch.tensor(1)] is given[1]
    assert ensemble[:] is ensemble[...] is ensemble[range(3)] is ensemble
    some = ensemble[[0, 2]]
    assert isinstance(some, ReplayBufferEnsemble)
    assert [some[0], some[1]] == [given[0], given[2]]
    assert some.sampler.p.tolist() == [0.5, 0.5]
    for index, length in ((slice(1), 1), (torch.tensor([0, 1]), 2), (torch.tensor([True, True, False]), 2)):
        assert len(ensemble[index]) == length
    assert ensemble[:, :3]["number"].tolist() == [[0, 1, 2], [100, 101, 102], [200, 201, 202]]
    assert (ensemble[1:, 2]["number"].tolist(), ensemble[0, 2]["number"]) == ([102, 202], 2)
    assert ensemble[[0, 2], torch.tensor([3, 1])]["number"].tolist() == [[3, 1], [203, 201]]
    everything = ensemble[:, :]
    assert [len(part) for part in everything.unbind(0)] == [6, 9, 4]
    storage, sampler, writer = ensemble.storage, ensemble.sampler, ensemble.writer
    assert storage[1] is given[1].storage
    assert storage[:, :2]["number"].tolist() == [[0, 1], [100, 101], [200, 201]]
    assert [len(part) for part in (storage[1:], sampler[1:], writer[1:])] == [2, 2, 2]
    assert sampler[2] is given[2].sampler
    assert writer[0] is given[0].writer
    for part in (ensemble, storage, sampler, writer):
        for index, error, match in (
            (1.0, TypeError, "integers"),
            (torch.tensor([1.0]), TypeError, "integers"),
            ("number", TypeError, "integers"),
            (torch.zeros(2, 2, dtype=torch.int64), RuntimeError, "one dimension"),
            (3, IndexError, "below 3"),
            (slice(3, None), IndexError, "at least one"),
            (torch.tensor([True]), IndexError, "mask"),
        ):
            with pytest.raises(error, match=match):
                part[index]


def test_rows_are_written_to_members_only():
    ensemble = ReplayBufferEnsemble(*members())
    for write in (
        lambda: ensemble.add(rows(0, 1)[0]),
        lambda: ensemble.extend(rows(0, 1)),
        lambda: ensemble.__setitem__((0, 0), rows(0, 1)[0]),
        ensemble.empty,
        lambda: ensemble.set_sampler(RandomSampler()),
        lambda: ensemble.storage.set(0, rows(0, 1)[0]),
        lambda: ensemble.writer.extend(rows(0, 1)),
    ):
        with pytest.raises(RuntimeError, match=r"ensemble\[i\]"):
            write()
    assert ensemble.write_count == 15
    ensemble[0].extend(rows(6, 2))
    assert (ensemble.write_count, ensemble[0, -1]["number"]) == (17, 7)


def test_what_cannot_be_drawn_is_an_error_and_draws_nothing():
    with pytest.raises(ValueError, match="divided"):
        ReplayBufferEnsemble(*members()).sample(9)
    ensemble = ReplayBufferEnsemble(*members((6, 0)), p=[0.999999, 0.000001])
    with pytest.raises(RuntimeError, match="member 1 has none"):
        ensemble.sample(4)
    assert ReplayBufferEnsemble(*members((6, 0)), p=[1, 0]).sample(4).shape == (2, 2)
    epochs = ReplayBufferEnsemble(*members((6, 8), sampler=SamplerWithoutReplacement), sample_from_all=True)
    epochs.sample(8)
    before = epochs.state_dict()["sampler"]
    with pytest.raises(RuntimeError, match="drop_last=True"):
        epochs.sample(8)  # member 0 has two of four rows left
    after = epochs.state_dict()["sampler"]
    assert torch.equal(before["generator"], after["generator"])
    for old, new in zip(before["samplers"], after["samplers"], strict=True):
        assert torch.equal(old["remaining"], new["remaining"])
        assert torch.equal(old["generator"], new["generator"])


def test_a_pass_ends_with_that_of_a_member():
    ensemble = ReplayBufferEnsemble(
        *members((4, 8), sampler=SamplerWithoutReplacement), sample_from_all=True, batch_size=4
    )
    for _ in range(2):  # member 1 is half through its pass when the first one ends, and goes on
        batches = [batch["number"] for batch in ensemble]
        assert len(batches) == 2
        assert sorted(torch.cat([batch[0] for batch in batches]).tolist()) == [0, 1, 2, 3]
    assert len(list(ensemble.epoch())) == 2
    endless = ReplayBufferEnsemble(*members((4, 9)), batch_size=4)
    assert len(list(endless.epoch())) == 4  # 13 rows


def test_wrong_arguments_are_refused():
    first, second = members()
    parts = {
        "storages": StorageEnsemble(first.storage, second.storage),
        "samplers": SamplerEnsemble(first.sampler, second.sampler),
        "writers": WriterEnsemble(first.writer, second.writer),
    }
    for error, match, make in [
        (TypeError, "all of storages", lambda: ReplayBufferEnsemble()),
        (TypeError, "all of storages", lambda: ReplayBufferEnsemble(storages=parts["storages"])),
        (TypeError, "their own parts", lambda: ReplayBufferEnsemble(first, **parts)),
        (TypeError, "not ensembles", lambda: ReplayBufferEnsemble(ReplayBufferEnsemble(first))),
        (TypeError, "not ensembles", lambda: StorageEnsemble(parts["storages"])),
        (TypeError, "Sampler", lambda: SamplerEnsemble(first.storage)),
        (ValueError, "at least one member", lambda: WriterEnsemble()),
        (TypeError, "exclude each other", lambda: SamplerEnsemble(RandomSampler(), p=[1], sample_from_all=True)),
        (ValueError, "every one", lambda: ReplayBufferEnsemble(first, sample_from_all=True, num_buffer_sampled=2)),
        (ValueError, "at least 1", lambda: ReplayBufferEnsemble(first, num_buffer_sampled=0)),
        (ValueError, "one non-negative number", lambda: ReplayBufferEnsemble(first, second, p=[1.0])),
        (ValueError, "one non-negative number", lambda: ReplayBufferEnsemble(first, second, p=[1.0, -1.0])),
        (ValueError, "one non-negative number", lambda: ReplayBufferEnsemble(first, second, p=[float("nan"), 1.0])),
        (ValueError, "one non-negative number", lambda: ReplayBufferEnsemble(first, second, p=[0.0, 0.0])),
        (TypeError, "that was given", lambda: ReplayBufferEnsemble(**parts, p=[1, 1])),
        (ValueError, "one part of each kind", lambda: ReplayBufferEnsemble(**parts, collate_fns=[None])),
        (ValueError, "an entry per storage", lambda: StorageEnsemble(first.storage, transforms=[None, None])),
    ]:
        with pytest.raises(error, match=match):
            make()


def test_priorities_are_given_to_the_members():
    masses = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}
    given = [TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(4), **masses) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*given, sample_from_all=True, batch_size=64)
    for number in range(2):
        ensemble[number].extend(rows(100 * number, 4))
    batch, info = ensemble.sample(return_info=True)
    assert batch["priority_weight"].shape == info["priority_weight"].shape == (2, 32)
    only = torch.tensor([[2.0], [3.0]])
    batch["td_error"] = (batch["index", "index"] == only).float()
    ensemble.update_tensordict_priority(batch)
    again = ensemble.sample()
    assert again["number"].unique().tolist() == [2, 103]
    again, info = ensemble.sample(return_info=True)
    ensemble[0].update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    ensemble.update_priority(info["index"][1:], torch.zeros(1, 32))
    ensemble[1].update_priority(0, 1.0)
    assert ensemble.sample()["number"].unique().tolist() == [0, 100]


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
@pytest.mark.parametrize(
    "sampler", [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(10, 0.7, 0.5)]
)
def test_a_loaded_ensemble_continues_with_the_same_batches(tmp_path, way, sampler):
    class Count(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, batch):
            self.calls += 1
            return batch.set("calls", self.calls.expand(batch.shape).clone())

    def build(sizes):
        given = members(sizes, sampler=sampler)
        given[0].append_transform(Count())
        return ReplayBufferEnsemble(*given, batch_size=4)

    ensemble, other = build((8, 8)), build((2, 3))
    ensemble.sample()
    for _ in range(2):
        restore(other, ensemble, tmp_path if way == "dumps" else None)
    assert [len(member) for member in (other[0], other[1])] == [8, 8]
    for _ in range(6):
        assert (ensemble.sample() == other.sample()).all()
    assert other.write_count == 16


def test_a_shared_ensemble_is_handed_over_with_its_rows():
    given = [TensorDictReplayBuffer(storage=LazyMemmapStorage(10)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*given, shared=True, sample_from_all=True)
    for number in range(2):
        ensemble[number].extend(rows(100 * number, 4))
    elsewhere = pickle.loads(pickle.dumps(ensemble))
    batch = elsewhere.sample(4)
    check(batch, batch["index"])
    elsewhere[1].extend(rows(104, 1))
    assert len(ensemble[1]) == 5
    alone = ReplayBufferEnsemble(*members())
    copied = pickle.loads(pickle.dumps(alone))
    copied[0].extend(rows(4, 1))
    assert len(copied[0]) == len(alone[0]) + 1
