"""`ParallelEnv`: several environments as one, each in its own process."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, multiprocessing

from llmrl.concurrency.process_monitor import end_process, process_state, wait_for_exit
from llmrl.concurrency.processes import poll_timeout
from llmrl.data.ragged.tensordicts import entry
from llmrl.envs.batched import BatchedEnv, MakeEnv, keyed
from llmrl.envs.parallel_worker import CLOSE, DONE, MESSAGE, RESTARTED, STEP, STEP_AND_RESTART, SharedRows, serve
from llmrl.envs.step import next_seed
from llmrl.errors import ConfigError, DeadlineError, WorkerError, check_choice

_MISSING = object()
_UNREADABLE = ("LAZY_LEGACY_OP", "CAPTURE_NONTENSOR_STACK", "LIST_TO_STACK")
_CLOSE_S = 5.0  # for environments to close before their processes are killed


class ParallelEnv(BatchedEnv):
    """`SerialEnv` with each env in its own process: the same specs, and the same values for the same seed.

    Entries go through shared memory that is laid out from the specs. Entries that `BatchedEnv` cannot stack, and
    actions whose dtype or shape differs from the declared one, are sent as messages.

    Raises  WorkerError if an env raised, with its traceback, or its process ended; DeadlineError if it did not
            reply in time. Both name the worker, and all processes have ended by then: make a new ParallelEnv

    timeout_s        seconds for one step, or one reset, of all environments
    start_timeout_s  seconds for the processes to start and make their environments
    mp_start_method  "forkserver", whose processes share imported modules; "spawn"; or "fork", which starts fastest, but
                     is unsafe after CUDA or with threads. The first two import the main module again: guard its code
                     with ``if __name__ == "__main__"``

    The other arguments are `BatchedEnv`'s. The function is pickled with cloudpickle, so it may be a lambda. Pickling a
    ParallelEnv pickles its arguments: the copy starts its own processes. The processes end on `close`, when this
    object is collected and when this process ends, however it ends.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: MakeEnv | Sequence[MakeEnv],
        *,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
        mp_start_method: str = "forkserver",
        **options: Any,
    ):
        check_choice("ParallelEnv", "mp_start_method", mp_start_method, multiprocessing.get_all_start_methods())
        if not (timeout_s > 0 and start_timeout_s > 0):
            raise ConfigError(
                f"ParallelEnv: seconds must be positive: got timeout_s={timeout_s}, start_timeout_s={start_timeout_s}."
            )
        self._times = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
        self._start_method = mp_start_method
        super().__init__(num_workers, create_env_fn, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._times, "mp_start_method": self._start_method, "device": self._given_device}
        return _remade, (self.num_workers, cloudpickle.dumps(self._makers), options)

    def close(self) -> None:
        if not self.is_closed:
            super().close()
            self._end()

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start_envs(self) -> list[dict[str, Any]]:
        self._given_device = self._device
        self._last: list[TensorDictBase | None] = [None] * self.num_workers
        self._is_started = self._restarts = self._is_restarted = False
        self._requests: list[Connection] = []
        self._replies: list[Connection] = []
        self._processes: list[Any] = []
        self._end = Finalize(self, _end, [self._processes, self._requests, self._replies], exitpriority=10)
        with self._closed_on_error():
            for name in _UNREADABLE:  # tensordict sets them to "None", which a new interpreter cannot parse
                if os.environ.get(name) == "None":
                    del os.environ[name]
            context = multiprocessing.get_context(self._start_method)
            if self._start_method == "forkserver":
                context.set_forkserver_preload([serve.__module__])  # imported once, not by each worker
            recipes = [cloudpickle.dumps(maker) for maker in self._makers]
            seed = torch.initial_seed()
            for recipe in recipes:
                seed = next_seed(seed)
                asked, asks = context.Pipe(duplex=False)
                replies, answers = context.Pipe(duplex=False)
                process = context.Process(target=serve, args=[asked, answers, os.getpid(), recipe, seed])
                process.start()
                asked.close()  # only the worker holds its ends, so its exit closes the connections
                answers.close()
                self._processes.append(process)
                self._requests.append(asks)
                self._replies.append(replies)
            self._sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
            self._pollers = [select.poll() for _ in recipes]  # each waits for one reply, or the exit of any process
            for replies, poller in zip(self._replies, self._pollers, strict=True):
                for descriptor in (replies.fileno(), *self._sentinels):
                    poller.register(descriptor, select.POLLIN)
            return self._answers(range(self.num_workers), "make its env", "start_timeout_s")

    def _adopt(self, descriptions: Sequence[dict[str, Any]]) -> None:
        with self._closed_on_error():
            super()._adopt(descriptions)
            if self._declared is None:
                return
            shared = [
                SharedRows({key: self._declared[key] for key in keys}, self.num_workers)
                for keys in (self._input_keys, self._step_keys, self._reset_keys)
            ]
            # Two result buffers: a step that restarts done envs writes its results and the roots of the next step.
            self._inputs, self._outputs, self._roots = (rows.columns for rows in shared)
            for number, requests in enumerate(self._requests):
                os.write(requests.fileno(), MESSAGE)
                requests.send(("share", (*shared, number)))
            self._answers(range(self.num_workers), "map the shared memory", "start_timeout_s")

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        requests = {number: pickle.dumps(("call", (method, *given))) for number, given in enumerate(arguments)}
        return self._ask(requests, f"answer {method}()")

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        if self._declared is not None and self._shared(td):
            requests = dict.fromkeys(range(self.num_workers), STEP_AND_RESTART if self._restarts else STEP)
        else:
            requests = self._messages("step_row", dict(enumerate(self._input_rows(td))))
        results = self._ask(requests, "take a step")
        self._is_started, self._is_restarted = True, any(result is RESTARTED for result in results)
        return self._results(results, requests, self._step_keys)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        self._restarts = True  # one round trip: a worker whose env is done restarts it right after the step
        try:
            return super().step_and_maybe_reset(tensordict)
        finally:
            self._restarts = self._is_restarted = False

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        requests: Mapping[int, bytes]
        if self._is_restarted:  # inside `step_and_maybe_reset`: the workers have already reset
            return self._read(self._roots, self._reset_keys)
        if td is None or (not self._row_batch_size and all(key == "_reset" for key in td.keys())):
            rows = range(self.num_workers)
            if self._is_started and td is not None and "_reset" in td.keys():
                rows = td.get("_reset").flatten().nonzero().flatten().tolist()
            requests = dict.fromkeys(rows, pickle.dumps(("restart_fresh", (self._declared is not None,))))
        else:
            given = self._reset_rows_given(td)
            kept = {number: row for number, row in enumerate(given) if row is not None or not self._is_started}
            requests = self._messages("restart", kept)
        results = self._ask(requests, "reset")
        self._is_started = True
        return self._results(results, requests, self._reset_keys)

    def _shared(self, td: TensorDictBase) -> bool:
        """Writes the step's inputs into shared memory; returns False if an entry does not fit."""
        for key, column in self._inputs.items():
            value = entry(td, key) if type(key) is str else td.get(key, None)
            if value is None or value.shape != column.shape or value.dtype != column.dtype:
                return False
            column.copy_(value)
        return True

    def _messages(self, method: str, rows: Mapping[int, TensorDictBase | None]) -> dict[int, bytes]:
        """Returns the pickled requests. Rows are cloned: pickling a view would pickle its whole storage."""
        shared = self._declared is not None
        return {n: pickle.dumps((method, (None if row is None else row.clone(), shared))) for n, row in rows.items()}

    def _results(
        self, results: Sequence[TensorDictBase | None], numbers: Iterable[int], keys: Sequence[NestedKey]
    ) -> TensorDictBase:
        if self._declared is None:
            for number, result in zip(numbers, results, strict=True):
                self._last[number] = result  # the other workers keep their latest row
            return self._joined(self._last, keys)
        return self._read(self._outputs, keys)

    def _read(self, shared: Mapping[NestedKey, Tensor], keys: Sequence[NestedKey]) -> TensorDictBase:
        td = keyed({key: shared[key].clone() for key in keys}, self.batch_size)
        return td if self.device is None else td.to(self.device)

    def _ask(self, requests: Mapping[int, bytes], what: str) -> list[Any]:
        if self.is_closed:
            raise WorkerError(f"ParallelEnv: must be open to {what}: its processes have ended; make a new one.")
        number = 0
        with self._closed_on_error():
            try:
                for number, request in requests.items():
                    self._send(number, request)
            except ConnectionError:
                raise self._ended(number, what) from None
            return self._answers(requests, what, "timeout_s")

    def _send(self, number: int, request: bytes) -> None:
        """Sends a single-byte request, or a pickled one."""
        os.write(self._requests[number].fileno(), request if len(request) == 1 else MESSAGE)
        if len(request) > 1:
            self._requests[number].send_bytes(request)

    def _answers(self, numbers: Collection[int], what: str, limit: str) -> list[Any]:
        """Returns the results of these workers in order; ``limit`` names the setting with the time limit."""
        deadline = time.monotonic() + self._times[limit]
        left_ms = poll_timeout(deadline)
        answers: dict[int, Any] = dict.fromkeys(numbers, _MISSING)
        for number in reversed(answers):  # the last worker asked usually replies last: one wait for all
            descriptor, poller = self._replies[number].fileno(), self._pollers[number]
            while answers[number] is _MISSING:
                events = poller.poll(left_ms)
                if events and events[0][0] == descriptor:  # events are in order of registration: its reply comes first
                    answers[number] = self._taken(number, what)
                    continue
                left_ms = poll_timeout(deadline)
                if events:  # a process has ended, possibly after sending an error
                    ended = self._sentinels[min(descriptor for descriptor, _ in events)]
                    self._taken(ended, what)
                    raise self._ended(ended, what)
                elif time.monotonic() >= deadline:
                    raise self._late([n for n in numbers if not self._replies[n].poll()], what, limit)
        return list(answers.values())

    def _taken(self, number: int, what: str) -> Any:
        try:
            answer = os.read(self._replies[number].fileno(), 1)
            if answer == DONE:
                return None
            if answer == RESTARTED:
                return RESTARTED
            if not answer:  # the other end was closed
                raise EOFError
            done, reply = self._replies[number].recv()
        except (EOFError, ConnectionError):
            raise self._ended(number, what) from None
        if not done:
            raise WorkerError(f"{self._name(number)} must {what}: its env raised {reply[0]}\n\n{reply[1]}")
        return reply

    def _name(self, number: int) -> str:
        return f"ParallelEnv: worker {number} of {self.num_workers}"

    def _ended(self, number: int, what: str) -> WorkerError:
        wait_for_exit(self._processes[number], 1.0)
        guard = "; does the main module start it under if __name__ == '__main__'?" if what == "make its env" else "."
        state = process_state(self._processes[number])
        return WorkerError(f"{self._name(number)} must {what}: its process {state}{guard}")

    def _late(self, pending: Sequence[int], what: str, limit: str) -> DeadlineError:
        states = ", ".join(f"worker {number} {process_state(self._processes[number])}" for number in pending)
        for number in pending:
            self._processes[number].kill()
        return DeadlineError(
            f"ParallelEnv: each of {self.num_workers} workers must {what} within {self._times[limit]:g} s ({limit}): "
            f"late and killed: {states}."
        )

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C too: late replies would be read as replies to the next request
            self.close()
            raise


def _remade(num_workers: int, makers: bytes, options: Mapping[str, Any]) -> ParallelEnv:
    return ParallelEnv(num_workers, cloudpickle.loads(makers), **options)


def _end(processes: Sequence[Any], requests: Sequence[Connection], replies: Sequence[Connection]) -> None:
    for connection in requests:
        with contextlib.suppress(OSError):
            os.write(connection.fileno(), CLOSE)
    deadline = time.monotonic() + _CLOSE_S
    for process in processes:
        end_process(process, max(0.0, deadline - time.monotonic()))
    for connection in (*requests, *replies):
        connection.close()
