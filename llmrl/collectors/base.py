"""`DataCollectorBase`, the base class of collectors, and `CollectorOptions`, the arguments that they share."""

from __future__ import annotations

import abc
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import Tensor, nn

from llmrl.collectors.weight_updaters import WeightUpdaterBase
from llmrl.errors import ConfigError, UnsupportedError, did_you_mean

Device = torch.device | str | None
Weights = nn.Module | TensorDictBase | Mapping[str, Tensor]
_WITHOUT_EFFECT = ("use_buffers", "no_cuda_sync", "trust_policy", "local_init_rb", "replay_buffer_chunk")


@dataclass(frozen=True)
class CollectorOptions:
    """Keyword arguments of every collector. With workers, frames_per_batch, devices and create_env_kwargs may be lists.

    frames_per_batch      frames of a batch, over all envs; rounded up to a multiple of the number of envs
    total_frames          the collection ends once this many are delivered; -1: never
    device                of policy, env and data; policy_device, env_device and storing_device override it
    create_env_kwargs     arguments of the env's constructor
    max_frames_per_traj   truncates a trajectory (a `StepCounter`, which also writes "step_count"); None, <= 0: never
    init_random_frames    number of initial frames with random actions; with a replay buffer: until it has had that many
    reset_at_each_iter    every batch begins with a reset
    reset_when_done       False: an env that is done is stepped further, until a reset at the next batch
    split_trajs           batches [N, T_max], a trajectory per row, with ("collector", "mask")
    postproc              function applied to each batch, after ``split_trajs``
    exploration_type      the interaction type (`tensordict.nn.InteractionType`) that the policy samples with
    return_same_td        one process: True: every batch is the same tensordict, overwritten
    interruptor           ends a batch early when its ``collection_stopped()`` is true; missing rows have traj_ids -1
    set_truncated         the last step of a batch is marked as truncated, and done
    replay_buffer         receives the data; iterating then yields None. ``extend_buffer=False``: it does at every step
    track_traj_ids        writes ("collector", "traj_ids") int64[*B, T]: a number for each trajectory, starting at 0
    compact_obs           omits ("next", observation), which `NextStateReconstructor` rebuilds
    compile_policy        ``torch.compile`` of the policy, True or its arguments; cudagraph_policy: CUDA graphs likewise
    weight_updater        receives the weights of ``update_policy_weights_``, instead of the schemes
    weight_sync_schemes   attribute path, such as "policy" or "env.transform[0].actor" -> scheme of `weight_update`
    track_policy_version  True, "int", "uuid" or a `PolicyVersion`: writes "policy_version", that of the weights used
    timeout_s             several processes: a worker that takes no step for this long has failed
    """

    frames_per_batch: int | Sequence[int]
    total_frames: int = -1
    device: Device | Sequence[Device] = None
    storing_device: Device | Sequence[Device] = None
    policy_device: Device | Sequence[Device] = None
    env_device: Device | Sequence[Device] = None
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    split_trajs: bool | None = None
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    exploration_type: InteractionType = InteractionType.RANDOM
    return_same_td: bool = False
    interruptor: Any = None
    set_truncated: bool = False
    replay_buffer: Any = None
    extend_buffer: bool = True
    track_traj_ids: bool = True
    compact_obs: bool = False
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None = None
    weight_sync_schemes: Mapping[str, Any] | None = None
    track_policy_version: Any = False
    timeout_s: float = 10.0

    @classmethod
    def of(cls, who: str, given: Mapping[str, Any], more: Iterable[str]) -> CollectorOptions:
        """The options among a constructor's keywords. ``more`` are the keywords that the constructor reads itself.

        Raises  TypeError for an unknown keyword, suggesting a similar one; ConfigError for invalid values
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known and name not in _WITHOUT_EFFECT:
                raise TypeError(f"{who}: unknown argument {name!r}.{did_you_mean(name, [*known, *more])}")
        if "frames_per_batch" not in given:
            raise TypeError(f"{who}: frames_per_batch must be given: the number of frames of a batch.")
        options = cls(**{name: value for name, value in given.items() if name in known})
        if (fault := next(options._faults(), None)) is not None:
            raise ConfigError(f"{who}: {fault}")
        return options

    def _faults(self) -> Iterator[str]:
        frames, schemes = self.frames_per_batch, self.weight_sync_schemes
        for count in frames if isinstance(frames, Sequence) else [frames]:
            if not isinstance(count, int) or count < 1:
                yield f"frames_per_batch must be a whole number, at least 1: got {frames!r}."
        if self.postproc is not None and not callable(self.postproc):
            yield f"postproc must be a function that takes a batch: got {self.postproc!r}."
        if schemes is not None and not (
            isinstance(schemes, Mapping) and all(hasattr(scheme, "create_sender") for scheme in schemes.values())
        ):
            example = "{'policy': SharedMemWeightSyncScheme()}"
            yield f"weight_sync_schemes must map model ids to schemes, such as {example}: got {schemes!r}."
        if self.total_frames == 0 or self.total_frames < -1:
            yield f"total_frames must be positive, or -1 for no limit: got {self.total_frames}."
        if not self.timeout_s > 0:
            yield f"timeout_s must be positive: got {self.timeout_s}."
        if not isinstance(self.exploration_type, InteractionType | None):
            yield f"exploration_type must be an InteractionType: got {self.exploration_type!r}."
        if self.replay_buffer is not None and not hasattr(self.replay_buffer, "extend"):
            yield f"replay_buffer must be a ReplayBuffer: got {self.replay_buffer!r}."
        if not self.extend_buffer and (self.replay_buffer is None or self.split_trajs or self.postproc is not None):
            yield "extend_buffer=False writes each step to a replay_buffer: give one, without split_trajs and postproc."
        if self.split_trajs and not self.track_traj_ids:
            yield "split_trajs splits batches by trajectory id: it needs track_traj_ids=True."
        if self.interruptor is not None and not callable(getattr(self.interruptor, "collection_stopped", None)):
            yield f"interruptor must have a method collection_stopped(): got {self.interruptor!r}."

    def finished(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch to deliver: split into trajectories, then passed through ``postproc``."""
        if self.split_trajs:
            from llmrl.collectors.utils import split_trajectories

            batch = split_trajectories(batch, prefix="collector")
        return batch if self.postproc is None else self.postproc(batch)

    def extend(self, batch: TensorDictBase, *, one_step: bool = False) -> None:
        """Adds a batch to the replay buffer: flattened to rows, or unchanged if its storage is a grid."""
        is_grid = getattr(getattr(self.replay_buffer, "storage", None), "ndim", 1) > 1
        if one_step and is_grid:
            self.replay_buffer.add(batch[..., 0])
        elif is_grid or self.split_trajs or self.postproc is not None:
            self.replay_buffer.extend(batch)
        else:
            self.replay_buffer.extend(batch.reshape(-1))


class DataCollectorBase(abc.ABC):
    """Runs a policy in environments, and yields batches of steps.

    A subclass implements ``iterator``, ``shutdown``, ``set_seed``, ``state_dict``, ``load_state_dict`` and ``_send``;
    one that can collect in the background also ``start`` and ``pause``.

    counters  frames: "produced" = "delivered" + "dropped" (those of unfinished batches at the end of the collection)
    """

    counters: Mapping[str, int]
    frames_per_batch: int
    _more_keywords: tuple[str, ...] = ()  # accepted besides those in the signatures and in `CollectorOptions`
    _senders: Mapping[str, Any]  # of weights, by model id

    def __init__(self, policy: Any, policy_factory: Any, options: Mapping[str, Any]) -> None:
        who = type(self).__name__
        if policy is not None and policy_factory is not None:
            raise TypeError(f"{who}: policy and policy_factory exclude each other: got both.")
        signatures = [inspect.signature(base.__init__) for base in type(self).__mro__]
        named = [own.name for one in signatures for own in one.parameters.values() if own.kind is own.KEYWORD_ONLY]
        self.options = CollectorOptions.of(who, options, [*named, *self._more_keywords, "policy"])
        self.total_frames, self.replay_buffer = self.options.total_frames, self.options.replay_buffer
        self._batches_out = 0
        self._version: int | str = 0
        self._iterator: Iterator[TensorDictBase] | None = None
        self._weight_updater: WeightUpdaterBase | None = None

    def _register_updater(self) -> None:
        """Sets the weight updater of the options, which may be a function that creates one."""
        if (updater := self.options.weight_updater) is not None:
            self._weight_updater = updater if isinstance(updater, WeightUpdaterBase) else updater()
            self._weight_updater.register_collector(self)

    # -- data ----------------------------------------------------------------------------------------------------------

    # The annotations are those without a replay buffer: with one, each batch is None, and the caller does not read it.

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self.iterator()

    @abc.abstractmethod
    def iterator(self) -> Iterator[TensorDictBase]:
        """Batches until ``total_frames``; None for each batch that goes into a replay buffer."""

    def next(self) -> TensorDictBase:
        """The next batch. Raises StopIteration at the end."""
        if self._iterator is None:
            self._iterator = self.iterator()
        try:
            return next(self._iterator)
        except BaseException:
            self._iterator = None  # it has ended or failed; a new one reports the current state
            raise

    def __len__(self) -> int:
        """The number of batches. Raises TypeError without ``total_frames``."""
        if self.total_frames < 0:
            raise TypeError(f"{type(self).__name__}: a collector has no length without total_frames.")
        return math.ceil(self.total_frames / self.frames_per_batch)

    def _ended(self) -> bool:
        return 0 <= self.total_frames <= self.counters["delivered"]

    def _check_division(self, parts: int, what: str) -> None:
        """Warns if frames_per_batch and total_frames have to be rounded up."""
        who, frames = type(self).__name__, self.frames_per_batch
        if frames % parts:
            self.frames_per_batch = math.ceil(frames / parts) * parts
            warnings.warn(
                f"{who}: frames_per_batch should be a multiple of the number of {what}: got {frames} for {parts}; "
                f"batches have {self.frames_per_batch}.",
                stacklevel=3,
            )
        if self.total_frames > 0 and self.total_frames % self.frames_per_batch:
            warnings.warn(
                f"{who}: total_frames should be a multiple of frames_per_batch: got {self.total_frames} and "
                f"{self.frames_per_batch}; {len(self) * self.frames_per_batch} frames are collected.",
                stacklevel=3,
            )

    # -- in the background ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collects in the background, into the replay buffer."""
        raise UnsupportedError(f"{type(self).__name__}: does not collect in the background.")

    def pause(self) -> AbstractContextManager[None]:
        """A block during which a started collector takes no step."""
        raise UnsupportedError(f"{type(self).__name__}: does not collect in the background.")

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends a collection that was started. Raises an error if it failed."""
        self.shutdown(timeout=timeout, close_env=close_env)

    @abc.abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends the collection, within ``timeout`` seconds."""

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        return self._weight_updater

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Weights] | None = None,
        policy_weights: Weights | None = None,
    ) -> None:
        """Updates the weights of the policies that collect, all or nothing; they use them from their next step on.

        Reads   a module, a state dict or a TensorDict; None: the weights of the policy given to the collector.
                ``model_id`` names another model of ``weight_sync_schemes``, ``weights_dict`` several
        Raises  WeightSyncError if they do not fit; ConfigError for a model that has no scheme
        """
        if policy_weights is not None:
            warnings.warn("update_policy_weights_: policy_weights is now policy_or_weights.", stacklevel=2)
            policy_or_weights = policy_weights if policy_or_weights is None else policy_or_weights
        if weights_dict is not None and (policy_or_weights is not None or model_id is not None):
            raise ConfigError(f"{type(self).__name__}: weights_dict excludes policy_or_weights and model_id.")
        updates = {model_id or "policy": policy_or_weights} if weights_dict is None else weights_dict
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        self._update_weights(updates, ids)

    def _update_weights(self, updates: Mapping[str, Weights | None], worker_ids: Sequence[int] | None) -> None:
        """Sends weights by model id, and increments the version."""
        for model_id, weights in updates.items():
            if model_id == "policy" and self._weight_updater is not None:
                self._weight_updater.push_weights(weights, worker_ids)
            elif model_id in self._senders:
                self._send(self._senders[model_id], weights, worker_ids)
            elif model_id == "policy" and weights is None:
                self.increment_version()
            else:
                raise ConfigError(
                    f"{type(self).__name__}: model {model_id!r} must have a scheme in weight_sync_schemes: got schemes "
                    f"for {list(self._senders)}."
                )

    @abc.abstractmethod
    def _send(self, sender: Any, weights: Weights | None, worker_ids: Sequence[int] | None) -> None:
        """Sends weights, and increments the version if they are the policy's."""

    def increment_version(self) -> None:
        """Counts an update; a weight updater calls it when its receivers have the weights."""
        self._version += 1

    def receive_weights(
        self,
        policy_or_weights: Weights | None = None,
        *,
        model_id: str | None = None,
        version: int | str | None = None,
    ) -> None:
        """Applies weights in this process, as ``update_policy_weights_``. ``version`` is theirs; None: the next one."""
        self.update_policy_weights_(policy_or_weights, model_id=model_id)
        if version is not None and model_id in (None, "policy"):
            self.set_version(version)

    def set_version(self, version: int | str) -> None:
        """Sets the version that was sent with the weights."""
        self._version = version

    @property
    def policy_version(self) -> int | str:
        """The version of the last weights sent: the number of updates, or a uuid."""
        return self._version

    # -- seeds and state -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the envs. Returns the seed for the next env (``seed`` itself if ``static_seed``)."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state from which a collection continues; unfinished trajectories are not in it and start again."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state``, from which the collection continues."""
