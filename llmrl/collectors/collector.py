"""`SyncDataCollector`: collects in this process, between training steps or in a background thread."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import CudaGraphModule, TensorDictModule, set_interaction_type
from torch import Tensor, nn

from llmrl.collectors.background import HasBackground, check_not_started
from llmrl.collectors.base import CollectorOptions, DataCollectorBase, Weights
from llmrl.concurrency.background_work import BackgroundWork
from llmrl.data.ted_utils import as_key, reduce_right
from llmrl.envs.base import EnvBase
from llmrl.envs.td_ops import stack_steps
from llmrl.envs.transforms.trajectory import StepCounter
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError
from llmrl.weight_update import ModelTarget, MultiProcessWeightSyncScheme, NoWeightSyncScheme, WeightSender
from llmrl.weight_update.target import resolve


class SyncDataCollector(HasBackground, DataCollectorBase):
    """Collects in this process.

    Reads   ``create_env_fn``, an env or a function that makes one; ``policy`` (None: random actions) or
            ``policy_factory``, a function that makes one; `CollectorOptions` for the other arguments
    Yields  batches [*B, T] of steps, time last, in TED form; entries whose name begins with "_" are omitted. An env
            resets when it is done; a trajectory cut off at the end of a batch continues in the next one
    Raises  TypeError and ConfigError for arguments that are unknown, or exclude each other

    The policy is copied only if its tensors are not on ``policy_device``.

    >>> from llmrl.envs import EnvBase
    >>> class Count(EnvBase):
    ...     def _reset(self, td):
    ...         return TensorDict(count=torch.zeros(1))
    ...     def _step(self, td):
    ...         count = td["count"] + 1
    ...         return TensorDict(count=count, reward=count, done=count >= 3)
    >>> collector = SyncDataCollector(Count, lambda td: td, frames_per_batch=5, total_frames=10)
    >>> [batch["collector", "traj_ids"].tolist() for batch in collector]
    [[0, 0, 0, 1, 1], [1, 2, 2, 2, 3]]
    """

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[..., EnvBase],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        **options: Any,
    ):
        super().__init__(policy, policy_factory, options)
        who = type(self).__name__
        if not isinstance(self.options.frames_per_batch, int):
            raise ConfigError(f"{who}: frames_per_batch must be one number: got {self.options.frames_per_batch}.")
        self.env = _make_env(create_env_fn, self.options, who)
        self.frames_per_batch = self.options.frames_per_batch
        self.counters = {"produced": 0, "delivered": 0, "dropped": 0}
        self._num_envs = max(1, self.env.batch_size.numel())
        self._check_division(self._num_envs, "envs")
        self._source = policy if policy_factory is None else policy_factory()
        if self._source is not None and not callable(self._source):
            raise ConfigError(f"{who}: the policy must be a function of a tensordict: got {self._source!r}.")
        self.policy = placed(self._source, self.options.policy_device or self.options.device, who)
        self._act = self.env.rand_action if self.policy is None else acting(self.policy, self.env, self.options)
        self._tracker = _tracker(self.options.track_policy_version)
        self._version = 0 if self._tracker is None else self._tracker.version
        self._register_updater()
        self._senders = self._make_senders()
        transforms = self.env.transform.leaves() if isinstance(self.env, TransformedEnv) else ()
        self._step_counter = next((t for t in transforms if isinstance(t, StepCounter)), None)
        self.number_trajectories(0, 1)
        self.before_step: Callable[[], None] | None = None  # called between two steps, where weights may change
        self._root: TensorDictBase | None = None  # the state that the next step starts from
        self._steps: list[TensorDictBase] = []  # of the current batch
        self._ids = torch.zeros(0, dtype=torch.int64)
        self._without: frozenset[tuple[str, ...]] | None = None
        self._same: TensorDictBase | None = None
        self.frames_taken = 0  # of the last batch collected
        self.background = BackgroundWork(who, self.options.timeout_s)

    def number_trajectories(self, first: int, stride: int) -> None:
        """Numbers trajectories ``first``, ``first + stride``, ...: worker i of n uses i, i + n, ..."""
        self._next_id, self._id_stride = first, stride

    @property
    def spec(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every declared entry, and the batch size under "", for comparison between workers."""
        found: dict[str, tuple[tuple[int, ...], str]] = {"": (tuple(self.env.batch_size), "")}
        for part in ("observation", "action", "reward", "done"):
            spec = getattr(self.env, f"full_{part}_spec")
            for key in spec.leaf_keys:
                found[str(key)] = (tuple(spec[key].shape), str(spec[key].dtype))
        return found

    # -- data ----------------------------------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase]:
        while not self._ended() and not self.background.stopped.is_set():
            check_not_started(self, self.background.is_elsewhere)
            if (batch := self.collect()) is None:
                return
            yield self.deliver(batch)

    def deliver(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Delivers a batch: adds it to the replay buffer if there is one, else returns it."""
        options = self.options
        out = options.finished(batch)
        if options.return_same_td and not options.split_trajs and options.postproc is None:
            self._same = out = out if self._same is None else self._same.update_(out)
        with self.background.step():  # a pause also protects the buffer and the counters
            if self.replay_buffer is not None and options.extend_buffer:
                options.extend(out)
            self.counters["delivered"] += self.frames_taken
            self._batches_out += 1
        return None if self.replay_buffer is not None else out

    @torch.no_grad()
    def collect(self) -> TensorDictBase | None:
        """One batch of steps, before ``split_trajs`` and ``postproc``; None if `shutdown` was called meanwhile."""
        options = self.options
        steps = self._steps = []
        ids: list[Tensor] = []
        versions: list[int | str] = []
        wanted = self.frames_per_batch // self._num_envs
        try:
            if options.reset_at_each_iter:
                self._root = None
            # Computed once per batch: other writers may extend the buffer, whose rows are counted, meanwhile.
            num_random = self._random_steps()
            with set_interaction_type(options.exploration_type):
                for step in range(wanted):
                    if step and options.interruptor is not None and options.interruptor.collection_stopped():
                        break
                    with self.background.step():
                        if self.background.stopped.is_set():
                            self.counters["dropped"] += len(steps) * self._num_envs
                            return None
                        if self.before_step is not None:
                            self.before_step()
                        if self._root is None:
                            self._start_all()
                        ids.append(self._ids)
                        versions.append(self._version)
                        steps.append(self._step(is_random=step < num_random))
                        self.counters["produced"] += self._num_envs
                        row = None if options.extend_buffer else self._assembled(steps[-1:], ids[-1:], versions[-1:])
                    if row is not None:
                        with self.background.step():
                            options.extend(row, one_step=True)
            with self.background.step():  # no weight update before the copy: steps may hold views of the weights
                batch = self._assembled(steps, ids, versions)
        except BaseException:
            self._root = None  # a failed step may leave it inconsistent: the next batch begins with a reset
            self.counters["dropped"] += len(steps) * self._num_envs
            raise
        self.frames_taken, self._steps = len(steps) * self._num_envs, []
        return self._completed(batch, wanted)

    def _step(self, *, is_random: bool) -> TensorDictBase:
        env = self.env
        td = env.rand_action(self._root) if is_random else self._act(self._root)
        if td is None:
            raise ConfigError(
                f"{type(self).__name__}: the policy must return the tensordict that it was given: got None."
            )
        if self.options.reset_when_done:
            td, self._root = env.step_and_maybe_reset(td)
            done = td.get("next").get("done")
            if done.any():
                self._new_ids(done.reshape(env.batch_size))
        else:
            td = env.step(td)
            self._root = env.step_mdp(td)
        return td

    def _start_all(self) -> None:
        self._root = self.env.reset()
        self._ids = torch.zeros(self.env.batch_size, dtype=torch.int64)
        self._new_ids(torch.ones(self.env.batch_size, dtype=torch.bool))

    def _new_ids(self, rows: Tensor) -> None:
        count = int(rows.sum())
        new = self._next_id + self._id_stride * torch.arange(count)
        self._next_id += self._id_stride * count
        # The new ids go to the rows that are done, in row order.
        self._ids = self._ids.masked_scatter(rows.to(self._ids.device), new)

    def _random_steps(self) -> int:
        limit = self.options.init_random_frames or 0
        if limit <= 0:
            return 0
        before = self.counters["produced"] if self.replay_buffer is None else self.replay_buffer.write_count
        return math.ceil(max(0, limit - before) / self._num_envs)

    def _assembled(self, steps: list[TensorDictBase], ids: list[Tensor], versions: list[int | str]) -> TensorDictBase:
        """The steps as a batch [*B, T], with trajectory ids, step counts and policy versions."""
        if self._without is None:
            self._without = _left_out(steps[0], self.env, compact=self.options.compact_obs)
        batch = stack_steps(steps, self._without)
        own: dict[str, Any] = {}
        if self.options.track_traj_ids:
            own["traj_ids"] = torch.stack(ids, -1)
        if self._step_counter is not None:
            count = batch.get(self._step_counter.step_count_key)
            own["step_count"] = reduce_right(count, batch.batch_size)
        if own:
            batch.set("collector", TensorDict(own, batch.batch_size, device=batch.device, names=batch.names))
        if self._tracker is not None:
            if self._tracker.version_type == "int":
                value: Any = torch.tensor(versions).expand(batch.batch_size).clone()
            else:
                rows = batch.batch_size[:-1]
                value = lazy_stack([NonTensorData(version, batch_size=rows) for version in versions], len(rows))
            batch.set("policy_version", value)
        return batch

    def _completed(self, batch: TensorDictBase, wanted: int) -> TensorDictBase:
        """The batch, padded if it was interrupted, marked as truncated if requested, on the storing device."""
        if self.options.set_truncated:
            for key in ("truncated", "done"):
                batch.get("next").get(key)[..., -1, :] = True
        # An interrupted batch is padded (with id -1), because buffers and stacks of workers' batches need one shape.
        missing = wanted - batch.batch_size[-1]
        if missing:
            rest = torch.zeros_like(batch[..., :1]).expand(*batch.batch_size[:-1], missing).clone()
            if self.options.track_traj_ids:
                rest.get("collector").get("traj_ids").fill_(-1)
            batch = torch.cat([batch, rest], -1)
            batch.refine_names(..., "time")
        device = self.options.storing_device or self.options.device
        if device is not None and (batch.device is None or not same_device(batch.device, device)):
            batch = batch.to(device)
        return batch

    # -- in the background ---------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        self.background.stop(timeout)
        self._root = self._same = None
        if close_env and not self.env.is_closed:
            self.env.close()

    # -- weights -------------------------------------------------------------------------------------------------------

    def _make_senders(self) -> dict[str, WeightSender]:
        """A sender for each model id. The models are in this process, so most senders only check and name weights."""
        schemes = self.options.weight_sync_schemes
        if schemes is None:
            schemes = {"policy": MultiProcessWeightSyncScheme()} if isinstance(self.policy, nn.Module) else {}
        senders = {}
        for model_id, scheme in schemes.items():
            sender = senders[model_id] = scheme.create_sender()
            sender.set_context(self, model_id)
            if scheme.per_worker:
                resolve(self, model_id)  # raises now if the path is invalid
        return senders

    def _update_weights(self, updates: Mapping[str, Weights | None], worker_ids: Sequence[int] | None) -> None:
        with self.pause():
            self.detach_steps()
            super()._update_weights(updates, worker_ids)

    def _send(self, sender: WeightSender, weights: Weights | None, worker_ids: Sequence[int] | None) -> None:
        # Without weights, those of the trainer's policy are meant; if the collector uses that very module, it has them.
        is_policy = sender.model_id == "policy"
        has_them = is_policy and weights is None and self.policy is self._source
        if is_policy and weights is None:
            weights = self._source
        if not has_them and not sender.scheme.per_worker:
            sender.update_weights(weights)
        elif not has_them and not isinstance(sender.scheme, NoWeightSyncScheme):
            ModelTarget(resolve(self, sender.model_id)).update_weights(sender.prepare(weights), version=0)
        if is_policy:
            self.increment_version()

    def receive_weights(self, policy_or_weights: Weights | None = None, **options: Any) -> None:
        with self.pause():  # no step may run between the change of the weights and that of the version
            super().receive_weights(policy_or_weights, **options)

    def detach_steps(self) -> None:
        """Copies the steps of the current batch before weights change: steps may hold views of the weights."""
        self._steps[:] = [step.clone() for step in self._steps]

    def increment_version(self) -> None:
        if self._tracker is None:
            self._version += 1
        else:
            self._tracker.increment_version()
            self._version = self._tracker.version

    def set_version(self, version: int | str) -> None:
        super().set_version(version)
        if self._tracker is not None:
            self._tracker.set_version(version)

    # -- seeds and state -----------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        with self.pause():
            self._root = None  # the next step begins with a reset
            return self.env.set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        with self.pause():
            return {
                "policy_state_dict": self.policy.state_dict() if isinstance(self.policy, nn.Module) else {},
                "env_state_dict": self.env.state_dict(),
                "frames": self.counters["delivered"],
                "iter": self._batches_out,
                "traj_ids": self._next_id,
                "version": self._version,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := self.state_dict().keys() - state.keys():
            raise ConfigError(f"{type(self).__name__}: not the state of a collector: missing keys {sorted(missing)}.")
        with self.pause():
            self.detach_steps()
            if isinstance(self.policy, nn.Module):
                self.policy.load_state_dict(state["policy_state_dict"])
            self.env.load_state_dict(state["env_state_dict"])
            # The frames of the current batch are counted as delivered or dropped when it ends.
            under_way = self.counters["produced"] - self.counters["delivered"] - self.counters["dropped"]
            self.counters.update(produced=state["frames"] + under_way, delivered=state["frames"], dropped=0)
            self._batches_out = state["iter"]
            self.set_version(state["version"])
            self._next_id = state["traj_ids"]
            self._root = None


def placed(policy: Any, device: torch.device | str | None, who: str) -> Any:
    """The policy itself if it has no tensors, or all are on ``device``; else a copy on the device.

    Each tensor is copied once, directly to the device; tied tensors stay tied.
    Raises  ConfigError for a policy that cannot be copied
    """
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(same_device(tensor.device, device) for tensor in tensors):
        return policy
    # The moved tensors are the memo of deepcopy: tied tensors stay tied, and no tensor is copied twice.
    moved: dict[int, Any] = {}
    for tensor in tensors:
        value = tensor.detach().to(device, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        moved[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    try:
        return copy.deepcopy(policy, moved)
    except Exception as error:  # __deepcopy__ of the policy's parts may raise anything
        raise ConfigError(
            f"{who}: a policy whose tensors are not on policy_device={device} is copied there, but this "
            f"{type(policy).__name__} cannot be copied ({type(error).__name__}: {error}); move it there yourself, or "
            "give policy_factory, a function that builds it."
        ) from error


def acting(policy: Any, env: EnvBase, options: CollectorOptions) -> Callable[[TensorDictBase], TensorDictBase]:
    """The policy as a function of a step: compiled if requested, with steps moved to its device and back.

    A module without ``in_keys`` whose ``forward`` parameters are all observations reads those and writes the actions.
    """
    act: Any = policy
    if isinstance(policy, nn.Module) and not hasattr(policy, "in_keys"):
        names = list(inspect.signature(policy.forward).parameters)
        if names and all(name in env.observation_spec for name in names):
            act = TensorDictModule(policy, in_keys=names, out_keys=list(env.action_keys))
    if options.compile_policy:
        act = torch.compile(act, **({} if options.compile_policy is True else options.compile_policy))
    if options.cudagraph_policy:
        act = CudaGraphModule(act, **({} if options.cudagraph_policy is True else options.cudagraph_policy))
    device = options.policy_device or options.device
    home = env.device or torch.device("cpu")
    if device is None or same_device(home, device):
        return act
    return lambda td: act(td.to(device)).to(home)


def same_device(one: torch.device | str, other: torch.device | str) -> bool:
    """True if both name the same device; "cuda" is the current CUDA device."""
    one, other = torch.device(one), torch.device(other)
    if one.type == other.type == "cuda" and None in (one.index, other.index):
        current = torch.cuda.current_device()
        return (current if one.index is None else one.index) == (current if other.index is None else other.index)
    return one == other


def _tracker(given: Any) -> Any:
    """The `PolicyVersion` that counts updates, or None."""
    if given is False or given is None:
        return None
    from llmrl.envs.llm.transforms.policy_version import PolicyVersion  # imports Transformers, which few workers need

    return given if isinstance(given, PolicyVersion) else PolicyVersion("uuid" if given == "uuid" else "int")


def _make_env(create_env_fn: Any, options: CollectorOptions, who: str) -> EnvBase:
    env = create_env_fn
    if not isinstance(env, EnvBase):
        env = create_env_fn(**(options.create_env_kwargs or {})) if callable(create_env_fn) else env
        if not isinstance(env, EnvBase):
            raise ConfigError(f"{who}: create_env_fn must be, or return, an EnvBase: got {type(env).__name__}.")
    device = options.env_device or options.device
    if device is not None and (env.device is None or not same_device(env.device, device)):
        env = env.to(device)
    if (limit := options.max_frames_per_traj or 0) > 0:
        if "step_count" in env.observation_spec.keys():
            raise ConfigError(
                f"{who}: max_frames_per_traj adds a StepCounter that writes 'step_count', but the env has that entry "
                "already: set the limit in the env's own StepCounter."
            )
        env = env.append_transform(StepCounter(max_steps=limit))
    return env


def _left_out(step: TensorDictBase, env: EnvBase, *, compact: bool) -> frozenset[tuple[str, ...]]:
    """Keys to omit: private entries at any depth, and in a compact batch what is also at the root of the next row."""
    found = {key for key in map(as_key, step.keys(True)) if key[-1].startswith("_")}
    if compact:
        observed = [*env.full_observation_spec.leaf_keys, *env.full_state_spec.leaf_keys]
        found |= {("next", *as_key(key)) for key in observed}
    return frozenset(found)
