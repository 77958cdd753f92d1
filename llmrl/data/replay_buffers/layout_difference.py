"""The first way in which the trees of two layouts differ, in words."""

from __future__ import annotations

from typing import Any

from llmrl.data.replay_buffers.layout import Branch, Leaf, Messages, TensorLeaf, Tree, Wrapped


def difference(expected: Any, got: Any, path: tuple[str, ...] = ()) -> str:
    """The first way in which two trees differ, in words that name the key."""
    where = repr(path[0] if len(path) == 1 else path) if path else "the row"
    if type(expected) is Wrapped and type(got) is Wrapped and expected.cls is got.cls:
        return difference(expected.inner, got.inner, path)
    if type(expected) is Branch and type(got) is Branch:
        for name in got.names:
            if name not in expected.names:
                return f"unknown key {(*path, name)!r}" if path else f"unknown key {name!r}"
        for name, child in zip(expected.names, expected.children, strict=True):
            if name not in got.names:
                return f"missing key {(*path, name)!r}" if path else f"missing key {name!r}"
            other = got.children[got.names.index(name)]
            if child != other:
                return difference(child, other, (*path, name))
        return f"{where}: got batch size {list(got.batch_size)} after the row dimension and device {got.device}, " + (
            f"expected {list(expected.batch_size)} and {expected.device}"
        )
    if type(expected) is TensorLeaf and type(got) is TensorLeaf:
        return f"{where}: got {_describe(got)}, expected {_describe(expected)}"
    return f"{where}: got {_name(got)}, expected {_name(expected)}"


def _describe(leaf: TensorLeaf) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} per row"


def _name(node: Any) -> str:
    if type(node) is TensorLeaf:
        return _describe(node)
    if type(node) is Messages:
        return "a conversation"
    if type(node) is Tree:
        return f"a {node.spec.type.__name__ if node.spec.type else 'tree'} of {len(node.children)} entries"
    if type(node) is Wrapped:
        return node.cls.__name__
    if isinstance(node, Leaf):
        return {Leaf.DATA: "a Python value", Leaf.RAGGED: "a ragged entry"}.get(node, "a tensordict")
    return "a tensordict" if type(node) is Branch else "a lazy stack"
