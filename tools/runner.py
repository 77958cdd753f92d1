"""Runs the tool calls of a batch concurrently, each with a deadline; answers are in order and of bounded size.

Every outcome becomes an answer to the model, including an unknown name, wrong arguments, an exception or a missed
deadline. The environment transforms find the calls in a text and write the answers into the conversation.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmrl.concurrency.daemon_threads import DaemonThreads
from llmrl.concurrency.deadline import watch_lock
from llmrl.errors import ConfigError, check_at_least, did_you_mean
from llmrl.tools.base import Status, Tool, ToolCall, ToolError, ToolResult
from llmrl.tools.function import as_tool

_LOG = logging.getLogger(__name__)
_GRACE_S = 1.0  # for a tool that keeps its deadline to stop its work and report its output so far
_WATCH_S = 1.0  # calls that start within this time share one update of the lock watchdog
_SLOT_S = 600.0  # to wait for a free slot
_MAX_LEFT_BEHIND = 16  # unfinished threads of one tool; more calls of it are refused until one ends


class ToolRunner(contextlib.AbstractContextManager):
    """Runs calls of its tools and owns the tools: closing the runner closes them.

    Calls of one conversation run in order, calls of different conversations concurrently, at most ``max_concurrency``
    over all threads that use the runner. A call's deadline counts from the moment it starts.

    ``counters`` has the number of calls, their outcomes (``ok``, ``error``, ``timeout``, ``malformed``, ``unknown``),
    how many answers were ``cut``, and how many calls were ``left_behind``: a plain Python function cannot be stopped,
    so one that does not return stays in its daemon thread. A function that holds the GIL inside C code blocks all
    threads: the process then exits a minute after the call's deadline and prints the stack of each thread.

    >>> from llmrl.tools import load_tool
    >>> with ToolRunner([load_tool("calculator")]) as runner:
    ...     (result,) = runner.run([ToolCall("calculator", {"expression": "6 * 7"}, id="call_0")])
    >>> result.content, result.status
    ('42', 'ok')
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        timeout_s: float = 10.0,
        max_result_chars: int = 4000,
        max_concurrency: int = 64,
    ):
        if not timeout_s > 0:
            raise ConfigError(f"ToolRunner: timeout_s must be positive: got {timeout_s}.")
        check_at_least("ToolRunner", 100, max_result_chars=max_result_chars)
        check_at_least("ToolRunner", 1, max_concurrency=max_concurrency)
        self.tools: dict[str, Tool] = {}
        for made in map(as_tool, tools):
            if made.name in self.tools:
                raise ConfigError(f"ToolRunner: every tool must have a name of its own: got {made.name!r} twice.")
            self.tools[made.name] = made
        self.timeout_s = timeout_s
        self.max_result_chars = max_result_chars
        self.max_concurrency = max_concurrency
        self.counters: dict[str, int] = dict.fromkeys(
            ("calls", "ok", "error", "timeout", "malformed", "unknown", "cut", "left_behind"), 0
        )
        self._slots = threading.Semaphore(max_concurrency)
        self._process, self._lock = os.getpid(), threading.Lock()
        self._running: dict[_Job, None] = {}  # jobs that hold a slot
        self._threads = DaemonThreads("llmrl-tools")
        self._left_behind: Counter[str] = Counter()  # per tool, abandoned calls that still run
        self._closed = False

    def __exit__(self, *exc: object) -> None:
        self.close()

    def schemas(self) -> list[dict[str, Any]]:
        """The schemas for the model, in the order of the tools."""
        return [tool.schema() for tool in self.tools.values()]

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results, in the order of the calls; blocks until each call has ended or its deadline has passed."""
        if self._closed:
            raise ConfigError("ToolRunner: must not be closed: got a call after close().")
        if self._process != os.getpid():  # after a fork: a thread of the parent may have held the lock
            self._process, self._lock = os.getpid(), threading.Lock()
        batch = _Batch([None] * len(calls))
        lanes: dict[Hashable, deque[_Job]] = {}  # the calls of one conversation, which run one after another
        for index, call in enumerate(calls):
            if (refusal := self._refusal(call)) is not None:
                batch.results[index] = self._result(call, *refusal)
            else:
                key = ("alone", index) if call.conversation is None else ("in", call.conversation)
                lanes.setdefault(key, deque()).append(_Job(index, call, self.tools[call.name], self.timeout_s))
        # No thread is running yet, so the batch can be filled without the lock.
        batch.waiting.extend(lanes.values())
        batch.left = sum(map(len, batch.waiting))
        # A call that starts while this thread sleeps cannot exceed its limit before the shortest limit has passed.
        shortest_s = min((job.limit_s for lane in batch.waiting for job in lane), default=0.0)
        try:
            while batch.left:
                self._grow(batch)
                if not batch.ended.wait(self._time_left(batch, shortest_s)):
                    self._abandon_late(batch)
        finally:
            with self._lock:  # so that no more calls start after an interruption
                for lane in (batch.waiting, *batch.running.values()):
                    lane.clear()
            watch_lock(batch, None)
        results = [result for result in batch.results if result is not None]
        with self._lock:
            self.counters["calls"] += len(results)
            for result in results:
                self.counters[result.status] += 1
                self.counters["cut"] += result.cut > 0
        return results

    def end(self, conversations: Iterable[Hashable]) -> None:
        """Frees the tools' state of finished conversations."""
        for conversation in conversations:
            for tool in self.tools.values():
                self._quietly(tool, "end", conversation)

    def close(self) -> None:
        """Closes every tool; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for tool in self.tools.values():
            self._quietly(tool, "close")
        self._threads.close()

    def _refusal(self, call: ToolCall) -> tuple[str, Status] | None:
        """The answer and status for a call that cannot be run; None if it can."""
        if call.error is not None:
            return call.error, "malformed"
        if call.name not in self.tools:
            hint, known = did_you_mean(str(call.name), self.tools), ", ".join(self.tools) or "none"
            return f"{call.name!r} is not a tool.{hint} Tools: {known}.", "unknown"
        if not isinstance(call.arguments, dict | None):
            kind = type(call.arguments).__name__
            return f"{call.name}: the arguments must be a JSON object: got a {kind}.", "malformed"
        with self._lock:
            left = self._left_behind[call.name]
        if left >= _MAX_LEFT_BEHIND:
            return f"{call.name}: cannot be called now: {left} earlier calls have still not ended.", "error"
        return None

    def _grow(self, batch: _Batch) -> None:
        """Starts one more thread if calls wait; that thread starts the next one, so short calls need few threads."""
        with self._lock:
            if not batch.waiting or batch.starts or batch.threads >= self.max_concurrency:
                return
            batch.starts = True
            batch.threads += 1
        try:
            self._threads.start(lambda: self._work(batch))
        except RuntimeError:  # the system has no more threads
            with self._lock:
                batch.starts = False
                batch.threads -= 1
            if not batch.threads:
                raise

    def _work(self, batch: _Batch) -> None:
        """Runs calls of the batch in a thread, until none waits or its current one was abandoned."""
        batch.starts = False
        # A call may block, so another thread is started for the waiting calls before it runs.
        while batch.left and (job := self._take(batch)) is not None:
            self._grow(batch)
            if self._slots.acquire(timeout=_SLOT_S):  # a job releases its slot at its deadline at the latest
                result = self._run_job(batch, job)
            else:
                oldest = min(list(self._running), key=lambda other: other.started, default=job)
                text = f"{job.tool.name}: it was not started within {_SLOT_S:g} s: all {self.max_concurrency} calls "
                text += f"at a time were taken, the longest by {oldest.tool.name!r}."
                result = self._result(job.call, text, "timeout")
            with self._lock:
                if job.left_behind:
                    self._left_behind[job.tool.name] -= 1
                    return
                self._finish(batch, job, result)

    def _take(self, batch: _Batch) -> _Job | None:
        with self._lock:
            if not batch.waiting:
                batch.threads -= 1
                return None
            # A lane is out of the queue while one of its calls runs, which keeps its calls in order.
            lane = batch.waiting.popleft()
            job = lane.popleft()
            batch.running[job] = lane
            return job

    def _run_job(self, batch: _Batch, job: _Job) -> ToolResult:
        call = job.call
        threading.current_thread().name = call.name
        job.started = started = time.monotonic()
        job.give_up_at = started + job.limit_s
        with self._lock:
            self._running[job] = None
            if job.give_up_at > batch.watched_until:  # one update for all calls that start within a second
                batch.watched_until = job.give_up_at + _WATCH_S
                watch_lock(batch, batch.watched_until)
        arguments, deadline = call.arguments or {}, started + job.timeout_s
        status: Status = "ok"
        try:
            run = partial(job.tool.call, arguments, conversation=call.conversation, deadline=deadline)
            content = str(contextvars.Context().run(run))  # a fresh context, because threads are reused
        except BaseException as error:  # also sys.exit(), which would silently end this thread
            content, status = _error_text(error), "timeout" if isinstance(error, TimeoutError) else "error"
        return self._result(call, content, status, time.monotonic() - started)

    def _finish(self, batch: _Batch, job: _Job, result: ToolResult) -> None:
        """Records a job's result and lets the next call of its conversation run. The caller holds the lock."""
        batch.results[job.index] = result
        if lane := batch.running.pop(job):
            batch.waiting.append(lane)
        if job in self._running:
            del self._running[job]
            self._slots.release()
        batch.left -= 1
        if not batch.left:
            batch.ended.set()

    def _time_left(self, batch: _Batch, shortest_s: float) -> float:
        """Seconds until a call can exceed its limit: one that is running, or one that starts in the meantime."""
        with self._lock:
            ends = [job.give_up_at for job in batch.running]
        return max(0.0, min(min(ends, default=float("inf")) - time.monotonic(), shortest_s, threading.TIMEOUT_MAX))

    def _abandon_late(self, batch: _Batch) -> None:
        """Abandons the calls that exceeded their limit. The batch loses their threads; their slots are released."""
        with self._lock:
            now = time.monotonic()
            for job in [job for job in batch.running if job.give_up_at <= now]:
                job.left_behind = True
                # Python cannot stop the thread; the flag tells it to discard its result.
                self._left_behind[job.tool.name] += 1
                self.counters["left_behind"] += 1
                batch.threads -= 1
                text = f"{job.tool.name}: no result within {job.timeout_s:g} s; the call was abandoned."
                self._finish(batch, job, self._result(job.call, text, "timeout", now - job.started))

    def _result(self, call: ToolCall, text: str, status: Status, duration_s: float = 0.0) -> ToolResult:
        content, cut = cut_text(text, self.max_result_chars)
        return ToolResult(call, content, status, duration_s, cut)

    def _quietly(self, tool: Tool, method: str, *args: Any) -> None:
        try:
            getattr(tool, method)(*args)
        except Exception:
            _LOG.warning("tool %r: %s() failed", tool.name, method, exc_info=True)


@dataclass(eq=False)
class _Job:
    """One call."""

    index: int
    call: ToolCall
    tool: Tool
    timeout_s: float  # the tool's own, if it has one
    started: float = 0.0
    give_up_at: float = float("inf")
    left_behind: bool = False

    def __post_init__(self) -> None:
        self.timeout_s = self.timeout_s if self.tool.timeout_s is None else self.tool.timeout_s
        self.limit_s = self.timeout_s + (_GRACE_S if self.tool.keeps_deadline else 0.0)  # until it is abandoned


@dataclass(eq=False)
class _Batch:
    """The calls of one `run`, and its threads."""

    results: list[ToolResult | None]
    waiting: deque[deque[_Job]] = field(default_factory=deque)  # lanes without a running call
    running: dict[_Job, deque[_Job]] = field(default_factory=dict)  # job -> the rest of its lane
    left: int = 0  # calls without a result
    ended: threading.Event = field(default_factory=threading.Event)
    threads: int = 0
    starts: bool = False  # a started thread has not taken a call yet
    watched_until: float = 0.0


def cut_text(text: str, limit: int) -> tuple[str, int]:
    """The text cut to ``limit`` characters (head, notice, tail), and the number of characters left out.

    A lone surrogate, which no tokenizer accepts, becomes a question mark.

    >>> cut_text("a" * 500 + "b" * 500, 50)
    ('aaaaaaaaa\\n[... 982 characters cut ...]\\nbbbbbbbbb', 982)
    >>> cut_text("short", 100)
    ('short', 0)
    """
    cut = 0
    if len(text) > limit:
        room = limit - len(f"\n[... {len(text):,} characters cut ...]\n")
        head, tail = room - room // 2, room // 2
        cut = len(text) - head - tail
        # Both ends are kept: errors are at the end of an output, their context at the beginning.
        text = f"{text[:head]}\n[... {cut:,} characters cut ...]\n{text[len(text) - tail :]}"
    return text.encode("utf-8", "replace").decode("utf-8"), cut


def _error_text(error: BaseException) -> str:
    """An exception as the model reads it, without a traceback, which would reveal the host's files."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be read)"
    if isinstance(error, ToolError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
