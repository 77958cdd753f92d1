"""`MultiSyncDataCollector`, `MultiaSyncDataCollector`, `aSyncDataCollector`: collectors in worker processes."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import cloudpickle
import torch
from tensordict import TensorDictBase

from llmrl.collectors.base import Weights
from llmrl.collectors.collector import SyncDataCollector
from llmrl.collectors.nested import NestedCollector
from llmrl.collectors.pooled import PooledCollector, at, common_count, moves_version
from llmrl.collectors.worker import STOP, Recipe
from llmrl.collectors.worker_pool import Packed, Worker, WorkerPool
from llmrl.envs.step import next_seed
from llmrl.errors import ConfigError, DeadlineError, UnsupportedError, WeightSyncError
from llmrl.weight_update import SharedMemWeightSyncScheme


class _MultiDataCollector(PooledCollector):
    """Collectors in worker processes, one for each env function.

    Reads   ``create_env_fn``, functions that make the envs (or one function, and ``num_workers``); ``policy``, copied
            to each process, or ``policy_factory``, called in each; `CollectorOptions` for the other arguments
    Raises  WorkerError, with the traceback, if a worker raised, or if its process ended; DeadlineError if it took no
            step for ``timeout_s``. Both name the worker, and end all processes

    num_threads           number of torch's threads in this process; num_sub_threads: in each worker
    update_at_each_batch  the weights of ``policy`` are sent before every batch
    weight_sync_schemes   default: the policy through shared memory, `SharedMemWeightSyncScheme`
    collector_class       the class of the workers' collectors

    Functions are pickled with cloudpickle, and may be lambdas; the main module is not run again. Workers write into a
    shared ``replay_buffer`` themselves; after `start` they do so continuously, and their policy may be some steps old.
    """

    cat_results: Literal["stack"] | int = "stack"
    preemptive_threshold: float | None = None

    def __init__(
        self,
        create_env_fn: Sequence[Callable[..., Any]] | Callable[..., Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        num_workers: int | None = None,
        collector_class: type[SyncDataCollector] | None = None,
        update_at_each_batch: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        **options: Any,
    ):
        super().__init__(policy, policy_factory, options)
        who = type(self).__name__
        self.num_workers = common_count(who, create_env_fn=create_env_fn, num_workers=num_workers)
        if self.options.interruptor is not None:
            raise UnsupportedError(f"{who}: interruptor is not supported with workers; use preemptive_threshold.")
        self._frames_of = self._divide_frames(self.num_workers)
        self.update_at_each_batch = update_at_each_batch
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._shared_counters = torch.zeros(self.num_workers, 3, dtype=torch.int64).share_memory_()
        self._senders, ends = self._connect(self._schemes(policy_factory))
        recipes = self._recipes(
            create_env_fn, policy_factory, collector_class or SyncDataCollector, num_sub_threads, ends
        )
        self._pool = self._make_pool(recipes)
        if self.sync:
            with self._pool.failing():
                self._check_equal_specs()
        if self.options.track_policy_version == "uuid":
            self._version = ""  # a string, so that _move_version makes a uuid
            self._move_version(None, None)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _default_scheme(self) -> Any:
        return SharedMemWeightSyncScheme(timeout=self.options.timeout_s)

    def _make_pool(self, recipes: Sequence[Recipe]) -> WorkerPool:
        return WorkerPool(type(self).__name__, recipes, self._shared_counters, self.options.timeout_s)

    def _connect(self, schemes: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A sender for each model, and each worker's scheme and end of the connection."""
        senders: dict[str, Any] = {}
        ends: list[dict[str, Any]] = [{} for _ in range(self.num_workers)]
        for model_id, scheme in schemes.items():
            sender = senders[model_id] = self._sender(model_id, scheme)
            for index in range(self.num_workers if scheme.per_worker else 0):
                ours, theirs = multiprocessing.Pipe()
                sender.register_worker(index, ours)
                ends[index][model_id] = (scheme, theirs)
        return senders, ends

    def _recipes(
        self, env_fn: Any, factory: Any, cls: type, threads: int, ends: Sequence[dict[str, Any]]
    ) -> list[Recipe]:
        who = type(self).__name__
        # Parts are pickled one by one, so that an error can name the part that cannot be pickled.
        policy = _packed(self.policy, f"{who}: the policy", "; or give policy_factory, a function that makes one")
        recipes, seed = [], torch.initial_seed() % 2**63
        for index in range(self.num_workers):
            seed = next_seed(seed)
            parts = {
                "class": cloudpickle.dumps(cls),
                "env": _packed(at(env_fn, index), f"{who}: create_env_fn[{index}]"),
                "policy": policy,
                "factory": _packed(factory[index] if isinstance(factory, Sequence) else factory, "policy_factory"),
                "options": _packed(self._options_of(index), f"{who}: an argument"),
            }
            build = partial(_build, parts, Packed(self._buffer_of_workers()))
            recipes.append(Recipe(build, index, self.num_workers, ends[index], threads, seed))
        return recipes

    def _options_of(self, index: int) -> dict[str, Any]:
        return super()._options_of(index) | {"storing_device": at(self.options.storing_device, index)}

    # -- data ----------------------------------------------------------------------------------------------------------

    def _take(self, worker: Worker) -> TensorDictBase | None:
        self._pool.arrivals.remove(worker)
        frames, batch = worker.batches.popleft()
        self._pool.delivered += frames
        return batch

    def _take_all(self) -> list[TensorDictBase | None]:
        self._pool.wait(self._have_all_arrived, "collect its part of the batch")
        self._shared_counters[:, STOP] = 0
        return [self._take(worker) for worker in self._pool.workers]

    def _have_all_arrived(self) -> bool:
        arrived = sum(bool(worker.batches) for worker in self._pool.workers)
        share = self.preemptive_threshold
        if share is not None and arrived >= max(1, math.ceil(share * self.num_workers)):
            # Enough have finished: the others end their batches after their current step.
            self._shared_counters[:, STOP] = 1
        return arrived == self.num_workers

    def _take_first(self) -> TensorDictBase | None:
        self._pool.wait(lambda: bool(self._pool.arrivals), "collect a batch")
        batch = self._take(self._pool.arrivals[0])
        return batch if batch is None else batch.clone()  # the worker reuses its memory

    def _push_due_weights(self) -> None:
        if self.update_at_each_batch:
            self.update_policy_weights_()

    def _check_equal_specs(self) -> None:
        first = self._pool.workers[0].spec
        for worker in self._pool.workers[1:]:
            keys = [key for key in first | worker.spec if first.get(key) != worker.spec.get(key)]
            if keys:
                what = f"{keys[0]}" if keys[0] else "the batch size"
                raise ConfigError(
                    f"{self._pool.name(worker)}: all envs must have the same specs, since their batches are joined: "
                    f"{what} is {worker.spec.get(keys[0])}, worker 0 has {first.get(keys[0])}; use "
                    "MultiaSyncDataCollector for envs that differ."
                )

    # -- in the background ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        who = type(self).__name__
        if self.replay_buffer is None:
            raise ConfigError(f"{who}.start: collects into a replay_buffer: give one.")
        if self._pool.is_started or self._batches_out:
            raise ConfigError(f"{who}.start: the collection has begun already.")
        self._pool.check_open("start")
        self._begin()

    def _begin(self) -> None:
        """Makes the workers write into the buffer, until each has collected its part of ``total_frames``."""
        self._pool.is_started = True
        limit = -1 if self.total_frames < 0 else math.ceil(self.total_frames / sum(self._frames_of))
        for worker in self._pool.workers:
            worker.send("run", limit)
        self._pool.watch()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self._pool.ask("pause")
        try:
            yield
        finally:
            for worker in self._pool.workers:
                worker.since = time.monotonic()
                worker.send("resume")

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        try:
            if self._pool.is_open or self._pool.failure is not None:
                self._pool.ask("pause")  # raises if a worker has failed
        finally:
            self.shutdown(timeout=timeout, close_env=close_env)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _send(self, sender: Any, weights: Weights | None, worker_ids: Sequence[int] | None) -> None:
        # Weights are checked before the version changes. The version is sent before the weights, because a worker needs
        # it when it applies them.
        named = sender.prepare(weights)
        if sender.model_id == "policy":
            self._move_version(sender.version + 1 if moves_version(sender) else None, worker_ids)
        self._hand_over(sender, named, worker_ids)

    def _hand_over(self, sender: Any, named: Mapping[str, Any], worker_ids: Sequence[int] | None) -> None:
        sender.update_weights(named, worker_ids=worker_ids)

    def _wait_for(self, sender: Any) -> None:
        """Waits for the sender; meanwhile receives batches, on which workers may block, and detects failed workers."""
        self._pool.check_open("take weights")
        # Refusals are raised after the wait: an exception inside it would end all workers.
        deadline, refusals = time.monotonic() + sender.scheme.timeout, []

        def has_settled() -> bool:
            try:
                sender.wait(0.0)
            except DeadlineError:
                return time.monotonic() > deadline
            except WeightSyncError as refusal:
                refusals.append(refusal)
            return True

        self._pool.wait(has_settled, "take weights", also=sender.pipes)
        if refusals:
            raise refusals[0]
        sender.wait(0.0)

    def increment_version(self) -> None:
        self._move_version(None, None)

    def set_version(self, version: int | str) -> None:
        self._settle()
        super().set_version(version)
        for worker in self._pool.workers:
            worker.send("version", None, version)

    def _move_version(self, number: int | None, worker_ids: Sequence[int] | None) -> None:
        """Increments the version: that of the sender's weights ``number``, or (None) of those that the workers have."""
        self._version = str(uuid.uuid4()) if isinstance(self._version, str) else self._version + 1
        self._tell_version(number, worker_ids)

    def _tell_version(self, number: int | None, worker_ids: Sequence[int] | None) -> None:
        for index in range(self.num_workers) if worker_ids is None else worker_ids:
            self._pool.workers[index].send("version", number, self._version)


class MultiSyncDataCollector(_MultiDataCollector):
    __doc__ = f"""{_MultiDataCollector.__doc__}
    Yields  batches with a share from each worker: ``frames_per_batch`` / workers, rounded up. The share of a worker has
            shape [T] if its env has no batch dimensions, [P, T] if it is a batch of P envs. Shapes for B workers:

    cat_results           "stack" (default): [B, T], [B, P, T]; 0: [B * T], [B * P, T]; -1: [B * T], [P, B * T]
    preemptive_threshold  once this share of the workers has finished, the others stop; their missing rows are zeros
                          with the trajectory id -1
    """

    sync = True

    def __init__(
        self,
        create_env_fn: Sequence[Callable[..., Any]] | Callable[..., Any],
        policy: Any = None,
        *,
        cat_results: Literal["stack"] | int | None = None,
        preemptive_threshold: float | None = None,
        **options: Any,
    ):
        if cat_results not in (None, "stack", 0, -1):
            raise ConfigError(f"{type(self).__name__}: cat_results must be 'stack', 0 or -1: got {cat_results!r}.")
        if preemptive_threshold is not None and not 0 <= preemptive_threshold <= 1:
            raise ConfigError(
                f"{type(self).__name__}: preemptive_threshold must be between 0 and 1: got {preemptive_threshold}."
            )
        self.cat_results = "stack" if cat_results is None else cat_results
        self.preemptive_threshold = preemptive_threshold
        super().__init__(create_env_fn, policy, **options)


class MultiaSyncDataCollector(_MultiDataCollector):
    __doc__ = f"""{_MultiDataCollector.__doc__}
    Yields  batches of ``frames_per_batch`` frames from one worker each, [T] or [P, T], in order of arrival. Workers
            collect during training, at most two batches ahead, so their policy may be some steps old.
    """


class aSyncDataCollector(MultiaSyncDataCollector):
    """`MultiaSyncDataCollector` with one worker: collects while the caller trains."""

    def __init__(self, create_env_fn: Callable[..., Any], policy: Any = None, **options: Any):
        super().__init__([create_env_fn], policy, **options)


# --- parts of a recipe ---


def _packed(value: Any, what: str, remedy: str = "") -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # parts of the value may raise anything
        raise ConfigError(
            f"{what} must be picklable, to be sent to the workers: {type(error).__name__}: {error}{remedy}."
        ) from error


def _build(parts: Mapping[str, bytes], buffer: Packed, stop: Any) -> SyncDataCollector | NestedCollector:
    """Builds a worker's collector, in the worker."""
    cls, env, policy, factory, options = map(cloudpickle.loads, parts.values())
    if buffer.value is not None:
        options["replay_buffer"] = buffer.value
    if issubclass(cls, SyncDataCollector):
        return cls(env, policy, policy_factory=factory, **{"interruptor": stop, **options})
    return NestedCollector(cls(env, policy if factory is None else factory(), **options))
