"""The worker process of a `ParallelEnv`: `serve` makes the env and answers requests; `SharedRows` is shared memory.

Requests and replies are single bytes on a pipe. After `MESSAGE`, a pickled one follows: a request is ``(method,
arguments)``, a reply ``(True, result)`` or ``(False, (error, traceback))``. Declared entries are in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from llmrl.concurrency import parent_watchdog
from llmrl.data.ragged.tensordicts import bare_tensordict, entry
from llmrl.envs.base import EnvBase
from llmrl.envs.batched import Declared, describe, keyed, restart
from llmrl.envs.td_ops import any_row

_ALIGNMENT = 64  # bytes; a complex128 view needs 16, which TensorDict.consolidate() does not guarantee
MESSAGE, STEP, STEP_AND_RESTART, CLOSE, DONE, RESTARTED = b"m", b"s", b"r", b"c", b"d", b"R"
_METHODS = {STEP: "step", STEP_AND_RESTART: "step_and_restart"}


class SharedRows:
    """A tensor [num_rows, *shape] for each declared entry. A process that receives it gets the same memory."""

    def __init__(self, declared: Mapping[NestedKey, Declared], num_rows: int):
        self.declared, self._num_rows = dict(declared), num_rows
        self._places: dict[NestedKey, slice] = {}
        end = 0
        for key, (shape, dtype) in declared.items():
            size = num_rows * shape.numel() * dtype.itemsize
            self._places[key] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        # One block for all entries: each block costs every process a file descriptor and startup time.
        self._block = torch.zeros(max(end, 1), dtype=torch.uint8).share_memory_()

    @property
    def columns(self) -> dict[NestedKey, Tensor]:
        """The tensors by key; new views at each access."""
        return {
            key: self._block[self._places[key]].view(dtype).view(self._num_rows, *shape)
            for key, (shape, dtype) in self.declared.items()
        }


_Cell = tuple[NestedKey, Declared, Tensor, np.ndarray | None]


def _cells(shared: SharedRows, row: int) -> list[_Cell]:
    """Returns the entries of one env, also as arrays if numpy has the dtype."""
    cells: list[_Cell] = []
    for key, column in shared.columns.items():
        array = None if column.dtype == torch.bfloat16 else column[row].numpy()
        cells.append((key, shared.declared[key], column[row], array))
    return cells


class _Worker:
    """One env, its latest result, and its row of the shared memory; the methods are the requests."""

    def __init__(self, env: EnvBase):
        self.env = env
        self._last: TensorDictBase | None = None

    def share(self, inputs: SharedRows, outputs: SharedRows, roots: SharedRows, row: int) -> None:
        self._inputs = {key: column[row] for key, column in inputs.columns.items()}
        self._outputs, self._roots = _cells(outputs, row), _cells(roots, row)
        self._resets = [cell for cell in self._outputs if cell[0] in roots.columns]
        read, written = ({key: array for key, _, _, array in cells} for cells in (_cells(inputs, row), self._outputs))
        self._step_in_place = self.env._array_step(read, written)

    def step(self) -> None:
        """Takes a step, reading and writing shared memory."""
        self._take_step()

    def step_and_restart(self) -> bytes | None:
        """Takes a step and restarts the rows that are done, in one request."""
        if not self._take_step():
            return None
        done = None if self._step_in_place is not None else entry(self._last, "done")
        given = bare_tensordict({} if done is None or done.all() else {"_reset": done}, self.env.batch_size)
        self._last = restart(self.env, given, self._last)
        self._write(self._roots)
        return RESTARTED

    def _take_step(self) -> bool:
        if self._step_in_place is not None:
            return self._step_in_place()
        values = {key: value.clone() for key, value in self._inputs.items()}  # the env may keep what it gets
        self._step(keyed(values, self.env.batch_size))
        self._write(self._outputs)
        return any_row(entry(self._last, "done"))

    def step_row(self, td: TensorDictBase, shared: bool) -> TensorDictBase | None:
        """Takes a step on entries from a message; writes shared memory, or returns the result for the reply."""
        self._step(td)
        return self._write(self._outputs) if shared else self._last

    def restart(self, given: TensorDictBase | None, shared: bool) -> TensorDictBase | None:
        self._last = restart(self.env, given, self._last)
        return self._write(self._resets) if shared else self._last

    def restart_fresh(self, shared: bool) -> TensorDictBase | None:
        self._last = self.env._start(None)
        return self._write(self._resets) if shared else self._last

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.env, method)(*arguments)

    def _step(self, td: TensorDictBase) -> None:
        self._last = self.env._transition(td if self.env.device is None else td.to(self.env.device))

    def _write(self, cells: Sequence[_Cell]) -> None:
        last = self._last
        for key, declared, row, array in cells:
            value = declared.of(last, key)
            if array is None or not value.is_cpu:
                row.copy_(value)
            else:
                array[...] = value.numpy()  # for small entries, a third of the time of copy_


def serve(requests: Connection, replies: Connection, owner: int, recipe: bytes, seed: int) -> None:
    """The main function of the process: makes the env with the pickled function ``recipe`` and answers requests until
    the owner closes or exits. ``seed`` seeds the global generators, which would be equal in forked processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C and then closes the workers
    parent_watchdog.follow(owner)
    torch.set_num_threads(1)  # one core per env; also, a forked process cannot use its parent's threads
    torch.set_grad_enabled(False)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    worker: _Worker | None = None

    def make() -> dict[str, Any]:
        nonlocal worker
        env = cloudpickle.loads(recipe)()
        description = describe(env)
        worker = _Worker(env)
        return description

    with contextlib.suppress(EOFError, ConnectionError):  # the owner has exited
        _reply(replies, make)
        while worker is not None and (request := os.read(requests.fileno(), 1)) not in (CLOSE, b""):
            method, arguments = requests.recv() if request == MESSAGE else (_METHODS[request], ())
            _reply(replies, getattr(worker, method), *arguments)
    if worker is not None:
        worker.env.close()


def _reply(replies: Connection, act: Callable[..., Any], *arguments: Any) -> None:
    try:
        result = act(*arguments)
        if result is None or result is RESTARTED:
            os.write(replies.fileno(), result or DONE)
            return
        message = pickle.dumps((True, result))
    except (Exception, SystemExit) as error:  # the owner raises it and closes this process
        text = f"{type(error).__name__}: {error}"
        message = pickle.dumps((False, (text, traceback.format_exc())))
    os.write(replies.fileno(), MESSAGE)  # after pickling, so that an unpicklable result is an error, not half a reply
    replies.send_bytes(message)
