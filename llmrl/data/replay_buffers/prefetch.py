"""Batches prepared ahead by threads, in the order in which they were drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from llmrl.errors import DeadlineError


class _Waiting(NamedTuple):
    before: Any  # the sampler's bookmark before this batch was drawn
    future: Future[Any]
    info: dict[str, Any]
    ran_out: bool


class Prefetcher:
    """Keeps a queue of up to ``depth`` batches drawn ahead.

    Rows are drawn and copied in the caller's thread, one batch after the other. Worker threads collate and run the
    transforms, which must therefore be safe to run concurrently. The sampler's bookmark is recorded before each draw:
    ``clear`` returns that of the oldest queued batch, so going back to it and drawing again gives the same batches.
    """

    def __init__(self, depth: int, timeout_s: float) -> None:
        if depth < 1 or timeout_s <= 0:
            raise ValueError(
                f"ReplayBuffer: prefetch and prefetch_timeout_s must be positive: got {depth} and {timeout_s}."
            )
        self.depth = depth
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(max_workers=depth, thread_name_prefix="replay-buffer-prefetch")
        self._queue: deque[_Waiting] = deque()

    def __reduce__(self) -> Any:
        return Prefetcher, (self.depth, self.timeout_s)  # a copy has its own threads and an empty queue

    def take(
        self,
        draw: Callable[[], tuple[Any, dict[str, Any], bool]],
        bookmark: Callable[[], Any],
        finish: Callable[[Any, dict[str, Any]], Any],
    ) -> _Waiting:
        """The next batch, after drawing until ``depth`` more are queued; worker threads ``finish`` them."""
        while len(self._queue) <= self.depth:
            before = bookmark()  # consistent with the draw: the caller holds the buffer's lock
            raw, info, ran_out = draw()
            self._queue.append(_Waiting(before, self._pool.submit(finish, raw, info), info, ran_out))

        return self._queue.popleft()

    def wait(self, waiting: _Waiting) -> tuple[Any, dict[str, Any], bool]:
        try:
            data = waiting.future.result(timeout=self.timeout_s)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"ReplayBuffer: a prefetched batch must be ready within prefetch_timeout_s={self.timeout_s:g}: it is "
                "not; a transform or collate_fn hangs."
            ) from error
        return data, waiting.info, waiting.ran_out

    def clear(self) -> Any:
        """Drops the queued batches; returns the sampler's bookmark to go back to, or ``None`` if none were queued."""
        if not self._queue:
            return None
        before = self._queue[0].before
        for waiting in self._queue:  # a running one cannot be cancelled: it finishes and its result is dropped
            waiting.future.cancel()
        self._queue.clear()
        return before

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
