"""Helpers for writing envs: `check_env_specs`, and `make_composite_from_td` (specs from data)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from llmrl.data.ragged.tensordicts import inner
from llmrl.data.specs import Composite, NonTensor, TensorSpec, Unbounded
from llmrl.envs.specs import EnvSpecs
from llmrl.envs.step import step_mdp
from llmrl.envs.td_ops import stack_steps
from llmrl.errors import ConfigError, ShapeError

__all__ = [
    "ExplorationType",
    "RandomPolicy",
    "check_env_specs",
    "exploration_type",
    "make_composite_from_td",
    "set_exploration_type",
    "step_mdp",
]


class RandomPolicy:
    """Draws the actions of an env from its spec.

    Writes  ``action_key``; for a `Composite`, its entries, for every row of the tensordict even if the spec has another
            batch size
    generator  random generator for the draws; by default torch's global one

    >>> from llmrl.data import OneHot
    >>> RandomPolicy(OneHot(3))(TensorDict())["action"].sum()
    tensor(1)
    """

    def __init__(
        self, action_spec: TensorSpec, action_key: NestedKey = "action", *, generator: torch.Generator | None = None
    ):
        named = isinstance(action_spec, Composite)
        self.action_spec, self.generator = action_spec, generator
        self.out_keys = list(action_spec.leaf_keys) if named else [action_key]

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        if isinstance(self.action_spec, Composite):
            return draw_entries(self.action_spec, td, self.generator)
        return td.set(self.out_keys[0], self.action_spec.rand(generator=self.generator))


def draw_entries(spec: Composite, td: TensorDictBase, generator: torch.Generator | None) -> TensorDictBase:
    """Draws the entries of ``spec`` for every row of ``td``, in place. Returns ``td``."""
    more = () if td.batch_size == spec.shape else td.batch_size
    drawn = _for_batch(spec, td.batch_size).rand(more, generator=generator)
    for key in spec.leaf_keys:
        td.set(key, drawn.get(key))
    return td


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """Returns a spec for data like ``data``: `Unbounded` per tensor, `NonTensor` for the rest, with the same nesting.

    A tensor without dims becomes shape (1,) unless ``unsqueeze_null_shapes`` is False; ``dynamic_shape`` makes the last
    non-batch dim of every tensor -1. Dims in which ragged rows differ are always -1.

    >>> make_composite_from_td(TensorDict(obs=torch.zeros(4, 3), batch_size=[4]))["obs"].shape
    torch.Size([4, 3])
    """
    data_cls = type(data) if is_tensorclass(data) else None
    held = inner(data)
    if isinstance(held, LazyStackedTensorDict):
        rows = [
            make_composite_from_td(row, unsqueeze_null_shapes=False, dynamic_shape=dynamic_shape)
            for row in held.tensordicts
        ]
        spec = _stacked(rows, held.stack_dim)
        spec.data_cls = data_cls
        return spec
    specs: dict[str, TensorSpec] = {}
    for key, value in held.items():
        if is_non_tensor(value):
            specs[key] = NonTensor(shape=value.batch_size, example_data=_first_entry(value))
        elif is_tensor_collection(value):
            specs[key] = make_composite_from_td(
                value, unsqueeze_null_shapes=unsqueeze_null_shapes, dynamic_shape=dynamic_shape
            )
        else:
            shape = [size if isinstance(size, int) else -1 for size in value.shape]  # jagged dims have symbolic sizes
            if dynamic_shape and len(shape) > held.batch_dims:
                shape[-1] = -1
            shape = shape or ([1] if unsqueeze_null_shapes else [])
            specs[key] = Unbounded(shape=shape, dtype=value.dtype, device=value.device)
    return Composite(specs, shape=held.batch_size, device=held.device, data_cls=data_cls)


def check_env_specs(
    env: EnvSpecs,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | Literal["both"] | None = None,
    *,
    policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
    num_steps: int = 3,
) -> None:
    """Runs ``env`` for ``num_steps`` steps and compares every entry with the spec that declares it.

    Calls   ``env.reset(tensordict)``, then ``policy`` (None: random actions) and ``env.step``; with
            ``break_when_any_done=False``, rows that are done are reset during the run; "both" does one run of each kind
            (None: True)
    Raises  AssertionError that lists every disagreement by time and key: missing, undeclared, shape, dtype (unless
            ``check_dtype`` is False), value outside the domain; with ``return_contiguous``, steps that do not stack
            densely

    The global random state is restored afterwards, and so is the env's generator unless ``seed`` is given: ``seed``
    seeds both for the run, and the env stays seeded.
    """
    known = {None: (True,), True: (True,), False: (False,), "both": (True, False)}
    if break_when_any_done not in known:
        raise ConfigError(f"check_env_specs: break_when_any_done must be bool or 'both': got {break_when_any_done!r}.")
    found: dict[str, None] = {}  # an ordered set: several runs and steps find the same problem
    with _random_state_kept(env, seed):
        for mode in known[break_when_any_done]:
            problems = _run_and_compare(env, tensordict, policy, num_steps, mode, check_dtype, bool(return_contiguous))
            found |= dict.fromkeys(problems)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise AssertionError(f"check_env_specs: {type(env).__name__} must produce what its specs declare:\n{lines}")


def _run_and_compare(
    env: EnvSpecs,
    tensordict: TensorDictBase | None,
    policy: Callable[[TensorDictBase], TensorDictBase] | None,
    num_steps: int,
    break_when_any_done: bool,
    check_dtype: bool,
    contiguous: bool,
) -> Iterator[str]:
    def problems(time: str, td: TensorDictBase, parts: tuple[str, ...]) -> Iterator[str]:
        for part in parts:
            for mismatch in _for_batch(env._get_spec(part), td.batch_size).mismatches(td):
                if check_dtype or mismatch.kind != "dtype":
                    yield f"{time}, {mismatch.name}: {mismatch.text} ({part}_spec)"
        if parts == ("action",):  # the root also has entries of other specs
            return
        for key in _undeclared(td, [env._get_spec(part) for part in (*parts, "state")]):
            if tensordict is None or key[0] not in tensordict.keys():
                yield f"{time}, {(key[0] if len(key) == 1 else key)!r}: written, but no spec declares it"

    td = env.reset(tensordict)
    yield from problems("reset", td, ("observation", "done"))
    steps = []
    for step in range(num_steps):
        td = env.rand_action(td) if policy is None else policy(td)
        yield from problems(f"step {step}", td, ("action",))
        if break_when_any_done:
            td = env.step(td)
            next_root = env.step_mdp(td)
        else:
            td, next_root = env.step_and_maybe_reset(td)
        yield from problems(f"step {step}, next", td.get("next"), ("observation", "reward", "done"))
        steps.append(td)
        if break_when_any_done and bool(td.get("next").get("done").any()):
            break
        td = next_root
    if contiguous and isinstance(stack_steps(steps), LazyStackedTensorDict):
        yield "rollout: its steps must have the same shapes to stack densely, and do not"


def _for_batch(spec: Composite, batch_size: torch.Size) -> Composite:
    # An env without a locked batch may have more or fewer rows than its specs. Then this returns the spec of one row,
    # which can also check a batch of rows.
    return spec if batch_size == spec.shape or not spec.shape else spec[(0,) * len(spec.shape)]


def _undeclared(td: TensorDictBase, specs: list[Composite], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(td, LazyStackedTensorDict):
        for row in td.tensordicts:
            yield from _undeclared(row, specs, prefix)
        return
    for key, value in td.items():
        declaring = [spec[key] for spec in specs if key in spec]
        if not declaring:
            yield (*prefix, key)
        elif type(value) is TensorDict and all(isinstance(spec, Composite) for spec in declaring):
            yield from _undeclared(value, declaring, (*prefix, key))


@contextmanager
def _random_state_kept(env: EnvSpecs, seed: int | None) -> Iterator[None]:
    envs = [env]
    while (base := vars(envs[-1]).get("base_env")) is not None:
        envs.append(base)
    generators = [(e, None if e._generator is None else e._generator.get_state()) for e in envs]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # fork_rng would initialize CUDA
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
            env.set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)  # fork_rng restores torch's
            np.random.set_state(numpy_state)
            if seed is None:
                for e, state in generators:
                    if state is not None:
                        e._generator.set_state(state)


def _stacked(rows: list[Any], dim: int) -> Any:
    # The spec of a stack of values with these specs: -1 where sizes differ; only entries that all of them have.
    first = rows[0]
    if len({len(row.shape) for row in rows}) > 1:
        raise ShapeError(f"make_composite_from_td: stacked rows need as many dims: got {[row.shape for row in rows]}.")
    shape = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*(row.shape for row in rows), strict=True)]
    shape.insert(dim, len(rows))
    if isinstance(first, Composite):
        keys = [key for key in first if all(key in row for row in rows)]
        entries = {key: _stacked([row[key] for row in rows], dim) for key in keys}
        return Composite(entries, shape=shape, device=first.device, data_cls=first.data_cls)
    if isinstance(first, NonTensor):
        return NonTensor(shape=shape, example_data=first.example_data)
    return Unbounded(shape=shape, dtype=first.dtype, device=first.device)


def _first_entry(value: Any) -> Any:
    entry = value.tolist() if isinstance(value, NonTensorStack) else value.data
    while isinstance(value, NonTensorStack) and isinstance(entry, list) and entry:
        value, entry = value.unbind(0)[0], entry[0]
    return entry
