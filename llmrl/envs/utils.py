"""Helpers around envs: `step_mdp` (t becomes t+1), `make_composite_from_td` (specs from data), `check_env_specs`.

`step_mdp` is on the hot path and looks at nothing but root keys; the other two are for when an env is being written.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

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

from llmrl.data.specs import Composite, NonTensor, TensorSpec, Unbounded
from llmrl.envs.td_ops import fill_missing, present_keys, shallow_copy, stack_steps
from llmrl.errors import ConfigError, MissingKeyError, ShapeError

if TYPE_CHECKING:
    from llmrl.envs.base import EnvBase

__all__ = ["check_env_specs", "make_composite_from_td", "next_seed", "step_mdp"]

_KeyTree = dict[str, "_KeyTree | None"]  # None: the entry itself, a dict: what is named below it


def step_mdp(
    tensordict: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = False,
    reward_keys: tuple[NestedKey, ...] = ("reward",),
    done_keys: tuple[NestedKey, ...] = ("done", "terminated", "truncated"),
    action_keys: tuple[NestedKey, ...] = ("action",),
) -> TensorDictBase:
    """The root of the next step: what is under ``"next"``, plus what only the root has (``keep_other``).

    Reads   ``"next"`` and the root keys; nothing is copied but references, and ``tensordict`` is not changed
    Returns a new tensordict. A nested plain tensordict is merged key by key; anything else that ``"next"`` has, such as
            a tensorclass, replaces the root's whole, so that nothing of time t stays in it
    Raises  MissingKeyError without ``"next"``

    >>> next_td = TensorDict(obs=torch.ones(1), reward=torch.ones(1))
    >>> root = step_mdp(TensorDict(obs=torch.zeros(1), hidden=torch.ones(1), next=next_td))
    >>> sorted(root.keys()), root["obs"]
    (['hidden', 'obs'], tensor([1.]))
    """
    excluded = (reward_keys if exclude_reward else ()) + (done_keys if exclude_done else ())
    next_tree = _key_tree(excluded)
    root_tree = _key_tree(excluded + (action_keys if exclude_action else ())) if keep_other else None
    return _next_root(tensordict, next_tree, root_tree)


def _next_root(td: TensorDictBase, next_tree: _KeyTree, root_tree: _KeyTree | None) -> TensorDictBase:
    # The trees name what to leave out of "next" and of the root; None: leave the whole root out.
    if isinstance(td, LazyStackedTensorDict):
        rows = [_next_root(row, next_tree, root_tree) for row in td.tensordicts]
        return LazyStackedTensorDict.lazy_stack(rows, td.stack_dim)
    next_td = td.get("next", None)
    if next_td is None:
        raise MissingKeyError(
            f"step_mdp: reads 'next', which is not there; keys present: {present_keys(td)}; step the env first."
        )
    entries: dict[str, Any] = {}
    if root_tree is not None:
        for key, value in td.items():
            if key == "next" or key == "_reset":
                continue
            if key not in root_tree or (value := _pruned(value, root_tree[key])) is not None:
                entries[key] = value
    for key, value in next_td.items():
        if key in next_tree and (value := _pruned(value, next_tree[key], keep_opaque=True)) is None:
            continue
        if type(value) is TensorDict and type(other := entries.get(key)) is TensorDict:
            value = shallow_copy(value)
            fill_missing(value, other)
        entries[key] = value
    names = td.names if td._has_names() else None
    return TensorDict._new_unsafe(entries, batch_size=td.batch_size, device=td.device, names=names)


def next_seed(seed: int) -> int:
    """The seed that follows ``seed`` when several envs or generators are seeded from one; 32 bits, well mixed.

    >>> next_seed(0), next_seed(1)
    (3793791033, 2433363436)
    """
    mask = (1 << 64) - 1  # splitmix64 (Steele et al. 2014), upper half
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 32


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """The spec that data like ``data`` would have: `Unbounded` per tensor, `NonTensor` for the rest, nested alike.

    A tensor without dims becomes shape (1,) unless ``unsqueeze_null_shapes`` is False; ``dynamic_shape`` makes the last
    dim of every tensor that has one beyond the batch -1. The dims in which ragged rows differ are -1 in any case.

    >>> make_composite_from_td(TensorDict(obs=torch.zeros(4, 3), batch_size=[4]))["obs"].shape
    torch.Size([4, 3])
    """
    data_cls = type(data) if is_tensorclass(data) else None
    inner = data._tensordict if data_cls is not None else data
    if isinstance(inner, LazyStackedTensorDict):
        rows = [
            make_composite_from_td(row, unsqueeze_null_shapes=False, dynamic_shape=dynamic_shape)
            for row in inner.tensordicts
        ]
        spec = _stacked(rows, inner.stack_dim)
        spec.data_cls = data_cls
        return spec
    specs: dict[str, TensorSpec] = {}
    for key, value in inner.items():
        if is_non_tensor(value):
            specs[key] = NonTensor(shape=value.batch_size, example_data=_first_entry(value))
        elif is_tensor_collection(value):
            specs[key] = make_composite_from_td(
                value, unsqueeze_null_shapes=unsqueeze_null_shapes, dynamic_shape=dynamic_shape
            )
        else:
            shape = [size if isinstance(size, int) else -1 for size in value.shape]  # jagged tensors have another kind
            if dynamic_shape and len(shape) > inner.batch_dims:
                shape[-1] = -1
            shape = shape or ([1] if unsqueeze_null_shapes else [])
            specs[key] = Unbounded(shape=shape, dtype=value.dtype, device=value.device)
    return Composite(specs, shape=inner.batch_size, device=inner.device, data_cls=data_cls)


def check_env_specs(
    env: EnvBase,
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
            ``break_when_any_done`` False rows that are done are reset on the way, with "both" it does one run of each
            kind (None: True)
    Raises  AssertionError that lists every disagreement by time and key: missing, undeclared, shape, dtype (unless
            ``check_dtype`` is False), value outside the domain; with ``return_contiguous``, steps that do not stack
            densely

    The global random state and the env's own generator are put back afterwards, unless ``seed`` is given: then both are
    seeded for the run and the env stays as seeded.
    """
    known = {None: (True,), True: (True,), False: (False,), "both": (True, False)}
    if break_when_any_done not in known:
        raise ConfigError(
            f"check_env_specs: break_when_any_done must be a bool or 'both': got {break_when_any_done!r}."
        )
    modes = known[break_when_any_done]
    found: dict[str, None] = {}
    with _random_state_kept(env, seed):
        for mode in modes:
            for problem in _run_and_compare(
                env, tensordict, policy, num_steps, mode, check_dtype, bool(return_contiguous)
            ):
                found.setdefault(problem)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise AssertionError(f"check_env_specs: {type(env).__name__} must produce what its specs declare:\n{lines}")


def _run_and_compare(
    env: EnvBase,
    tensordict: TensorDictBase | None,
    policy: Callable[[TensorDictBase], TensorDictBase] | None,
    num_steps: int,
    break_when_any_done: bool,
    check_dtype: bool,
    contiguous: bool,
) -> Iterator[str]:
    def compare(time: str, td: TensorDictBase, parts: tuple[str, ...]) -> Iterator[str]:
        for part in parts:
            for mismatch in _for_batch(env._get_spec(part), env.batch_size, td.batch_size).mismatches(td):
                if check_dtype or mismatch.kind != "dtype":
                    yield f"{time}, {mismatch.name}: {mismatch.text} ({part}_spec)"

    def undeclared(time: str, td: TensorDictBase, parts: tuple[str, ...]) -> Iterator[str]:
        for key in _undeclared(td, [env._get_spec(part) for part in (*parts, "state")]):
            if tensordict is None or key[0] not in tensordict.keys():
                yield f"{time}, {_name(key)}: written, but no spec declares it"

    td = env.reset(tensordict)
    yield from compare("reset", td, ("observation", "done"))
    yield from undeclared("reset", td, ("observation", "done"))
    steps = []
    for step in range(num_steps):
        td = env.rand_action(td) if policy is None else policy(td)
        yield from compare(f"step {step}", td, ("action",))
        if break_when_any_done:
            td = env.step(td)
            next_root = env.step_mdp(td)
        else:
            td, next_root = env.step_and_maybe_reset(td)
        yield from compare(f"step {step}, next", td.get("next"), ("observation", "reward", "done"))
        yield from undeclared(f"step {step}, next", td.get("next"), ("observation", "reward", "done"))
        steps.append(td)
        if break_when_any_done and bool(td.get("next").get("done").any()):
            break
        td = next_root
    if contiguous and isinstance(stack_steps(steps), LazyStackedTensorDict):
        yield "rollout: its steps must have the same shapes to stack densely, and do not"


def _for_batch(spec: Composite, declared: torch.Size, batch_size: torch.Size) -> Composite:
    # An env without a locked batch may have started another number of rows than its specs are written for.
    return spec if batch_size == declared or not declared else spec[(0,) * len(declared)]


def _undeclared(td: TensorDictBase, specs: list[Composite], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in td.items():
        declaring = [spec[key] for spec in specs if key in spec]
        if not declaring:
            yield (*prefix, key)
        elif type(value) is TensorDict and all(isinstance(spec, Composite) for spec in declaring):
            yield from _undeclared(value, declaring, (*prefix, key))


@contextmanager
def _random_state_kept(env: EnvBase, seed: int | None) -> Iterator[None]:
    envs = [env]
    while (base := vars(envs[-1]).get("base_env")) is not None:
        envs.append(base)
    generators = [(e, None if e._generator is None else e._generator.get_state()) for e in envs]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
            env.set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if seed is None:
                for e, state in generators:
                    if state is not None:
                        e._generator.set_state(state)


def _stacked(rows: list[Any], dim: int) -> Any:
    # The spec of a stack of values with these specs: -1 where they differ in size, the entries that all of them have.
    first = rows[0]
    if len({len(row.shape) for row in rows}) > 1:
        raise ShapeError(
            f"make_composite_from_td: stacked rows must have as many dims: got {[row.shape for row in rows]}."
        )
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


def _name(key: tuple[str, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)


@functools.lru_cache(maxsize=64)
def _key_tree(keys: tuple[NestedKey, ...]) -> _KeyTree:
    tree: _KeyTree = {}
    for key in keys:
        *path, last = (key,) if isinstance(key, str) else key
        node: _KeyTree | None = tree
        for part in path:
            node = node.setdefault(part, {}) if node is not None else None
        if node is not None:
            node[last] = None
    return tree


def _pruned(value: Any, tree: _KeyTree | None, keep_opaque: bool = False) -> Any:
    # What is left of an entry without what the tree names; None: nothing.
    if tree is None:
        return None
    if type(value) is not TensorDict:
        return value if keep_opaque else None
    out = shallow_copy(value)
    for key, below in tree.items():
        keys = out.keys()
        if key in keys:
            rest = _pruned(out.get(key), below, keep_opaque)
            out = shallow_copy(out, without=(key,)) if rest is None else out.set(key, rest)
    return out
