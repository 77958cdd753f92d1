"""`MCTSForest`: trajectories with shared prefixes stored once, readable as trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from llmrl.data.maps.table import QueryModule, TensorDictMap, TensorMap
from llmrl.data.maps.tree import Tree
from llmrl.data.replay_buffers.storages import LazyStackStorage
from llmrl.data.ted_utils import steps_left, sum_ahead, trajectory_ends
from llmrl.errors import ConfigError, DataError, MissingKeyError


class NodeMap(TensorMap):
    """The branches of each observation; written by the forest.

    Returns  from ``map[td]``: the observation keys; "_index", int64[k], the positions in ``data_map`` of the steps
             taken from there; "_hash". For a batch [B] a lazy stack
    """

    def __init__(self, query_module: QueryModule) -> None:
        self.query_module = query_module
        self.branches: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.branches)

    def clear(self) -> None:
        self.query_module.forget()
        self.branches = []

    def contains(self, item: TensorDictBase) -> Tensor:
        return self.query_module.index(item) < len(self)

    def node(self, item: TensorDictBase) -> int:
        """The number of one observation. Raises MissingKeyError if it was never seen."""
        if (node := int(self.query_module.index(item))) >= len(self):
            key = item.select(*self.query_module.in_keys).to_dict()
            raise MissingKeyError(f"MCTSForest: no trajectory has this observation: {key!r:.200}.")
        return node

    def __getitem__(self, item: TensorDictBase) -> TensorDictBase:
        if item.batch_dims:
            return LazyStackedTensorDict.maybe_dense_stack([self[row] for row in item.unbind(0)])
        out = item.select(*self.query_module.in_keys)
        out.set("_index", torch.tensor(self.branches[self.node(item)], dtype=torch.int64))
        return out.set("_hash", self.query_module.hash(item))

    def __setitem__(self, item: TensorDictBase, value: Any) -> None:
        raise TypeError("MCTSForest.node_map cannot be written to: use MCTSForest.extend.")


class MCTSForest:
    """Trajectories indexed by observation and action. A step shared by several of them is stored once.

    Reads    of `extend`, a rollout [*B, T] (time last): ``observation_keys``, also under "next", ``action_keys`` and,
             if present, ``reward_keys`` and ``done_keys`` under "next"; all other keys are stored too, except
             ``excluded_keys``
    Raises   DataError, storing nothing, if an action leads to another state than before, or a reward is not finite
    data_map   (observation, action) -> the step, with "next"; also by position. Default storage: `LazyStackStorage`
    node_map   observation -> "_index", the positions of the steps taken from there
    counts, returns   for each position: how often the step was taken, and its returns (sums of rewards) added up

    Keys are by default "observation", "action", "reward" and, if present, "done", "terminated" and "truncated";
    `get_keys_from_env` reads them from an environment. ``max_size`` limits the steps; ``consolidated`` has no effect.

    >>> from tensordict import TensorDict
    >>> rollout = TensorDict(observation=torch.tensor([[0], [1]]), action=torch.tensor([1, 5]), batch_size=[2])
    >>> rollout["next"] = TensorDict(observation=torch.tensor([[1], [6]]), reward=torch.tensor([[0.0], [1.0]]))
    >>> forest, other = MCTSForest(), rollout.clone()
    >>> forest.extend(rollout)
    >>> other["action"][1], other["next", "observation"][1], other["next", "reward"][1] = 7, 8, 0.0
    >>> forest.extend(other)
    >>> print(forest.get_tree(rollout[0]).to_string())
    0: 2 x 0.5
    ├── 1: 1 x 1
    └── 2: 1 x 0
    """

    def __init__(
        self,
        *,
        data_map: TensorDictMap | None = None,
        node_map: NodeMap | None = None,
        max_size: int | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        reward_keys: Sequence[NestedKey] | None = None,
        observation_keys: Sequence[NestedKey] | None = None,
        action_keys: Sequence[NestedKey] | None = None,
        excluded_keys: Sequence[NestedKey] | None = None,
        consolidated: bool | None = None,
    ) -> None:
        self.done_keys = _keys(done_keys, ("done", "terminated", "truncated"))
        self.reward_keys = _keys(reward_keys, ("reward",))
        self.observation_keys = _keys(observation_keys, ("observation",))
        self.action_keys = _keys(action_keys, ("action",))
        self.excluded_keys = _keys(excluded_keys, ())
        self.data_map, self.node_map = data_map, node_map
        self.max_size = max_size
        if data_map is None or node_map is None:
            self._make_maps()
        self.counts: list[int] = []
        self.returns: list[float] = []
        self._ends: list[int] = []  # per position: the node that the step leads to

    def _make_maps(self) -> None:
        both = [*self.observation_keys, *self.action_keys]
        storage = LazyStackStorage(self.max_size)
        self.data_map = self.data_map or TensorDictMap(query_module=QueryModule(both), storage=storage)
        self.node_map = self.node_map or NodeMap(QueryModule(self.observation_keys))

    def get_keys_from_env(self, env: Any) -> None:
        """Reads all key names from the specs of ``env``. Raises ConfigError if the forest already has trajectories."""
        if len(self):
            raise ConfigError("MCTSForest.get_keys_from_env: must be called before the first trajectory is added.")
        self.observation_keys = list(env.observation_spec.keys(True, True))
        self.action_keys, self.reward_keys, self.done_keys = env.action_keys, env.reward_keys, env.done_keys
        self.data_map = self.node_map = None
        self._make_maps()

    def __len__(self) -> int:
        """The number of distinct steps."""
        return len(self._ends)

    def extend(self, rollout: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Adds the trajectories of ``rollout``; with ``return_node`` returns the tree at its first step."""
        if not rollout.batch_dims:
            raise DataError("MCTSForest.extend: a rollout must have a time dimension: got batch size []; use add.")
        earned = self._returns(rollout).flatten().tolist()
        steps = rollout.exclude(*self.excluded_keys, *(("next", key) for key in self.excluded_keys)).reshape(-1)
        before, known = len(self.node_map), len(self)
        nodes, after = self.node_map.query_module, steps.get("next")
        try:
            starts = nodes.index(steps, extend=True).tolist()
            ends = nodes.index(after, extend=True).tolist()
            index = self.data_map.query_module.index(steps, extend=True).tolist()
            self._check_ends(index, ends)
            # These numbers only served the check: the write below assigns the same ones again and stores the rows.
            self.data_map.query_module.forget(known)
            self.data_map[steps] = steps
        except BaseException:  # KeyboardInterrupt too: both maps must have the same steps
            nodes.forget(before)
            self.data_map.query_module.forget(known)
            raise
        self.node_map.branches += [[] for _ in range(len(nodes) - before)]
        for start, position, end, value in zip(starts, index, ends, earned, strict=True):
            if position == len(self):  # a new step: positions count up in the order of the rollout
                self._ends.append(end)
                self.counts.append(0)
                self.returns.append(0.0)
                self.node_map.branches[start].append(position)
            self.counts[position] += 1
            self.returns[position] += value
        return self.get_tree(rollout[(0,) * rollout.batch_dims]) if return_node else None

    def add(self, step: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Adds one step, or a batch [*B] of independent steps."""
        return self.extend(step.unsqueeze(-1), return_node=return_node)

    def get_tree(self, root: TensorDictBase, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """The tree of all trajectories from the observation in ``root``, of batch size [].

        max_depth  most steps from the root; None: all
        compact    merges consecutive steps that the same trajectories take into one vertex; else each step is a vertex

        A path ends where it returns to an observation already on it (``is_repeated``).
        Raises  MissingKeyError if no trajectory has the observation
        """
        if root.batch_dims:
            raise DataError(f"MCTSForest.get_tree: root must be one observation: got batch size {[*root.batch_size]}.")
        limit = len(self) + 1 if max_depth is None else max_depth  # a path never visits an observation twice
        start = self.node_map.node(root)
        root = root.select(*self.observation_keys)
        tree = None
        ids: dict[int, int] = {}  # of observations, in the order in which the vertices are made
        on_path: dict[int, None] = {}
        # An explicit stack: a trajectory may be longer than Python's recursion limit. An entry is either a vertex to
        # make (its parent, first step and depth), or the path length to restore after a vertex is done.
        waiting: list[tuple[Tree | None, int | None, int] | int] = [(None, None, 0)]
        while waiting:
            task = waiting.pop()
            if isinstance(task, int):
                while len(on_path) > task:
                    on_path.popitem()
                continue
            parent, first, depth = task
            size = len(on_path)
            following = [start] if first is None else [self._ends[first]]
            branches = [] if first is None else [first]
            is_repeated = False
            while following:
                node = following.pop()
                is_repeated = node in on_path
                on_path.setdefault(node)
                choices = self.node_map.branches[node]
                # A vertex grows while there is one branch and no trajectory ends. Where some end (the counts differ),
                # the other trajectories continue in a child, which has its own value.
                if not compact or is_repeated or len(choices) != 1 or depth + len(branches) == limit:
                    continue
                if not branches or self.counts[choices[0]] == self.counts[branches[-1]]:
                    branches.append(choices[0])
                    following.append(self._ends[choices[0]])
            vertex = Tree(self, root, node, tuple(branches), parent, ids.setdefault(node, len(ids)))
            vertex.is_repeated = is_repeated
            tree = tree or vertex
            if parent is not None:
                parent.subtree = (*parent.subtree, vertex)
            waiting.append(size)  # below the children, so that it is popped after them
            depth += len(branches)
            if not is_repeated and depth < limit:
                waiting += [(vertex, choice, depth) for choice in reversed(self.node_map.branches[node])]
        return tree

    def get_child(self, root: TensorDictBase) -> TensorDictBase:
        """The steps [k] taken from the observation in ``root``."""
        return self.data_map[torch.tensor(self.node_map.branches[self.node_map.node(root)])]

    def valid_paths(self, root: TensorDictBase) -> list[tuple[int, ...]]:
        """The paths to the leaves of ``get_tree(root)``."""
        return list(self.get_tree(root).valid_paths())

    def to_string(self, root: TensorDictBase, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """One line for each vertex of ``get_tree(root)`` below its root: its path, indented by depth, then what
        ``node_format_fn`` returns for it; by default its data.
        """
        describe = node_format_fn or (lambda tree: tree.node_data.to_dict())
        below = ((path, tree) for path, tree in self.get_tree(root).walk() if path)
        return "\n".join(f"{'  ' * (len(path) - 1)}{path} {describe(tree)}" for path, tree in below)

    def _check_ends(self, index: list[int], ends: list[int]) -> None:
        new: dict[int, int] = {}
        for row, (position, end) in enumerate(zip(index, ends, strict=True)):
            if (self._ends[position] if position < len(self) else new.setdefault(position, end)) != end:
                raise DataError(
                    f"MCTSForest: an action must always lead to the same observation: step {row} of the rollout leads "
                    "elsewhere than before; in a stochastic env add the random outcome to action_keys."
                )

    def _returns(self, rollout: TensorDictBase) -> Tensor:
        """float64 [*B, T]: the sum of the rewards from each step to the end of its trajectory."""
        after = rollout.get("next", None)
        if after is None:
            raise MissingKeyError("MCTSForest: each step must have its successor under 'next': the key is missing.")
        present = after.keys(True, True)
        rewards = [
            after.get(key).reshape(*rollout.batch_size, -1).sum(-1) for key in self.reward_keys if key in present
        ]
        zero = torch.zeros(rollout.batch_size, dtype=torch.float64, device=rollout.device)
        total = sum(rewards, zero)
        if not total.isfinite().all():
            raise DataError("MCTSForest: rewards must be finite: got NaN or infinity; leave out failed trajectories.")
        done = torch.zeros(rollout.batch_size, dtype=torch.bool, device=total.device)
        for key in self.done_keys:
            if key in present:
                done |= after.get(key).reshape(*rollout.batch_size, -1).any(-1)
        left = steps_left(trajectory_ends(done=done))
        return sum_ahead(total, left, steps=total.shape[-1], discount=1.0, dim=-1)


def _keys(given: Sequence[NestedKey] | None, default: Sequence[NestedKey]) -> list[NestedKey]:
    return list(default if given is None else [given] if isinstance(given, str) else given)
