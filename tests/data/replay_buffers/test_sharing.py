"""Buffers in several processes: the same rows for all of them, or an error at the hand-over; never a silent copy."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from llmrl.data.replay_buffers.process_lock import ProcessLock
from llmrl.errors import DeadlineError, UnsupportedError
from tests.support.buffers import holding
from tests.support.processes import wait_until

FORK = multiprocessing.get_context("fork")
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # a new interpreter imports torch
METHODS = ["fork", SPAWN, pytest.param("forkserver", marks=pytest.mark.slow)]
SHARED = {"memmap": lambda: LazyMemmapStorage(21), "shared memory": lambda: LazyTensorStorage(21, shared_init=True)}
DEADLINE_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def constant(value: float) -> TensorDict:
    return TensorDict({"a": torch.full((10,), value)}, [10])


def run(method: str, target, *arguments) -> None:
    """Runs ``target`` in a process and raises what went wrong there."""
    for name in ("LAZY_LEGACY_OP", "CAPTURE_NONTENSOR_STACK", "LIST_TO_STACK"):
        if os.environ.get(name) == "None":  # tensordict leaves this behind, and cannot read it in a new interpreter
            del os.environ[name]
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(send, target, arguments))
    process.start()
    send.close()
    try:
        assert receive.poll(DEADLINE_S), "the process did not answer in time"
        error = receive.recv()
    finally:
        process.join(DEADLINE_S)
    if error is not None:
        raise error


def _report(send, target, arguments) -> None:
    try:
        target(*arguments)
        send.send(None)
    except BaseException as error:
        send.send(error)


def extend_by_ones(buffer: ReplayBuffer) -> None:
    buffer.extend(constant(1.0))


def check_zeros_and_extend(buffer: ReplayBuffer) -> None:
    assert (buffer["a"][:10] == 0).all()
    buffer.extend(constant(1.0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["memmap", "shared memory"])
def test_another_process_reads_and_writes_the_same_rows(method, kind):
    """The documented example."""
    buffer = holding(constant(0.0), SHARED[kind](), kind=TensorDictReplayBuffer)
    run(method, check_zeros_and_extend, buffer)
    assert len(buffer) == buffer.write_count == 20
    assert buffer["_data", "a"].tolist() == [0.0] * 10 + [1.0] * 10
    buffer.extend(constant(1.0))  # from where the other process stopped
    assert (len(buffer), buffer.writer.cursor) == (21, 9)
    assert buffer["a"][:10].tolist() == [1.0] * 9 + [0.0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["memmap", "shared memory"])
def test_whoever_writes_first_allocates_for_all(method, kind):
    buffer = ReplayBuffer(storage=SHARED[kind]())
    run(method, extend_by_ones, buffer)
    assert len(buffer) == 10
    assert buffer["a"].tolist() == [1.0] * 10
    buffer.extend(constant(2.0))
    assert len(buffer) == 20
    folder = buffer.storage._folder.path
    assert folder.exists()
    del buffer
    gc.collect()
    assert not folder.exists()


@dataclass
class Step:
    obs: torch.Tensor
    note: torch.Tensor | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, torch.Tensor]


def test_trees_of_any_form_are_shared():
    obs = torch.arange(3)
    for batch in (Step(obs), Step(obs, obs), Pair(obs, {"x": obs}), OrderedDict(b=obs, a=(obs, [obs])), {1: obs}):
        storage = LazyTensorStorage(4, shared_init=True)
        other = pickle.loads(pickle.dumps(storage))
        storage.set(slice(0, 3), batch)
        other.set(3, storage.get(2))
        assert str(other[:]) == str(storage[:])
        assert type(other[:]) is type(batch)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_storage_of_one_process_is_refused_at_the_hand_over(storage):
    buffer = holding(constant(0.0), storage(20))
    with pytest.raises(RuntimeError, match="LazyMemmapStorage"):
        multiprocessing.get_context("spawn").Process(target=extend_by_ones, args=(buffer,)).start()
    # fork hands over without asking: the first write says so, and the rows here are what they were
    with pytest.raises(RuntimeError, match=r"share\(\) before the fork"):
        run("fork", extend_by_ones, buffer)
    assert len(buffer) == 10


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_copy_of_a_buffer_of_one_process_has_rows_and_draws_of_its_own(storage, copied):
    sampler = PrioritizedSampler(20, alpha=1.0, beta=1.0)
    buffer = holding(constant(0.0), storage(20), kind=TensorDictReplayBuffer, sampler=sampler, batch_size=3, prefetch=1)
    buffer.sample()
    other = copied(buffer)
    assert torch.equal(other.sample()["index"], buffer.sample()["index"])
    other.extend(constant(1.0))
    other[0] = TensorDict(a=torch.tensor(7.0))
    assert (len(buffer), len(other), buffer.writer.cursor, other.writer.cursor) == (10, 20, 10, 0)
    assert [float(row["a"]) for row in (buffer[0], other[0], other[9], other[19])] == [0.0, 7.0, 0.0, 1.0]
    lone = copied(buffer.storage)
    lone.set(0, TensorDict(a=torch.tensor(7.0), index=torch.tensor(0)))
    assert float(buffer[0]["a"]) == 0.0
    assert float(lone.get(0)["a"]) == 7.0
    buffer.close()
    other.close()


def test_what_cannot_be_shared_is_refused():
    for storage in (ListStorage(3), LazyStackStorage(3)):
        with pytest.raises(UnsupportedError, match="Python objects"):
            ReplayBuffer(storage=storage).share()
    with_text = LazyTensorStorage(3)
    with_text.set(0, TensorDict(a="text"))
    with pytest.raises(UnsupportedError, match="text"):
        with_text.share()
    assert not with_text.shared
    assert with_text.get(0)["a"] == "text"
    with pytest.raises(RuntimeError, match="private"):
        ReplayBuffer(storage=LazyTensorStorage(3), shared=True).share(False)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(3), batch_size=1, prefetch=1)
    with pytest.raises(RuntimeError, match="prefetch"):
        multiprocessing.get_context("spawn").Process(target=extend_by_ones, args=(buffer,)).start()
    buffer.close()


def test_a_pickle_outlives_its_owner_with_a_clear_error():
    buffer = holding(constant(3.0), LazyMemmapStorage(20))
    pickled = pickle.dumps(buffer)
    again = pickle.loads(pickled)
    assert again["a"].tolist() == [3.0] * 10
    del buffer
    gc.collect()
    assert again["a"].tolist() == [3.0] * 10  # what is mapped stays
    with pytest.raises(RuntimeError, match="owner"):
        pickle.loads(pickled)


def hold(lock: ProcessLock, send) -> None:
    with lock:
        send.send("held")
        time.sleep(DEADLINE_S)


def test_a_lock_is_waited_for_until_the_deadline_and_released_by_the_death_of_its_holder(tmp_path):
    lock = ProcessLock(tmp_path / "lock", timeout_s=0.05)
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(lock, send))
    process.start()
    assert receive.poll(DEADLINE_S)
    with pytest.raises(DeadlineError, match=f"process {process.pid} holds"), lock:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    with lock, lock:
        pass


def file_is_free(path) -> bool:
    other = ProcessLock(path, timeout_s=0.0)
    other.hand_over()
    try:
        with other:
            return True
    except DeadlineError:
        return False


def enter_as(lock: ProcessLock, number: int, send) -> None:
    with lock:
        send.send(number)


def test_processes_enter_a_lock_in_the_order_in_which_they_came(tmp_path):
    lock = ProcessLock(tmp_path / "lock", timeout_s=DEADLINE_S)
    receive, send = FORK.Pipe(duplex=False)
    lock.hand_over()
    with lock:
        processes = [FORK.Process(target=enter_as, args=(lock, number, send)) for number in range(5)]
        for number, process in enumerate(processes):
            process.start()
            wait_until(lambda count=number + 2: (tmp_path / "lock").read_bytes()[0] >= count)  # it is in the queue
        os.kill(processes[2].pid, signal.SIGKILL)
        processes[2].join(DEADLINE_S)
    assert [receive.recv() for _ in range(4)] == [0, 1, 3, 4]
    for process in processes:
        process.join(DEADLINE_S)


def write_by_threads(buffer: ReplayBuffer, first: int, send) -> None:
    """Four threads of a forked process, which all find the lock as it was inherited."""
    start, errors = threading.Barrier(4), []

    def write(number: int) -> None:
        try:
            start.wait(DEADLINE_S)
            for _ in range(5):
                buffer.extend(TensorDict(a=torch.full((3,), float(number)), batch_size=[3]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(first + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    send.send(errors)


@pytest.mark.parametrize("kind", ["tensor", "memmap"])
def test_four_forked_writers_with_threads_all_write(kind):
    allocation = TensorDict(a=torch.zeros(240), batch_size=[240])
    buffer = ReplayBuffer(
        storage=TensorStorage(allocation, filled=False) if kind == "tensor" else LazyMemmapStorage(240)
    )
    buffer.share()
    receive, send = FORK.Pipe(duplex=False)
    writers = [FORK.Process(target=write_by_threads, args=(buffer, 4 * n, send)) for n in range(4)]
    for process in writers:
        process.start()
    assert [receive.recv() for _ in writers if receive.poll(DEADLINE_S)] == [[]] * 4
    for process in writers:
        process.join(DEADLINE_S)
    assert buffer["a"].view(-1, 3).sort(0).values.unique_consecutive(return_counts=True, dim=0)[1].tolist() == [5] * 16


def try_to_enter(lock: ProcessLock, send) -> None:
    try:
        with lock:
            send.send("entered")
    except DeadlineError:
        send.send("late")


@pytest.mark.parametrize("where", ["this thread", "another thread"])
@pytest.mark.parametrize("how", ["fork", "pickle"])
def test_a_lock_handed_over_from_inside_keeps_the_other_process_out(tmp_path, where, how):
    lock = ProcessLock(tmp_path / "lock", timeout_s=0.3 if where == "this thread" else DEADLINE_S)
    inside, leave = threading.Event(), threading.Event()

    def hold_it() -> None:
        with lock:
            inside.set()
            leave.wait(DEADLINE_S)

    receive, send = FORK.Pipe(duplex=False)

    def hand_over():
        other = pickle.loads(pickle.dumps(lock)) if how == "pickle" else lock
        process = FORK.Process(target=try_to_enter, args=(other, send))
        process.start()
        return process

    with lock:
        assert file_is_free(tmp_path / "lock")  # no other process has it
    if where == "this thread":
        with lock, lock:
            process = hand_over()
            assert not file_is_free(tmp_path / "lock")
            process.join(DEADLINE_S)
        assert receive.recv() == "late"
    else:  # the hand-over waits for the other thread to leave
        thread = threading.Thread(target=hold_it)
        thread.start()
        assert inside.wait(DEADLINE_S)
        threading.Timer(0.05, leave.set).start()
        hand_over().join(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert leave.is_set()
        assert receive.recv() == "entered"
    with lock:
        assert not file_is_free(tmp_path / "lock")
    assert file_is_free(tmp_path / "lock")


# --- rows with checksums ---

CAPACITY, BATCH = 256, 32


def checked_rows(writer: int, first: int) -> TensorDict:
    """Every entry of a row is a function of the writer and the row's number."""
    number = torch.arange(first, first + BATCH)
    value = writer * 10**9 + number
    return TensorDict(
        writer=torch.full((BATCH,), writer),
        number=number,
        wide=value.unsqueeze(1) * torch.arange(1, 65),
        next=TensorDict(check=value * 31 % 1_000_003, batch_size=[BATCH]),
        batch_size=[BATCH],
    )


def check_rows(batch: TensorDict) -> None:
    value = batch["writer"] * 10**9 + batch["number"]
    assert torch.equal(batch["wide"], value.unsqueeze(1) * torch.arange(1, 65))
    assert torch.equal(batch["next", "check"], value * 31 % 1_000_003)


def write_until(buffer: ReplayBuffer, writer: int, stop, counts) -> None:
    torch.set_num_threads(1)
    first = 0
    while not stop.is_set():
        buffer.extend(checked_rows(writer, first))
        first += BATCH
    counts[writer] = first


def stress(method: str, make, seconds: float, batches: int) -> None:
    context = multiprocessing.get_context(method)
    buffer = ReplayBuffer(storage=make(CAPACITY), batch_size=64)
    stop, counts = context.Event(), context.Array("q", 2)
    writers = [context.Process(target=write_until, args=(buffer, number, stop, counts)) for number in range(2)]
    for process in writers:
        process.start()
    try:
        deadline, seen, read = time.monotonic() + DEADLINE_S + seconds, set(), 0
        until = time.monotonic() + seconds
        while (time.monotonic() < until or read < batches or len(seen) < 2) and time.monotonic() < deadline:
            if len(buffer) == 0:
                time.sleep(0.001)
                continue
            batch = buffer.sample()
            check_rows(batch)
            seen |= set(batch["writer"].tolist())
            read += 1
    finally:
        stop.set()
        for process in writers:
            process.join(DEADLINE_S)
    assert [process.exitcode for process in writers] == [0, 0]
    assert read >= batches
    assert seen == {0, 1}
    assert buffer.write_count == counts[0] + counts[1]
    assert len(buffer) == CAPACITY
    content = buffer[:]
    check_rows(content)
    for writer in range(2):  # of each writer, the newest rows are there, in order
        numbers = content["number"].roll(-buffer.writer.cursor)[content["writer"].roll(-buffer.writer.cursor) == writer]
        assert numbers.numel() == 0 or numbers[-1] == counts[writer] - 1
        assert torch.equal(numbers, numbers.sort().values)


def test_two_writers_and_a_reader_never_see_half_a_row():
    stress("fork", LazyMemmapStorage, 0.3, 50)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_two_writers_and_a_reader_for_five_seconds_each(method):
    stress(method, lambda size: LazyTensorStorage(size, shared_init=True), 5.0, 500)


def test_a_pickled_sampler_holds_no_shared_memory_and_its_parts_still_share_one_generator():
    ensemble = ReplayBufferEnsemble(
        *(holding(constant(number), LazyMemmapStorage(21)) for number in (0.0, 1.0)),
        generator=torch.Generator().manual_seed(3),
        batch_size=4,
    )
    ensemble.sample()
    content = ForkingPickler.dumps(ensemble.sampler.samplers)
    assert b"rebuild_storage" not in bytes(content)
    first, second = pickle.loads(content)
    assert first.generator is second.generator
    assert torch.equal(first.generator.get_state(), ensemble.sampler.generator.get_state())


def die_in_mid_write(buffer: ReplayBuffer, write) -> None:
    """Kills this process when half of the columns are written."""
    storage = buffer.storage
    columns = storage._columns[:1]

    def half(index, leaves, count):
        for column, leaf in zip(columns, leaves, strict=False):
            column[index] = leaf
        os.kill(os.getpid(), signal.SIGKILL)

    storage._write = half
    write(buffer)


def pairs(value: int, count: int) -> TensorDict:
    return TensorDict(a=torch.full((count,), value), b=torch.full((count, 2), float(value)), batch_size=[count])


@pytest.mark.parametrize("kind", ["memmap", "shared memory"])
@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.extend(pairs(2, 5)),
        lambda buffer: buffer.extend(pairs(2, 12)),  # past the end of the ring
        lambda buffer: buffer.add(pairs(2, 1)[0]),
        lambda buffer: buffer.__setitem__(torch.tensor([3, 20, 3]), pairs(2, 3)),
        lambda buffer: buffer.__setitem__(20, pairs(2, 1)[0]),
    ],
    ids=["extend", "wrap", "add", "set", "set one"],
)
def test_rows_that_a_killed_writer_was_replacing_are_as_before(kind, write):
    buffer = holding(pairs(1, 21), SHARED[kind](), kind=ReplayBuffer, batch_size=2)
    buffer.extend(pairs(1, 15))
    process = FORK.Process(target=die_in_mid_write, args=(buffer, write))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    assert buffer.storage.counters.replaced
    assert buffer[:]["a"].tolist() == [1] * 21
    assert buffer[:]["b"].tolist() == [[1.0, 1.0]] * 21
    write(buffer)
    assert (buffer[:]["a"] == buffer[:]["b"][:, 0]).all()


def make_and_die(send) -> None:
    storage = LazyTensorStorage(21, shared_init=True)
    storage.set(slice(0, 10), constant(1.0))
    send.send(storage.folder)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_buffer_removes_the_memory_of_a_killed_owner_and_of_no_other():
    other = LazyTensorStorage(21, shared_init=True)
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=make_and_die, args=(send,))
    process.start()
    folder = receive.recv()
    process.join(DEADLINE_S)
    assert folder.exists()
    del process
    third = LazyTensorStorage(21, shared_init=True)
    assert not folder.exists()
    assert other.folder.exists()
    assert third.folder.exists()


def test_a_buffer_of_factories_is_built_where_it_is_used():
    buffer = ReplayBuffer(storage=LazyStackStorage, delayed_init=True)
    elsewhere = pickle.loads(pickle.dumps(buffer))
    elsewhere.extend(constant(1.0))
    assert (len(elsewhere), len(buffer)) == (10, 0)
    assert isinstance(buffer.storage, LazyStackStorage)
