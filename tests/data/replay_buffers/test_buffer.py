"""Buffers: documented forms, transforms, no aliasing, exact counters, prefetching, whatever their parts are."""

import threading
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch._dynamo.testing import CompileCounter

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
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
)
from llmrl.errors import CheckpointError, DataError, DeadlineError, UnsupportedError
from tests.support.buffers import holding, rows
from tests.support.refusals import refusals


class Doubling:
    """On writes x 2, on reads + 1."""

    def __init__(self):
        self.seen = 0

    def __call__(self, td):
        td["a"] += 1
        return td

    def inv(self, td):
        self.seen += 1
        return td.clone().set("a", td["a"] * 2)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_pytree_has_one_row_per_leading_index(storage):
    data = {"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}, "x.y": torch.zeros(3, 0)}
    buffer = holding(data, storage(10))
    read, row = buffer[:], buffer[1]
    assert (len(buffer), row["a"]["b"], row["a"]["c"][1][0].shape) == (3, data["a"]["b"][1], (10,))
    assert torch.equal(read["a"]["b"], data["a"]["b"])
    assert (read["a"]["c"][1][0].shape, read["x.y"].shape) == ((3, 10), (3, 0))
    assert torch.equal(buffer.storage.entry(("a", "b"), torch.tensor([2, 0])), data["a"]["b"][[2, 0]])
    with pytest.raises(RuntimeError, match="one leading size"):
        buffer.extend({**data, "x.y": torch.zeros(2, 0)})


def test_next_returns_none_once_at_the_end_of_each_pass():
    buffer = holding(rows(1, 2, 3), sampler=SamplerWithoutReplacement(), batch_size=2)
    sizes = [None if (batch := buffer.next()) is None else len(batch) for _ in range(6)]
    assert sizes == [2, 1, None, 2, 1, None]


def test_transforms_invert_on_writes_and_run_on_reads_and_never_touch_what_they_are_given():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=Doubling())
    given = rows(1, 2)
    buffer.extend(given)
    buffer.add(rows(3)[0])
    assert given["a"].tolist() == [1, 2]
    for _ in range(2):  # a read that changed the storage would show the second time
        assert buffer[:]["a"].tolist() == [3, 5, 7]
    buffer[0] = rows(10)[0]
    assert buffer[0]["a"] == 21


def test_a_transform_that_keeps_everything_back_writes_nothing():
    class Never:
        def __call__(self, td):
            return td

        def inv(self, td):
            return None

    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=Never())
    assert (buffer.extend(rows(1, 2)).tolist(), buffer.add(rows(1)[0]).tolist()) == ([], [])
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_writes_run_the_last_transform_first_and_invert_swaps_directions():
    class Step:
        def __init__(self, name, log):
            self.name, self.log = name, log

        def __call__(self, td):
            self.log.append(f"{self.name} read")
            return td

        def inv(self, td):
            self.log.append(f"{self.name} write")
            return td

    log = []
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=Step("b", log))
    buffer.append_transform(Step("c", log), invert=True).insert_transform(0, Step("a", log))
    buffer.extend(rows(1))
    assert log == ["c read", "b write", "a write"]
    log.clear()
    buffer.sample(1)
    assert log == ["a read", "b read", "c write"]


def test_lists_are_stacked_lazily_only_where_shapes_differ():
    buffer = holding([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))], ListStorage(10))
    assert type(buffer[:]) is TensorDict
    buffer.add(TensorDict(a=torch.ones(3)))
    assert isinstance(buffer[:], LazyStackedTensorDict)
    tensors = holding(torch.arange(3), ListStorage(10))
    assert tensors[:].tolist() == [0, 1, 2]
    assert ReplayBuffer(storage=ListStorage(10), collate_fn=tuple).extend([1]).tolist() == [0]


test_arguments_that_make_no_buffer_are_refused = refusals(
    (ValueError, "batch_size", lambda: ReplayBuffer(prefetch=2)),
    (TypeError, "exclude each other", lambda: ReplayBuffer(transform=abs, transform_factory=lambda: abs)),
    (ValueError, "drop_last", lambda: ReplayBuffer(sampler=SamplerWithoutReplacement(drop_last=True))),
    (TypeError, "got int", lambda: ReplayBuffer(storage=3)),
    (TypeError, "must be a Sampler", lambda: ReplayBuffer(sampler=ListStorage)),
    (TypeError, "callable", lambda: ReplayBuffer(transform=3)),
    (ValueError, "at least 1", lambda: ReplayBuffer(batch_size=0)),
    (TypeError, "priority_key", lambda: ReplayBuffer(priority_key="x")),
    (ValueError, "shared", lambda: ReplayBuffer(prefetch=1, batch_size=1, shared=True)),
    (UnsupportedError, "consolidated", lambda: LazyTensorStorage(3, consolidated=True)),
    (UnsupportedError, "attached", lambda: LazyTensorStorage(3, consolidated=False).attach(ReplayBuffer())),
    *([] if torch.accelerator.is_available() else [(ValueError, "pin_memory", lambda: ReplayBuffer(pin_memory=True))]),
)


def test_sampling_without_rows_or_size_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(RuntimeError, match="batch_size"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample(1)
    with pytest.raises(RuntimeError, match="at least one row"):
        buffer.extend(rows())
    sized = holding(rows(1, 2), batch_size=2)
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            sized.sample(size)
    with pytest.warns(UserWarning, match="overrules"):
        assert len(sized.sample(3)) == 3


def seeded(seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(20), batch_size=3, generator=torch.Generator().manual_seed(seed), transform=Doubling()
    )


@pytest.mark.parametrize("room", [0, 100, 500, 1000, 1500])  # for the rows, the states, the manifest
def test_a_failed_dump_leaves_the_previous_one(tmp_path, largest_file, room):
    buffer = seeded()
    buffer.extend(rows(1, 2))
    buffer.dumps(tmp_path / "buffer")
    buffer.extend(rows(3))
    with pytest.raises(CheckpointError, match=r"File too large.*make room"), largest_file(room):
        buffer.dumps(tmp_path / "buffer")
    assert [path.name for path in tmp_path.iterdir()] == ["buffer"]
    other = seeded()
    other.loads(tmp_path / "buffer")
    assert len(other) == 2


def test_the_global_seed_decides_when_no_generator_is_given():
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        buffer = holding(rows(*range(100)), LazyTensorStorage(100), sampler=RandomSampler())
        draws.append(buffer.sample(10)["a"].tolist() + buffer.sample(10)["a"].tolist())
        torch.rand(3)
    assert draws[0] == draws[1]


def test_threads_may_write_while_others_sample():
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=16)
    buffer.extend(TensorDict(a=torch.zeros(8), b=torch.zeros(8, 3), batch_size=[8]))
    failures: list[BaseException] = []

    def run(work):
        try:
            for step in range(60):
                work(step)
        except BaseException as error:
            failures.append(error)

    def write(step):
        value = float(step)
        buffer.extend(TensorDict(a=torch.full((8,), value), b=torch.full((8, 3), value), batch_size=[8]))

    def read(step):
        batch = buffer.sample()
        assert torch.equal(batch["a"].unsqueeze(1).expand(16, 3), batch["b"])

    threads = [threading.Thread(target=run, args=(work,)) for work in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures
    assert buffer.write_count == 8 + 2 * 60 * 8


@pytest.mark.parametrize(
    "sampler", [RandomSampler, SamplerWithoutReplacement, partial(PrioritizedSampler, 12, 1.0, 1.0)]
)
def test_prefetching_changes_no_batch(sampler):
    def build(prefetch):
        generator = torch.Generator().manual_seed(3)
        arguments = {"batch_size": 3, "generator": generator, "transform": lambda td: td.set("a", td["a"] + 1)}
        return ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, prefetch=prefetch, **arguments)

    plain, ahead = build(None), build(2)
    for buffer in (plain, ahead):
        buffer.extend(rows(*range(10)))
    for step in range(12):
        (batch, info), (again, other_info) = (buffer.sample(return_info=True) for buffer in (plain, ahead))
        assert torch.equal(batch["a"], again["a"])
        assert all(torch.equal(value, other_info[key]) for key, value in info.items())
        if step % 3 == 2 and "priority_weight" in info:
            for buffer in (plain, ahead):
                buffer.update_priority(info["index"], 0.5 + step)
        if step == 4:
            for buffer in (plain, ahead):
                buffer.extend(rows(*range(100, 107)))
        if step == 7:
            plain.load_state_dict(plain.state_dict())
            other = build(2)
            other.load_state_dict(ahead.state_dict())
            ahead.close()
            ahead = other
    if sampler is SamplerWithoutReplacement:
        assert [batch["a"].tolist() for batch in plain] == [batch["a"].tolist() for batch in ahead]
    ahead.close()


def test_a_transform_that_hangs_hits_the_deadline():
    release = threading.Event()

    def hang(td):
        release.wait(60)
        return td

    arguments = {"batch_size": 1, "prefetch": 1, "prefetch_timeout_s": 0.05, "transform": hang}
    buffer = holding(rows(1), **arguments)
    with pytest.raises(DeadlineError, match=r"prefetch_timeout_s=0\.05"):
        buffer.sample()
    release.set()
    buffer.close()


def test_an_error_in_a_prefetching_thread_reaches_the_caller():
    def fail(td):
        raise ArithmeticError("in the transform")

    buffer = holding(rows(1), batch_size=1, prefetch=1, transform=fail)
    with pytest.raises(ArithmeticError, match="in the transform"):
        buffer.sample()
    buffer.close()


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


def test_a_batch_of_the_wrong_length_is_not_broadcast():
    for storage in (LazyTensorStorage(4), LazyStackStorage(4), ListStorage(4)):
        storage.set(slice(0, 3), rows(1, 2, 3))
        with pytest.raises((DataError, IndexError), match=r"one (row per )?position"):
            storage.set(slice(0, 3), rows(9))
        assert [int(row["a"]) for row in storage.get(slice(0, 3))] == [1, 2, 3]
    buffer = holding(rows(1, 2, 3))
    with pytest.raises(DataError, match="1 rows for 2 positions"):
        buffer[1:3] = rows(7)
    assert "3 rows" in repr(buffer)


def test_one_row_of_a_batch_does_not_keep_the_batch_in_memory():
    big = LazyStackStorage(64)
    big.set(slice(0, 64), TensorDict(a=torch.rand(64, 100), batch_size=[64]))
    for position in range(1, 64):  # all but one are replaced, one by one
        big.set(position, TensorDict(a=torch.rand(100)))
    assert big._rows[0].leaves[0].untyped_storage().nbytes() == 400


@pytest.mark.slow
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


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_write_that_replaces_its_own_rows_is_told(storage):
    buffer = ReplayBuffer(storage=storage(4))
    rows = TensorDict(a=torch.arange(6), batch_size=[6])
    with pytest.warns(UserWarning, match=r"6 rows were written at once into a storage of 4: the first 2 are lost"):
        buffer.extend(list(rows.unbind(0)) if storage is ListStorage else rows)
    assert sorted(int(row["a"]) for row in buffer.storage[:]) == [2, 3, 4, 5]


def test_include_info_is_taken_with_a_warning():
    buffer = holding(rows(1, 2), LazyTensorStorage(4), kind=TensorDictReplayBuffer, batch_size=2)
    with pytest.warns(DeprecationWarning, match="include_info is deprecated"):
        assert "index" in buffer.sample(include_info=False)
