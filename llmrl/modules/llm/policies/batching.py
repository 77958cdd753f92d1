"""``BatchingEngine``: joins the requests of several threads into one call of the wrapped engine.

It has no thread of its own: the thread of the oldest request makes the call for all requests that can share it. No
thread has to be started or joined, and an interrupted thread leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from torch import Tensor

from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.modules.llm.engines.base import Engine, Generation, Hear, MediaRows, Rows, SamplingParams
from llmrl.modules.llm.vision import present

BATCHING_SETTINGS = frozenset({"batching", "min_batch_size", "max_batch_size", "batching_timeout"})

_PAUSE_S, _GATHER_S = 0.003, 0.02  # of requests that keep arriving: the longest pause between two, and all together
_FIRST_S = 4.0  # taken for the time of the last call before there is one: clients that start ask slowly
_LOOK_AROUND_S = 1.0  # longest sleep before a waiting thread checks that the calling thread is alive


class BatchingEngine:
    """An ``Engine`` that joins requests of several threads. Other attributes are those of the wrapped engine.

    min_batch_size  rows to wait for; default 1: a request runs at once, with any that arrived while the engine was busy
    max_batch_size  maximum rows in one call; requests are never split, a larger one runs alone
    timeout         seconds that a request waits for others; then it runs with those that have arrived
    expected        returns how many requests there may be at a time: an idle engine waits while fewer are and more
                    keep arriving, at most a quarter of the time of its last call. Else the first of many runs alone
    Raises          ConfigError  if a size is not positive, min exceeds max, or the timeout is negative

    Requests share a call if they have the same sampling parameters (for scoring: the same temperature). One call runs
    at a time; weights are updated between calls. If a joined call fails, its requests are repeated one by one, and only
    those that fail alone get an error.

    >>> import torch
    >>> from llmrl.testing import FakeEngine, tiny_tokenizer
    >>> engine = BatchingEngine(FakeEngine(["Yes."], tokenizer=tiny_tokenizer()), min_batch_size=2, timeout=0.01)
    >>> len(engine.generate([torch.tensor([1, 2])], SamplingParams()).ids)  # alone within the timeout
    1
    """

    def __init__(
        self,
        engine: Engine,
        *,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        timeout: float = 10.0,
        expected: Callable[[], int] | None = None,
    ) -> None:
        for name, size in (("min_batch_size", min_batch_size), ("max_batch_size", max_batch_size)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ConfigError(f"batching: {name} must be a positive integer: got {size!r}.")
        if None not in (min_batch_size, max_batch_size) and min_batch_size > max_batch_size:
            raise ConfigError(
                f"batching: min_batch_size must not exceed max_batch_size: got {min_batch_size} and {max_batch_size}."
            )
        if not isinstance(timeout, (int, float)) or not timeout >= 0:
            raise ConfigError(f"batching: batching_timeout must be at least 0 seconds: got {timeout!r}.")
        self.engine = engine
        self.min_batch_size = 1 if min_batch_size is None else min_batch_size
        self.max_batch_size = max_batch_size
        self.timeout, self._expected = timeout, expected
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[_Request] = []  # in the order of arrival
        self._caller: threading.Thread | None = None  # the thread that is using the engine
        self._taken: list[_Request] = []  # the requests of the running call
        self._joining = True
        self._took_s = _FIRST_S  # the time of the last call
        self._gather_until = 0.0  # when an idle engine begins the next one

    # --- the engine's protocol ----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the engine's weights."""
        return self.engine.version

    @version.setter
    def version(self, value: int) -> None:
        self.engine.version = value

    def generate(
        self,
        prompts: Rows,
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        media: MediaRows = None,
        hear: Hear | None = None,
    ) -> Generation:
        """See `Engine`; waits for other requests with the same parameters."""

        def call(parts: list[tuple[Any, ...]]) -> list[Generation]:
            given = {"seeds": _chained(parts, 1), **present(media=_chained(parts, 2), hear=_shared(parts, 3))}
            whole = self.engine.generate(_chained(parts, 0), params, **given)
            names = [name for name in vars(whole) if name != "version"]
            columns = [_split(getattr(whole, name), parts) for name in names]
            return [replace(whole, **dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]

        return self._ask(("generate", params, seeds is None, media is None), call, (prompts, seeds, media, hear))

    def score(
        self, sequences: Rows, *, temperature: float = 1.0, masks: Rows | None = None, media: MediaRows = None
    ) -> list[Tensor]:
        """See `Engine`; waits for other requests at the same temperature."""

        def call(parts: list[tuple[Any, ...]]) -> list[list[Tensor]]:
            given = {"temperature": temperature, "masks": _chained(parts, 1), **present(media=_chained(parts, 2))}
            return _split(self.engine.score(_chained(parts, 0), **given), parts)

        return self._ask(("score", temperature, masks is None, media is None), call, (sequences, masks, media))

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """See `Engine`; runs between two calls, so that the samples of a call have one version."""
        with self._alone():
            self.engine.update_weights(weights, version=version)

    def close(self) -> None:
        """Answers waiting requests, then closes the engine."""
        self.drain()
        self.engine.close()

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.engine, name)

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: the settings and the engine, without requests."""
        return {name: self.__dict__[name] for name in ("engine", "min_batch_size", "max_batch_size", "timeout")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _expected=None)
        self._reset()

    # --- draining and inspection --------------------------------------------------------------------------------------

    def drain(self, timeout: float = 600.0) -> None:
        """Stops joining requests: waiting ones are sent at once, later ones individually.

        Returns when all are answered. Raises DeadlineError after ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._joining = False
            self._changed.notify_all()
            while self._queue or self._caller is not None:
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"batching: all requests must be answered within {timeout:g} s of closing: "
                        f"{self._num_pending()} are not."
                    )
                self._changed.wait(min(left, _LOOK_AROUND_S))
                self._free_if_dead()

    def state(self) -> dict[str, Any]:
        """The settings and the waiting requests: ``queue_size`` wait for a call, ``pending_futures`` for an answer.

        ``lock_state`` is "locked" while a thread uses the engine, else "unlocked".
        """
        with self._changed:
            return {
                "batching_enabled": self._joining,
                "min_batch_size": self.min_batch_size,
                "max_batch_size": self.max_batch_size,
                "queue_size": len(self._queue),
                "pending_futures": self._num_pending(),
                "lock_state": "unlocked" if self._caller is None else "locked",
            }

    # --- joining ------------------------------------------------------------------------------------------------------

    def _ask(self, kind: tuple[Any, ...], call: Callable[[list[Any]], list[Any]], part: tuple[Any, ...]) -> Any:
        """Waits until this request is answered, by a call in this thread or in another."""
        if not len(part[0]):
            return call([part])[0]
        request = _Request(kind, call, part, len(part[0]), time.monotonic() + self.timeout)
        try:
            with self._changed:
                self._queue.append(request)
                self._changed.notify_all()
                while not request.answered and (batch := self._take(request)) is None:
                    now = time.monotonic()
                    waits = (end - now for end in (request.deadline, self._gather_until))
                    self._changed.wait(min((left for left in waits if left > 0), default=_LOOK_AROUND_S))
                    self._free_if_dead()
                    if not request.answered and request.caller is not None and not request.caller.is_alive():
                        name = request.caller.name
                        raise RolloutError(f"batching: thread {name} ended without an answer to this request.")
            if not request.answered:
                began = time.monotonic()
                _answer(batch)
                self._took_s = time.monotonic() - began
        finally:
            self._leave(request)
        if request.error is not None:
            raise request.error
        return request.answer

    def _leave(self, request: _Request) -> None:
        """Cleans up after an answer, an error or an interrupt: frees the engine, and requeues unanswered requests."""
        with self._changed:
            if request in self._queue:
                self._queue.remove(request)
            if self._caller is threading.current_thread():
                # If interrupted inside a joined call, a thread of another request in it repeats the call.
                undone = [taken for taken in self._taken if taken is not request and not taken.answered]
                for taken in undone:
                    taken.caller = None
                self._queue[:0] = undone
                self._caller, self._taken = None, []
            self._changed.notify_all()

    def _take(self, request: _Request) -> list[_Request] | None:
        """The requests of the call that this thread must make now; None while it must wait. Needs the lock."""
        if self._caller is not None or request not in self._queue:
            return None
        # Frequent requests of one kind must not delay the other kinds beyond their timeout.
        now = time.monotonic()
        first = min(self._queue, key=lambda waiting: waiting.deadline)
        if first.kind != request.kind and first.deadline <= now:
            return None
        same = [waiting for waiting in self._queue if waiting.kind == request.kind]
        if same[0] is not request:  # the oldest of a kind makes its call
            return None
        batch, num_rows = [request], request.num_rows
        for waiting in same[1:] if self._joining else ():
            if self.max_batch_size is not None and num_rows + waiting.num_rows > self.max_batch_size:
                break
            batch.append(waiting)
            num_rows += waiting.num_rows
        full = not self._joining or num_rows >= self.min_batch_size or len(batch) < len(same)
        self._gather_until = self._gathers(same) if full else request.deadline
        if self._gather_until > now:
            return None
        self._caller, self._taken = threading.current_thread(), batch
        for taken in batch:
            self._queue.remove(taken)
            taken.caller = self._caller
        return batch

    def _gathers(self, same: list[_Request]) -> float:
        """Until when an idle engine waits for more requests; in the past if they waited for it, or all are there."""
        if self._expected is None or not self._joining or len(same) >= self._expected():
            return 0.0
        pause_s, most_s = max(_PAUSE_S, self._took_s / 20), max(_GATHER_S, self._took_s / 4)
        return min(max(waiting.arrived for waiting in same) + pause_s, same[0].arrived + most_s)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclusive use of the engine inside the block."""
        with self._changed:
            while self._caller is not None:
                self._changed.wait(_LOOK_AROUND_S)
                self._free_if_dead()
            self._caller = threading.current_thread()
        try:
            yield
        finally:
            with self._changed:
                self._caller = None
                self._changed.notify_all()

    def _num_pending(self) -> int:
        return len(self._queue) + sum(not taken.answered for taken in self._taken)

    def _free_if_dead(self) -> None:
        """Frees the engine if the thread that used it no longer exists, for example after a fork."""
        if self._caller is not None and not self._caller.is_alive():
            self._caller, self._taken = None, []
            self._changed.notify_all()


def check_batching(settings: Any) -> None:
    """Raises ConfigError for wrapper arguments that disable batching but set a batch size, or for invalid sizes."""
    if settings.batching is False and (settings.min_batch_size, settings.max_batch_size) != (None, None):
        raise ConfigError(
            f"batching: batching=False must come without min_batch_size and max_batch_size: got "
            f"{settings.min_batch_size} and {settings.max_batch_size}."
        )
    join_requests(None, settings)  # checks sizes before an engine is built, which would stay open


def join_requests(engine: Engine | None, settings: Any) -> Engine | None:
    """The engine, in a ``BatchingEngine`` if a wrapper's arguments enable batching or set a batch size."""
    sizes = settings.min_batch_size, settings.max_batch_size
    if not (sizes != (None, None) if settings.batching is None else settings.batching):
        return engine
    return BatchingEngine(engine, min_batch_size=sizes[0], max_batch_size=sizes[1], timeout=settings.batching_timeout)


def own_engine(engine: Engine) -> Engine:
    """The engine itself, without a `BatchingEngine` around it."""
    return engine.engine if isinstance(engine, BatchingEngine) else engine


@dataclass(eq=False)
class _Request:
    """Rows of one thread that wait for their answer.

    kind    requests of equal kind can share a call
    part    the per-row arguments; ``call`` takes those of several requests and returns one answer per request
    caller  the thread that makes the call, once it is known
    """

    kind: tuple[Any, ...]
    call: Callable[[list[Any]], list[Any]]
    part: tuple[Any, ...]
    num_rows: int
    deadline: float
    arrived: float = field(default_factory=time.monotonic)
    caller: threading.Thread | None = None
    answered: bool = False
    answer: Any = None
    error: Exception | None = None


def _answer(batch: list[_Request]) -> None:
    """Makes one call for all requests; if that fails, one for each, so that only the faulty requests fail."""
    try:
        answers = batch[0].call([request.part for request in batch])
    except Exception as error:
        if len(batch) > 1:
            for request in batch:
                _answer([request])
            return
        batch[0].error = error
        answers = [None]
    for request, answer in zip(batch, answers, strict=True):
        request.answer = answer
        request.answered = True


def _chained(parts: list[tuple[Any, ...]], position: int) -> list[Any] | None:
    return None if parts[0][position] is None else list(chain.from_iterable(part[position] for part in parts))


def _shared(parts: list[tuple[Any, ...]], position: int) -> Hear | None:
    """What hears of the rows of all parts; None if no part hears of its own."""
    own = [(part[position], row) for part in parts for row in range(len(part[0]))]

    def hear(row: int, ids: list[int], log_probs: list[float]) -> bool:
        heard, place = own[row]
        return heard is None or heard(place, ids, log_probs)

    return hear if any(heard is not None for heard, _ in own) else None


def _split(values: Sequence[Any] | None, parts: list[tuple[Any, ...]]) -> list[Any]:
    """Splits the values by parts: as many for each part as it has rows."""
    rest = iter(values or ())
    return [None if values is None else list(islice(rest, len(part[0]))) for part in parts]
