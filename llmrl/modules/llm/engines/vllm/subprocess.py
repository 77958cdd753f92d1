"""A `Core` in a separate process: vLLM's ``AsyncLLM``, which batches the requests of any number of threads.

``AsyncLLM`` is bound to one event loop, which runs in a thread here. Every wait ends with the answer, at its deadline,
or when the process exits, whichever is first: in most calls other than requests, vLLM itself would wait forever for a
process that has exited.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmrl.concurrency.background_loop import BackgroundLoop
from llmrl.concurrency.process_monitor import (
    LogTail,
    process_state,
    remove_shared_memory,
    shared_memory_of,
    wait_for_exit,
)
from llmrl.errors import DeadlineError, LLMRLError, RolloutError, WeightSyncError
from llmrl.modules.llm.engines.vllm import compat
from llmrl.modules.llm.engines.vllm.core import (
    Completion,
    CoreInfo,
    LoadedAdapter,
    LogitTemperature,
    NothingLoadedError,
    Progress,
    Requests,
    completion_of_output,
)
from llmrl.modules.llm.engines.vllm.gauges import EngineStats
from llmrl.modules.llm.engines.vllm.images import prompt_of

_STARTED_S = 120.0  # timeout of the first answer, once vLLM reports that the engine is up
_LOOP_S = 10.0  # timeout of functions that run in the loop
_CLOSING_S = 30.0  # time for the process to end its workers; killed earlier, it leaves them and shared memory behind
_AGAIN_S = 0.005  # interval at which an abort is repeated
_RESUMED_S = 2.0  # timeout of resuming: the engine may have stopped answering
_EXIT_S = 4.0  # timeout of the exit of a process that vLLM reports as dead
T = TypeVar("T")


class SubprocessCore:
    """Requests to one ``AsyncLLM``, which this object owns.

    Scoring at a temperature other than 1 waits until no row is being sampled, and new rows wait for it, because the
    temperature is a setting of the whole engine.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._closing = False
        self._numbers = itertools.count()
        self._drawing: set[_Call] = set()
        self._shared: set[Path] = set()  # shared memory files, which the process removes unless it is killed
        self._loop = BackgroundLoop("llmrl-vllm")
        self._log = self._in_loop(lambda: LogTail(asyncio.get_running_loop(), compat.NOISE))
        try:
            with self._log.inherited():
                self.llm = build()
        except BaseException as error:
            if not isinstance(error, LLMRLError):  # llmrl's own errors are raised before the process starts
                error.add_note(f"The engine's process: {self._log.lines()}")
            self._in_loop(self._log.close)
            self._loop.close()
            raise
        self._processes = compat.processes(self.llm)
        atexit.register(_close_at_exit, weakref.ref(self))
        try:
            self._in_loop(self._watch_processes)
            config = self.llm.vllm_config
            self.info = CoreInfo.of_vllm(config, self.llm.tokenizer, place="subprocess")
            self._adapter = LoadedAdapter(enabled=config.lora_config is not None)
            self._make_request = compat.request_factory()
            self.take_gauges = EngineStats(self.llm).take
            self._temperature = LogitTemperature(self.call_workers, concurrent=True)
            self.call_workers("llmrl_prepare", time.monotonic() + _STARTED_S)
            self._shared = set().union(*(shared_memory_of(process.pid) for process in self._processes))
        except BaseException:
            self.close()
            raise

    # --- requests -----------------------------------------------------------------------------------------------------

    def complete(self, requests: Requests) -> list[Completion]:
        """One completion per prompt: each is a request that joins the running batch."""
        prompts, end, phase = requests.prompts, requests.end, f"{requests.phase} {len(requests.prompts)} rows"
        heard = requests.hear is not None
        params = [
            self._make_request(heard=heard, **{"detokenize": "stop" in option, **option}) for option in requests.options
        ]
        call = _Call(requests, params)
        with self._temperature.held(requests.temperature, requests.phase, end):
            outputs = self._wait(lambda: self._outputs(call), phase, end)
        return [completion_of_output(*row) for row in zip(outputs, prompts, requests.options, strict=True)]

    async def _outputs(self, call: _Call) -> list[Any]:
        if call.requests.phase == "generating":
            self._drawing.add(call)
            call.aborted = call.requests.stop()  # runs in the loop, so no abort comes between these lines
        rows = [asyncio.ensure_future(self._output(call, row)) for row in range(len(call.params))]
        try:
            return await asyncio.gather(*rows)
        finally:
            for row in rows:
                row.cancel()  # removes the request from the engine
            await asyncio.gather(*rows, return_exceptions=True)
            self._drawing.discard(call)

    async def _output(self, call: _Call, row: int) -> Any:
        if call.aborted:
            return None
        name = f"llmrl-{next(self._numbers)}"
        call.names.append(name)
        media = None if call.requests.media is None else call.requests.media[row]
        prompt = prompt_of(self.llm, call.requests.prompts[row], media, call.requests.version)
        outputs = self.llm.generate(prompt, call.params[row], name, lora_request=self._adapter.request)
        progress = Progress(None if call.requests.hear is None else call.requests.hear[row])
        wanted, last = True, None
        async for output in outputs:
            last = output
            if wanted and not (wanted := progress.tell(output)):
                await self.llm.abort(name)  # it ends with one more output
        return last

    def abort(self) -> int:
        """Ends the rows being sampled, with the ids so far, and waits for their end. Returns the number of requests."""
        return self._wait(self._abort, "aborting requests", time.monotonic() + _STARTED_S)

    async def _abort(self) -> int:
        calls = list(self._drawing)
        for call in calls:
            call.aborted = True
        while any(call in self._drawing for call in calls):  # repeated: a request may not have reached the engine
            if names := [name for call in calls for name in call.names]:
                await self.llm.abort(names)
            await asyncio.sleep(_AGAIN_S)
        return sum(len(call.params) for call in calls)

    # --- weights ------------------------------------------------------------------------------------------------------

    def call_workers(self, method: str, end: float, **arguments: Any) -> list[Any]:
        return self._wait(lambda: self.llm.collective_rpc(method, kwargs=arguments), f"answering {method}", end)

    @contextlib.contextmanager
    def updating(self, version: int, end: float) -> Iterator[bool]:
        """Pauses the engine between two steps."""
        with self._paused(end):
            yield True
            if not self._wait(self.llm.reset_prefix_cache, "emptying the prefix cache", end):
                raise WeightSyncError("VLLMEngine: the prefix cache must be emptied after an update: vLLM refused.")

    @contextlib.contextmanager
    def _paused(self, end: float) -> Iterator[None]:
        try:
            try:
                pause = partial(self.llm.pause_generation, mode="wait", clear_cache=False)
                self._wait(pause, "pausing for new weights", end)
            except (RolloutError, DeadlineError) as error:
                raise NothingLoadedError(f"{error} Nothing was updated.") from error
            yield
        finally:  # even if pausing failed without an answer: the engine may be paused
            with contextlib.suppress(RolloutError, DeadlineError):  # keeps the first error; the next request fails too
                self._wait(self.llm.resume_generation, "resuming", time.monotonic() + _RESUMED_S)

    def set_adapter(self, folder: Path, *, version: int, end: float) -> None:
        with self._paused(end):
            self._adapter.replace(
                folder,
                version,
                lambda request: self._wait(lambda: self.llm.add_lora(request), "loading an adapter", end),
                lambda number: self._wait(lambda: self.llm.remove_lora(number), "removing an adapter", end),
            )

    def sleep(self, end: float, *, keep_weights: bool) -> None:
        self._wait(partial(self.llm.sleep, 1 if keep_weights else 2), "falling asleep", end)

    def wake(self, part: str | None, end: float) -> None:
        self._wait(partial(self.llm.wake_up, None if part is None else [part]), "waking up", end)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, ask: Callable[[], Awaitable[T]], phase: str, end: float) -> T:
        """Calls ``ask`` in the loop and returns its result.

        Raises  DeadlineError at ``end``; RolloutError if the process exited, the engine was closed, or vLLM fails
        """
        closed = RolloutError(f"VLLMEngine: the engine was closed while {phase}.")
        try:
            return self._loop.run(self._result_or_death(ask), end)
        except TimeoutError as error:
            raise DeadlineError(
                f"VLLMEngine: {phase} must end before its deadline: {self._process_states()} {self._log.lines()}"
            ) from error
        except LLMRLError as error:
            raise closed from error
        except Exception as error:
            if self._closing:
                raise closed from error
            if not isinstance(error, _DiedError) and type(error).__name__ != "EngineDeadError":
                raise RolloutError(f"VLLMEngine: {phase} failed: {type(error).__name__}: {error}") from error
            for process in self._processes:  # so that the message can include exit codes
                wait_for_exit(process, _EXIT_S)
            raise RolloutError(
                f"VLLMEngine: the engine's process died while {phase}: {self._process_states()} "
                f"{self._log.lines()}\nrestart() starts a new one."
            ) from None

    async def _result_or_death(self, ask: Callable[[], Awaitable[T]]) -> T:
        # vLLM does not report that its process exited: the process sentinel ends the wait.
        task = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # an answer that arrived at the same time is used
                raise _DiedError
            return task.result()
        finally:
            task.cancel()

    def _process_states(self) -> str:
        return " ".join(
            f"process {process.pid} ({process.name}) {process_state(process)}." for process in self._processes
        )

    def _in_loop(self, call: Callable[[], T]) -> T:
        """Calls a function in the thread of the loop, which reads pipes and owns vLLM's sockets."""

        async def run() -> T:
            return call()

        return self._loop.run(run(), time.monotonic() + _LOOP_S)

    def _watch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = loop.create_future()
        for process in self._processes:
            loop.add_reader(process.sentinel, self._note_death)

    def _note_death(self) -> None:
        for process in self._processes:
            self._death.get_loop().remove_reader(process.sentinel)
        self._log.drain()
        if not self._death.done():
            self._death.set_result(None)

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the process and all calls that wait for it."""
        if self._closing:
            return
        self._closing = True
        for process in self._processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)  # a stopped process could not shut down
        with contextlib.suppress(LLMRLError, TimeoutError):
            self._in_loop(lambda: compat.stop_output_handler(self.llm))
        self.llm.shutdown(timeout=_CLOSING_S)
        with contextlib.suppress(LLMRLError, TimeoutError):
            self._in_loop(self._release)
        self._loop.close()
        remove_shared_memory(self._shared)

    def _release(self) -> None:
        self._note_death()
        compat.destroy_sockets(self.llm)
        self._log.close()


def _close_at_exit(reference: Callable[[], SubprocessCore | None]) -> None:
    core = reference()
    if core is not None:
        core.close()


@dataclass(eq=False)
class _Call:
    """Rows of one call, and the names of their requests so far."""

    requests: Requests
    params: Sequence[Any]
    names: list[str] = field(default_factory=list)
    aborted: bool = False


class _DiedError(Exception):
    """The engine's process ended before it answered."""
