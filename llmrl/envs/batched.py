"""`SerialEnv`: several environments as one, in this process. `BatchedEnv` is the base of it and of `ParallelEnv`."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import bare_tensordict, entry, new_tensordict, present_keys
from llmrl.data.specs import Composite, NonTensor, TensorSpec, contains_lazy_spec
from llmrl.envs.base import EnvBase
from llmrl.envs.step import next_seed
from llmrl.envs.td_ops import fill_missing
from llmrl.errors import ConfigError, MissingKeyError, ShapeError

PARTS = ("observation", "state", "action", "reward", "done")
MakeEnv = Callable[..., EnvBase]


class BatchedEnv(EnvBase):
    """``num_workers`` environments with equal specs as one env of batch size [num_workers, *B].

    Calls   each env's step with the declared entries that it reads (`EnvBase.step_reads`), and its reset with all
            entries of the caller's tensordict; a partial reset calls only the environments that have a row to reset
    Returns the declared entries. If they are tensors of fixed shape, stacked; if an env has states, dims of -1,
            or entries that are not tensors, the rows as the environments made them, in a lazy stack if they are ragged
    Raises  ConfigError if the number of functions is not ``num_workers``, if a function does not return an env, and if
            the specs of two environments differ: it names the worker and the entry

    create_env_fn      makes an env; or a list of functions, one per worker
    create_env_kwargs  keywords for the function; or a list, one per worker
    device             of all entries; by default that of the environments

    `set_seed` gives each worker the `next_seed` of the previous worker's seed.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: MakeEnv | Sequence[MakeEnv],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
    ):
        who = type(self).__name__
        if not isinstance(num_workers, int) or num_workers < 1:
            raise ConfigError(f"{who}: num_workers must be at least 1: got {num_workers!r}.")
        makers = [create_env_fn] * num_workers if callable(create_env_fn) else create_env_fn
        keywords = create_env_kwargs or {}
        keywords = [keywords] * num_workers if isinstance(keywords, Mapping) else keywords
        if not isinstance(makers, Sequence) or not all(callable(maker) for maker in makers):
            raise ConfigError(f"{who}: create_env_fn must be a function that makes an env: got {create_env_fn!r}.")
        for name, given in (("create_env_fn", makers), ("create_env_kwargs", keywords)):
            if len(given) != num_workers:
                raise ConfigError(f"{who}: {name} must be one, or one per worker: got {len(given)} for {num_workers}.")
        super().__init__(device=device)
        self.num_workers = num_workers
        self._makers = [functools.partial(maker, **dict(given)) for maker, given in zip(makers, keywords, strict=True)]
        self._adopt(self._start_envs())

    @abc.abstractmethod
    def _start_envs(self) -> list[dict[str, Any]]:
        """Makes the environments and returns the `describe` of each."""

    @abc.abstractmethod
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the result of ``env.method(*arguments)`` for every env."""

    def _adopt(self, descriptions: Sequence[dict[str, Any]]) -> None:
        first = descriptions[0]
        for number, other in enumerate(descriptions[1:], 1):
            if difference := _difference(first, other):
                raise ConfigError(
                    f"{type(self).__name__}: all environments must have the same specs: worker {number} of "
                    f"{self.num_workers} differs from worker 0: {difference}."
                )
        self._row_batch_size: torch.Size = first["batch_size"]
        self._batch_size = torch.Size((self.num_workers, *self._row_batch_size))
        self._device = self._device or first["device"]
        self.step_reads = first["step_reads"]
        specs: dict[str, Composite] = first["specs"]
        for part, spec in specs.items():
            self._set_spec(part, spec.expand(self.num_workers, *spec.shape))
        self._reset_keys = (*specs["observation"].leaf_keys, *specs["done"].leaf_keys)
        self._step_keys = (*self._reset_keys, *specs["reward"].leaf_keys)
        self._input_keys = tuple(key for part in self.step_reads for key in specs[part].leaf_keys)
        # Tensors of fixed shape can be stacked and shared. A state may hold any value an env needs at its next step.
        self._declared = None
        if specs["state"].is_empty() and all(_is_dense(spec) for spec in specs.values()):
            leaves = {key: spec[key] for spec in specs.values() for key in spec.leaf_keys}
            self._declared = {key: Declared(leaf.shape, leaf.dtype) for key, leaf in leaves.items()}

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds every env (all with ``seed`` if ``static_seed``). Returns the seed for the next env."""
        self._generator = torch.Generator(device=self.device or "cpu").manual_seed(seed)
        seeds = [seed]  # one more than there are workers: the last one is for the next env
        for _ in range(self.num_workers):
            seeds.append(seed if static_seed else next_seed(seeds[-1]))
        self._call("set_seed", [(each,) for each in seeds[:-1]])
        return seeds[-1]

    def state_dict(self) -> dict[str, Any]:
        states = self._call("state_dict", [()] * self.num_workers)
        return super().state_dict() | {f"worker{number}": state for number, state in enumerate(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [f"worker{number}" for number in range(self.num_workers)]
        if (found := {name for name in state if name.startswith("worker")}) != set(names):
            raise ConfigError(
                f"{type(self).__name__}: the state must have an entry per worker: got {len(found)}, expected "
                f"{self.num_workers}."
            )
        super().load_state_dict(state)
        self._call("load_state_dict", [(state[name],) for name in names])

    def _rows(self, td: TensorDictBase, names: Sequence[str]) -> list[TensorDictBase]:
        if isinstance(td, LazyStackedTensorDict):
            return [row.select(*names) for row in td.unbind(0)]
        # Entry by entry, to skip the checks that tensordict makes for each row.
        parts = {name: td.get(name).unbind(0) for name in names}
        return [
            new_tensordict({name: part[number] for name, part in parts.items()}, self._row_batch_size)
            for number in range(self.num_workers)
        ]

    def _input_rows(self, td: TensorDictBase) -> list[TensorDictBase]:
        keys = td.keys()
        names = dict.fromkeys(key if isinstance(key, str) else key[0] for key in self._input_keys)
        return self._rows(td, [name for name in names if name in keys])

    def _reset_rows_given(self, td: TensorDictBase | None) -> list[TensorDictBase | None]:
        """Returns the entries to reset each env with; None for an env that is not reset."""
        if td is None:
            td = new_tensordict({}, self.batch_size)
        rows = self._rows(td, [name for name in td.keys() if name != "next"])
        if "_reset" not in td.keys():
            return [*rows]
        return [row if row.get("_reset").any() else None for row in rows]

    def _joined(self, rows: Sequence[TensorDictBase], keys: Sequence[NestedKey]) -> TensorDictBase:
        if self._declared is None:
            # The row of an env that was not reset comes from a step and has a reward; rows from a reset have none.
            others = [key for key in self._step_keys if key not in keys]
            joined = LazyStackedTensorDict.maybe_dense_stack([row.exclude(*others) for row in rows], 0)
        else:
            columns = self._each(lambda number: [self._declared[key].of(rows[number], key) for key in keys])
            values = (torch.stack(column) for column in zip(*columns, strict=True))
            joined = keyed(dict(zip(keys, values, strict=True)), self.batch_size)
        return joined if self.device is None else joined.to(self.device)

    def _each(self, act: Callable[[int], Any]) -> list[Any]:
        """Returns the results of all envs; an error names the worker that raised it."""
        results = []
        for number in range(self.num_workers):
            try:
                results.append(act(number))
            except Exception as error:
                error.add_note(f"{type(self).__name__}: in worker {number} of {self.num_workers}.")
                raise
        return results


class SerialEnv(BatchedEnv):
    """Several environments as one, stepped one after the other in this process. Takes the arguments of `BatchedEnv`.

    >>> from llmrl.envs import GymEnv
    >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    >>> env.rollout(3)["observation"].shape
    torch.Size([2, 3, 4])
    """

    def _start_envs(self) -> list[dict[str, Any]]:
        self._last: list[TensorDictBase | None] = [None] * self.num_workers
        self.envs: list[EnvBase] = self._each(lambda number: self._makers[number]())
        return self._each(lambda number: describe(self.envs[number]))

    def close(self) -> None:
        if not self.is_closed:
            for env in self.envs:
                env.close()
            super().close()

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._each(lambda number: getattr(self.envs[number], method)(*arguments[number]))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        rows = self._input_rows(td)
        self._last = self._each(lambda number: self.envs[number]._transition(rows[number]))
        return self._joined(self._last, self._step_keys)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        given, last = self._reset_rows_given(td), self._last
        self._last = self._each(lambda number: restart(self.envs[number], given[number], last[number]))
        return self._joined(self._last, self._reset_keys)


class Declared(NamedTuple):
    """The shape and dtype of an entry of one env."""

    shape: torch.Size
    dtype: torch.dtype

    def of(self, td: TensorDictBase, key: NestedKey) -> Tensor:
        """Returns the entry. Raises MissingKeyError or ShapeError if the env did not write what its specs declare."""
        value = entry(td, key) if type(key) is str else td.get(key, None)
        if value is None:
            raise MissingKeyError(f"an env must write what its specs declare: {key!r} is not in {present_keys(td)}.")
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ShapeError(
                f"an env must write what its specs declare: {key!r} is {value.dtype} of shape {tuple(value.shape)}, "
                f"declared {self.dtype} of shape {tuple(self.shape)}; see check_env_specs."
            )
        return value


def describe(env: EnvBase) -> dict[str, Any]:
    """Returns the properties of an environment that a batched env needs."""
    if not isinstance(env, EnvBase):
        raise ConfigError(f"create_env_fn must return an EnvBase: got {type(env).__name__}; GymWrapper makes one.")
    specs = {part: env._get_spec(part).clone() for part in PARTS}
    return {"batch_size": env.batch_size, "device": env.device, "step_reads": env.step_reads, "specs": specs}


def restart(env: EnvBase, given: TensorDictBase | None, last: TensorDictBase | None) -> TensorDictBase:
    """Resets one env, or only the rows that ``"_reset"`` in ``given`` marks. Without ``given`` the env is not reset:
    returns its latest result, ``last``."""
    if given is None:
        return env._start(None) if last is None else last
    if last is not None and "_reset" in given.keys() and not given.get("_reset").all():
        fill_missing(given, last)  # the values that rows without a reset keep
    return env.reset(None if given.is_empty() else given)


def keyed(values: Mapping[NestedKey, Tensor], batch_size: torch.Size) -> TensorDict:
    """Returns a tensordict of these entries (keys may be nested; shapes must fit the batch size, unchecked)."""
    td = bare_tensordict({key: value for key, value in values.items() if isinstance(key, str)}, batch_size)
    for key, value in values.items():
        if not isinstance(key, str):
            td.set(key, value)
    return td


def _is_dense(spec: TensorSpec) -> bool:
    if isinstance(spec, Composite):
        return spec.data_cls is None and not contains_lazy_spec(spec) and all(map(_is_dense, spec.values()))
    return not isinstance(spec, NonTensor) and -1 not in spec.shape


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    for field in ("batch_size", "device", "step_reads"):
        if one[field] != other[field]:
            return f"{field} is {other[field]} and not {one[field]}"
    for part in PARTS:
        first, second = one["specs"][part], other["specs"][part]
        for key in dict.fromkeys((*first.leaf_keys, *second.leaf_keys)):
            if (theirs := second.get(key)) != (ours := first.get(key)):
                return f"{key!r} of the {part} spec is {theirs} and not {ours}"
        if first != second:
            return f"the {part} spec is {second} and not {first}"
    return ""
