"""Moves from one step to the next: `step_mdp` makes t+1 the root, `next_seed` derives the next env's seed.

`step_mdp` is on the hot path: it reads root keys only, and copies only references.
"""

from __future__ import annotations

import functools
from typing import Any

from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import dim_names, new_tensordict, required
from llmrl.envs.td_ops import fill_missing, shallow_copy

_KeyTree = dict[str, "_KeyTree | None"]  # None: the entry itself; a dict: keys nested below it


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
    """Returns the root of the next step: the entries under ``"next"``, plus those only the root has (``keep_other``).

    Reads   ``"next"`` and the root keys; only references are copied, and ``tensordict`` is not changed
    Returns a new tensordict. Nested plain tensordicts are merged key by key; any other entry under ``"next"``, such as
            a tensorclass, replaces the root's entry entirely, so that it keeps nothing of time t
    Raises  MissingKeyError without ``"next"``

    >>> import torch
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
    # The trees name the entries to leave out of "next" and of the root; None leaves the whole root out.
    next_td = None if isinstance(td, LazyStackedTensorDict) else required(td, "next", "step_mdp", "step the env first")
    stack = td if next_td is None else next_td
    if isinstance(stack, LazyStackedTensorDict):  # row by row: reading whole entries would stack them
        rows = [_next_root(row, next_tree, root_tree) for row in td.unbind(stack.stack_dim)]
        return LazyStackedTensorDict.lazy_stack(rows, stack.stack_dim)
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
        # Carries over the root's nested entries that "next" lacks, in a copy so that "next" does not change.
        if type(value) is TensorDict and type(other := entries.get(key)) is TensorDict:
            value = shallow_copy(value)
            fill_missing(value, other)
        entries[key] = value
    return new_tensordict(entries, td.batch_size, td.device, dim_names(td))


def next_seed(seed: int) -> int:
    """Returns the seed that follows ``seed`` when several envs or generators are seeded from one; 32 mixed bits.

    >>> next_seed(0), next_seed(1)
    (3793791033, 2433363436)
    """
    mask = (1 << 64) - 1  # splitmix64 (Steele et al. 2014), upper half
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 32


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
    # Returns the entry without the parts that the tree names; None if nothing is left.
    if tree is None:
        return None
    if type(value) is not TensorDict:
        return value if keep_opaque else None
    out = shallow_copy(value)
    for key, below in tree.items():
        if key in out.keys():
            rest = _pruned(out.get(key), below, keep_opaque)
            out = shallow_copy(out, without=(key,)) if rest is None else out.set(key, rest)
    return out
