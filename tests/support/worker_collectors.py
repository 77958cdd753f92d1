"""Collectors with workers for a test, after which no process may be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import descendants, is_running, wait_until


def pids(collector: Any) -> list[int]:
    """The processes of its workers, which are children of this one or actors of Ray."""
    workers = collector._pool.workers
    return [one.process.pid if hasattr(one, "process") else int(one.place.split()[1]) for one in workers]


@contextmanager
def collectors(kind: type, **defaults: Any) -> Iterator[Callable[..., Any]]:
    """Makes collectors, of two counting envs and of ``kind`` where a call does not say otherwise."""
    made: list[Any] = []
    started: set[int] = set()

    def make(cls: type = kind, envs: Any = 2, policy: Any = None, **options: Any) -> Any:
        envs = [CountingEnv] * envs if isinstance(envs, int) else envs
        given = {"frames_per_batch": 12, "total_frames": 24, "timeout_s": 60.0, **defaults, **options}
        made.append(cls(envs, None if "policy_factory" in options and policy is None else policy or Scale(), **given))
        started.update(pids(made[-1]), *(dict(descendants(pid)) for pid in pids(made[-1])))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
    wait_until(lambda: not any(map(is_running, started)), 60)  # a worker's own fork server takes its time
