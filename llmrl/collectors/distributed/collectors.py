"""`DistributedDataCollector`, `DistributedSyncDataCollector`, `RPCDataCollector`: collectors on other machines."""

from __future__ import annotations

import contextlib
import copy
import functools
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.background import check_not_started
from llmrl.collectors.collector import SyncDataCollector
from llmrl.collectors.distributed.launchers import delayed_jobs, delayed_port, launcher_of
from llmrl.collectors.distributed.links import GroupLink, Link, RPCLink, check_backend
from llmrl.collectors.distributed.pool import RemotePool
from llmrl.collectors.distributed.rendezvous import Rendezvous
from llmrl.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector, _MultiDataCollector
from llmrl.collectors.pooled import at, common_count
from llmrl.collectors.worker import Recipe
from llmrl.collectors.worker_pool import Worker
from llmrl.concurrency.background_work import BackgroundWork
from llmrl.errors import ConfigError, DeadlineError, UnsupportedError, WorkerError, check_at_least
from llmrl.weight_update import NoWeightSyncScheme, WeightSyncScheme

_CLASSES = {"single": SyncDataCollector, "sync": MultiSyncDataCollector, "async": MultiaSyncDataCollector}


@dataclass(frozen=True)
class RemoteOptions:
    """The keyword arguments of collectors on other machines, besides `CollectorOptions`.

    collector_class             of a worker: a class, or "single", "sync", "async"
    collector_kwargs            its further arguments; a list has an entry for each worker
    num_workers_per_collector   processes of a worker's collector, with an env each, if its class uses processes
    sync                        True: a batch has a part from each worker; False: it is the next batch of any worker
    update_after_each_batch     after a batch, the workers that collected it receive the weights of ``policy``
    max_weight_update_interval  a worker receives them at the latest after this many batches (of any worker); -1: never
    launcher                    "mp": processes of this machine; "submitit": jobs; "submitit_delayed": the jobs that
                                `submitit_delayed_launcher` has started
    slurm_kwargs                settings of a submitit executor, its "folder" (shared by all machines) and "cluster"
    tcp_port                    port at which this process listens for its workers; None: a free port
    host                        its address for the workers; None: loopback for "mp", else its host name
    start_timeout_s             until all workers have connected; None: 120, or 3600 for jobs in a queue
    num_sub_threads             number of torch's threads in each worker
    """

    collector_class: type | str = SyncDataCollector
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    num_workers_per_collector: int = 1
    sync: bool = False
    update_after_each_batch: bool = False
    max_weight_update_interval: int = -1
    launcher: str = "submitit"
    slurm_kwargs: Mapping[str, Any] | None = None
    tcp_port: int | None = None
    host: str | None = None
    start_timeout_s: float | None = None
    num_sub_threads: int = 1


class _Stopped(Exception):
    """Ends the collection in the background."""


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method so that it pauses the thread of `start`."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.background.pause() if self.background.is_elsewhere else contextlib.nullcontext():
            return method(self, *arguments, **options)

    return call


class _RemoteDataCollector(_MultiDataCollector):
    """A collector that has a worker for each env function, on this machine or on others.

    Reads   ``create_env_fn``, functions that make the envs; ``policy``, copied to each worker, or
            ``policy_factory``, called in each; `RemoteOptions` and `CollectorOptions` for the other arguments
    Yields  with ``sync`` batches of ``frames_per_batch`` frames, [workers, *B, T], with *B of the worker's collector;
            else batches [*B, T] of ``frames_per_batch`` frames from one worker each, in order of arrival; workers
            collect at most two batches ahead. With a ``replay_buffer`` None: this process extends it with the batches,
            also in the background (`start`), where only ``update_policy_weights_`` sends weights
    Raises  WorkerError, with the traceback, if a worker raised, or if its process ended; DeadlineError if it took no
            step for ``timeout_s``. Both name the worker, and end all workers
    """

    _more_keywords = tuple(field.name for field in fields(RemoteOptions))

    def __init__(self, create_env_fn: Any, policy: Any, factory: Any, options: Mapping[str, Any]):
        who = type(self).__name__
        mine = {name: value for name, value in options.items() if name in RemoteOptions.__dataclass_fields__}
        self.remote = RemoteOptions(**mine)
        self.sync = self.remote.sync
        self._class = self._check(who, options)
        rest = {name: value for name, value in options.items() if name not in mine}
        makers = list(create_env_fn) if isinstance(create_env_fn, Sequence) else [create_env_fn]
        if issubclass(self._class, _MultiDataCollector):
            makers = [[maker] * self.remote.num_workers_per_collector for maker in makers]
        common_count(who, create_env_fn=makers, collector_kwargs=self.remote.collector_kwargs)
        self._since = [0] * len(makers)  # batches delivered since each worker last received weights
        self._waits: dict[str, bool] = {}  # by model id: updates return when the workers have answered
        self._last: set[int] = set()  # the workers of the last batch delivered
        super().__init__(
            makers,
            policy,
            policy_factory=factory,
            collector_class=self._class,
            num_sub_threads=self.remote.num_sub_threads,
            **rest,
        )
        self.background = BackgroundWork(who, self.options.timeout_s)

    def _check(self, who: str, options: Mapping[str, Any]) -> type:
        remote = self.remote
        cls = remote.collector_class
        cls = _CLASSES.get(cls, cls) if isinstance(cls, str) else cls
        if not (
            isinstance(cls, type)
            and issubclass(cls, (SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector))
        ):
            raise ConfigError(
                f"{who}: collector_class must be SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector, a "
                f"class derived from one, or one of {list(_CLASSES)}: got {cls!r}."
            )
        count = remote.num_workers_per_collector
        check_at_least(who, 1, num_workers_per_collector=count)
        if count > 1 and issubclass(cls, SyncDataCollector):
            raise ConfigError(
                f"{who}: num_workers_per_collector={count} needs a collector with several "
                "processes: collector_class='sync' or 'async'."
            )
        if not options.get("extend_buffer", True):
            raise UnsupportedError(
                f"{who}: extend_buffer=False writes at every step, but the steps of other machines come in batches: "
                "leave it out."
            )
        return cls

    # -- implemented by subclasses -------------------------------------------------------------------------------------

    framework: str
    backend: str | None = None
    scheme_class: type[WeightSyncScheme]  # of schemes that send weights through the link

    @abstractmethod
    def _link(self, host: str) -> Link:
        """The channel for batches and weights: a process group, or RPC."""

    # -- processes -----------------------------------------------------------------------------------------------------

    def _options_of(self, index: int) -> dict[str, Any]:
        return {**super()._options_of(index), **at(self.remote.collector_kwargs or {}, index)}

    def _connect(self, schemes: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The senders; workers are registered with them once all have joined the link."""
        senders: dict[str, Any] = {}
        ends: list[dict[str, Any]] = [{} for _ in range(self.num_workers)]
        for model_id, scheme in schemes.items():
            if not isinstance(scheme, (self.scheme_class, NoWeightSyncScheme)):
                raise ConfigError(
                    f"{type(self).__name__}: the scheme of {model_id!r} must be a {self.scheme_class.__name__}, or "
                    f"a NoWeightSyncScheme: got {type(scheme).__name__}."
                )
            if model_id != "policy" and issubclass(self._class, _MultiDataCollector):
                raise ConfigError(
                    f"{type(self).__name__}: with collector_class={self._class.__name__} the policy alone can have a "
                    f"scheme: got one for {model_id!r}, which is in processes of the workers."
                )
            mine = copy.copy(scheme)  # not sync: `_settle` waits for the answers, and receives other messages meanwhile
            mine.sync = False
            senders[model_id] = self._sender(model_id, mine)
            self._waits[model_id] = scheme.sync
            for end in ends:
                end[model_id] = (scheme, None)
        return senders, ends

    def _make_pool(self, recipes: Sequence[Recipe]) -> RemotePool:
        who, remote = type(self).__name__, self.remote
        launch, start_s, is_local = launcher_of(remote.launcher, remote.slurm_kwargs, who)
        is_local = is_local and remote.host is None
        host = remote.host or ("127.0.0.1" if is_local else socket.gethostname())
        rendezvous = Rendezvous(host, remote.tcp_port or delayed_port(), is_local=is_local, who=who)
        try:
            link = self._link(host)
            if remote.launcher == "submitit_delayed":
                delayed_jobs(rendezvous.address, self.num_workers, self.framework, self.backend, who)
        except BaseException:
            # The pool, which would close the port, was not created.
            rendezvous.close()
            raise
        start_s = remote.start_timeout_s or start_s
        options = {"rendezvous": rendezvous, "link": link, "launch": launch, "start_timeout_s": start_s}
        pool = RemotePool(who, recipes, self._shared_counters, self.options.timeout_s, **options)
        with pool.failing():
            for model_id, sender in self._senders.items():
                for index in range(self.num_workers):
                    sender.register_worker(index, link.worker(index + 1, model_id))
        return pool

    def _buffer_of_workers(self) -> None:
        return None  # the owner writes batches into the buffer when they arrive

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        self.background.stopped.set()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(WorkerError, DeadlineError):  # the thread has failed, or hangs
                stack.enter_context(self.background.pause())
            for sender in self._senders.values():
                for index in range(self.num_workers):
                    sender.unregister_worker(index)  # drops the sender's references to the worker
            super().shutdown(timeout, close_env)
        self.background.stop(timeout)

    # -- in the background ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.background.start(self._work())

    def _work(self) -> Iterator[None]:
        """Iterates in the thread; lets other threads pause it between two batches, and while it waits for one."""
        with contextlib.ExitStack() as turn, contextlib.suppress(_Stopped):

            def take_turns() -> None:
                # The pool also calls this while it waits in other threads, which have paused this one already.
                if not self.background.is_elsewhere:
                    turn.close()
                    turn.enter_context(self.background.step())
                    if self.background.stopped.is_set():
                        raise _Stopped

            self._pool.tick = take_turns
            take_turns()
            for _ in self.iterator():
                yield take_turns()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        with self.background.pause(), super().pause():
            yield

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        self.shutdown(timeout, close_env)
        self.background.check()

    _update_weights = _alone(_MultiDataCollector._update_weights)
    set_version = _alone(_MultiDataCollector.set_version)
    set_seed = _alone(_MultiDataCollector.set_seed)
    state_dict = _alone(_MultiDataCollector.state_dict)
    load_state_dict = _alone(_MultiDataCollector.load_state_dict)

    # -- data ----------------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase]:
        check_not_started(self, self.background.is_elsewhere)
        return super().iterator()

    def _take(self, worker: Worker) -> TensorDictBase | None:
        if not self.sync:
            self._last = set()
        self._last.add(worker.index)
        return super()._take(worker)

    def _handed_out(self, parts: list[TensorDictBase | None]) -> TensorDictBase | None:
        self._since = [since + 1 for since in self._since]
        batch = super()._handed_out(parts)
        if self.replay_buffer is None:
            return batch
        self.options.extend(batch)
        return None

    # -- weights -------------------------------------------------------------------------------------------------------

    def _push_due_weights(self) -> None:
        if self.background.is_started:
            return  # the trainer may be changing the policy's weights now
        limit = self.remote.max_weight_update_interval
        # The union of both conditions, so that a worker receives the weights once.
        due = self._last if self.remote.update_after_each_batch else set()
        due = due | {index for index, since in enumerate(self._since) if 0 < limit <= since}
        self._last = set()
        if due:
            self.update_policy_weights_(worker_ids=sorted(due))

    def _hand_over(self, sender: Any, named: Mapping[str, Any], worker_ids: Sequence[int] | None) -> None:
        ids = list(range(self.num_workers)) if worker_ids is None else worker_ids
        for index in ids:
            if sender.model_id == "policy":
                self._since[index] = 0
            if not isinstance(sender.scheme, NoWeightSyncScheme):
                self._pool.workers[index].send("weights", sender.model_id)
        super()._hand_over(sender, named, worker_ids)
        if self._waits[sender.model_id]:
            self._settle([sender])


class DistributedDataCollector(_RemoteDataCollector):
    __doc__ = f"""{_RemoteDataCollector.__doc__}
    backend  of the torch.distributed process group that carries batches and weights: "gloo" or "nccl"

    The collector creates its own group; a group of the trainer is not used.
    """

    framework, scheme_class = "distributed", GroupLink.scheme

    def __init__(
        self,
        create_env_fn: Sequence[Callable[..., Any]] | Callable[..., Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        backend: str = "gloo",
        **options: Any,
    ):
        check_backend(backend, type(self).__name__)
        self.backend = backend
        super().__init__(create_env_fn, policy, policy_factory, options)

    def _default_scheme(self) -> Any:
        return self.scheme_class(self.backend, sync=False)

    def _link(self, host: str) -> Link:
        who, devices = type(self).__name__, torch.cuda.device_count()
        if self.backend == "nccl" and self.remote.launcher == "mp" and devices <= self.num_workers:
            raise ConfigError(
                f"{who}: backend='nccl' needs a GPU for this process and one for each worker: got {devices} for "
                f"{self.num_workers} workers on this machine; use 'gloo', which goes through host memory."
            )
        return GroupLink(self.backend, host, self.num_workers)


class DistributedSyncDataCollector(DistributedDataCollector):
    """`DistributedDataCollector` whose batches have a part from each worker, and which sends weights by itself.

    update_interval  all workers receive the weights of ``policy`` after this many batches
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, *, update_interval: int = 1, **options: Any):
        who = type(self).__name__
        check_at_least(who, 1, update_interval=update_interval)
        for name in ("sync", "update_after_each_batch"):
            if name in options:
                raise TypeError(
                    f"{who}: {name} is an argument of DistributedDataCollector; this one has update_interval."
                )
        limit = options.pop("max_weight_update_interval", -1)
        interval = min(update_interval, limit) if limit > 0 else update_interval
        super().__init__(create_env_fn, policy, sync=True, max_weight_update_interval=interval, **options)


class RPCDataCollector(_RemoteDataCollector):
    __doc__ = f"""{_RemoteDataCollector.__doc__}
    Batches and weights are sent by torch.distributed.rpc, which this process must not use for anything else, and not
    for a `RemoteBuffer` afterwards.

    visible_devices     the device of each worker, for workers that send CUDA tensors
    tensorpipe_options  arguments of ``TensorPipeRpcBackendOptions``
    """

    framework, scheme_class = "rpc", RPCLink.scheme

    def __init__(
        self,
        create_env_fn: Sequence[Callable[..., Any]] | Callable[..., Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        visible_devices: Sequence[torch.device | str] | None = None,
        tensorpipe_options: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        self._visible_devices, self._tensorpipe_options = visible_devices, tensorpipe_options or {}
        super().__init__(create_env_fn, policy, policy_factory, options)

    def _default_scheme(self) -> Any:
        return self.scheme_class()

    def _link(self, host: str) -> Link:
        options, devices = self._tensorpipe_options, self._visible_devices
        return RPCLink(host, self.num_workers, options, devices, type(self).__name__)
