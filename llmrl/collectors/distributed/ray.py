"""`RayCollector`: collectors in Ray actors, on any machine of a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from llmrl.collectors.base import CollectorOptions, DataCollectorBase, Weights, registered
from llmrl.collectors.collector import SyncDataCollector
from llmrl.collectors.ray_actors import AHEAD, ActorPool, check_buffer
from llmrl.envs.parallel import ParallelEnv
from llmrl.errors import ConfigError, DeadlineError, UnsupportedError, WorkerError
from llmrl.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, RayWeightSyncScheme

__all__ = ["RayCollector"]

_OWN = ("collector_class", "collector_kwargs", "num_workers_per_collector", "num_collectors", "sync", "ray_init_config")
_OWN += ("remote_configs", "update_after_each_batch", "max_weight_update_interval", "use_env_creator")


class RayCollector(DataCollectorBase):
    """Collectors in Ray actors, each with envs and a copy of the policy.

    Reads   ``create_env_fn``, functions that make the envs (or one, and ``num_collectors``); ``policy`` or
            ``policy_factory``, called in each actor; `CollectorOptions` for the other arguments
    Yields  with ``sync`` batches to which each actor has given its share, [B * T] or [B * P, T]; else batches of
            ``frames_per_batch`` frames by one actor each, [T] or [P, T], first come, first served: actors collect on
            while a batch is trained on, at most two batches ahead
    Raises  WorkerError where an actor raised, with its traceback, or died; DeadlineError where it takes no step for
            ``timeout_s``. Both name the actor, and all actors have ended by then

    collector_class             of the collector in each actor; ``collector_kwargs``: more arguments of it, or one
                                mapping for each actor
    num_workers_per_collector   copies of the env in each actor: processes of a collector that has several, else the
                                envs of a `ParallelEnv`
    ray_init_config             arguments of ``ray.init`` where Ray does not run yet, such as ``{"address": "auto"}``
    remote_configs              options of each actor, or a list with those of each: ``num_cpus`` (1), ``num_gpus``, ...
    update_after_each_batch     the weights of ``policy`` are sent after each batch: to all, or to the batch's own actor
    max_weight_update_interval  an actor that has collected so many batches with the same weights is sent new ones
    replay_buffer               a `RayReplayBuffer`, which the actors write into; iterating then yields None

    Weights go through Ray's object store (`RayWeightSyncScheme`) and are applied between two steps; with a
    ``collector_class`` of several processes between two batches. `start` fills the buffer without end.
    """

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
        use_env_creator: bool = False,  # functions are pickled whatever they are
        **options: Any,
    ):
        super().__init__()
        who = type(self).__name__
        if policy is not None and policy_factory is not None:
            raise TypeError(f"{who}: policy and policy_factory exclude each other: got both.")
        self.options = CollectorOptions.of(who, options, _OWN)
        self.policy, self.replay_buffer, self.sync = policy, self.options.replay_buffer, sync
        count = _count(who, create_env_fn, num_collectors, remote_configs)
        if num_workers_per_collector < 1:
            raise ConfigError(f"{who}: num_workers_per_collector must be at least 1: got {num_workers_per_collector}.")
        self._check(who)
        self.frames_per_batch, self.total_frames = self.options.frames_per_batch, self.options.total_frames
        self._check_division(count if sync else 1, "collectors")
        self._update_after_each_batch, self._max_interval = update_after_each_batch, max_weight_update_interval
        self._delivered = 0
        self._updater = registered(self.options.weight_updater, self)
        schemes = self.options.weight_sync_schemes
        if schemes is None:
            has_weights = policy_factory is not None or isinstance(policy, nn.Module)
            schemes = {"policy": RayWeightSyncScheme(timeout=self.options.timeout_s)} if has_weights else {}
        makers = [
            _Maker(
                cls=collector_class,
                env=_env(_of(create_env_fn, index), num_workers_per_collector, collector_class),
                policy=policy,
                factory=policy_factory,
                options=self._options_of(count, schemes) | dict(_of(collector_kwargs or {}, index)),
                index=index,
                count=count,
            )
            for index in range(count)
        ]
        self._pool = ActorPool(
            who,
            makers,
            [_of(remote_configs or {}, index) for index in range(count)],
            model_ids=["policy", *(name for name in schemes if name != "policy")],
            init=ray_init_config,
            timeout_s=self.options.timeout_s,
        )
        self._senders = self._connect(schemes)

    def _check(self, who: str) -> None:
        options = self.options
        check_buffer(options.replay_buffer, who)
        if not isinstance(options.frames_per_batch, int):
            raise ConfigError(f"{who}: frames_per_batch is one number: got {options.frames_per_batch}.")
        if options.interruptor is not None:
            raise UnsupportedError(f"{who}: an interruptor is not shared with actors.")
        if options.track_policy_version == "uuid":
            raise UnsupportedError(f"{who}: versions are numbers: got track_policy_version='uuid'; use True.")

    def _options_of(self, count: int, schemes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of an actor's collector; without a buffer its batches are finished here."""
        given = self.options
        same = ("device", "policy_device", "env_device", "create_env_kwargs", "max_frames_per_traj")
        same += ("reset_at_each_iter", "reset_when_done", "exploration_type", "set_truncated", "track_traj_ids")
        same += ("compact_obs", "compile_policy", "cudagraph_policy", "track_policy_version", "extend_buffer")
        same += ("timeout_s", "replay_buffer")
        finishes = given.replay_buffer is not None
        mine = {name: getattr(given, name) for name in (*same, *(("split_trajs", "postproc") if finishes else ()))}
        if given.init_random_frames:  # a buffer counts those of all actors
            mine["init_random_frames"] = math.ceil(given.init_random_frames / (1 if finishes else count))
        if others := [model_id for model_id in schemes if model_id != "policy"]:
            mine["weight_sync_schemes"] = {name: MultiProcessWeightSyncScheme() for name in ("policy", *others)}
        return mine | {"frames_per_batch": math.ceil(self.frames_per_batch / (count if self.sync else 1))}

    def _connect(self, schemes: Mapping[str, Any]) -> dict[str, Any]:
        senders = {}
        for model_id, scheme in schemes.items():
            sender = senders[model_id] = scheme.create_sender()
            sender.set_context(self, model_id)
            if model_id == "policy" and isinstance(self.policy, nn.Module):
                sender.register_model(self.policy)
            for member in self._pool.members if scheme.per_worker else ():
                sender.register_worker(member.index, member.handle)
        return senders

    @property
    def remote_collectors(self) -> list[Any]:
        """The handles of the actors."""
        return [member.handle for member in self._pool.members]

    @property
    def local_policy(self) -> Any:
        """The policy of this process, whose weights are sent."""
        return self.policy

    # -- data ----------------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        take = self._shares if self.sync else self._first_batch
        while not self._ended():
            if self._pool.is_started:
                raise ConfigError(f"{type(self).__name__}: collects in the background already: read the replay buffer.")
            self._pool.check_open("collect")
            self._update_stale()
            if not (parts := take()):
                return
            self._batches_out += 1
            if self.replay_buffer is not None:
                yield None
                continue
            batch = _joined(parts)
            if self.options.storing_device is not None:
                batch = batch.to(self.options.storing_device)
            yield self.options.finished(batch)

    def _shares(self) -> list[TensorDictBase | None]:
        """A batch of each actor, by the weights that were sent last."""
        self._settle()
        for member in self._pool.members:
            self._pool.grant(member)
        parts = {}
        for _ in self._pool.members:
            member, frames, batch = self._pool.take()
            self._delivered += frames
            parts[member.index] = batch
        return [parts[index] for index in sorted(parts)]

    def _first_batch(self) -> list[TensorDictBase | None]:
        """The batch that comes first, while each actor collects ahead; none at the end."""
        members = self._pool.members
        under_way = sum(len(member.due) for member in members)
        for _ in range(AHEAD):
            for member in members:
                ahead = self._delivered + under_way * self.frames_per_batch
                if len(member.due) < AHEAD and not 0 <= self.total_frames <= ahead:
                    self._pool.grant(member)
                    under_way += 1
        if not under_way:
            return []
        self._last, frames, batch = self._pool.take()
        self._delivered += frames
        return [batch]

    @property
    def counters(self) -> dict[str, int]:
        """Frames: as in `DataCollectorBase`. Those under way count as dropped once the collection has ended."""
        found = self._pool.counters
        delivered = found["delivered"] if self._pool.is_started else self._delivered
        dropped = 0 if self._pool.is_open else found["produced"] - delivered
        return {"produced": found["produced"], "delivered": delivered, "dropped": dropped}

    @counters.setter
    def counters(self, value: Mapping[str, int]) -> None:
        self._delivered = value["delivered"]

    # -- in the background ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.replay_buffer is None:
            raise ConfigError(
                f"{type(self).__name__}.start: actors write into a replay_buffer: give a RayReplayBuffer."
            )
        total, count = self.total_frames, len(self._pool.members)
        self._pool.start({"total_frames": -1 if total < 0 else math.ceil(total / count)})

    def pause(self) -> AbstractContextManager[None]:
        return self._pool.pause()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        try:
            if self._pool.is_open or self._pool.failure is not None:
                self._pool.ask("counters")  # raises what an actor failed with
        finally:
            self.shutdown(timeout, close_env)

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends the collection and its actors; Ray goes on."""
        self._pool.close(timeout)

    stop_remote_collectors = shutdown

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def weight_updater(self) -> Any:
        return self._updater

    def _update_stale(self) -> None:
        """Sends weights to the actors that are to have new ones before they are asked for a batch."""
        members = self._pool.members
        due = [m.index for m in members if 0 < self._max_interval <= m.batches]
        if self._update_after_each_batch and self._batches_out:
            due = [m.index for m in members] if self.sync else sorted({self._last.index, *due})
        if due:
            self.update_policy_weights_(worker_ids=due)

    def _update_weights(self, updates: Mapping[str, Weights | None], worker_ids: Sequence[int] | None) -> None:
        self._pool.check_open("take weights")
        for model_id, weights in updates.items():
            sender = self._senders.get(model_id)
            if self._updater is not None and model_id == "policy":
                self._updater.push_weights(weights, worker_ids)
            elif sender is not None:
                self._settle()
                sender.update_weights(weights, worker_ids=worker_ids)
                if model_id == "policy" and not isinstance(sender.scheme, NoWeightSyncScheme):
                    self._version = sender.version
            elif model_id == "policy" and weights is None:
                self.increment_version()
            else:
                raise ConfigError(
                    f"{type(self).__name__}: model {model_id!r} must have a scheme in weight_sync_schemes: got schemes "
                    f"for {list(self._senders)}."
                )
            for member in self._pool.members:
                if worker_ids is None or member.index in worker_ids:
                    member.batches = 0

    def _settle(self) -> None:
        """Waits until the actors have the weights that were handed over."""
        for sender in self._senders.values():
            try:
                sender.wait()
            except (DeadlineError, WorkerError):  # an actor that refused weights goes on with those it has
                with self._pool.failing():
                    raise

    def increment_version(self) -> None:
        """Called by a weight updater, when its actors have the weights."""
        self._version += 1

    # -- seeds and state -----------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the actors' envs and generators, each from the one before."""
        for member in self._pool.members:
            [seed] = self._pool.ask("set_seed", seed, static_seed, of=[member])
        return seed

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        states = self._pool.ask("call", "state_dict")
        own = {"frames": self._delivered, "iter": self._batches_out, "version": self._version}
        return {**{f"worker{index}": state for index, state in enumerate(states)}, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for member in self._pool.members:
            if (name := f"worker{member.index}") not in state:
                raise ConfigError(f"{type(self).__name__}: the state must have an entry per collector: lacks {name}.")
            self._pool.ask("call", "load_state_dict", state[name], of=[member])
        self._delivered, self._batches_out, self._version = state["frames"], state["iter"], state["version"]


@dataclass
class _Maker:
    """Makes the collector of one actor, there."""

    cls: type
    env: Any
    policy: Any
    factory: Any
    options: dict[str, Any]
    index: int
    count: int

    def __call__(self) -> DataCollectorBase:
        single = issubclass(self.cls, SyncDataCollector)
        if not single and self.count > 1:
            given = self.options.get("postproc") if self.options.get("replay_buffer") is not None else None
            self.options["postproc"] = partial(_unique, index=self.index, count=self.count, then=given)
        collector = self.cls(self.env, self.policy, policy_factory=self.factory, **self.options)
        if single:
            collector.next_id, collector.id_stride = self.index, self.count
        return collector


def _joined(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    if len(parts) == 1:
        return parts[0]
    batch = torch.cat(list(parts), 0)
    if type(batch) is TensorDict:
        batch.names = [*[None] * (batch.batch_dims - 1), "time"]
    return batch


def _unique(batch: TensorDictBase, *, index: int, count: int, then: Callable[..., Any] | None) -> TensorDictBase:
    """Trajectory ids of a collector of several processes as ids that no other actor has."""
    if (ids := batch.get(("collector", "traj_ids"), None)) is not None:
        batch.set(("collector", "traj_ids"), torch.where(ids < 0, ids, ids * count + index))
    return batch if then is None else then(batch)


def _env(create_env_fn: Any, num_workers: int, cls: type) -> Any:
    if not issubclass(cls, SyncDataCollector):
        return [create_env_fn] * num_workers
    return create_env_fn if num_workers == 1 else partial(ParallelEnv, num_workers, create_env_fn)


def _count(who: str, create_env_fn: Any, num_collectors: int | None, configs: Any) -> int:
    """The number of actors. Raises ConfigError where the arguments name several."""
    given = {
        "create_env_fn": len(create_env_fn) if isinstance(create_env_fn, Sequence) else None,
        "remote_configs": len(configs) if isinstance(configs, Sequence) else None,
        "num_collectors": num_collectors,
    }
    counts = {name: count for name, count in given.items() if count is not None}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise ConfigError(f"{who}: there must be one number of collectors, at least 1: got {counts}.")
    return next(iter(counts.values()), 1)


def _of(value: Any, index: int) -> Any:
    """An actor's part of an argument that may be a list with one for each."""
    return value[index] if isinstance(value, (list, tuple)) else value
