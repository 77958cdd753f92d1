"""`PooledCollector`: the common base of collectors whose workers are processes or Ray actors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from llmrl.collectors.background import check_not_started
from llmrl.collectors.base import DataCollectorBase, Weights
from llmrl.collectors.worker import AHEAD
from llmrl.errors import ConfigError, DeadlineError, WorkerError
from llmrl.weight_update import NoWeightSyncScheme

_OF_EACH = ("device", "policy_device", "env_device", "create_env_kwargs")  # may be lists with an entry for each worker
_SAME = ("max_frames_per_traj", "reset_at_each_iter", "reset_when_done", "exploration_type", "set_truncated")
_SAME += ("track_traj_ids", "compact_obs", "compile_policy", "cudagraph_policy", "track_policy_version")
_SAME += ("extend_buffer", "timeout_s")


class PooledCollector(DataCollectorBase):
    """Arguments, weights, counters and state of a collector that has workers.

    A subclass sets ``_pool``, ``_senders`` by model id, and ``_frames_of``, the frames in a batch of each worker.
    """

    _pool: Any
    _frames_of: list[int]
    sync: bool = False  # True: a batch has a part from each worker; False: it is the next batch of any worker
    cat_results: Literal["stack"] | int

    def __init__(self, policy: Any, policy_factory: Any, options: Mapping[str, Any]):
        super().__init__(policy, policy_factory, options)
        self.policy = policy
        self._register_updater()

    # -- workers -------------------------------------------------------------------------------------------------------

    def _buffer_of_workers(self) -> Any:
        """The replay buffer into which the workers write."""
        return self.replay_buffer

    def _options_of(self, index: int) -> dict[str, Any]:
        """The arguments of a worker's collector; without a buffer the owner applies split_trajs and postproc."""
        given, count = self.options, len(self._frames_of)
        mine = {name: at(getattr(given, name), index) for name in _OF_EACH}
        mine |= {name: getattr(given, name) for name in _SAME}
        mine["frames_per_batch"] = self._frames_of[index]
        if self._buffer_of_workers() is not None:
            mine |= {name: getattr(given, name) for name in ("split_trajs", "postproc", "init_random_frames")}
        elif given.init_random_frames:
            mine["init_random_frames"] = -(-given.init_random_frames // count)
        return mine

    def _divide_frames(self, count: int) -> list[int]:
        """The frames in a batch of each worker; sets ``frames_per_batch``."""
        who, frames = type(self).__name__, self.options.frames_per_batch
        if not isinstance(frames, int):
            if not self.sync:
                raise ConfigError(f"{who}: frames_per_batch must be one number: got {frames}.")
            if len(frames) != count:
                raise ConfigError(
                    f"{who}: frames_per_batch must have one number per worker: got {len(frames)} for {count}."
                )
            if self.cat_results == "stack" and len(set(frames)) > 1:
                raise ConfigError(f"{who}: batches of {frames} frames do not stack: use cat_results=-1.")
            self.frames_per_batch = sum(frames)
            return list(frames)
        parts = count if self.sync else 1
        self.frames_per_batch = frames
        self._check_division(parts, "workers")
        return [self.frames_per_batch // parts] * count

    def _schemes(self, policy_factory: Any) -> Mapping[str, Any]:
        if self.options.weight_sync_schemes is not None:
            return self.options.weight_sync_schemes
        has_weights = policy_factory is not None or isinstance(self.policy, nn.Module)
        return {"policy": self._default_scheme()} if has_weights else {}

    @abstractmethod
    def _default_scheme(self) -> Any:
        """The policy's scheme if ``weight_sync_schemes`` is not given."""

    def _sender(self, model_id: str, scheme: Any) -> Any:
        sender = scheme.create_sender()
        sender.set_context(self, model_id)
        if model_id == "policy" and isinstance(self.policy, nn.Module):
            sender.register_model(self.policy)
        return sender

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        self._pool.close(timeout)

    def _check_iterates(self) -> None:
        check_not_started(self, self._pool.is_started)
        self._pool.check_open("collect")

    # -- data ----------------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase]:
        while not self._ended():
            self._check_iterates()
            self._push_due_weights()
            if self.sync:
                self._settle()  # the whole batch must be collected with the new weights
                for worker in self._pool.workers:
                    self._pool.grant(worker)
                yield self._handed_out(self._take_all())
            elif self._grant_ahead():
                yield self._handed_out([self._take_first()])
            else:
                return

    @abstractmethod
    def _push_due_weights(self) -> None:
        """Sends new weights if an update is due; called before batches are collected."""

    @abstractmethod
    def _take_all(self) -> list[TensorDictBase | None]:
        """One batch from each worker, in worker order."""

    @abstractmethod
    def _take_first(self) -> TensorDictBase | None:
        """The first batch to arrive."""

    def _handed_out(self, parts: list[TensorDictBase | None]) -> TensorDictBase | None:
        self._batches_out += 1
        if parts[0] is None:  # the workers wrote it into the buffer
            return None
        batch = joined(parts, self.cat_results) if self.sync else parts[0]
        device = self._storing_device()
        return self.options.finished(batch if device is None else batch.to(device))

    def _storing_device(self) -> Any:
        device = self.options.storing_device or self.options.device
        return None if isinstance(device, (list, tuple)) else device  # for a list, each worker has moved its batch

    # -- counters and state --------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """Frames, as in `DataCollectorBase`; those of unfinished batches count as dropped once the collection ends."""
        return self._pool.counters

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        states = self._pool.ask("state_dict")
        own = {"frames": self._pool.delivered, "iter": self._batches_out, "version": self._version}
        return {**{f"worker{index}": state for index, state in enumerate(states)}, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [f"worker{index}" for index in range(len(self._frames_of))]
        if missing := [name for name in names if name not in state]:
            raise ConfigError(f"{type(self).__name__}: the state must have an entry per worker: {missing} are missing.")
        self._pool.ask("load_state_dict", [(state[name],) for name in names])
        self._pool.delivered, self._batches_out, self._version = state["frames"], state["iter"], state["version"]

    # -- weights -------------------------------------------------------------------------------------------------------

    def _update_weights(self, updates: Mapping[str, Weights | None], worker_ids: Sequence[int] | None) -> None:
        self._pool.check_open("take weights")
        count = len(self._frames_of)
        if unknown := [index for index in worker_ids or () if index not in range(count)]:
            raise ConfigError(f"{type(self).__name__}: worker_ids must be from 0 to {count - 1}: got {unknown}.")
        self._settle(self._senders[model_id] for model_id in updates if model_id in self._senders)
        super()._update_weights(updates, worker_ids)

    def _settle(self, senders: Iterable[Any] | None = None) -> None:
        """Waits until the workers have the weights that were sent."""
        for sender in self._senders.values() if senders is None else senders:
            try:
                self._wait_for(sender)
            except (DeadlineError, WorkerError):  # not WeightSyncError: after a refusal workers keep their weights
                with self._pool.failing():
                    raise

    def _wait_for(self, sender: Any) -> None:
        sender.wait()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the workers' envs and generators. Each worker's seed is what the previous worker returned."""
        for worker in self._pool.workers:
            [seed] = self._pool.ask("set_seed", [(seed, static_seed)], [worker])
        return seed

    def _grant_ahead(self) -> bool:
        """Requests batches from the workers, at most `AHEAD` each. Returns False at the end, when none are pending."""
        workers = self._pool.workers
        under_way = sum(worker.ahead for worker in workers)
        for _ in range(AHEAD):
            for worker in workers:
                # One batch per worker and round, so that the last frames are shared equally.
                asked = self._pool.delivered + under_way * self.frames_per_batch
                if worker.ahead < AHEAD and not 0 <= self.total_frames <= asked:
                    self._pool.grant(worker)
                    under_way += 1
        return under_way > 0


def moves_version(sender: Any) -> bool:
    return sender.model_id == "policy" and not isinstance(sender.scheme, NoWeightSyncScheme)


def common_count(who: str, **arguments: Any) -> int:
    """The number of workers implied by the arguments: a number, or the length of a list; 1 if there is neither.

    Raises  ConfigError if the arguments disagree
    """
    counts = {name: len(value) for name, value in arguments.items() if isinstance(value, (list, tuple))}
    counts |= {name: value for name, value in arguments.items() if isinstance(value, int)}
    if len(set(counts.values())) > 1 or min(counts.values(), default=1) < 1:
        raise ConfigError(f"{who}: there must be one number of workers, at least 1: got {counts}.")
    return next(iter(counts.values()), 1)


def at(value: Any, index: int) -> Any:
    """A worker's value of an argument that may be a list with an entry for each worker."""
    return value[index] if isinstance(value, (list, tuple)) else value


def joined(batches: Sequence[TensorDictBase], how: Literal["stack"] | int) -> TensorDictBase:
    """The batches of several workers, stacked or concatenated; the last dimension is named "time"."""
    out = TensorDict.maybe_dense_stack(list(batches), 0) if how == "stack" else torch.cat(list(batches), how)
    if type(out) is TensorDict:
        out.names = [*[None] * (out.batch_dims - 1), "time"]
    return out
