"""`EnvBase`: reset, step and rollout over tensordicts.

Data are in TED form: time t is at the root, and t+1, made by the step, under ``"next"``. Steps do not validate
against the specs; `check_env_specs` compares an env with the specs that it declares.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import attach, entries_of, entry, new_tensordict, required
from llmrl.envs.specs import DONE_KEYS, EnvSpecs
from llmrl.envs.td_ops import any_row, fill_missing, put_rows, shallow_copy, stack_steps, update_rows
from llmrl.errors import ConfigError, RolloutError, ShapeError, check_at_least

if TYPE_CHECKING:
    from llmrl.envs.transforms.base import Transform

Policy = Callable[[TensorDictBase], TensorDictBase]


class EnvBase(EnvSpecs, abc.ABC):
    """An environment. A subclass implements ``_reset`` and ``_step``, and declares specs so that it can be checked.

    ``_reset(td | None)``  gets the caller's tensordict; in a `batch_locked` env its ``"_reset"`` bool[*B, 1] (absent:
                           all) names the rows to restart
    ``_step(td)``          returns a new tensordict with observations, reward and done; does not change ``td``
    ``_set_seed(seed)``    seeds the env's random generators

    ``"done"``, ``"terminated"``, ``"truncated"`` are bool[*B, 1]. Those that a subclass omits are filled in: done
    is terminated or truncated, a done without a reason is terminated, the rest is False.

    With ``batch_locked=False`` the env has no state between calls: any leading batch size may be stepped or reset.

    >>> class CountTo(EnvBase):
    ...     def __init__(self, limit, batch_size=()):
    ...         super().__init__(batch_size=batch_size, batch_locked=False)
    ...         self.limit = limit
    ...     def _reset(self, td):
    ...         batch_size = self.batch_size if td is None else td.batch_size
    ...         return TensorDict(count=torch.zeros(*batch_size, 1), batch_size=batch_size)
    ...     def _step(self, td):
    ...         count = td["count"] + 1
    ...         return TensorDict(count=count, reward=count, done=count >= self.limit, batch_size=td.batch_size)
    >>> CountTo(3).rollout(10, policy=lambda td: td)["next", "reward"].flatten()
    tensor([1., 2., 3.])
    """

    step_reads: tuple[str, ...] = ("action", "state", "observation", "done")
    """The specs whose entries ``_step`` reads: `SerialEnv` and `ParallelEnv` send only these to their envs."""

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        batch_size: Sequence[int] | torch.Size = (),
        batch_locked: bool = True,
    ):
        super().__init__(device, batch_size)
        self.batch_locked = batch_locked
        self._generator: torch.Generator | None = None
        self.is_closed = False

    # -- for subclasses to override ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        """Returns the entries of t = 0."""

    @abc.abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Returns the entries of t+1."""

    def _set_seed(self, seed: int) -> None:
        pass

    def _blank(self, old: TensorDictBase, new: TensorDictBase) -> None:
        """Writes empty values into ``new`` (rows after a reset) for entries that only ``old`` (rows before it) has.

        For entries that a reset does not write and that must not be carried into the next trajectory.
        """

    def _array_step(
        self, inputs: Mapping[NestedKey, np.ndarray], outputs: Mapping[NestedKey, np.ndarray]
    ) -> Callable[[], bool] | None:
        """Returns a version of ``_step`` without tensordicts, for the workers of a `ParallelEnv`: a function that reads
        ``inputs``, writes ``outputs`` (arrays by declared key) and returns whether the env is done. None: the workers
        call ``_step``."""
        return None

    # -- one step ------------------------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Starts trajectories.

        Reads   ``"_reset"`` bool[*B, 1] or [*B], if present: only these rows are reset, the others keep their values
                all other entries are passed to the env and its transforms (a query, say)
        Returns a new tensordict: the given one without ``"_reset"`` and ``"next"``, overwritten by the reset
        Raises  ShapeError if a `batch_locked` env gets another batch size; MissingKeyError if rows that are to keep
                their values lack one of the entries that the reset writes
        """
        if tensordict is None:
            return self._start(None)
        self._check_batch_size(tensordict, "reset")
        rows = tensordict.get("_reset", None)
        if rows is None:
            return self._carry(tensordict, self._start(tensordict))
        return self._reset_rows(tensordict, rows, given=tensordict)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Takes the action in ``tensordict``.

        Reads   the action entries (`action_keys`) and the entries of time t that the env needs
        Writes  ``"next"``: observations, reward, done. Entries that a policy wrote under ``"next"`` and the env does
                not write are kept. Nothing else in ``tensordict`` changes
        Returns ``tensordict``
        Raises  MissingKeyError without an action, ShapeError if a `batch_locked` env gets another batch size
        """
        self._check_batch_size(tensordict, "step")
        next_td = self._transition(tensordict)
        preset = entry(tensordict, "next")  # written by the policy, such as a new hidden state
        if preset is not None:
            fill_missing(next_td, preset)
        attach(tensordict, "next", next_td)
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Takes one step and makes the root of the next: rows that are done start a new trajectory and keep nothing.

        Returns ``(tensordict with "next", a new tensordict for the next step)``
        """
        tensordict = self.step(tensordict)
        next_root = self.step_mdp(tensordict)
        done = entry(next_root, "done")
        if any_row(done):
            next_root = self._reset_rows(next_root, done, given=None)
        return tensordict, next_root

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`llmrl.envs.step_mdp` with this env's keys; drops its rewards and actions."""
        from llmrl.envs.step import step_mdp

        return step_mdp(
            tensordict,
            exclude_action=True,
            reward_keys=self.reward_keys or ("reward",),
            action_keys=self.action_keys or ("action",),
        )

    def _transition(self, td: TensorDictBase) -> TensorDictBase:
        keys = entries_of(td) if type(td) is TensorDict else td.keys()
        for name in self._action_root_names():
            if name not in keys:  # a test by name: reading a ragged entry would build its rows
                required(td, name, f"{type(self).__name__}.step", "let the policy, or env.rand_action(td), write it")
        next_td = self._step(td)
        if next_td is None or next_td is td:
            got = "None" if next_td is None else "the tensordict it was given"
            raise RolloutError(f"{type(self).__name__}._step: must return a new tensordict (t+1): got {got}.")
        _complete_done(next_td, f"{type(self).__name__}._step")
        return next_td

    def _start(self, td: TensorDictBase | None) -> TensorDictBase:
        reset_td = self._reset(td)
        if reset_td is None:
            raise RolloutError(f"{type(self).__name__}._reset: must return a tensordict (t = 0): got None.")
        _complete_done(reset_td, f"{type(self).__name__}._reset")
        return reset_td

    def _reset_rows(self, td: TensorDictBase, mask: Tensor, given: TensorDictBase | None) -> TensorDictBase:
        # ``given`` holds the old entries that the reset hooks see; None: they see only the batch size.
        batch_size = td.batch_size
        if not isinstance(mask, Tensor):
            raise ShapeError(f"{type(self).__name__}.reset: '_reset' must be a bool tensor: got {type(mask).__name__}.")
        if mask.numel() != batch_size.numel():
            raise ShapeError(
                f"{type(self).__name__}.reset: '_reset' must have one entry per row: got shape {tuple(mask.shape)} for "
                f"batch size {tuple(batch_size)}."
            )
        rows = mask.reshape(batch_size)
        old = shallow_copy(td, without=("_reset", "next"))
        if not rows.any():
            return old
        start = new_tensordict({}, batch_size) if given is None else shallow_copy(given, without=("_reset",))
        if rows.all():
            return self._carry(td, self._start(start))
        if self.batch_locked:  # such an env resets all rows; the unmasked ones get their old values back
            whole = self._start(start.set("_reset", rows.unsqueeze(-1)))
            return update_rows(old, rows, whole, reader=f"{type(self).__name__}.reset")
        new = self._start(shallow_copy(start, without=("next",))[rows])  # indexing "next" costs more than the rest
        self._blank(old, new)
        return put_rows(old, rows, new, reader=f"{type(self).__name__}.reset")

    def _carry(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        self._blank(td, reset_td)
        if td.batch_size != reset_td.batch_size:  # the data ran out: fewer rows than requested have started
            return reset_td
        out = shallow_copy(td, without=("_reset", "next"))
        if isinstance(out, LazyStackedTensorDict) or isinstance(reset_td, LazyStackedTensorDict):
            all_rows = torch.ones(out.batch_size, dtype=torch.bool)  # row by row, since entries may be ragged
            return update_rows(out, all_rows, reset_td, reader=f"{type(self).__name__}.reset")
        for key, value in reset_td.items():
            out.set(key, value)
        return out

    def _check_batch_size(self, td: TensorDictBase, what: str) -> None:
        if self.batch_locked and td.batch_size != self.batch_size:
            raise ShapeError(
                f"{type(self).__name__}.{what}: a batch-locked env takes its own batch size only: got "
                f"{tuple(td.batch_size)}, expected {tuple(self.batch_size)}."
            )

    # -- many steps ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(
        self,
        max_steps: int,
        policy: Policy | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        tensordict: TensorDictBase | None = None,
        auto_cast_to_device: bool = False,
    ) -> TensorDictBase:
        """Runs ``policy`` (None: random actions) for at most ``max_steps`` steps.

        Stops   as soon as a row is done (``break_when_any_done``), or when every row has been done once
                (``break_when_all_done``; all rows are stepped until then); with neither, at ``max_steps``, and rows
                that are done are reset
        Calls   ``callback(env, td)`` after each step
        Returns the steps stacked along a last dim named "time": dense, or a lazy stack if the steps are ragged
        Raises  ConfigError for ``max_steps`` below 1, or ``auto_reset=False`` without ``tensordict``
        """
        check_at_least(f"{type(self).__name__}.rollout", 1, max_steps=max_steps)
        if not auto_reset and tensordict is None:
            raise ConfigError(f"{type(self).__name__}.rollout: auto_reset=False needs the tensordict to start from.")
        td = self.reset(tensordict) if auto_reset else shallow_copy(tensordict)  # keeps the caller's as is
        policy_device = _device_of(policy) if auto_cast_to_device else None
        resets = not (break_when_any_done or break_when_all_done)
        ever_done: Tensor | None = None
        steps: list[TensorDictBase] = []
        for step in range(max_steps):
            if policy is None:
                td = self.rand_action(td)
            elif policy_device is None:
                td = policy(td)
            else:
                td = policy(td.to(policy_device))
                td = td if self.device is None else td.to(self.device)
            last = step == max_steps - 1  # no step follows, so a reset would be wasted
            if resets and not last:
                td, next_root = self.step_and_maybe_reset(td)
            else:
                td, next_root = self.step(td), None
            steps.append(td)
            if callback is not None:
                callback(self, td)
            if resets:
                td = next_root
                continue
            done = entry(entry(td, "next"), "done")
            if break_when_any_done:
                if any_row(done):
                    break
            else:
                # Rows that are done are stepped on without a reset, and may later report done=False.
                ever_done = done if ever_done is None else ever_done | done
                if ever_done.all():
                    break
            if not last:
                td = self.step_mdp(td)
        return stack_steps(steps)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draws the action entries from `full_action_spec`, in place; after `set_seed`, with the env's own generator.
        In a chat env, a random action continues the conversation in ``tensordict``."""
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size, device=self.device)
        if self._continue_randomly(tensordict, self._generator):
            return tensordict
        spec = self.full_action_spec
        if spec.is_empty():
            raise ConfigError(
                f"{type(self).__name__}.rand_action: needs an action_spec to draw from, or a policy: none is declared."
            )
        from llmrl.envs.utils import draw_entries

        return draw_entries(spec, tensordict, self._generator)

    def _continue_randomly(self, td: TensorDictBase, generator: torch.Generator | None) -> bool:
        """Writes a random action that continues ``td``; returns False if only the spec defines actions."""
        return False

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Calls `rand_action`, then `step`; starts from a reset if no tensordict is given."""
        return self.step(self.rand_action(self.reset() if tensordict is None else tensordict))

    def check_env_specs(self, *arguments: Any, **keywords: Any) -> None:
        """`llmrl.envs.check_env_specs` of this env, which has the arguments."""
        from llmrl.envs.utils import check_env_specs

        check_env_specs(self, *arguments, **keywords)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the env and its random actions. Returns the seed for the next env (``seed`` itself if
        ``static_seed``)."""
        from llmrl.envs.step import next_seed

        self._generator = torch.Generator(device=self.device or "cpu").manual_seed(seed)
        self._set_seed(seed)
        return seed if static_seed else next_seed(seed)

    # -- transforms ----------------------------------------------------------------------------------------------------

    def append_transform(self, transform: Transform) -> EnvBase:
        """Returns this env with ``transform`` applied after the transforms it already has."""
        from llmrl.envs.transforms.transformed_env import TransformedEnv  # it subclasses this class

        return TransformedEnv(self, transform)

    def insert_transform(self, index: int, transform: Transform) -> EnvBase:
        """Returns this env with ``transform`` inserted at ``index``; only 0 is valid for an env without transforms."""
        if index != 0:
            raise ConfigError(f"{type(self).__name__}.insert_transform: an env without any takes index 0: got {index}.")
        return self.append_transform(transform)

    # -- housekeeping --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.is_closed = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the random-action generator, for an exact resume."""
        return {} if self._generator is None else {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "generator" in state:
            self._generator = torch.Generator(device=self.device or "cpu")
            self._generator.set_state(state["generator"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"


def _complete_done(td: TensorDictBase, who: str) -> None:
    read = entries_of(td).get if type(td) is TensorDict else td.get  # a dict lookup costs a tenth of TensorDict.get
    done, terminated, truncated = flags = read("done"), read("terminated"), read("truncated")
    for key, flag in zip(DONE_KEYS, flags, strict=True):
        if flag is not None and flag.dtype != torch.bool:
            raise RolloutError(f"{who}: {key!r} must be bool: got {flag.dtype}.")
    if done is not None and terminated is not None and truncated is not None:
        return
    if done is None:
        given = [flag for flag in (terminated, truncated) if flag is not None]
        nothing = torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=td.device)
        done = given[0] | given[-1] if given else nothing
        td.set("done", done)
    if truncated is None:
        truncated = torch.zeros_like(done) if terminated is None else done & ~terminated
        td.set("truncated", truncated)
    if terminated is None:
        td.set("terminated", done & ~truncated)


def _device_of(policy: Any) -> torch.device | None:
    device = getattr(policy, "device", None)
    if device is None and isinstance(policy, torch.nn.Module):
        device = next((parameter.device for parameter in policy.parameters()), None)
    return device
