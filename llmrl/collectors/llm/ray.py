"""`RayLLMCollector`: conversations from Ray actors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.collectors.background import check_not_started
from llmrl.collectors.llm.batches import cat_rows
from llmrl.collectors.llm.collector import LLMCollector
from llmrl.collectors.pooled import at, common_count
from llmrl.collectors.ray_actors import ActorOwner, ActorPool
from llmrl.collectors.weight_updaters import WeightUpdaterBase
from llmrl.envs.base import EnvBase
from llmrl.errors import ConfigError, did_you_mean
from llmrl.weight_update import RayWeightSyncScheme

_KNOWN = inspect.signature(LLMCollector).parameters


class RayLLMCollector(ActorOwner):
    """`LLMCollector` in Ray actors, on any machine of a cluster.

    Yields  batches of ``dialog_turns_per_batch`` turns: with ``sync_iter`` one from all actors together, and nothing is
            sampled while the caller trains; else the first to arrive, while each actor collects its next one

    env               an env, or a function that makes it in each actor; or a list of functions, one for each actor:
                      give each its share of the data (``rank``, ``world_size`` of `DatasetChatEnv`)
    policy            a picklable policy, or ``policy_factory``, called in each actor, which builds a vLLM engine on the
                      GPUs that Ray assigns to the actor
    num_collectors    number of actors, which share ``total_dialog_turns``
    ray_init_config   arguments of ``ray.init`` if Ray is not running, such as ``{"address": "auto"}``
    remote_config     options of each actor; ``num_cpus`` and ``num_gpus`` are two of them
    replay_buffer     a `RayReplayBuffer`, which the actors write into; iterating then yields None
    weight_updater    receives the weights of ``update_policy_weights_``, instead of Ray's object store
    timeout_s         longest time that an actor may take no turn
    options           arguments of `LLMCollector`

    Raises  WorkerError, with the traceback, if an actor raised, or if it died; DeadlineError. Both name the actor
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]],
        *,
        policy: Any = None,
        policy_factory: Callable[[], Any] | None = None,
        dialog_turns_per_batch: int,
        total_dialog_turns: int = -1,
        num_collectors: int | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        sync_iter: bool = True,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        weight_updater: WeightUpdaterBase | None = None,
        timeout_s: float = 900.0,
        **options: Any,
    ):
        who = type(self).__name__
        for name in options:
            if name not in _KNOWN:
                raise TypeError(f"{who}: unknown argument {name!r}.{did_you_mean(name, _KNOWN)}")
        if (policy is None) == (policy_factory is None):
            raise ConfigError(f"{who}: give exactly one of policy and policy_factory.")
        count = common_count(who, env=env, num_collectors=num_collectors)
        if 0 <= total_dialog_turns < count:
            raise ConfigError(f"{who}: total_dialog_turns must be at least {count}: got {total_dialog_turns}.")
        self.replay_buffer = options.get("replay_buffer")
        self.sync_iter, self.dialog_turns_per_batch = sync_iter, dialog_turns_per_batch
        self.total_dialog_turns = total_dialog_turns
        self._version = 0
        options["dialog_turns_per_batch"] = -(-dialog_turns_per_batch // count) if sync_iter else dialog_turns_per_batch
        # If the budget is not divisible, the first actors take one more turn.
        shares = [
            -1 if total_dialog_turns < 0 else total_dialog_turns // count + (index < total_dialog_turns % count)
            for index in range(count)
        ]
        makers = [
            partial(_make, at(env, index), policy, policy_factory, options | {"total_dialog_turns": share})
            for index, share in enumerate(shares)
        ]
        resources = {name: n for name, n in (("num_cpus", num_cpus), ("num_gpus", num_gpus)) if n is not None}
        config = {**(remote_config or {}), **resources}
        given = {"init": ray_init_config, "timeout_s": timeout_s, "replay_buffer": self.replay_buffer}
        self._pool = ActorPool(who, makers, [config] * count, model_ids=["policy"], **given)
        self._sender = RayWeightSyncScheme(timeout=timeout_s).create_sender()
        for member in self._pool.workers:
            self._sender.register_worker(member.index, member.handle)
        self.weight_updater = weight_updater
        if weight_updater is not None:
            weight_updater.register_collector(self)

    # -- data ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase]:
        while (batches := self._collect()) is not None:
            yield cat_rows(batches) if self.replay_buffer is None else None

    def next(self) -> TensorDictBase | None:
        """The next batch (None with a replay buffer). Raises StopIteration at the end of the budget or of the data."""
        return next(iter(self))

    def _collect(self) -> list[TensorDictBase | None] | None:
        """The batches of all actors, or the first to arrive; None at the end."""
        self._pool.check_open("collect")
        check_not_started(self, self._pool.is_started)
        found: dict[int, TensorDictBase | None] = {}
        while members := [member for member in self._pool.workers if not member.has_ended]:
            for member in members:
                if not member.due and (member.index not in found or not self.sync_iter):
                    self._pool.grant(member)
            member, turns, batch = self._pool.take()
            if turns is not None:
                found[member.index] = batch
            if found and (not self.sync_iter or not any(m.due for m in members)):
                break
        if found and not self.sync_iter:
            self._pool.grant(member)  # it collects while the caller trains
        return [found[index] for index in sorted(found)] or None

    # -- in the background ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Makes the actors fill the replay buffer, until their budget or data end, or `async_shutdown`."""
        self._pool.start({})

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version of the weights in use."""
        return self._version

    def update_policy_weights_(self, weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None) -> None:
        """Sends new weights to all actors, which apply them between two turns, and waits until all have them.

        Raises  WeightSyncError, naming an actor that refuses them; the others then have them
        """
        self._pool.check_open("take weights")
        if self.weight_updater is not None:
            self.weight_updater.push_weights(weights)
            return
        self._sender.update_weights(weights)
        self._sender.wait()
        self._version = self._sender.version

    def increment_version(self) -> None:
        """Counts an update; a weight updater calls it when the actors have the weights."""
        self._version += 1

    def init_updater(self, *arguments: Any, **options: Any) -> None:
        """Calls ``init`` of the weight updater."""
        if self.weight_updater is None:
            raise ConfigError(f"{type(self).__name__}.init_updater: there is no weight_updater: give one.")
        self.weight_updater.init(*arguments, **options)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of the actors' collectors, without unfinished conversations."""
        states = self._pool.ask("state_dict")
        own = {"turns": self._pool.delivered, "version": self._version}
        return {**{f"worker{index}": state for index, state in enumerate(states)}, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; the caller must load the weights."""
        for member in self._pool.workers:
            if (name := f"worker{member.index}") not in state:
                raise ConfigError(f"{type(self).__name__}: the state must have an entry per collector: lacks {name}.")
            self._pool.ask("load_state_dict", [(state[name],)], [member])
            member.has_ended = False
        self._pool.delivered, self._version = state["turns"], state["version"]


def _make(env: Any, policy: Any, factory: Any, options: Mapping[str, Any]) -> LLMCollector:
    """Builds an actor's collector, in the actor."""
    env = env if isinstance(env, EnvBase) else env()
    return LLMCollector(env, policy=policy, policy_factory=factory, **options)
