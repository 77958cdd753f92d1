"""`RemotePool`, the owner's side of workers that may run on other machines."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from queue import Empty
from typing import Any

from torch import Tensor

from llmrl.collectors.distributed.launchers import Job, Launch
from llmrl.collectors.distributed.links import Link, Posted, unpacked
from llmrl.collectors.distributed.rendezvous import Rendezvous
from llmrl.collectors.worker import PRODUCED, Recipe
from llmrl.collectors.worker_pool import START_S, Worker, WorkerPool
from llmrl.concurrency.process_monitor import end_process
from llmrl.errors import DeadlineError, WorkerError


class _RemoteWorker(Worker):
    """The owner's side of a worker on any machine; ``connection`` is None until the worker connects."""

    def __init__(self, index: int, process: Any, counters: Tensor):
        super().__init__(index, process, None)
        self._counters = counters
        self.where = "not connected yet"
        self.fetch: Callable[[Posted], Tensor] | None = None

    @property
    def descriptors(self) -> list[int]:
        return [self.connection.fileno()]

    def state(self) -> str:
        if not isinstance(self.process, Job):
            return super().state()
        self.process.join(1.0)
        return self.process.describe()

    def take_in(self, frames: int, batch: Any) -> None:
        self.batches.append((frames, unpacked(batch, self.fetch(batch)) if isinstance(batch, Posted) else batch))

    def send(self, *request: Any) -> None:
        if self.connection is not None and not self.connection.closed:
            super().send(*request)

    def finish(self, deadline: float) -> None:
        """Reads all messages, so that the worker does not block on sending, and updates its frame counter."""
        with contextlib.suppress(OSError, EOFError):
            while self.connection is not None and self.connection.poll(max(0.0, deadline - time.monotonic())):
                name, *values = pickle.loads(self.connection.recv_bytes())
                if name == "progress":
                    self._counters[PRODUCED] = values[0]
        if self.connection is not None:
            self.connection.close()  # ends even a worker that hangs
        if not (isinstance(self.process, Job) and self.process.is_foreign):
            end_process(self.process, max(0.5, deadline - time.monotonic()))


class RemotePool(WorkerPool):
    """Workers that connect to this process, and join a link with it.

    ``launch`` starts a worker's process, given the address of ``rendezvous`` and an index; all must connect within
    ``start_timeout_s``.
    """

    def __init__(
        self,
        who: str,
        recipes: Sequence[Recipe],
        counters: Tensor,
        timeout_s: float,
        *,
        rendezvous: Rendezvous,
        link: Link,
        launch: Launch,
        start_timeout_s: float,
    ):
        self._rendezvous, self.link = rendezvous, link
        self._launch, self._start_timeout_s = launch, start_timeout_s
        self._closing = Finalize(self, _close, [rendezvous, link], exitpriority=9)  # after the workers
        super().__init__(who, recipes, counters, timeout_s)

    def _start(self, recipes: Sequence[Recipe]) -> None:
        try:
            for recipe in recipes:
                process = self._launch(self._rendezvous.address, recipe.index)
                self.workers.append(_RemoteWorker(recipe.index, process, self._counters[recipe.index]))
            deadline = time.monotonic() + self._start_timeout_s
            while missing := [worker for worker in self.workers if worker.connection is None]:
                self._welcome(missing, recipes, deadline)
        finally:
            self._rendezvous.close()
        self.wait(lambda: all(worker.spec is not None for worker in self.workers), "make its env", START_S)
        self._join()

    def _welcome(self, missing: Sequence[Any], recipes: Sequence[Recipe], deadline: float) -> None:
        try:
            index, where, connection = self._rendezvous.arrivals.get(timeout=0.1)
        except Empty:
            for worker in missing:
                if worker.process.exitcode is not None:
                    raise WorkerError(f"{self.name(worker)} must connect to its owner: {worker.state()}.") from None
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.name(missing[0])} must connect to {self._rendezvous.address} within "
                    f"{self._start_timeout_s:g} s: it has not. Its machine must be able to reach that address; raise "
                    "start_timeout_s for jobs that wait in a queue."
                ) from None
            return
        worker = missing[0] if index is None else self.workers[index]
        worker.connection, worker.where, worker.since = connection, where, time.monotonic()
        worker.fetch = lambda posted, rank=worker.index + 1: self._fetch(rank, posted)
        # Sent only after the worker has proved that it has the key: recipes hold pickled code and data.
        connection.send_bytes(pickle.dumps((recipes[worker.index], self.link)))

    def _join(self) -> None:
        failures: list[Exception] = []

        def join() -> None:
            try:
                self.link.join(0)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=join, name="llmrl-join", daemon=True)  # `wait` detects failed workers
        thread.start()
        for worker in self.workers:
            # All must join at the same time: the group exists only once the last one has joined.
            worker.send("join")
        self._asked = True
        self.wait(
            lambda: bool(failures) or (not thread.is_alive() and all(worker.replies for worker in self.workers)),
            "join the others",
            START_S,
        )
        self._asked = False
        if failures:
            raise failures[0]
        for worker in self.workers:
            worker.replies.clear()

    def _fetch(self, rank: int, posted: Posted) -> Tensor:
        worker = self.workers[rank - 1]
        try:
            return self.link.fetch(rank, posted, self._timeout_s)
        except RuntimeError as error:  # torch's error for a peer that has ended does not name the worker
            raise WorkerError(f"{self.name(worker)} must send a batch: {worker.state()} ({error}).") from error

    def close(self, timeout_s: float | None = None) -> None:
        super().close(timeout_s)
        self._closing()


def _close(rendezvous: Rendezvous, link: Link) -> None:
    rendezvous.close()
    link.close()
