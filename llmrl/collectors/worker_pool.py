"""The owner's side of worker processes: starts them, sends them requests and receives their batches.

If a worker raises, ends or hangs, all are ended. The error names the worker, and every later call raises it again.
"""

from __future__ import annotations

import abc
import contextlib
import multiprocessing
import os
import pickle
import select
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.collectors.worker import AHEAD, DELIVERED, PRODUCED, Recipe, serve, shape_of
from llmrl.concurrency.process_monitor import end_process, process_state, wait_for_exit
from llmrl.envs.batched import keyed
from llmrl.envs.parallel_worker import SharedRows
from llmrl.errors import DeadlineError, LLMRLError, WorkerError

START_S = 120.0  # for processes to start and to make their envs, on a busy machine
CLOSE_S = 5.0  # for envs to close; then their processes are killed
_SMALL = 16_384  # bytes that fit into an empty pipe


class Worker:
    """The owner's side of one worker process."""

    def __init__(self, index: int, process: Any, connection: Connection):
        self.index, self.process, self.connection = index, process, connection
        self.where = f"process {process.pid}"  # for messages
        self.batches: deque[tuple[int, TensorDictBase | None]] = deque()  # arrived, with their frames
        self.replies: deque[Any] = deque()
        self.spec: dict[str, Any] | None = None
        self.slots: SharedRows | None = None
        self._writing: threading.Thread | None = None  # writes the latest large request
        self.due = 0  # batches granted but not arrived
        self.seen, self.since = 0, time.monotonic()  # its frame counter, and when that last changed

    def begin(self) -> None:
        """Restarts the worker's progress timeout before a request, unless the worker is busy."""
        if not self.due:
            self.since = time.monotonic()

    @property
    def ahead(self) -> int:
        """Number of batches that the owner has requested and not taken yet."""
        return self.due + len(self.batches)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when the worker has sent a message or has ended."""
        return [self.connection.fileno(), self.process.sentinel]

    def state(self) -> str:
        """The state of its process, for messages."""
        wait_for_exit(self.process, 1.0)
        return f"its process {process_state(self.process)}"

    def finish(self, deadline: float) -> None:
        """Waits for the end of a worker that was told to close, and kills it at the deadline."""
        end_process(self.process, max(0.0, deadline - time.monotonic()))
        self.connection.close()

    def take_in(self, frames: int, batch: TensorDictBase | int | None) -> None:
        """Stores a batch, given itself or its slot in shared memory. The first batch determines the memory's layout."""
        if isinstance(batch, int):
            values = {key: column[batch] for key, column in self.slots.columns.items()}
            batch = keyed(values, self._size)
            batch.names = [*[None] * (len(self._size) - 1), "time"]
        # The first batch arrives in a message; later ones of the same shapes arrive in shared memory.
        elif batch is not None and self.slots is None and (declared := shape_of(batch)):
            self.slots, self._size = SharedRows(declared, AHEAD), batch.batch_size
            with contextlib.suppress(OSError):
                self._post(bytes(ForkingPickler.dumps(("share", self.slots))))  # pickle would copy the shared memory
        self.batches.append((frames, batch))

    def send(self, *request: Any) -> None:
        self._post(pickle.dumps(request))

    def _post(self, data: bytes) -> None:
        """Sends large data in a thread: the worker reads between two steps, and may first block on sending a batch.
        Requests that follow are sent in threads that wait for this one, in order.
        """
        before = self._writing
        if len(data) > _SMALL or (before is not None and before.is_alive()):
            self._writing = threading.Thread(target=self._write, args=[data, before], daemon=True)
            self._writing.start()
        else:
            self._write(data)

    def _write(self, data: bytes, before: threading.Thread | None = None) -> None:
        if before is not None:
            before.join()
        with contextlib.suppress(OSError):  # the worker has ended: the next `wait` reports it
            self.connection.send_bytes(data)


class FailingPool(abc.ABC):
    """Base of pools whose workers all end if one fails."""

    _who: str
    is_open: bool
    is_started = False  # in the background
    delivered = 0  # frames that the owner has taken; in the background the workers count instead
    failure: BaseException | None = None

    def check_open(self, what: str) -> None:
        if self.failure is not None:
            raise type(self.failure)(str(self.failure)) from self.failure
        if not self.is_open:
            raise WorkerError(f"{self._who}: must be open to {what}: it was shut down.")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Ends all workers if the block raises; later calls raise the error again."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too: late replies would be mistaken for those to the next request
            self.failure = error if isinstance(error, LLMRLError) else None
            self.close(0.0)
            raise

    @property
    def counters(self) -> dict[str, int]:
        """Frames: "produced" = "delivered" + "dropped" (those of unfinished batches at the end of the collection)."""
        produced, delivered = self._counted()
        delivered = delivered if self.is_started else self.delivered
        return {"produced": produced, "delivered": delivered, "dropped": 0 if self.is_open else produced - delivered}

    @abc.abstractmethod
    def _counted(self) -> tuple[int, int]:
        """Frames that the workers have produced, and frames that they have delivered."""

    @abc.abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """Ends the workers; those that have not ended within ``timeout_s`` are killed."""


class WorkerPool(FailingPool):
    """A process for each recipe.

    ``who`` names the collector in messages; ``counters`` int64[workers, 3] are shared with the workers. A busy worker
    whose frame counter does not change for ``timeout_s`` has failed.
    """

    def __init__(self, who: str, recipes: Sequence[Recipe], counters: Tensor, timeout_s: float):
        self._who, self._counters, self._timeout_s = who, counters, timeout_s
        self.workers: list[Worker] = []
        self.arrivals: list[Worker] = []  # the worker of each batch that arrived, in order of arrival
        self._asked = False  # True while workers, even those without a batch, must answer a request
        self._is_closing = False
        self.tick: Callable[[], None] = lambda: None  # called repeatedly while the pool waits
        self._end = Finalize(self, _end, [self.workers], exitpriority=10)
        with self.failing():
            self._start(recipes)

    def _start(self, recipes: Sequence[Recipe]) -> None:
        for recipe in recipes:
            ours, theirs = multiprocessing.Pipe()
            process = start_worker(serve, [theirs, os.getpid(), recipe, self._counters[recipe.index]], recipe.index)
            for end in (theirs, *(end for _, end in recipe.schemes.values())):
                end.close()  # only the worker keeps its end open, so its death closes the connection
            self.workers.append(Worker(recipe.index, process, ours))
        self.wait(lambda: all(worker.spec is not None for worker in self.workers), "make its env", START_S)

    def wait(
        self, is_done: Callable[[], bool], what: str, limit_s: float | None = None, also: Sequence[Connection] = ()
    ) -> None:
        """Receives workers' messages until ``is_done()``, which is checked after each, and when there is data on
        ``also``. Busy workers must make progress.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        poller = select.poll()
        at = {}
        for worker in self.workers:
            for descriptor in worker.descriptors:
                poller.register(descriptor, select.POLLIN)
                at[descriptor] = worker
        for connection in also:
            poller.register(connection.fileno(), select.POLLIN)
        with self.failing():
            while not is_done():
                # Wakes up at least ten times a second, to check that the workers still take steps.
                ready = {at[descriptor].index for descriptor, _ in poller.poll(100) if descriptor in at}
                for index in sorted(ready):
                    self._receive(self.workers[index], what)
                self.tick()
                self._check_progress(what, limit_s)

    def _receive(self, worker: Worker, what: str) -> None:
        try:
            if not worker.connection.poll():  # only the sentinel is ready: the process has ended
                raise EOFError
            name, *values = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise WorkerError(f"{self.name(worker)} must {what}: {worker.state()}.") from None
        worker.since = time.monotonic()
        if name == "error":
            raise WorkerError(f"{self.name(worker)} must {what}: it raised {values[0]}\n\n{values[1]}")
        if name == "ready":
            [worker.spec] = values
        elif name == "reply":
            worker.replies.append(values[0])
        elif name == "progress":
            self._counters[worker.index, PRODUCED] = values[0]
        elif name == "batch":
            worker.due -= 1
            worker.take_in(*values)
            self.arrivals.append(worker)

    def _check_progress(self, what: str, limit_s: float) -> None:
        now = time.monotonic()
        for worker in self.workers:
            # Every step counts as progress, so that a batch may take any time.
            produced = int(self._counters[worker.index, PRODUCED])
            is_idle = worker.spec is not None and not worker.due and not self._asked
            if produced != worker.seen or is_idle:
                worker.seen, worker.since = produced, now
            if now - worker.since > limit_s:
                raise DeadlineError(
                    f"{self.name(worker)} must {what}: it has done nothing for {limit_s:g} s, and its process "
                    f"{process_state(worker.process)}; raise timeout_s if a step of the env takes longer."
                )

    def name(self, worker: Worker) -> str:
        return f"{self._who}: worker {worker.index} of {len(self.workers)} ({worker.where})"

    def ask(
        self, name: str, arguments: Sequence[Sequence[Any]] | None = None, workers: Sequence[Worker] | None = None
    ) -> list[Any]:
        """Sends a request to each worker with its own arguments, and returns the answers. Workers may be in a batch."""
        workers = self.workers if workers is None else workers
        arguments = [()] * len(workers) if arguments is None else arguments
        self.check_open(name)
        for worker, given in zip(workers, arguments, strict=True):
            worker.begin()
            worker.send(name, *given)
        self._asked = True
        try:
            self.wait(lambda: all(worker.replies for worker in workers), f"answer {name!r}")
        finally:
            self._asked = False
        return [worker.replies.popleft() for worker in workers]

    def grant(self, worker: Worker) -> None:
        """Requests a batch."""
        worker.begin()
        worker.due += 1
        worker.send("grant", 1)

    def _counted(self) -> tuple[int, int]:
        return tuple(self._counters[:, [PRODUCED, DELIVERED]].sum(0).tolist())

    @property
    def is_open(self) -> bool:
        return self._end.still_active()

    def close(self, timeout_s: float | None = None) -> None:
        if self.is_open:
            self._is_closing = True
            _end(self.workers, CLOSE_S if timeout_s is None else timeout_s)
            self._end.cancel()

    def watch(self) -> None:
        """Starts a thread that warns if a worker ends unexpectedly."""
        threading.Thread(target=self._watch, name="llmrl-collector-watch", daemon=True).start()

    def _watch(self) -> None:
        ended_sentinels = wait([worker.process.sentinel for worker in self.workers])
        if not self._is_closing:
            ended = next(worker for worker in self.workers if worker.process.sentinel in ended_sentinels)
            warnings.warn(f"{self.name(ended)} has ended; the next call of the collector reports why.", stacklevel=1)


class Packed:
    """A value that cloudpickle pickles when a process is started: a shared buffer cannot be pickled at other times."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (cloudpickle.dumps(self.value),)


def _unpacked(data: bytes) -> Packed:
    return Packed(cloudpickle.loads(data))


def start_worker(serve: Callable[..., None], arguments: Sequence[Any], index: int) -> Any:
    """Starts a process of ``serve`` without running the main module again: cloudpickle sends its objects by value."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])  # so that a worker starts in milliseconds
    process = context.Process(target=serve, args=arguments, name=f"llmrl-collector-{index}")
    # Without these names the child cannot find the main module, and so does not run the user's script again.
    main = sys.modules["__main__"]
    saved = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        process.start()
    finally:
        vars(main).update(saved)
    return process


def _end(workers: Sequence[Worker], close_s: float = CLOSE_S) -> None:
    """Makes the workers close their envs, and kills those that have not ended within ``close_s`` seconds."""
    for worker in workers:
        worker.send("close")
    # Waits only after the loop above, so that all workers close their envs at the same time.
    deadline = time.monotonic() + close_s
    for worker in workers:
        worker.finish(deadline)
