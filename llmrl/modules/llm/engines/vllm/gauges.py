"""Gauges of a running vLLM: the share of its KV cache in use, preempted requests, hits of its prefix cache, accepted
tokens of speculative decoding.

The numbers are ``preempted``, ``prefix_hits`` and ``prefix_queries``, ``accepted`` and ``drafted`` (in tokens),
``cache_max`` and ``waiting_max``; those that a vLLM does not report are absent. `gauge_metrics`
converts them to a run's metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from llmrl.optional import require

_COUNTERS = {  # names in a server's /metrics; a new "started" means a new process, whose counters began at 0
    "vllm:num_preemptions": "preempted",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "process_start_time_seconds": "started",
}


class EngineStats:
    """Adds up the statistics that an engine built here reports after each step; vLLM calls it from any thread.

    It registers itself in the ``stat_loggers`` of ``engine``, an ``LLMEngine`` or ``AsyncLLM``. If the engine has none
    (``disable_log_stats=True``, or another vLLM version), there are no numbers.
    """

    def __init__(self, engine: Any) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, float] = {}
        loggers = getattr(getattr(engine, "logger_manager", None), "stat_loggers", None)
        if isinstance(loggers, list):
            loggers.append(self)

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any) -> None:
        """Called by vLLM. ``iteration_stats`` omits a preempted request that ends before it is resumed."""
        prefix = getattr(scheduler_stats, "prefix_cache_stats", None)
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)  # None in a step without drafts
        found = {
            "preempted": getattr(iteration_stats, "num_preempted_reqs", None),
            "prefix_queries": getattr(prefix, "queries", None),
            "prefix_hits": getattr(prefix, "hits", None),
            "drafted": getattr(drafts, "num_draft_tokens", None),
            "accepted": getattr(drafts, "num_accepted_tokens", None),
            "cache_max": getattr(scheduler_stats, "kv_cache_usage", None),
            "waiting_max": getattr(scheduler_stats, "num_waiting_reqs", None),
        }
        with self._lock:
            for name, value in found.items():
                if value is not None:
                    self._numbers[name] = _both(name, self._numbers.get(name, 0), value)

    def log(self, *_: Any, **__: Any) -> None:
        """Called by vLLM, like its aliases below; does nothing."""

    log_engine_initialized = record_sleep_state = record_admission_rejection = log

    def take(self) -> dict[str, float]:
        """The numbers since the last call."""
        with self._lock:
            numbers, self._numbers = self._numbers, {}
        return numbers


class ServerCounters:
    """A server's counts between two readings of its ``/metrics``, for all its clients; it reports no maxima."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, page: str) -> dict[str, float]:
        """The numbers since the last ``page``; none the first time, after a restart, or for an empty page."""
        before, self._last = self._last, _read_counters(page)
        now = dict(self._last)
        if before.pop("started", None) != now.pop("started", None):
            return {}
        counts = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        return counts if all(count >= 0 for count in counts.values()) else {}  # negative after a restart


def _read_counters(page: str) -> dict[str, float]:
    """Sums of the counters over a server's engines. Raises MissingDependencyError; ValueError for a damaged page."""
    lines = [line + "\n" for line in page.splitlines() if line.startswith(tuple(_COUNTERS))]
    if not lines:
        return {}
    parser = require("prometheus_client.parser", extra="vllm", used_by="VLLMEngine")
    found: dict[str, float] = {}
    for family in parser.text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            if name := _COUNTERS.get(sample.name.removesuffix("_total")):
                found[name] = found.get(name, 0) + sample.value
    return found


def merged(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merges the numbers of several engines: sums, or maxima for ``_max``; keeps only numbers that all report."""
    numbers = dict(parts[0]) if parts else {}
    for part in parts[1:]:
        numbers = {name: _both(name, value, part[name]) for name, value in numbers.items() if name in part}
    return numbers


def _both(name: str, one: float, other: float) -> float:
    return max(one, other) if name.endswith("_max") else one + other


def gauge_metrics(numbers: Mapping[str, float]) -> dict[str, float]:
    """Converts numbers to metrics of metrics.jsonl; a share of nothing is absent.

    >>> gauge_metrics({"preempted": 3, "cache_max": 0.5, "prefix_hits": 16, "prefix_queries": 64})
    {'engine/preempted': 3, 'engine/cache_max_frac': 0.5, 'engine/prefix_hit_frac': 0.25}
    """
    names = {"preempted": "preempted", "cache_max": "cache_max_frac", "waiting_max": "waiting_max"}
    metrics = {f"engine/{name}": numbers[key] for key, name in names.items() if key in numbers}
    shares = {"prefix_hit_frac": ("prefix_hits", "prefix_queries"), "draft_accepted_frac": ("accepted", "drafted")}
    for name, (part, whole) in shares.items():
        if numbers.get(whole) and part in numbers:
            metrics[f"engine/{name}"] = numbers[part] / numbers[whole]
    return metrics
