"""A broadcast to workers in other processes: it arrives, and one that hangs ends the update for all others in time."""

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from llmrl.errors import RolloutError, WeightSyncError
from llmrl.modules.llm.engines.vllm.transfer import NCCL, WeightTransfer
from llmrl.modules.llm.engines.weights import WeightSet
from llmrl.weight_update import broadcast
from llmrl.weight_update.buffers import StoredTensor
from tests.support.processes import free_port, raises_within

WEIGHTS = {name: torch.arange(1 << 21).float() + number for number, name in enumerate("abcde")}  # 8 MiB each
METADATA = {name: (tensor.dtype, tensor.shape) for name, tensor in WEIGHTS.items()}


def worker(rank, pipe):
    """The methods of `WorkerExtension` that a transfer calls, with tensors for a model."""
    loaded = {}
    while (message := pipe.recv()) is not None:
        method, arguments = message
        try:
            answer = []
            if method == "llmrl_open_buffer":
                info = arguments["info"]
                buffer = broadcast.BroadcastBuffer.open(info["size"], "cpu", info["group"], rank)
            elif method == "llmrl_receive":
                entries = [StoredTensor(*entry) for entry in arguments["stored"]]
                buffer.pass_on(arguments["start"], arguments["stop"])
                answer = buffer.damaged(entries)
                loaded |= {entry.name: buffer.read(entry).clone() for entry in entries}
            elif method == "llmrl_finish":
                answer = {"differs": [name for name in WEIGHTS if not torch.equal(loaded.pop(name), WEIGHTS[name])]}
        except WeightSyncError as error:
            answer = str(error)
        pipe.send(answer)


class Workers:
    """Two forked workers; a call raises if one of them does not answer within a second, as a health monitor does."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.pipes, ends = zip(*(context.Pipe() for _ in range(2)), strict=True)
        self.processes = [context.Process(target=worker, args=(1 + n, end), daemon=True) for n, end in enumerate(ends)]
        self.stops = None  # the call of llmrl_receive at which the second worker hangs
        for process in self.processes:
            process.start()

    def call(self, method, end, **arguments):
        if method == "llmrl_describe":
            return [{"gpu": None}] * len(self.pipes)
        if method == "llmrl_receive" and self.stops is not None:
            self.stops -= 1
            if not self.stops:
                os.kill(self.processes[1].pid, signal.SIGSTOP)
        for pipe in self.pipes:
            pipe.send((method, arguments))
        for pipe in reversed(self.pipes):
            if not pipe.poll(1 if self.stops == 0 else 30):
                raise RolloutError("http://second:8100 must answer /health")
        return [pipe.recv() for pipe in self.pipes]


@contextmanager
def two_workers(monkeypatch):
    monkeypatch.setattr(broadcast, "_PASSED_S", 20.0)  # before the fork: of the workers too
    workers = Workers()
    try:
        yield workers
    finally:
        for process in workers.processes:
            process.kill()
            process.join()


def test_a_worker_that_hangs_in_a_broadcast_is_named_and_neither_the_trainer_nor_the_other_worker_hangs(monkeypatch):
    with two_workers(monkeypatch) as workers:
        transfer = WeightTransfer(workers.call)
        settings = NCCL(buffer_bytes=1 << 24, master_port=free_port())
        for _ in range(2):  # the second through the same group
            transfer.send(WeightSet(METADATA, [WEIGHTS]), float("inf"), settings)
        workers.stops = 2
        with raises_within(15, RolloutError, "http://second:8100 must answer"):
            transfer.send(WeightSet(METADATA, [WEIGHTS]), float("inf"), settings)
        [survivor, _] = workers.pipes
        assert survivor.poll(40)
        assert (answer := survivor.recv()) == [] or "all 3 members of its group: rank 1 got" in answer

        workers.stops, workers.pipes = None, workers.pipes[:1]
        again = NCCL(buffer_bytes=1 << 24, master_port=free_port())
        transfer.send(WeightSet(METADATA, [WEIGHTS]), float("inf"), again)


def test_a_source_does_not_wait_and_may_go_on_with_its_tensor():
    port, found = free_port(), torch.zeros(3)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(broadcast.stateless_init_process_group, "127.0.0.1", port, 1, 2)
        source = broadcast.stateless_init_process_group("127.0.0.1", port, 0, 2)
        other = joining.result(30)
    tensor = torch.ones(3)
    source.broadcast(tensor)
    tensor.zero_()
    other.broadcast(found)
    assert found.tolist() == [1, 1, 1]
    source.finish()
    source.abort()
    with pytest.raises(WeightSyncError, match="this group has ended"):
        source.broadcast(tensor)
