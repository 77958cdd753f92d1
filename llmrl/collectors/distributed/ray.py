"""`RayCollector`: collectors in Ray actors, on any machine of a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.base import DataCollectorBase, Weights
from llmrl.collectors.collector import SyncDataCollector
from llmrl.collectors.pooled import PooledCollector, at, common_count, moves_version
from llmrl.collectors.ray_actors import ActorOwner, ActorPool
from llmrl.envs.parallel import ParallelEnv
from llmrl.errors import ConfigError, UnsupportedError, check_at_least
from llmrl.weight_update import MultiProcessWeightSyncScheme, RayWeightSyncScheme


class RayCollector(ActorOwner, PooledCollector):
    """Collectors in Ray actors, each with envs and a copy of the policy.

    Reads   ``create_env_fn``, functions that make the envs (or one, and ``num_collectors``); ``policy`` or
            ``policy_factory``, called in each actor; `CollectorOptions` for the other arguments
    Yields  with ``sync`` batches with a share from each actor, [B * T] or [B * P, T]; else batches of
            ``frames_per_batch`` frames from one actor each, [T] or [P, T], in order of arrival: actors collect during
            training, at most two batches ahead
    Raises  WorkerError, with the traceback, if an actor raised, or if it died; DeadlineError if it takes no step for
            ``timeout_s``. Both name the actor, and end all actors

    collector_class             of the collector in each actor; ``collector_kwargs``: its further arguments, or a list
                                with a mapping for each actor
    num_workers_per_collector   copies of the env in each actor: the processes of a ``collector_class`` that has
                                processes, else the envs of a `ParallelEnv`
    ray_init_config             arguments of ``ray.init`` if Ray is not running, such as ``{"address": "auto"}``
    remote_configs              options of all actors, or a list with those of each: ``num_cpus`` (1), ``num_gpus``, ...
    update_after_each_batch     the weights of ``policy`` are sent after each batch: to all, or to the batch's own actor
    max_weight_update_interval  an actor receives new weights after this many batches with the same weights
    replay_buffer               a `RayReplayBuffer`, which the actors write into; iterating then yields None

    Weights go through Ray's object store (`RayWeightSyncScheme`) and are applied between two steps, or between two
    batches if ``collector_class`` has processes. `start` fills the buffer continuously.
    """

    cat_results = 0

    def __init__(
        self,
        create_env_fn: Sequence[Callable[..., Any]] | Callable[..., Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        collector_class: type[DataCollectorBase] = SyncDataCollector,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        num_collectors: int | None = None,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        use_env_creator: bool = False,  # ignored: all functions are pickled
        **options: Any,
    ):
        super().__init__(policy, policy_factory, options)
        who, self.sync = type(self).__name__, sync
        if not isinstance(self.options.frames_per_batch, int):  # unequal shares cannot be joined along the envs
            raise ConfigError(f"{who}: frames_per_batch must be one number: got {self.options.frames_per_batch}.")
        given = {"create_env_fn": create_env_fn, "num_collectors": num_collectors, "remote_configs": remote_configs}
        count = common_count(who, **given, collector_kwargs=collector_kwargs)
        check_at_least(who, 1, num_workers_per_collector=num_workers_per_collector)
        if self.options.interruptor is not None:
            raise UnsupportedError(f"{who}: interruptor is not supported with actors.")
        if self.options.track_policy_version == "uuid":
            raise UnsupportedError(f"{who}: versions are numbers: got track_policy_version='uuid'; use True.")
        self._frames_of = self._divide_frames(count)
        self._update_after_each_batch, self._max_interval = update_after_each_batch, max_weight_update_interval
        self._schemes_of = schemes = self._schemes(policy_factory)
        makers = [
            partial(
                _make,
                collector_class,
                _env(at(create_env_fn, index), num_workers_per_collector, collector_class),
                policy,
                policy_factory,
                self._options_of(index) | dict(at(collector_kwargs or {}, index)),
                index,
                count,
            )
            for index in range(count)
        ]
        self._pool = ActorPool(
            who,
            makers,
            [at(remote_configs or {}, index) for index in range(count)],
            model_ids=["policy", *(name for name in schemes if name != "policy")],
            init=ray_init_config,
            timeout_s=self.options.timeout_s,
            replay_buffer=self.replay_buffer,
        )
        self._senders = self._connect(schemes)

    def _options_of(self, index: int) -> dict[str, Any]:
        mine = super()._options_of(index) | {"replay_buffer": self.replay_buffer}
        if others := [model_id for model_id in self._schemes_of if model_id != "policy"]:
            mine["weight_sync_schemes"] = {name: MultiProcessWeightSyncScheme() for name in ("policy", *others)}
        return mine

    def _default_scheme(self) -> Any:
        return RayWeightSyncScheme(timeout=self.options.timeout_s)

    def _connect(self, schemes: Mapping[str, Any]) -> dict[str, Any]:
        senders = {model_id: self._sender(model_id, scheme) for model_id, scheme in schemes.items()}
        for sender in senders.values():
            for member in self._pool.workers if sender.scheme.per_worker else ():
                sender.register_worker(member.index, member.handle)
        return senders

    @property
    def local_policy(self) -> Any:
        """The policy in this process, whose weights are sent."""
        return self.policy

    # -- data ----------------------------------------------------------------------------------------------------------

    def _take_all(self) -> list[TensorDictBase | None]:
        parts = {}
        for _ in self._pool.workers:
            member, _, batch = self._pool.take()
            parts[member.index] = batch
        return [parts[index] for index in sorted(parts)]

    def _take_first(self) -> TensorDictBase | None:
        self._last, _, batch = self._pool.take()
        return batch

    def _storing_device(self) -> Any:
        return self.options.storing_device  # not ``device``: this process may lack the actors' device

    # -- in the background ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        total, count = self.total_frames, len(self._pool.workers)
        self._pool.start({"total_frames": -1 if total < 0 else math.ceil(total / count)})

    stop_remote_collectors = ActorOwner.shutdown

    # -- weights -------------------------------------------------------------------------------------------------------

    def _push_due_weights(self) -> None:
        members = self._pool.workers
        due = [m.index for m in members if 0 < self._max_interval <= m.batches]
        if self._update_after_each_batch and self._batches_out:
            due = [m.index for m in members] if self.sync else sorted({self._last.index, *due})
        if due:
            self.update_policy_weights_(worker_ids=due)

    def _update_weights(self, updates: Mapping[str, Weights | None], worker_ids: Sequence[int] | None) -> None:
        super()._update_weights(updates, worker_ids)
        for member in self._pool.workers:
            if worker_ids is None or member.index in worker_ids:
                member.batches = 0

    def _send(self, sender: Any, weights: Weights | None, worker_ids: Sequence[int] | None) -> None:
        sender.update_weights(weights, worker_ids=worker_ids)
        if moves_version(sender):
            self._version = sender.version


def _make(cls: type, env: Any, policy: Any, factory: Any, options: dict[str, Any], index: int, count: int) -> Any:
    """Builds an actor's collector, in the actor."""
    single = issubclass(cls, SyncDataCollector)
    if not single and count > 1:
        given = options.get("postproc") if options.get("replay_buffer") is not None else None
        options["postproc"] = partial(_unique, index=index, count=count, then=given)
    collector = cls(env, policy, policy_factory=factory, **options)
    if single:
        collector.number_trajectories(index, count)
    return collector


def _unique(batch: TensorDictBase, *, index: int, count: int, then: Callable[..., Any] | None) -> TensorDictBase:
    """Makes the trajectory ids of a collector with several processes unique across actors."""
    if (ids := batch.get(("collector", "traj_ids"), None)) is not None:
        batch.set(("collector", "traj_ids"), torch.where(ids < 0, ids, ids * count + index))
    return batch if then is None else then(batch)


def _env(create_env_fn: Any, num_workers: int, cls: type) -> Any:
    if not issubclass(cls, SyncDataCollector):
        return [create_env_fn] * num_workers
    return create_env_fn if num_workers == 1 else partial(ParallelEnv, num_workers, create_env_fn)
