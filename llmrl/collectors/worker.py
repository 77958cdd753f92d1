"""A collector's worker: a collector controlled by another process, its owner.

The owner sends pickled requests ``(name, *arguments)`` through a `Connection`, and receives ``(name, *values)``:
"ready", "batch", "reply" or "error". The worker collects one batch for each credit granted by the owner, so that it
never collects more than the owner has room for. Between two steps it applies new weights, and handles pauses and its
end.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from llmrl.collectors.base import DataCollectorBase
from llmrl.concurrency import parent_watchdog
from llmrl.data.ted_utils import leaf_keys
from llmrl.envs.batched import Declared
from llmrl.envs.parallel_worker import SharedRows
from llmrl.envs.step import next_seed

AHEAD = 2  # the most batches of one worker that the owner has requested and not taken
_WORK = ("grant", "run", "share")  # requests to handle after a pause; the owner waits for answers to all others
PRODUCED, DELIVERED, STOP = 0, 1, 2  # columns of the counters that owner and worker share, int64[workers, 3]


@dataclass
class Recipe:
    """The arguments from which a worker is built.

    collector  builds the collector, given the interruptor
    index      number of this worker, of ``count`` workers
    schemes    weight synchronisation by model id, with the worker's end of the connection
    threads    number of torch's threads in the worker
    """

    collector: Callable[[Any], DataCollectorBase]
    index: int
    count: int
    schemes: Mapping[str, tuple[Any, Any]]
    threads: int
    seed: int


class Closed(Exception):
    """The owner has closed the connection, or told the worker to end."""


class WorkerLoop:
    """Answers the requests of one owner; ``counters`` is this worker's row of the shared ones."""

    def __init__(self, connection: Connection, recipe: Recipe, counters: Tensor):
        self._connection, self._counters = connection, counters.numpy()
        self.collector: Any = recipe.collector(SimpleNamespace(collection_stopped=lambda: bool(self._counters[STOP])))
        self.collector.number_trajectories(recipe.index, recipe.count)
        self.collector.before_step = self._before_step
        self._later: deque[tuple[Any, ...]] = deque()  # requests that arrived during a batch
        self._pauses = 0  # begun and not ended
        self._credits = 0  # batches that it may collect; -1: no limit
        self._tells = True  # sends every batch; False: the owner only reads the counters
        self._slots: SharedRows | None = None
        self._slot = 0  # last slot written
        self._versions: dict[int, int | str] = {}  # sender's version -> policy version, of weights not yet received
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)
        self._receivers: dict[str, Any] = {}
        self._models: dict[int, str] = {}  # model ids by the file descriptor on which their weights arrive
        for model_id, (scheme, end) in recipe.schemes.items():
            self._receive_weights(model_id, scheme, end)

    def _receive_weights(self, model_id: str, scheme: Any, end: Any) -> None:
        """Receives weights of this model from now on; the owner announces weights that arrive on no `Connection`."""
        receiver = self._receivers[model_id] = scheme.create_receiver()
        receiver.set_context(self.collector, model_id)
        receiver.register_model(self.collector.policy if model_id == "policy" else model_id)
        receiver.register_worker_transport(end)
        if isinstance(end, Connection):
            self._poller.register(end.fileno(), select.POLLIN)
            self._models[end.fileno()] = model_id

    def run(self) -> None:
        """Handles requests and collects batches, until the owner closes."""
        self._send("ready", self.collector.spec)
        try:
            while True:
                while self._later or not self._credits:
                    self._handle(self._later.popleft() if self._later else self._next_request())
                self._deliver(self.collector.collect())
        except Closed:
            pass

    def end(self) -> None:
        self._counters[PRODUCED] = self.collector.counters["produced"]
        self.collector.shutdown()

    def _deliver(self, batch: TensorDictBase) -> None:
        frames = self.collector.frames_taken
        self._counters[PRODUCED] = self.collector.counters["produced"]
        out = self.collector.deliver(batch)
        # After the rows are in the buffer: if the worker is killed in between, it counted too few, never too many.
        self._counters[DELIVERED] += frames
        self._credits -= self._credits > 0  # -1 stays: no limit
        if self._tells:
            on_device = out is not None and out.device is not None and out.device.type != "cpu"
            self._tell(frames, out.cpu() if on_device else out)

    def _tell(self, frames: int, batch: TensorDictBase | None) -> None:
        """Sends a batch: in shared memory, if it has the shapes of the first batch, else in the message."""
        if self._slots is not None and batch is not None and shape_of(batch) == self._slots.declared:
            # The owner requests at most AHEAD batches, and copies one before it requests another: this slot is free.
            self._slot = (self._slot + 1) % AHEAD
            for key, column in self._slots.columns.items():
                column[self._slot].copy_(batch.get(key))
            self._send("batch", frames, self._slot)
        else:
            self._send("batch", frames, batch)

    # -- between two steps ---------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        self._counters[PRODUCED] = self.collector.counters["produced"]
        # Reads all pending messages, so that requests sent before this step are handled before it.
        while events := self._poller.poll(0):
            self._attend({descriptor for descriptor, _ in events})

    def _attend(self, descriptors: set[int]) -> None:
        """Handles requests before weights, because a request announces the version of the weights that follow it."""
        if self._connection.fileno() in descriptors:
            self._note(self._read())
            return
        for descriptor in descriptors:
            self._take_weights(self._models[descriptor])

    def _take_weights(self, model_id: str, timeout: float = 0.0) -> None:
        # Steps of the current batch may hold views of the weights that are about to be overwritten.
        self.collector.detach_steps()
        version = self._receivers[model_id].receive(timeout)
        if version is not None and model_id == "policy":
            self.collector.set_version(self._versions.pop(version))

    def _pause(self) -> None:
        """Takes no step until the owner resumes it; meanwhile applies weights and answers requests."""
        self._pauses += 1
        # Pauses may be nested: this one has ended when fewer are active than at its start.
        depth = self._pauses
        self._send("reply", None)
        while self._pauses >= depth:
            self._attend({descriptor for descriptor, _ in self._poller.poll()})
            # The owner may wait for answers during its pause, so only requests for work are left for later.
            while self._later and self._later[-1][0] not in _WORK:
                self._handle(self._later.pop())

    def _note(self, request: tuple[Any, ...]) -> None:
        name, *arguments = request
        if name == "close":
            raise Closed
        if name == "pause":
            self._pause()
        elif name == "resume":
            self._pauses -= 1
        elif name == "version":
            number, version = arguments
            if number is None:
                self.collector.set_version(version)
            else:
                self._versions[number] = version
        elif name == "weights":
            [model_id] = arguments
            self._take_weights(model_id, self._receivers[model_id].scheme.timeout)
            self._send("weights", model_id)
        else:
            self._later.append(request)

    # -- between two batches -------------------------------------------------------------------------------------------

    def _next_request(self) -> tuple[Any, ...]:
        """Waits for a request; applies weights meanwhile."""
        while not self._later:
            self._attend({descriptor for descriptor, _ in self._poller.poll()})
        return self._later.popleft()

    def _handle(self, request: tuple[Any, ...]) -> None:
        name, *arguments = request
        if name == "grant":
            self._credits += 1
        elif name == "run":
            self._tells, [self._credits] = False, arguments
        elif name == "share":
            [self._slots] = arguments
        elif name == "set_seed":
            torch.manual_seed(arguments[0])
            self._send("reply", self.collector.set_seed(*arguments))
        else:
            self._send("reply", getattr(self.collector, name)(*arguments))

    def _read(self) -> tuple[Any, ...]:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise Closed from None

    def _send(self, *message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))


def shape_of(batch: TensorDictBase) -> dict[Any, Declared] | None:
    """Shape and dtype of every entry by key; None if an entry is not a tensor of fixed shape."""
    if type(batch) is not TensorDict:
        return None
    found = {}
    for key in leaf_keys(batch):
        value = batch.get(key)
        if not isinstance(value, Tensor) or value.is_nested:
            return None
        found[key] = Declared(value.shape, value.dtype)
    return found


def serve(connection: Connection, owner: int, recipe: Recipe, counters: Tensor) -> None:
    """Main function of a worker process on the owner's machine; returns when the owner closes or ends."""
    parent_watchdog.follow(owner)
    direct(connection, recipe, lambda: WorkerLoop(connection, recipe, counters))


def direct(connection: Connection, recipe: Recipe, make_loop: Callable[[], WorkerLoop]) -> None:
    """Runs a worker's loop until the owner closes. Errors are sent to the owner with their tracebacks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C and then closes
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    random.seed(recipe.seed)
    np.random.seed(next_seed(recipe.seed))
    loop: WorkerLoop | None = None
    try:
        loop = make_loop()
        loop.run()
    except (Exception, SystemExit) as error:
        report(connection, error)
    finally:
        if loop is not None:
            loop.end()


def report(connection: Connection, error: BaseException) -> None:
    """Sends an error to the owner."""
    # As text: the exception may not be picklable, or its class may not be importable by the owner.
    text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # the owner ended
        connection.send_bytes(pickle.dumps(("error", text, traceback.format_exc())))
