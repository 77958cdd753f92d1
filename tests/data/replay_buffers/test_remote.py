"""Buffers behind remote references of torch RPC: real processes, and what is said when one of them does not answer."""

import functools
import multiprocessing
import os
import signal
import threading
import warnings

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import FileStore, autograd, rpc

from llmrl.data.replay_buffers import (
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RemoteBuffer,
    RemoteTensorDictReplayBuffer,
    SamplerWithoutReplacement,
)
from llmrl.errors import DeadlineError, WorkerError
from tests.support.buffers import check_errors_of_proxies, check_priorities_of_proxies, check_proxy
from tests.support.buffers import numbered as rows

pytestmark = pytest.mark.slow
DEADLINE_S = 90.0
NAMES = ["trainer", "owner", "other"]


class BufferNode(RemoteTensorDictReplayBuffer):
    """What users of remote buffers write: a class whose constructor builds the parts where it is called."""

    def __init__(self, capacity: int) -> None:
        super().__init__(storage=LazyTensorStorage(capacity), sampler=SamplerWithoutReplacement(), batch_size=4)


def join_rpc(name: str, folder: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=DEADLINE_S)
    rpc.init_rpc(name, rank=NAMES.index(name), world_size=len(NAMES), rpc_backend_options=options)


def serve(name: str, folder: str, end) -> None:
    torch.set_num_threads(1)
    join_rpc(name, folder)
    end.poll(10 * DEADLINE_S)
    rpc.shutdown(graceful=False)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("rpc"))
    context = multiprocessing.get_context("spawn")
    ends = {name: context.Pipe() for name in NAMES[1:]}
    others = {name: context.Process(target=serve, args=(name, folder, ends[name][1]), daemon=True) for name in ends}
    for process in others.values():
        process.start()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # init_rpc does, not we
        join_rpc(NAMES[0], folder)
    yield others
    rpc.shutdown(graceful=False)
    for ours, _ in ends.values():
        ours.send("end")
    for process in others.values():
        process.join(DEADLINE_S)


def pid(buffer) -> int:
    return os.getpid()


def sleep_past(buffer, event_s: float) -> None:
    threading.Event().wait(event_s)


def extend_from_elsewhere(buffer: RemoteBuffer, first: int) -> int:
    buffer.extend(rows(first, 5))
    return os.getpid()


def test_a_buffer_is_used_where_it_is(processes, tmp_path):
    make = functools.partial(LazyTensorStorage, 20)
    buffer = RemoteTensorDictReplayBuffer.on(
        "owner", storage=make, sampler=SamplerWithoutReplacement, batch_size=4, timeout_s=DEADLINE_S
    )
    assert buffer.apply(pid) == processes["owner"].pid
    buffer.load_state_dict(check_proxy(buffer, tmp_path))
    assert buffer.append_transform(negate) is buffer
    assert buffer[1]["number"] == -1
    assert "owner" in repr(buffer)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        len(buffer)


def negate(batch: TensorDict) -> TensorDict:
    return batch.set("number", -batch["number"])


def test_plain_references_work_in_both_of_their_forms(processes):
    rref = rpc.remote("owner", BufferNode, args=(10,))
    assert rref.rpc_sync().extend(rows(0, 6)).tolist() == list(range(6))
    assert len(rref.rpc_sync().sample(4)) == 4
    assert rpc.rpc_sync(rref.owner(), BufferNode.add, args=(rref, rows(6, 1)[0])) == 6
    assert rpc.rpc_sync(rref.owner(), BufferNode.extend, args=(rref, rows(7, 2))).tolist() == [7, 8]
    batch = rpc.rpc_sync(rref.owner(), RemoteTensorDictReplayBuffer.sample, args=(rref, 4))
    assert torch.equal(batch["number"], batch["index"])
    assert rpc.rpc_sync(rref.owner(), BufferNode.__len__, args=(rref,)) == 9
    assert len(RemoteBuffer(rref, timeout_s=DEADLINE_S)) == 9


def test_several_processes_write_one_buffer_at_the_same_time(processes):
    buffer = RemoteTensorDictReplayBuffer.on("owner", storage=functools.partial(LazyTensorStorage, 100), batch_size=8)
    waits = [
        rpc.rpc_async("other", extend_from_elsewhere, args=(buffer, 100 * number), timeout=DEADLINE_S)
        for number in range(8)
    ]
    mine = torch.cat([buffer.extend(rows(-100 * number, 5)) for number in range(1, 5)])
    assert {wait.wait() for wait in waits} == {processes["other"].pid}
    assert len(buffer) == buffer.write_count == 60
    numbers = buffer["number"]
    assert sorted(numbers.tolist()) == sorted(
        number for start in (*range(0, 800, 100), *range(-400, 0, 100)) for number in range(start, start + 5)
    )
    assert torch.equal(numbers[mine], torch.cat([rows(-100 * number, 5)["number"] for number in range(1, 5)]))
    assert torch.equal(buffer["next", "reward"], numbers / 2)


def test_priorities_and_ragged_rows_travel(processes):
    buffer = RemoteTensorDictReplayBuffer.on(
        "owner",
        storage=functools.partial(LazyStackStorage, 10),
        sampler=functools.partial(PrioritizedSampler, 10, 1.0, 1.0, eps=0.0),
        batch_size=6,
    )
    check_priorities_of_proxies(buffer)


def test_errors_of_the_buffer_reach_the_caller_unchanged(processes):
    buffer, note = check_errors_of_proxies(functools.partial(RemoteTensorDictReplayBuffer.on, "owner"))
    assert "In the other process" in note
    with pytest.raises(ValueError, match="positive"):
        RemoteBuffer(buffer.rref, timeout_s=0)


def test_an_answer_that_does_not_come_in_time_names_the_process(processes):
    buffer = RemoteTensorDictReplayBuffer.on("owner", timeout_s=DEADLINE_S)
    buffer.timeout_s = 0.2
    with pytest.raises(DeadlineError, match=r"'owner'.*timeout_s=0\.2"):
        buffer.apply(sleep_past, 10.0)
    with pytest.raises(WorkerError, match="'nobody'"):
        RemoteTensorDictReplayBuffer.on("nobody", timeout_s=1.0)


def ask_in_two_groups(folder: str, end) -> None:
    for name in ("first", "second"):
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=DEADLINE_S)
        store = FileStore(f"{folder}/{name}", 1)
        autograd._init(0)
        rpc._init_rpc_backend(store=store, name=name, rank=0, world_size=1, rpc_backend_options=options)
        try:
            end.send(len(RemoteTensorDictReplayBuffer.on(name, timeout_s=DEADLINE_S)))
        except WorkerError as error:
            end.send(str(error))
        rpc.shutdown(graceful=False)


def test_a_second_group_of_one_process_is_refused_by_name(tmp_path):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ask_in_two_groups, args=(str(tmp_path), theirs), daemon=True)
    process.start()
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == 0
    assert ours.poll(DEADLINE_S)
    assert "another group of torch.distributed.rpc before: got 'first'" in ours.recv()
    process.join(DEADLINE_S)


def test_the_end_of_the_process_is_an_error_before_the_deadline(processes):
    """Last in this file: the process does not come back."""
    buffer = RemoteTensorDictReplayBuffer.on("other", timeout_s=DEADLINE_S)
    os.kill(processes["other"].pid, signal.SIGKILL)
    processes["other"].join(DEADLINE_S)
    with pytest.raises(WorkerError, match="'other'"):
        len(buffer)
