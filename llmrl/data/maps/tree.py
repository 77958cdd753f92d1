"""`Tree`: the trajectories of a forest that start from one observation, with shared prefixes merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from tensordict import TensorDictBase

from llmrl.data.specs import TensorSpec
from llmrl.errors import MissingKeyError

if TYPE_CHECKING:
    from llmrl.data.maps.forest import MCTSForest

Path = tuple[int, ...]


class Tree:
    """A vertex and its descendants. Made by `MCTSForest.get_tree`; reads its steps from the forest.

    rollout    the steps [L] that lead here from the parent's observation; the first one selects the branch. For the
               root of a compact tree, the steps before the first branching. None if there are none
    subtree    the children, in the order in which they were first taken
    node_id    the number of the observation, in depth-first order (preorder); 0 for the root. Vertices with the same
               observation, which several paths reach, share it
    count      how often trajectories took this branch; for the root, how often they took any step from it
    wins       the sum of their undiscounted returns from here on, including the rewards of ``rollout``
    hash       int64 hash of the observation; vertices with the same observation share it
    """

    def __init__(
        self, forest: MCTSForest, node_data: TensorDictBase, node: int, branches: Path, parent: Tree | None, id_: int
    ) -> None:
        self._forest, self._node, self.branches, self.node_id = forest, node, branches, id_
        self._root_data = node_data
        self._parent = None if parent is None else ref(parent)  # weak: avoids a reference cycle
        self.subtree: tuple[Tree, ...] = ()
        self.is_repeated = False

    # --- contents ---

    @property
    def parent(self) -> Tree | None:
        """The parent vertex; None for the root, and after the enclosing tree was freed."""
        return None if self._parent is None else self._parent()

    @property
    def rollout(self) -> TensorDictBase | None:
        return self.rollout_from_path(())

    @property
    def node_data(self) -> TensorDictBase:
        """The observation keys of this vertex."""
        last = self._forest.data_map[self.branches[-1]]["next"] if self.branches else self._root_data
        return last.select(*self._forest.observation_keys)

    @property
    def node_observation(self) -> Any:
        """The observation of this vertex, after its rollout; a tuple if there are several keys."""
        values = tuple(self.node_data.get(key) for key in self._forest.observation_keys)
        return values[0] if len(values) == 1 else values

    @property
    def hash(self) -> int:
        return int(self._forest.node_map.query_module.hash(self.node_data))

    @property
    def count(self) -> int:
        return self._sum(self._forest.counts)

    visits = count

    @property
    def wins(self) -> float:
        return self._sum(self._forest.returns)

    def _sum(self, of_steps: list[Any]) -> Any:
        # All trajectories of a vertex take its first step. At a root without steps they may take any step from there.
        steps = self.branches[:1] or self._forest.node_map.branches[self._node]
        return sum(of_steps[step] for step in steps)

    @property
    def value(self) -> float:
        """The mean return of the trajectories from here on."""
        return self.wins / self.count if self.count else float("nan")

    @property
    def selected_actions(self) -> Any:
        """The actions of the rollout; None without a rollout."""
        return self._actions(slice(None))

    @property
    def prev_action(self) -> Any:
        """The last action before the observation of this vertex."""
        return self._actions(-1)

    @property
    def branching_action(self) -> Any:
        """The first action of the rollout, which distinguishes this vertex from its siblings."""
        return self._actions(0)

    def _actions(self, index: Any) -> Any:
        if not self.branches:
            return None
        steps = self.rollout[index]
        values = tuple(steps.get(key) for key in self._forest.action_keys)
        return values[0] if len(values) == 1 else values

    # --- structure ---

    @property
    def num_children(self) -> int:
        return len(self.subtree)

    @property
    def is_terminal(self) -> bool:
        """True if the trajectory that leads here is done."""
        if not self.branches:
            return False
        last = self._forest.data_map[self.branches[-1]]["next"]
        return any(bool(last[key].any()) for key in self._forest.done_keys if key in last.keys(True))

    def fully_expanded(self, env: Any) -> bool:
        """True if each action of ``env``, which must be discrete, has a child."""
        spec: TensorSpec = env.action_spec
        return self.num_children == spec.cardinality()

    def walk(self) -> Iterator[tuple[Path, Tree]]:
        """Yields (path, vertex) depth first, this vertex first; a path lists child indices."""
        waiting: list[tuple[Path, Tree]] = [((), self)]
        while waiting:
            path, tree = waiting.pop()
            yield path, tree
            waiting += [((*path, place), child) for place, child in reversed(list(enumerate(tree.subtree)))]

    def vertices(self, *, key_type: str = "hash") -> dict[Any, Tree]:
        """The vertices by "hash" or "id" (the last one of those that share it) or "path"."""
        keys: dict[str, Callable[[Path, Tree], Any]] = {
            "hash": lambda path, tree: tree.hash,
            "id": lambda path, tree: tree.node_id,
            "path": lambda path, tree: path,
        }
        if key_type not in keys:
            raise ValueError(f"Tree.vertices: key_type must be one of {', '.join(keys)}: got {key_type!r}.")
        return {keys[key_type](path, tree): tree for path, tree in self.walk()}

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """The number of distinct observations; with ``count_repeat`` of vertices."""
        nodes = [tree._node for _, tree in self.walk()]
        return len(nodes) if count_repeat else len(set(nodes))

    def edges(self) -> list[tuple[int, int]]:
        """The (parent id, child id) pairs."""
        return [(tree.node_id, child.node_id) for _, tree in self.walk() for child in tree.subtree]

    def valid_paths(self) -> Iterator[Path]:
        """The paths to the leaves."""
        return (path for path, tree in self.walk() if not tree.subtree)

    def max_length(self) -> int:
        """The number of steps of the longest path."""
        return max(len(self._branches(path)) for path in self.valid_paths())

    def rollout_from_path(self, path: Sequence[int]) -> TensorDictBase | None:
        """The steps from the root to the vertex at ``path``; None if there are none."""
        branches = self._branches(path)
        return self._forest.data_map[torch.tensor(branches)] if branches else None

    def _branches(self, path: Sequence[int]) -> list[int]:
        tree, branches = self, list(self.branches)
        for place in path:
            tree = tree.subtree[place]
            branches += tree.branches
        return branches

    def get_vertex_by_id(self, id: int) -> Tree:
        return self._found(lambda tree: tree.node_id == id, f"the id {id}")

    def get_vertex_by_hash(self, hash: int) -> Tree:
        return self._found(lambda tree: tree.hash == int(hash), f"the hash {hash}")

    def _found(self, is_it: Callable[[Tree], bool], what: str) -> Tree:
        for _, tree in self.walk():
            if is_it(tree):
                return tree
        raise MissingKeyError(f"Tree: no vertex has {what}.")

    def __contains__(self, other: Tree) -> bool:
        """True if a vertex of this tree has the same observation."""
        return any(tree._node == other._node and tree._forest is other._forest for _, tree in self.walk())

    # --- display ---

    def to_string(self, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """One line for each vertex, children below their parent; by default id, count and value."""
        lines = []
        waiting: list[tuple[str, str, Tree]] = [("", "", self)]
        while waiting:
            own, below, tree = waiting.pop()
            lines.append(own + _label(tree, node_format_fn))
            for child in reversed(tree.subtree):
                mark, gap = ("└── ", "    ") if child is tree.subtree[-1] else ("├── ", "│   ")
                waiting.append((below + mark, below + gap, child))
        return "\n".join(lines)

    def to_svg(self, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """An SVG drawing: the root on the left, vertices colored from red (lowest value) to green (highest)."""
        depth, row, width, height = {}, {}, 150, 24
        leaves = 0
        for path, tree in self.walk():
            depth[tree] = len(path)
            if not tree.subtree:
                row[tree], leaves = leaves, leaves + 1
        vertices = [tree for _, tree in self.walk()]
        for tree in reversed(vertices):  # children first: a parent is centered on its children
            if tree.subtree:
                row[tree] = sum(row[child] for child in tree.subtree) / len(tree.subtree)
        values = [tree.value for tree in vertices if tree.value == tree.value] or [0.0]  # NaN: no trajectory came here
        low, span = min(values), (max(values) - min(values)) or 1.0
        at = {tree: (20 + depth[tree] * width, 20 + row[tree] * height) for tree in row}
        parts = [
            f'<path d="M{at[one][0]} {at[one][1]} L{at[other][0]} {at[other][1]}" stroke="#999"/>'
            for one in vertices
            for other in one.subtree
        ]
        for tree in vertices:
            x, y = at[tree]
            share = (tree.value - low) / span if tree.value == tree.value else 0.5
            parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="hsl({120 * share:.0f} 60% 50%)"/>')
            parts.append(f'<text x="{x + 9}" y="{y - 5}">{escape(_label(tree, node_format_fn))}</text>')
        size = (max(depth.values()) + 1) * width + 60, leaves * height + 30
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="monospace" '
            f'font-size="9">{"".join(parts)}</svg>'
        )

    _repr_svg_ = to_svg  # what a notebook shows

    def __repr__(self) -> str:
        return f"Tree({_label(self, None)}, {self.num_children} children)"


def _label(tree: Tree, format_: Callable[[Tree], Any] | None) -> str:
    return str(format_(tree)) if format_ is not None else f"{tree.node_id}: {tree.count} x {tree.value:.3g}"
