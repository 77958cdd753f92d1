"""What holds for a buffer whatever its parts: documented forms, no aliasing, no broadcasting, exact counters."""

import inspect
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pytest
import torch
from tensordict import TensorDict
from torch._dynamo.testing import CompileCounter

from llmrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSliceSampler,
    RandomSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from llmrl.errors import DataError, MissingKeyError, UnsupportedError
from tests.support.buffers import holding, rows


@dataclass
class Step:
    obs: torch.Tensor
    extra: dict


def test_a_write_transform_runs_before_rows_are_written():
    """The documented recipe: a batch [2, 3] is stored as six rows. What is given as transform runs on reads."""
    data = TensorDict(a=torch.arange(6).view(2, 3), batch_size=[2, 3])
    buffer = holding(data, write_transform=lambda td: td.reshape(-1), batch_size=4)
    assert (len(buffer), len(buffer.sample()), buffer["a"].tolist()) == (6, 4, [0, 1, 2, 3, 4, 5])
    literal = holding(data, transform=lambda td: td.reshape(-1))
    assert (len(literal), len(literal.sample(5))) == (2, 15)


def test_an_epoch_ends_for_every_sampler():
    for sampler, sizes in ((RandomSampler(), [4, 4, 4]), (SamplerWithoutReplacement(), [4, 4, 2])):
        buffer = holding(rows(*range(10)), sampler=sampler, batch_size=4)
        for _ in range(2):
            assert [len(batch) for batch in buffer.epoch()] == sizes
    endless = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=2)  # a RandomSampler has no passes
    endless.extend(rows(1, 2, 3))
    assert [len(batch) for batch in islice(endless, 9)] == [2] * 9


def test_the_path_of_a_container_may_begin_with_data():
    buffer = holding(TensorDict(a=torch.arange(3), next=TensorDict(b=torch.arange(3)), batch_size=[3]))
    assert torch.equal(buffer["_data", "a"], buffer["a"])
    assert torch.equal(buffer["_data", "next", "b"], buffer["next", "b"])
    with pytest.raises(MissingKeyError, match=r"\('next', 'bb'\).*Did you mean 'b'"):
        buffer["next", "bb"]


def test_reading_a_full_buffer_twice_in_place_gives_the_same():
    def double(batch):
        batch["a"].mul_(2)
        batch.rename_key_("a", "b")
        return batch

    for storage in (LazyTensorStorage(3), LazyMemmapStorage(3), LazyStackStorage(3), ListStorage(3)):
        buffer = holding(rows(1, 2, 3), storage, transform=double)
        assert [buffer[:]["b"].tolist() for _ in range(3)] == [[2, 4, 6]] * 3


def test_dataclasses_are_rows_in_every_storage_of_trees(tmp_path):
    for make in (ListStorage, LazyTensorStorage, LazyMemmapStorage):
        buffer, loaded = ReplayBuffer(storage=make(4)), ReplayBuffer(storage=make(4))
        buffer.extend(Step(obs=torch.arange(3), extra={"x.y": torch.arange(3) * 2.0}))
        buffer.dumps(tmp_path)
        loaded.loads(tmp_path)
        for each in (buffer, loaded):
            assert len(each) == 3
            row = each[1]
            assert isinstance(row, Step)
            assert (row.obs, row.extra["x.y"]) == (1, 2.0)


def test_rows_of_named_dimensions_are_stored():
    data = TensorDict(a=torch.arange(3), next=TensorDict(a=torch.arange(3), batch_size=[3]), batch_size=[3])
    data.names = ["time"]
    for storage in (LazyTensorStorage(4), ListStorage(4), LazyStackStorage(4)):
        buffer = holding(data, storage)
        assert buffer["next", "a"].tolist() == [0, 1, 2]


def test_a_batch_of_the_wrong_length_is_not_broadcast():
    for storage in (LazyTensorStorage(4), LazyStackStorage(4), ListStorage(4)):
        storage.set(slice(0, 3), rows(1, 2, 3))
        with pytest.raises((DataError, IndexError), match=r"one (row per )?position"):
            storage.set(slice(0, 3), rows(9))
        assert [int(row["a"]) for row in storage.get(slice(0, 3))] == [1, 2, 3]


def test_one_entry_is_read_without_the_others():
    for storage in (LazyTensorStorage(4), LazyStackStorage(4), ListStorage(4)):
        data = TensorDict(a=torch.arange(3), next=TensorDict(done=torch.zeros(3, 1), batch_size=[3]), batch_size=[3])
        storage.set(slice(0, 3), data)
        assert storage.entry("a", torch.tensor([2, 0])).tolist() == [2, 0]
        assert storage.entry(("next", "done"), torch.tensor([1])).shape == (1, 1)
        with pytest.raises(MissingKeyError, match=r"\('next', 'don'\).*Did you mean 'done'"):
            storage.entry(("next", "don"), torch.tensor([0]))
        storage.entry("a", torch.tensor([0, 1])).fill_(-1)
        assert storage.entry("a", torch.tensor([0, 1])).tolist() == [0, 1]


def test_every_change_of_the_content_moves_the_count_of_mutations():
    changes = (
        lambda buffer: buffer.extend(rows(1, 2)),
        lambda buffer: buffer.add(rows(3)[0]),
        lambda buffer: buffer.__setitem__(0, rows(7)[0]),
        lambda buffer: buffer.load_state_dict(buffer.state_dict()),
        lambda buffer: buffer.empty(),
    )
    for storage in (LazyTensorStorage(4), LazyStackStorage(4), ListStorage(4)):
        buffer = ReplayBuffer(storage=storage)
        seen = [storage.counters.mutations]
        for change in changes:
            change(buffer)
            seen.append(storage.counters.mutations)
        assert seen == sorted(set(seen))


def test_counters_do_not_overflow():
    buffer = holding(rows(1, 2, 3), LazyTensorStorage(4))
    buffer.storage.counters.write_count = 2**40
    buffer.extend(rows(4, 5))
    assert buffer.write_count == 2**40 + 2


def test_one_row_of_a_batch_does_not_keep_the_batch_in_memory():
    big = LazyStackStorage(64)
    big.set(slice(0, 64), TensorDict(a=torch.rand(64, 100), batch_size=[64]))
    for position in range(1, 64):  # all but one are replaced, one by one
        big.set(position, TensorDict(a=torch.rand(100)))
    assert big._rows[0].leaves[0].untyped_storage().nbytes() == 400


def test_a_compiled_function_writes_and_reads_a_buffer_without_being_compiled_again():
    for storage, writer in (
        (LazyTensorStorage(8, compilable=True), RoundRobinWriter(compilable=True)),
        (LazyStackStorage(8, compilable=True), TensorDictMaxValueWriter(rank_key="a", compilable=True)),
    ):
        buffer = ReplayBuffer(storage=storage, writer=writer, batch_size=2, compilable=True)
        counter = CompileCounter()

        @torch.compile(backend=counter)
        def write_and_read(data, buffer=buffer):
            data = data + 1
            buffer.extend(data)
            buffer.add(data[0])
            return buffer.sample()["a"] * 2

        frames = []
        for number in range(4):
            assert write_and_read(rows(number, number + 1).float()).shape == (2,)
            frames.append(counter.frame_count)
        assert frames[1:] == frames[1:2] * 3
        assert len(buffer) == 8
    torch.compiler.reset()


def test_compilable_is_taken_by_all_parts():
    for make in (ListStorage, LazyMemmapStorage):
        assert make(3, compilable=True).max_size == 3
    assert TensorStorage(torch.zeros(3), compilable=True).max_size == 3
    assert TensorDictRoundRobinWriter(compilable=True)
    assert ReplayBuffer(writer=ImmutableDatasetWriter(compilable=True), compilable=True).write_count == 0


def test_include_info_is_taken_with_a_warning():
    buffer = holding(rows(1, 2), LazyTensorStorage(4), kind=TensorDictReplayBuffer, batch_size=2)
    with pytest.warns(DeprecationWarning, match="include_info is deprecated"):
        assert "index" in buffer.sample(include_info=False)


def test_what_a_buffer_does_not_support_is_refused():
    with pytest.raises(UnsupportedError, match=r"consolidated=True.*call consolidate\(\)"):
        LazyTensorStorage(3, consolidated=True)
    with pytest.raises(UnsupportedError, match=r"attached.*mark_update"):
        LazyTensorStorage(3, consolidated=False).attach(ReplayBuffer())
    with pytest.raises(ValueError, match="shared buffer"):
        ReplayBuffer(prefetch=1, batch_size=1, shared=True)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="pin_memory"):
            ReplayBuffer(pin_memory=True)


MASSES = {"alpha": 0.7, "beta": 0.9}


@pytest.mark.parametrize(
    ("make", "arguments", "meant"),
    [
        (ReplayBuffer, {"storage": ListStorage, "batchsize": 4}, "'batch_size'"),
        (ReplayBuffer, {"prefetch_timeout": 4}, "'prefetch_timeout_s'"),
        (TensorDictReplayBuffer, {"batchsize": 4}, "'batch_size'"),
        (TensorDictReplayBuffer, {"priorty_key": "error"}, "'priority_key'"),
        (RemoteTensorDictReplayBuffer, {"priorty_key": "error"}, "'priority_key'"),
        (PrioritizedReplayBuffer, {**MASSES, "epsilon": 1e-6}, "'eps'"),
        (PrioritizedReplayBuffer, {**MASSES, "dtypes": torch.float64}, "'dtype'"),
        (TensorDictPrioritizedReplayBuffer, {**MASSES, "reducton": "mean"}, "'reduction'"),
        (ReplayBufferEnsemble, {"colate_fn": list}, "'collate_fn'"),
        (ReplayBufferEnsemble, {"prefetch": 2}, None),  # of other buffers
        (SliceSampler, {"slice_length": 2}, "'slice_len'"),
        (SliceSamplerWithoutReplacement, {"slice_len": 2, "droplast": True}, "'drop_last'"),
        (partial(PrioritizedSliceSampler, 10, 1.0, 1.0), {"slice_len": 2, "reducton": "mean"}, "'reduction'"),
    ],
)
def test_a_misspelt_argument_is_answered_with_the_name_that_was_meant(make, arguments, meant):
    name, wrong = getattr(make, "func", make).__name__, list(arguments)[-1]
    end = "" if meant is None else rf" Did you mean {meant}\?"
    with pytest.raises(TypeError, match=rf"^{name}: .*got {wrong!r}\.{end}$"):
        make(**arguments)


def test_help_shows_the_arguments_of_a_constructor():
    arguments = inspect.signature(ReplayBuffer).parameters
    assert list(arguments)[:3] == ["storage", "sampler", "writer"]
    assert all(each.kind is each.KEYWORD_ONLY for each in arguments.values())


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_write_that_replaces_its_own_rows_is_told(storage):
    buffer = ReplayBuffer(storage=storage(4))
    rows = TensorDict(a=torch.arange(6), batch_size=[6])
    with pytest.warns(UserWarning, match=r"6 rows were written at once into a storage of 4: the first 2 are lost"):
        buffer.extend(list(rows.unbind(0)) if storage is ListStorage else rows)
    assert sorted(int(row["a"]) for row in buffer.storage[:]) == [2, 3, 4, 5]
