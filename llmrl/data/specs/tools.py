"""Functions on a whole tree of specs: finds stacks in it, compares the keys of their members, and completes them."""

from __future__ import annotations

from llmrl.data.specs.base import TensorSpec
from llmrl.data.specs.composite import Composite
from llmrl.data.specs.stacked import Stacked, StackedComposite

__all__ = ["check_no_exclusive_keys", "consolidate_spec", "contains_lazy_spec"]


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Whether there is a `Stacked` or `StackedComposite` in ``spec``, however deep."""
    if isinstance(spec, (Stacked, StackedComposite)):
        return True
    return isinstance(spec, Composite) and any(contains_lazy_spec(child) for child in spec.values())


def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Whether the members of every stack in ``spec`` have the same keys; without ``recurse``, those of ``spec`` itself.

    >>> import torch
    >>> from llmrl.data.specs import Unbounded
    >>> spec = torch.stack([Composite(x=Unbounded(), y=Unbounded()), Composite(x=Unbounded())])
    >>> check_no_exclusive_keys(spec), check_no_exclusive_keys(consolidate_spec(spec))
    (False, True)
    """
    if isinstance(spec, StackedComposite):
        if any(set(member.keys()) != set(spec.members[0].keys()) for member in spec.members):
            return False
        nested = [spec[name] for name, entry in spec.members[0].items() if isinstance(entry, Composite)]
        children = [*spec.members, *nested]
    else:
        children = spec.values() if isinstance(spec, Composite) else ()
    return not recurse or all(check_no_exclusive_keys(child) for child in children)


def consolidate_spec(
    spec: Composite, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> Composite:
    """A copy in which the members of a `StackedComposite` have every key that one of them has.

    A key that was absent gets a spec of the same type as elsewhere, with size 0 in the dims beyond the member's own
    (where it has none, the very spec); a `Composite` comes without entries, to be filled in the same way.

    ``recurse_through_entries`` goes on in nested composites, ``recurse_through_stack`` in the members of stacks.

    >>> import torch
    >>> from llmrl.data.specs import Unbounded
    >>> spec = torch.stack([Composite(x=Unbounded((3,))), Composite()])
    >>> consolidate_spec(spec)[1]["x"].shape
    torch.Size([0])
    """
    spec = spec.clone()
    if isinstance(spec, StackedComposite):
        if recurse_through_stack:
            members = [consolidate_spec(member, recurse_through_entries) for member in spec.members]
            spec = StackedComposite(*members, dim=spec.stack_dim)
        _complete(spec, recurse_through_entries)
        return spec
    for key, child in list(spec.items()) if recurse_through_entries else ():
        if isinstance(child, Composite):
            spec[key] = consolidate_spec(child, recurse_through_entries, recurse_through_stack)
    return spec


def _complete(spec: StackedComposite, recurse: bool) -> None:
    names = dict.fromkeys(name for member in spec.members for name in member.keys())
    for name in names:
        known = next(member[name] for member in spec.members if name in member)
        for member in spec.members:
            if name not in member:
                member[name] = None if known is None else known._emptied(member.ndim)
        if recurse and isinstance(entry := spec[name], StackedComposite):
            _complete(entry, recurse)
