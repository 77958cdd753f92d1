"""A worker process on any machine: connects to its owner and collects until the owner closes."""

from __future__ import annotations

import contextlib
import pickle
import select
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.distributed.links import Link, packed
from llmrl.collectors.distributed.rendezvous import Address, connect
from llmrl.collectors.worker import Recipe, WorkerLoop, direct, report, shape_of
from llmrl.concurrency import parent_watchdog


class RemoteLoop(WorkerLoop):
    """A worker's loop that shares no memory with the owner: batches and weights are sent through a link, the frame
    counter by messages.
    """

    def __init__(self, connection: Connection, recipe: Recipe, link: Link):
        self._link, self._recipe = link, recipe
        self._told_at, self._number = 0.0, 0
        connected = Recipe(recipe.collector, recipe.index, recipe.count, {}, recipe.threads, recipe.seed)
        super().__init__(connection, connected, torch.zeros(3, dtype=torch.int64))
        self._tell_every_s = min(1.0, self.collector.options.timeout_s / 4)

    def _handle(self, request: tuple[Any, ...]) -> None:
        if request[0] != "join":
            super()._handle(request)
            return
        self._link.join(self._recipe.index + 1, self.collector)
        for model_id, (scheme, _) in self._recipe.schemes.items():
            self._receive_weights(model_id, scheme, self._link.owner(model_id))
        self._send("reply", None)

    def _before_step(self) -> None:
        if time.monotonic() - self._told_at > self._tell_every_s:
            self._tell_progress()
        super()._before_step()

    def _tell(self, frames: int, batch: TensorDictBase | None) -> None:
        self._tell_progress()
        if batch is None or shape_of(batch) is None:
            self._send("batch", frames, batch)
            return
        self._number += 1
        posted, memory = packed(batch, self._number)
        self._link.post(posted.number, memory, lambda: self._send("batch", frames, posted))

    def _tell_progress(self) -> None:
        self._told_at = time.monotonic()
        self._send("progress", self.collector.counters["produced"])

    def end(self) -> None:
        with contextlib.suppress(OSError):  # the owner ended
            self._tell_progress()
        super().end()


def serve(address: Address, index: int | None = None) -> None:
    """Runs a worker of the owner at ``address`` until that closes or ends; ``index`` None: the owner chooses it."""
    connection = connect(address, index)
    data = connection.recv_bytes()
    parent_watchdog.exit_after(connection.fileno(), select.POLLRDHUP)  # when the owner has closed or ended
    try:
        recipe, link = pickle.loads(data)
    except Exception as error:  # modules of the recipe are missing on this machine
        report(connection, error)
        return
    direct(connection, recipe, lambda: RemoteLoop(connection, recipe, link))
    link.close()
