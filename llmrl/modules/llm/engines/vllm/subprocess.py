"""vLLM in a process of its own, asked by any number of threads: every row is a request that joins the running batch.

vLLM's ``AsyncLLM`` lives in one event loop, which runs in a thread here. Whatever a caller waits for ends with the
answer, with its deadline, or with the death of the process, whichever comes first: vLLM itself would leave a caller
waiting for the answer of a dead process in most calls that are no request.
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
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmrl.concurrency.background_loop import BackgroundLoop
from llmrl.errors import DeadlineError, LLMRLError, RolloutError
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.in_process import LocalCore
from llmrl.modules.llm.engines.vllm.process_monitor import (
    LogTail,
    await_end,
    fate,
    remove_shared_memory,
    shared_memory_of,
)
from llmrl.modules.llm.engines.vllm.transfer import NothingLoadedError, Settings, SharedMemory, Transfers
from llmrl.modules.llm.engines.vllm.weight_spec import WeightSet

__all__ = ["AsyncCore"]

_STARTED_S = 120.0  # for the first answer of an engine that says that it is up
_LOOP_S = 10.0  # for what the loop does by itself
_CLOSING_S = 30.0  # for the process to end its own workers; killed earlier, it leaves those and shared memory behind
_RESUMED_S = 2.0  # for the engine to go on; it may have stopped answering
_LAST_WORDS_S = 4.0  # for a process that vLLM calls dead to be gone
T = TypeVar("T")


class AsyncCore(LocalCore):
    """Requests to one ``AsyncLLM``, which belongs to this object.

    Scoring under another temperature than 1 waits until no row is being drawn, and new rows wait for it: that
    temperature is a setting of the whole engine.
    """

    own_process = True
    owned = True

    def __init__(self, build: Callable[[], Any]) -> None:
        self._closing = False
        self._numbers = itertools.count()
        self._drawing: set[_Call] = set()
        self._shared: set[Path] = set()  # files of the process, which it removes unless it is killed
        self._loop = BackgroundLoop("llmrl-vllm")
        self._transfers = Transfers(self._call)
        self._loop.run(self._listen(), time.monotonic() + _LOOP_S)
        try:
            with self._log.inherited():
                self.llm = build()
        except BaseException as error:
            if not isinstance(error, LLMRLError):  # which is about what was asked, and comes before there is a process
                error.add_note(f"The engine's process: {self._log.lines()}")
            self._loop.run(self._leave(), time.monotonic() + _LOOP_S)
            self._loop.close()
            raise
        self._processes = adapter.processes(self.llm)
        atexit.register(_close, weakref.ref(self))
        try:
            self._loop.run(self._watch(), time.monotonic() + _LOOP_S)
            self._adopt(self.llm.vllm_config, self.llm.tokenizer)
            self._call("llmrl_prepare", time.monotonic() + _STARTED_S)
            self._shared = set().union(*(shared_memory_of(process.pid) for process in self._processes))
        except BaseException:
            self.close()
            raise

    def _turn(self, temperature: float) -> Hashable:
        return 1.0 if temperature == 1.0 else object()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _run(
        self, prompts: Sequence[list[int]], options: Sequence[Mapping[str, Any]], phase: str, end: float
    ) -> list[Any]:
        call = _Call(prompts, self._requests(options))
        if phase == "generating":
            self._drawing.add(call)
        try:
            return self._wait(lambda: self._answers(call), f"{phase} {len(prompts)} rows", end)
        finally:
            self._drawing.discard(call)

    async def _answers(self, call: _Call) -> list[Any]:
        rows = [asyncio.ensure_future(self._answer(call, row)) for row in range(len(call.prompts))]
        try:
            return await asyncio.gather(*rows)
        finally:
            for row in rows:
                row.cancel()  # takes the request out of the engine
            await asyncio.gather(*rows, return_exceptions=True)

    async def _answer(self, call: _Call, row: int) -> Any:
        if call.aborted:
            return None
        name = f"llmrl-{next(self._numbers)}"
        call.names.append(name)
        prompt = adapter.tokens(call.prompts[row])
        answers = self.llm.generate(prompt, call.requests[row], name, lora_request=self._adapter)
        return [answer async for answer in answers][-1]

    def abort(self) -> int:
        """Ends what is being drawn, with what it has; how many requests that were."""
        return self._wait(self._abort, "aborting requests", time.monotonic() + _STARTED_S)

    async def _abort(self) -> int:
        calls = list(self._drawing)
        for call in calls:
            call.aborted = True
        names = [name for call in calls for name in call.names]
        if names:
            await self.llm.abort(names)
        return sum(len(call.prompts) for call in calls)

    # --- weights ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _paused(self, end: float) -> Iterator[None]:
        """Between two steps of the engine, with nothing under way."""
        try:
            try:
                pause = partial(self.llm.pause_generation, mode="wait", clear_cache=False)
                self._wait(pause, "pausing for new weights", end)
            except (RolloutError, DeadlineError) as error:
                raise NothingLoadedError(f"{error} Nothing was updated.") from error
            yield
        finally:  # also where it did not answer: it may have heard
            with contextlib.suppress(RolloutError, DeadlineError):  # which was said already, or is by the next request
                self._wait(self.llm.resume_generation, "resuming", time.monotonic() + _RESUMED_S)

    def check_backend(self, backend: Settings | None) -> None:
        """Every one will do."""

    def _send(self, weights: WeightSet, end: float, backend: Settings | None) -> None:
        self._transfers.send(weights, end, SharedMemory() if backend is None else backend)

    def _add_adapter(self, lora: Any, end: float) -> None:
        self._wait(lambda: self.llm.add_lora(lora), "loading an adapter", end)

    def _remove_adapter(self, lora: Any, end: float) -> None:
        self._wait(lambda: self.llm.remove_lora(lora.lora_int_id), "removing an adapter", end)

    def _empty_prefix_cache(self, end: float) -> bool:
        return self._wait(self.llm.reset_prefix_cache, "emptying the prefix cache", end)

    def _label(self, version: int, end: float) -> None:
        label = getattr(self.llm, "update_weight_version", None)
        if label is not None:
            self._wait(lambda: label(str(version)), f"labelling version {version}", end)

    def _call(self, name: str, end: float, **arguments: Any) -> list[Any]:
        return self._wait(lambda: self.llm.collective_rpc(name, kwargs=arguments), f"answering {name}", end)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, ask: Callable[[], Awaitable[T]], phase: str, end: float) -> T:
        """What ``ask`` says; it is called in the loop.

        Raises  DeadlineError at ``end``; RolloutError where the process died, the engine was closed, or vLLM fails
        """
        try:
            return self._loop.run(self._answer_or_death(ask), end)
        except TimeoutError as error:
            raise DeadlineError(
                f"VLLMEngine: {phase} must end before its deadline: {self._whereabouts()} {self._log.lines()}"
            ) from error
        except LLMRLError as error:
            raise self._closed(phase) from error
        except Exception as error:
            if self._closing:
                raise self._closed(phase) from error
            if self._is_dead(error):
                raise RolloutError(
                    f"VLLMEngine: the engine's process must live while it is {phase}: {self._whereabouts()} "
                    f"{self._log.lines()}\nrestart() begins a new one."
                ) from None
            raise RolloutError(f"VLLMEngine: {phase} failed: {type(error).__name__}: {error}") from error

    async def _answer_or_death(self, ask: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _DiedError
            return task.result()
        finally:
            task.cancel()

    def _is_dead(self, error: Exception) -> bool:
        if not isinstance(error, _DiedError) and type(error).__name__ != "EngineDeadError":
            return False
        for process in self._processes:
            await_end(process, _LAST_WORDS_S)
        return True

    def _closed(self, phase: str) -> RolloutError:
        return RolloutError(f"VLLMEngine: the engine must be open: close() was called while it was {phase}.")

    def _whereabouts(self) -> str:
        return " ".join(f"process {process.pid} ({process.name}) {fate(process)}." for process in self._processes)

    async def _listen(self) -> None:
        self._log = LogTail(asyncio.get_running_loop(), adapter.NOISE)

    async def _watch(self) -> None:
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

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the process, and whatever waits for it."""
        self._closing = True
        self._transfers.close()
        for process in self._processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)  # one that was stopped could not end by itself
        with contextlib.suppress(LLMRLError, TimeoutError):
            self._loop.run(self._stop_listening(), time.monotonic() + _LOOP_S)
        self.llm.engine_core.shutdown(timeout=_CLOSING_S)
        self.llm.shutdown()
        with contextlib.suppress(LLMRLError, TimeoutError):
            self._loop.run(self._leave(self.llm), time.monotonic() + _LOOP_S)
        self._loop.close()
        remove_shared_memory(self._shared)

    async def _stop_listening(self) -> None:
        adapter.stop_listening(self.llm)

    async def _leave(self, llm: Any | None = None) -> None:
        if llm is not None:
            self._note_death()
            adapter.destroy_sockets(llm)
        self._log.close()


def _close(reference: Callable[[], AsyncCore | None]) -> None:
    """At the end of this process, of an engine that nobody has closed."""
    core = reference()
    if core is not None and not core._closing:
        core.close()


class _Call:
    """Rows that were asked for together, and the names of their requests so far."""

    def __init__(self, prompts: Sequence[list[int]], requests: Sequence[Any]) -> None:
        self.prompts, self.requests = prompts, requests
        self.names: list[str] = []
        self.aborted = False


class _DiedError(Exception):
    """The engine's process ended before it answered."""
