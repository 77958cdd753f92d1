"""Every class x every shape operation: the spec ends up with the shape, bounds and mask that a tensor would."""

import math

import pytest
import torch

from llmrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    contains_lazy_spec,
)
from llmrl.errors import ShapeError

SHAPE = (2, 1, 3, 4)
LOW = torch.arange(12.0).reshape(3, 4)  # varies along the last two dims, not along the first
ROWS_OF_4 = torch.arange(12).view(3, 4).tolist()
ROWS = torch.arange(8).reshape(2, 1, 1, 4)
MASK = torch.eye(5, dtype=torch.bool)[ROWS % 5]  # one choice, varying by two dims
PAIRS = torch.cat([torch.eye(2, dtype=torch.bool)[ROWS % 2], torch.eye(3, dtype=torch.bool)[ROWS % 3]], -1)
NVEC = torch.arange(2, 26).reshape(SHAPE)

LEAVES = {
    "bounded scalar": Bounded(-1, 1, shape=SHAPE),
    "bounded varying": Bounded(LOW, LOW + 0.5, shape=SHAPE),
    "bounded discrete": Bounded(LOW.long(), LOW.long() + 3, shape=SHAPE),
    "unbounded": Unbounded(shape=SHAPE),
    "unbounded discrete": Unbounded(shape=SHAPE, dtype=torch.int32),
    "unbounded bool": Unbounded(shape=SHAPE, dtype=torch.bool),
    "categorical": Categorical(7, shape=SHAPE),
    "categorical masked": Categorical(5, shape=SHAPE, mask=MASK),
    "multi categorical": MultiCategorical([3, 2, 5, 4], shape=SHAPE),
    "multi categorical by row": MultiCategorical(NVEC),
    "multi categorical masked": MultiCategorical([2, 3], shape=(*SHAPE, 2), mask=PAIRS),
    "binary": Binary(4, shape=SHAPE),
    "one-hot": OneHot(5, shape=(*SHAPE, 5)),
    "one-hot masked": OneHot(5, shape=(*SHAPE, 5), mask=MASK),
    "multi one-hot": MultiOneHot([2, 3], shape=(*SHAPE, 5)),
    "multi one-hot masked": MultiOneHot([2, 3], shape=(*SHAPE, 5), mask=PAIRS, dtype=torch.int64),
    "stacked first": torch.stack([Bounded(-1, 1, SHAPE[1:]), Bounded(5, 6, SHAPE[1:])]),
    "stacked in the middle": torch.stack([Bounded(LOW[0] + n, LOW[0] + n, (2, 1, 4)) for n in range(3)], 2),
    "stacked one-hot": torch.stack([OneHot(5, (2, 1, 3, 5), mask=torch.arange(5) > n) for n in range(4)], 3),
    "stacked twice": torch.stack([torch.stack([Bounded(n, n, (2, 1)) for n in row], -1) for row in ROWS_OF_4], 2),
    "choice": Choice([Bounded(LOW, LOW + 0.5, shape=SHAPE), Bounded(40, 41, shape=SHAPE)]),
}

# x is a spec, or a tensor of its shape; t the dims that belong to a one-hot spec's domain.
OPS = {
    "expand": lambda x, *t: x.expand(6, 2, 5, 3, 4, *t),
    "expand keeping -1": lambda x, *t: x.expand(-1, 5, -1, -1, *t),
    "reshape": lambda x, *t: x.reshape(3, 8, *t),
    "reshape inferring": lambda x, *t: x.reshape((4, -1, *t)),
    "view": lambda x, *t: x.view(2, 12, *t),
    "flatten": lambda x, *t: x.flatten(0, 3),
    "flatten some": lambda x, *t: torch.flatten(x, 1, -2 - len(t)),
    "unflatten": lambda x, *t: x.unflatten(-1 - len(t), (2, 2)),
    "squeeze": lambda x, *t: x.squeeze(),
    "squeeze one": lambda x, *t: torch.squeeze(x, 1),
    "squeeze nothing": lambda x, *t: x.squeeze(0),
    "unsqueeze": lambda x, *t: torch.unsqueeze(x, 2),
    "unsqueeze last": lambda x, *t: x.unsqueeze(-1 - len(t)),
    "unbind": lambda x, *t: x.unbind(2)[1],
    "unbind last": lambda x, *t: torch.unbind(x, -1 - len(t))[3],
    "index int": lambda x, *t: x[1],
    "index slice": lambda x, *t: x[:, 0, 1:],
    "index ellipsis": lambda x, *t: x[(..., 2, *(slice(None) for _ in t))],
    "index none": lambda x, *t: x[None, :, :, 0],
    "index list": lambda x, *t: x[[1, 0, 1]],
    "index tensors": lambda x, *t: x[:, :, torch.tensor([0, 2]), torch.tensor([1, 3])],
    "index mask": lambda x, *t: x[torch.tensor([True, False])],
    "index mask of two dims": lambda x, *t: x[torch.tensor([[True], [True]])],
    "index nothing": lambda x, *t: x[:, :, 3:],
    "index select": lambda x, *t: torch.index_select(x, 2, torch.tensor([2, 0])),
    "clone": lambda x, *t: x.clone(),
}


@pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES)
def test_a_spec_changes_shape_as_its_values_do_and_its_domain_follows_entry_by_entry(spec):
    torch.manual_seed(0)
    tail = spec.shape[4:]
    value, zero = spec.rand(), spec.zero()
    wild = torch.randint(-5, 30, spec.shape).double()
    nearest = spec.project(wild)
    for name, op in OPS.items():
        changed = op(spec, *tail)
        assert changed.shape == op(value, *tail).shape, name
        assert changed.is_in(op(value, *tail)), (name, list(changed.mismatches(op(value, *tail))))
        drawn = changed.rand((2,))
        assert drawn.shape == (2, *changed.shape), name
        assert changed.is_in(drawn), name
        assert type(changed) is type(spec) or isinstance(spec, Stacked), name
        assert changed.project(op(wild, *tail)).equal(op(nearest, *tail)), name
        assert changed.zero().equal(op(zero, *tail)), name


@pytest.mark.parametrize("lazy", [False, True])
def test_a_composite_changes_its_batch_dims_and_carries_the_rest(lazy):
    def make(shape, shift):
        low = LOW.expand(shape) + shift
        return Composite(
            value=Bounded(low, low + 0.5, shape=shape).unsqueeze(-1).expand(*shape, 6),
            nested={"choice": OneHot(5, (*shape, 5), mask=torch.arange(5) > shift)},
            text=NonTensor(shape=shape, example_data=""),
            nothing=None,
            shape=shape,
        )

    spec = torch.stack([make(SHAPE[1:], 0), make(SHAPE[1:], 1)]) if lazy else make(SHAPE, 0)
    assert isinstance(spec, StackedComposite) == lazy == contains_lazy_spec(spec)
    td = spec.rand()
    for name, op in OPS.items():
        changed = op(spec)
        assert changed.shape == changed["nested"].shape == changed["text"].shape == op(torch.zeros(SHAPE)).shape, name
        assert (changed["value"].shape, changed["nothing"]) == ((*changed.shape, 6), None), name
        assert changed["nested", "choice"].is_in(op(td["nested", "choice"], 5)), name
        assert changed["value"].is_in(op(td["value"], 6)), name
        assert changed.is_in(changed.rand()), name


def test_the_dim_of_a_one_hot_vector_cannot_be_touched():
    spec = OneHot(4, shape=(2, 3, 4))
    assert (spec.reshape(6, -1).shape, spec.expand(5, 2, 3, -1).shape) == ((6, 4), (5, 2, 3, 4))
    for op in (
        lambda: spec.flatten(),
        lambda: spec.reshape(2, 12),
        lambda: spec.expand(2, 3, 8),
        lambda: spec.unbind(-1),
        lambda: spec.unflatten(2, (2, 2)),
        lambda: spec.unsqueeze(-1),
        lambda: spec[..., 0],
        lambda: spec[..., :2],
        lambda: spec[..., None],
        lambda: spec.squeeze(-1),
        lambda: spec.make_neg_dim(-1),
        lambda: torch.stack([spec, spec], -1),
        lambda: Composite(a=spec, shape=(2, 3, 4)),
    ):
        with pytest.raises(ShapeError, match=r"domain|must begin with"):
            op()


def test_bounds_and_masks_cost_no_memory_until_they_vary():
    vocabulary = 150_000
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[7] = True
    for spec in (Categorical(vocabulary, shape=(1,), mask=mask), OneHot(vocabulary, (1, vocabulary), mask=mask)):
        tail = spec.shape[1:]
        spec = spec.expand(64, 512, *tail).reshape(8, 8, 512, *tail).flatten(0, 1)[:10].unsqueeze(0)
        held = spec._numbers if tail else spec
        assert held._mask.numel() == vocabulary
        assert spec.mask.shape == (1, 10, 512, vocabulary)
        assert spec.mask.untyped_storage().nbytes() == vocabulary
    groups = MultiCategorical([vocabulary, 2], (64, 512, 2), mask=torch.cat([mask, torch.tensor([True, False])]))
    assert groups._mask.numel() == 2 * vocabulary
    assert groups.mask.shape == (64, 512, vocabulary + 2)
    assert groups.mask.untyped_storage().nbytes() == vocabulary + 2
    assert groups.rand().flatten(0, 1).unique(dim=0).tolist() == [[7, 0]]
    assert groups.to_one_hot_spec()._numbers == groups
    wide = Categorical(vocabulary, shape=(64, 512), mask=mask)
    assert wide.rand().eq(7).all()  # draws and checks cost by entry, not by entry and choice
    assert wide.project(torch.zeros(64, 512).long()).eq(7).all()
    box = Bounded(0, 1, shape=(10**6, 10**6))
    assert box._low.numel() == box.expand(5, -1, -1).flatten()._high.numel() == 1
    assert box.high.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("name", LEAVES)
def test_every_class_takes_a_dim_of_any_size(name):
    dense = LEAVES[name][0, 0]
    if name in ("unbounded", "categorical", "binary", "one-hot", "multi one-hot", "bounded scalar"):
        spec = dense.make_neg_dim(0)
        assert spec.shape[0] == -1
        for size in (0, 1, 7):
            value = dense[[1] * size].rand()
            assert value.shape[0] == size
            assert spec.is_in(value)
            assert spec.project(value) is value
        assert (spec.rand().shape[0], spec.cardinality()) == (1, math.inf)
    elif "varying" in name:
        with pytest.raises(ShapeError, match="cannot vary along dim 0"):
            dense.make_neg_dim(0)


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (lambda spec: spec.expand(2, 5), r"Unbounded\w+: cannot expand to \(2, 5\) a spec of shape \(2, 3\)"),
        (lambda spec: spec.reshape(7), "cannot reshape to"),
        (lambda spec: spec.unflatten(0, (3, 3)), "cannot unflatten"),
        (lambda spec: spec.unsqueeze(4), "cannot unsqueeze dim 4"),
        (lambda spec: spec.unbind(2), "cannot unbind dim 2"),
        (lambda spec: spec[0, 0, 0], "cannot have more dims than the spec"),
        (lambda spec: spec[5], "cannot index with 5"),
        (lambda spec: spec[[0, 5]], "below the size of its dim: got"),
        (lambda spec: spec[torch.ones(3, dtype=torch.bool)], "must have the shape of the dims it masks"),
        (lambda spec: spec[..., 0, ...], "one Ellipsis"),
        (lambda spec: spec[True], "cannot hold True"),
    ],
)
def test_what_a_tensor_refuses_is_a_shape_error(op, match):
    with pytest.raises(ShapeError, match=match):
        op(Unbounded(shape=(2, 3)))
