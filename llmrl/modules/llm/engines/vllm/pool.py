"""A `Core` over several servers of one model: rows go to the least loaded server, those of a lost one to the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmrl.errors import ConfigError, LLMRLError, RolloutError
from llmrl.modules.llm.engines.vllm.core import Completion, NothingLoadedError, Requests
from llmrl.modules.llm.engines.vllm.gauges import merged
from llmrl.modules.llm.engines.vllm.server import ServerCore, served_model

_UNKNOWN = "unknown"  # matches no server's label: marks a server that was lost before it got any weights
_RETURNED_S = 2.0  # timeout of the probe that each update sends to a lost server


class PoolCore:
    """Requests to ``urls``, whose servers must serve the same model.

    A server that fails is excluded, and its rows are sent to other servers: a row depends only on its prompt, its seed
    and the weights. The next update readmits it and sends it the weights. If no server is left, those that still have
    the current weights are readmitted at once, at most once per call.

    Several ranks may use the same servers. One of them sends the weights; the others then receive its ``labels``, and
    use only the servers that have these labels.
    """

    def __init__(self, urls: Sequence[str], **waits: float) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise ConfigError(f"VLLMEngine: servers must be different, at least one: got {list(urls)}.")
        self._lock = threading.Lock()
        self._in_flight: dict[ServerCore, int] = {}  # available servers -> rows in flight
        self._lost: dict[ServerCore, str] = {}  # lost servers -> reason
        self._num_workers: dict[ServerCore, int] = {}
        self._updated: dict[ServerCore, int] = {}  # servers of the last update -> number of workers
        self._is_loading = False
        self._counted: list[ServerCore] = []  # the servers that the last gauges cover
        try:
            for url in urls:
                self._in_flight[ServerCore(url, **waits)] = 0
            cores = list(self._in_flight)
            for core in cores[1:]:
                if core.info.model != cores[0].info.model:
                    raise ConfigError(
                        f"VLLMEngine: servers must serve the same model: {core.url} has {core.info.model}, "
                        f"{cores[0].url} has {cores[0].info.model}."
                    )
        except BaseException:
            self.close()
            raise
        self.info = replace(
            cores[0].info,
            max_length=min(core.info.max_length for core in cores),
            processed=all(core.info.processed for core in cores),
        )

    @property
    def url(self) -> str:
        """All URLs in one string, equal on every rank that uses these servers."""
        return " ".join(sorted(core.url for core in (*self._in_flight, *self._lost)))

    @property
    def labels(self) -> dict[str, str | None]:
        """Available servers' URLs -> labels of the weights that they were sent last."""
        return {core.url: core.label for core in self._in_flight}

    @labels.setter
    def labels(self, labels: Mapping[str, str | None]) -> None:
        with self._lock:
            for core in (cores := [*self._in_flight, *self._lost]):
                core.label = labels.get(core.url, _UNKNOWN)
            self._lost = {core: "it did not get the last weights." for core in cores if core.url not in labels}
            self._in_flight = {core: self._in_flight.get(core, 0) for core in cores if core.url in labels}

    # --- requests -----------------------------------------------------------------------------------------------------

    def complete(self, requests: Requests) -> list[Completion]:
        """One completion per prompt. Raises RolloutError if no server is left."""
        found: dict[int, Completion] = {}
        asked_again = False
        # Rows of servers that were lost during the call are missing, and go to the others.
        while missing := [row for row in range(len(requests.prompts)) if row not in found]:
            if not self._in_flight and not asked_again:  # servers may have been too busy to answer
                self._take_in(requests.end)
                asked_again = True
            parts = self._assign(missing, requests.prompts)

            def ask(core: ServerCore, parts: Mapping[ServerCore, list[int]] = parts) -> list[Completion]:
                rows = parts[core]
                prompts, options = [requests.prompts[row] for row in rows], [requests.options[row] for row in rows]
                hear = None if requests.hear is None else [requests.hear[row] for row in rows]
                try:
                    return core.complete(replace(requests, prompts=prompts, options=options, hear=hear))
                finally:
                    with self._lock:
                        if core in self._in_flight:
                            self._in_flight[core] = max(0, self._in_flight[core] - len(rows))

            for core, answers in self._each(list(parts), ask).items():
                found |= zip(parts[core], answers, strict=True)
        return [found[row] for row in range(len(requests.prompts))]

    def _assign(self, rows: Sequence[int], prompts: Sequence[list[int]]) -> dict[ServerCore, list[int]]:
        """Assigns rows to the servers with the fewest rows in flight, and counts them there.

        Rows of one prompt stay on one server, which then reads it once, as far as the servers stay equally loaded.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(prompts[row]), []).append(row)
        parts: dict[ServerCore, list[int]] = {}
        with self._lock:
            self._check_any(RolloutError)
            # An equal share of all rows in flight: each server is filled up to it.
            fair = -(-(sum(self._in_flight.values()) + len(rows)) // len(self._in_flight))
            for group in groups.values():
                while group:
                    core = min(self._in_flight, key=self._in_flight.__getitem__)
                    count = max(1, fair - self._in_flight[core])
                    taken, group = group[:count], group[count:]
                    self._in_flight[core] += len(taken)
                    parts.setdefault(core, []).extend(taken)
        return parts

    def _each(self, cores: Sequence[ServerCore], ask: Callable[[ServerCore], Any]) -> dict[ServerCore, Any]:
        """Calls ``ask`` for all servers at the same time; returns the answers, and marks servers that fail as lost.
        While weights are loaded the first failure ends the other calls, which may wait for the lost server.
        """
        answers: dict[ServerCore, Any] = {}
        with ThreadPoolExecutor(max(len(cores), 1), thread_name_prefix="llmrl-vllm-pool") as pool:
            asked = {pool.submit(ask, core): core for core in cores}
            for future in as_completed(asked):
                try:
                    answers[asked[future]] = future.result()
                except RolloutError as error:
                    self._lose(asked[future], str(error))
                    for other in [each for each in asked if self._is_loading and not each.done()]:
                        asked[other].give_up("another server was lost")
        return {core: answers[core] for core in cores if core in answers}

    def _lose(self, core: ServerCore, why: str) -> None:
        with self._lock:
            self._in_flight.pop(core, None)
            self._lost[core] = why

    def _check_any(self, kind: type[LLMRLError]) -> None:
        if not self._in_flight:
            raise kind(
                f"VLLMEngine: a server must be left: all are lost. {' '.join(self._lost.values())} Start them again; "
                "llmrl resume continues a run from its newest checkpoint."
            )

    # --- weights ------------------------------------------------------------------------------------------------------

    def call_workers(self, method: str, end: float, **arguments: Any) -> list[Any]:
        """The answers of the workers of all servers. While weights are loaded, a server that fails ends the update.
        Before that, lost servers that answer again are readmitted.
        """
        if not self._is_loading:
            self._take_in()
        cores = list(self._in_flight)

        def ask(core: ServerCore) -> list[Any]:
            numbered = {}
            if method == "llmrl_open_buffer":  # worker ranks in the broadcast group, server by server
                numbered["first_rank"] = 1 + sum(self._num_workers[other] for other in cores[: cores.index(core)])
            return core.call_workers(method, end, **arguments, **numbered)

        answers = self._each(cores, ask)
        if not self._is_loading:
            self._num_workers = {core: len(workers) for core, workers in answers.items()}
        if self._is_loading and len(answers) < len(cores):
            raise RolloutError(f"VLLMEngine: a server was lost during an update. {' '.join(self._lost.values())}")
        self._check_any(RolloutError)
        return [answer for core in answers for answer in answers[core]]

    @contextlib.contextmanager
    def updating(self, version: int, end: float) -> Iterator[bool]:
        """Ensures that no request of any client runs on any server inside the block."""
        before, same = self._updated, True
        with contextlib.ExitStack() as updates:
            for core in list(self._in_flight):
                try:
                    same &= updates.enter_context(core.updating(version, end))
                except NothingLoadedError as error:
                    self._lose(core, str(error))
            self._check_any(NothingLoadedError)
            # A broadcast group is fixed to its workers: if servers joined, left or changed, it must be rebuilt.
            self._updated = {core: self._num_workers[core] for core in self._in_flight}
            self._is_loading = True
            try:
                yield same and self._updated == before
            finally:
                self._is_loading = False

    def _take_in(self, same_until: float | None = None) -> None:
        """Readmits lost servers that answer with this model; with ``same_until``, a deadline, only those that still
        have the weights that they were sent.
        """
        for core in list(self._lost):
            with contextlib.suppress(LLMRLError, LookupError, ValueError):
                served = served_model(core.url, timeout_s=_RETURNED_S)
                core.label = core.label or _UNKNOWN
                if same_until is not None:
                    core.check_label(same_until)
                if (served.get("root") or served["id"]) == self.info.model:
                    with self._lock:
                        if self._lost.pop(core, None) is not None:
                            self._in_flight[core] = 0

    def set_adapter(self, folder: Path, *, version: int, end: float) -> None:
        for core in self._in_flight:
            core.set_adapter(folder, version=version, end=end)

    def take_gauges(self) -> dict[str, float]:
        """Merged gauges of all servers; empty if the servers changed since the last call: rows ran on others too."""
        with self._lock:
            before, self._counted = self._counted, list(self._in_flight)
        numbers = merged([core.take_gauges() for core in self._counted])
        return numbers if set(self._counted) == set(before) else {}

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        for core in [*self._in_flight, *self._lost]:
            core.close()
