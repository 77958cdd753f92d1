"""Runs the tool calls of a batch: at the same time, each with its deadline, the answers in order and of bounded size.

Whatever a call does is an answer to the model: a name that is not known, wrong arguments, an exception, no end. Which
text holds a call, and how the answer is written into the conversation, is the business of the environment transforms.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmrl.errors import ConfigError, did_you_mean
from llmrl.tools.base import Status, Tool, ToolCall, ToolError, ToolResult
from llmrl.tools.calls import watch_lock
from llmrl.tools.function import as_tool

__all__ = ["ToolRunner", "cut_text"]

_LOG = logging.getLogger(__name__)
_GRACE_S = 1.0  # for a tool that keeps its deadline: to stop what it runs, and to say what there was until then
_MAX_LEFT_BEHIND = 16  # threads of one tool that did not end; more calls of it are refused until one does


class ToolRunner:
    """Runs calls of the tools it is given, and owns them: closing it closes them.

    Calls of one conversation run in their order, those of different conversations at the same time, at most
    ``max_concurrency`` over all threads that use the runner. A deadline counts from the moment that a call starts.

    ``counters`` has the calls so far, how they ended (``ok``, ``error``, ``timeout``, ``malformed``, ``unknown``), how
    many answers were ``cut``, and how many calls were ``left_behind``: a plain Python function cannot be stopped, so
    one that does not end stays in its daemon thread. One that keeps the interpreter's lock inside C code stops all
    threads: the process ends a minute after the call's deadline, and says where each stood.

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
        if max_result_chars < 100:
            raise ConfigError(f"ToolRunner: max_result_chars must be at least 100: got {max_result_chars}.")
        if max_concurrency < 1:
            raise ConfigError(f"ToolRunner: max_concurrency must be at least 1: got {max_concurrency}.")
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
        self._lock = threading.Lock()
        self._left_behind: Counter[str] = Counter()  # of each tool, those that still run
        self._closed = False

    def __enter__(self) -> ToolRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told, in the order of the tools."""
        return [tool.schema() for tool in self.tools.values()]

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The results, in the order of the calls; blocks until the last has ended or was given up."""
        if self._closed:
            raise ConfigError("ToolRunner: must not be closed: got a call after close().")
        results: list[ToolResult | None] = [self._refused(call) for call in calls]
        lanes: dict[Hashable, deque[int]] = {}
        for index, (call, result) in enumerate(zip(calls, results, strict=True)):
            if result is None:
                # Without a conversation there is no order to keep.
                key = ("call", index) if call.conversation is None else ("conversation", call.conversation)
                lanes.setdefault(key, deque()).append(index)
        self._run_lanes(calls, results, deque(lanes.values()))
        return [self._counted(result) for result in results if result is not None]

    def end(self, conversations: Iterable[Hashable]) -> None:
        """These conversations are over: every tool frees what it keeps for them."""
        for conversation in conversations:
            for tool in self.tools.values():
                self._quietly(tool, "end", conversation)

    def close(self) -> None:
        """Closes every tool; once is enough."""
        if self._closed:
            return
        self._closed = True
        for tool in self.tools.values():
            self._quietly(tool, "close")

    def _run_lanes(
        self, calls: Sequence[ToolCall], results: list[ToolResult | None], waiting: deque[deque[int]]
    ) -> None:
        """A lane is the calls of one conversation: its first runs in a thread, the next follows when that has ended."""
        events: queue.SimpleQueue[_Job] = queue.SimpleQueue()  # a job comes when it starts and when it ends
        running: dict[int, _Job] = {}  # by call index
        while waiting or running:
            while waiting and len(running) < self.max_concurrency:
                lane = waiting.popleft()
                index = lane.popleft()
                running[index] = job = _Job(index, calls[index], self.tools[calls[index].name], lane)
                threading.Thread(target=self._work, args=[job, events], name=job.call.name, daemon=True).start()
            try:
                changed = [events.get(timeout=self._patience(running.values()))]
            except queue.Empty:
                changed = list(running.values())
            for job in changed:
                if running.get(job.index) is job and (result := self._outcome(job)) is not None:
                    watch_lock(job, None)
                    results[job.index] = result
                    del running[job.index]
                    if job.lane:
                        waiting.append(job.lane)

    def _work(self, job: _Job, events: queue.SimpleQueue[_Job]) -> None:
        """In its own thread: waits for a slot, runs the call, and says when it starts and ends."""
        tool, call = job.tool, job.call
        self._slots.acquire()  # whoever holds one gives it back by its deadline
        timeout_s = self.timeout_s if tool.timeout_s is None else tool.timeout_s
        job.start(timeout_s, _GRACE_S if tool.keeps_deadline else 0.0)
        watch_lock(job, job.give_up_at)
        events.put(job)
        status: Status
        try:
            content = tool.call(call.arguments or {}, conversation=call.conversation, deadline=job.deadline)
            status = "ok"
        except BaseException as error:  # sys.exit() in a tool is no reason to end anything either
            content, status = _said(error), "timeout" if isinstance(error, TimeoutError) else "error"
        with self._lock:
            job.content, job.status, job.ended = str(content), status, time.monotonic()
            if job.given_up:
                self._left_behind[tool.name] -= 1
            else:
                self._slots.release()
        events.put(job)

    def _outcome(self, job: _Job) -> ToolResult | None:
        """The result of a job that has ended or whose time is over; None while it may run."""
        with self._lock:
            if job.ended is not None:
                content, cut = cut_text(job.content, self.max_result_chars)
                return ToolResult(job.call, content, job.status, job.ended - job.started, cut)
            if time.monotonic() < job.give_up_at:
                return None
            job.given_up = True
            self._left_behind[job.tool.name] += 1
            self.counters["left_behind"] += 1
            self._slots.release()
        text = f"{job.tool.name}: no result within {job.timeout_s:g} s; the call was given up."
        return ToolResult(job.call, text, "timeout", time.monotonic() - job.started)

    def _patience(self, jobs: Iterable[_Job]) -> float | None:
        """Seconds until the first deadline; None where all wait for a slot: then one of them says when it starts."""
        first = min((job.give_up_at for job in jobs), default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _refused(self, call: ToolCall) -> ToolResult | None:
        """The result of a call that cannot be run at all."""
        if call.error is not None:
            return self._answer(call, call.error, "malformed")
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            return self._answer(
                call,
                f"There is no tool {call.name!r}.{did_you_mean(str(call.name), self.tools)} Tools: {known}.",
                "unknown",
            )
        if not isinstance(call.arguments, dict | None):
            kind = type(call.arguments).__name__
            return self._answer(call, f"{call.name}: the arguments must be a JSON object: got a {kind}.", "malformed")
        with self._lock:
            left = self._left_behind[call.name]
        if left >= _MAX_LEFT_BEHIND:
            text = f"{call.name}: cannot be called now: {left} earlier calls have still not ended."
            return self._answer(call, text, "error")
        return None

    def _answer(self, call: ToolCall, text: str, status: Status) -> ToolResult:
        content, cut = cut_text(text, self.max_result_chars)
        return ToolResult(call, content, status, 0.0, cut)

    def _counted(self, result: ToolResult) -> ToolResult:
        with self._lock:
            self.counters["calls"] += 1
            self.counters[result.status] += 1
            self.counters["cut"] += result.cut > 0
        return result

    def _quietly(self, tool: Tool, method: str, *args: Any) -> None:
        try:
            getattr(tool, method)(*args)
        except Exception:
            _LOG.warning("tool %r: %s() failed", tool.name, method, exc_info=True)


@dataclass(eq=False)
class _Job:
    """One call in its thread; ``lane`` has the calls of its conversation that wait for it."""

    index: int
    call: ToolCall
    tool: Tool
    lane: deque[int]
    timeout_s: float = 0.0
    started: float = 0.0
    deadline: float = float("inf")
    give_up_at: float = float("inf")
    ended: float | None = None
    content: str = ""
    status: Status = "error"
    given_up: bool = False

    def start(self, timeout_s: float, grace_s: float) -> None:
        self.started, self.timeout_s = time.monotonic(), timeout_s
        self.deadline = self.started + timeout_s
        self.give_up_at = self.deadline + grace_s


def cut_text(text: str, limit: int) -> tuple[str, int]:
    """At most ``limit`` characters: head and tail with a notice between, and how many were left out.

    Half of a surrogate pair, which no tokenizer takes, becomes a question mark.

    >>> cut_text("a" * 500 + "b" * 500, 50)
    ('aaaaaaaaa\\n[... 982 characters cut ...]\\nbbbbbbbbb', 982)
    >>> cut_text("short", 100)
    ('short', 0)
    """
    if len(text) > limit:
        room = limit - len(f"\n[... {len(text):,} characters cut ...]\n")
        head, tail = room - room // 2, room // 2
        cut = len(text) - head - tail
        text = f"{text[:head]}\n[... {cut:,} characters cut ...]\n{text[len(text) - tail :]}"
    else:
        cut = 0
    return text.encode("utf-8", "replace").decode("utf-8"), cut


def _said(error: BaseException) -> str:
    """What the model is told about an exception: no traceback, it would show the host's files."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be read)"
    if isinstance(error, ToolError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
