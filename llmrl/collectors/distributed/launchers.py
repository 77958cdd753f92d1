"""Launchers of worker processes, on this machine or as submitit jobs; `submitit_delayed_launcher`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrl.collectors.distributed.rendezvous import Address
from llmrl.collectors.distributed.worker import serve
from llmrl.collectors.worker_pool import CLOSE_S, START_S, start_worker
from llmrl.concurrency.process_monitor import end_process
from llmrl.errors import ConfigError, DeadlineError
from llmrl.optional import require

QUEUE_S = 3600.0  # for queued jobs to start
_FOLDER = "llmrl_jobs"
_DEFAULTS = {"timeout_min": 24 * 60}
_TAIL = 2000  # characters of a job's log in a message

Launch = Callable[[Address, int], Any]  # starts worker i, and returns its process


class Job:
    """Adapts a job to the process methods that a pool uses; None: a job that `submitit_delayed_launcher` started."""

    pid = None

    def __init__(self, job: Any = None):
        self._job = job

    @property
    def exitcode(self) -> int | None:
        if self._job is None:
            return None
        return 0 if self._job.done() else None

    @property
    def is_foreign(self) -> bool:
        """True if this process cannot end it."""
        return self._job is None

    def join(self, timeout: float) -> None:
        """Waits by polling, because a job is not a child of this process."""
        end = time.monotonic() + timeout
        while self.exitcode is None and time.monotonic() < end:
            time.sleep(0.05)

    def kill(self) -> None:
        if self._job is not None:
            with contextlib.suppress(Exception):  # it has ended meanwhile, or the scheduler does not respond
                self._job.cancel()

    def describe(self) -> str:
        """Its state and the end of its log, for messages."""
        if self._job is None:
            return "it closed its connection"
        log = ""
        with contextlib.suppress(Exception):  # no log was written
            log = (self._job.stderr() or "").strip()[-_TAIL:]
        return f"its job {self._job.job_id} is {self._job.state}" + (f"; the end of its log:\n{log}" if log else "")


def launcher_of(name: str, slurm_kwargs: Mapping[str, Any] | None, who: str) -> tuple[Launch, float, bool]:
    """The launch function, the seconds within which all workers must connect, and True if all run on this machine."""
    if name != "submitit" and slurm_kwargs:
        raise ConfigError(f"{who}: slurm_kwargs are settings of launcher='submitit': got them with {name!r}.")
    if name == "mp":
        return lambda address, index: start_worker(serve, [address, index], index), START_S, True
    if name == "submitit":
        executor = _executor(slurm_kwargs, who)
        return lambda address, index: Job(executor.submit(serve, address, index)), QUEUE_S, _is_local(executor)
    if name == "submitit_delayed":
        if _delayed is None:
            raise ConfigError(
                f"{who}: launcher='submitit_delayed' only works in a function that submitit_delayed_launcher decorates."
            )
        return lambda address, index: Job(), QUEUE_S, _delayed.is_local
    raise ConfigError(f"{who}: launcher must be 'mp', 'submitit' or 'submitit_delayed': got {name!r}.")


def _executor(settings: Mapping[str, Any] | None, who: str) -> Any:
    submitit = require("submitit", extra="slurm", used_by=who)
    settings = {**_DEFAULTS, **(settings or {})}
    executor = submitit.AutoExecutor(folder=settings.pop("folder", _FOLDER), cluster=settings.pop("cluster", None))
    try:
        executor.update_parameters(**settings)
    except (NameError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{who}: settings of jobs must be folder, cluster and parameters of a submitit executor: got "
            f"{settings} ({error})."
        ) from error
    return executor


def _is_local(executor: Any) -> bool:
    return executor.cluster in ("local", "debug")


# -- the trainer as a job ----------------------------------------------------------------------------------------------


@dataclass
class _Delayed:
    """Settings that the decorator passes to the job of the trainer."""

    path: Path  # file from which the workers read its address
    num_jobs: int
    framework: str
    backend: str
    tcpport: int | None
    is_local: bool


_delayed: _Delayed | None = None  # in the job of the trainer


def delayed_jobs(address: Address, num_workers: int, framework: str, backend: str | None, who: str) -> None:
    """Writes the address of this trainer for the jobs that wait for it."""
    given = _delayed
    wanted = (given.num_jobs, given.framework, given.backend if backend else None)
    if wanted != (num_workers, framework, backend):
        raise ConfigError(
            f"{who}: must match submitit_delayed_launcher, which has num_jobs={given.num_jobs}, framework="
            f"{given.framework!r}, backend={given.backend!r}; got {num_workers} workers, {framework!r}, {backend!r}."
        )
    # The jobs poll for the file: renamed into place, it is never read half written.
    unfinished = given.path.with_suffix(".part")
    unfinished.touch(mode=0o600)  # it holds the key
    unfinished.write_text(json.dumps([address.host, address.port, address.key.hex()]))
    os.replace(unfinished, given.path)


def delayed_port() -> int | None:
    return None if _delayed is None else _delayed.tcpport


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | None = None,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a trainer's function: a call runs it as a job, with ``num_jobs`` further jobs that collect for it.

    Reads   framework ("distributed" or "rpc") and backend of the collector that the function creates with
            ``launcher="submitit_delayed"``; tcpport (None: a free port); settings of a submitit executor for the
            trainer's job and for the collecting jobs, with ``folder`` (shared by all machines) and ``cluster``
    Returns the function's result when its job has ended; the collecting jobs have ended too
    """
    who = "submitit_delayed_launcher"
    if num_jobs < 1 or framework not in ("distributed", "rpc"):
        raise ConfigError(
            f"{who}: num_jobs must be at least 1 and framework 'distributed' or 'rpc': got {num_jobs}, {framework!r}."
        )

    def decorate(main: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def launch(*arguments: Any, **keywords: Any) -> Any:
            trainers, collectors = (_executor(conf, who) for conf in (submitit_main_conf, submitit_collection_conf))
            path = Path(trainers.folder).absolute() / f"address-{uuid.uuid4().hex}.json"
            is_local = _is_local(trainers) and _is_local(collectors)
            settings = _Delayed(path, num_jobs, framework, backend, tcpport, is_local)
            job = trainers.submit(_run_main, settings, main, arguments, keywords)
            jobs = [Job(collectors.submit(_wait_and_serve, path)) for _ in range(num_jobs)]
            try:
                return job.result()
            finally:
                for one in (Job(job), *jobs):
                    end_process(one, CLOSE_S)
                path.unlink(missing_ok=True)

        return launch

    return decorate


def _run_main(settings: _Delayed, main: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    global _delayed
    _delayed = settings
    return main(*arguments, **keywords)


def _wait_and_serve(path: Path) -> None:
    deadline = time.monotonic() + QUEUE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise DeadlineError(f"a collecting job: the trainer must write its address to {path}: it has not.")
        time.sleep(0.2)
    host, port, key = json.loads(path.read_text())
    serve(Address(host, port, bytes.fromhex(key)))
