"""Every leaf class x every shape operation: the spec ends up with the shape, bounds and mask that a tensor would."""

from __future__ import annotations

import math

import pytest
import torch

from llmrl.data.specs import Bounded, Categorical, Composite, NonTensor, Unbounded
from llmrl.errors import ShapeError

SHAPE = (2, 1, 3, 4)
LOW = torch.arange(12.0).reshape(3, 4)  # varies along the last two dims, not along the first
MASK = torch.eye(5, dtype=torch.bool)[torch.arange(8).reshape(2, 1, 1, 4) % 5]  # one choice, varying by two dims

LEAVES = {
    "bounded scalar": Bounded(-1, 1, shape=SHAPE),
    "bounded varying": Bounded(LOW, LOW + 0.5, shape=SHAPE),
    "bounded discrete": Bounded(LOW.long(), LOW.long() + 3, shape=SHAPE),
    "unbounded": Unbounded(shape=SHAPE),
    "unbounded discrete": Unbounded(shape=SHAPE, dtype=torch.int32),
    "unbounded bool": Unbounded(shape=SHAPE, dtype=torch.bool),
    "categorical": Categorical(7, shape=SHAPE),
    "categorical masked": Categorical(5, shape=SHAPE, mask=MASK),
}

OPS = {
    "expand": lambda x: x.expand(6, 2, 5, 3, 4),
    "expand keeping -1": lambda x: x.expand(-1, 5, -1, -1),
    "reshape": lambda x: x.reshape(3, 8),
    "reshape inferring": lambda x: x.reshape((4, -1)),
    "view": lambda x: x.view(2, 12),
    "flatten": lambda x: x.flatten(),
    "flatten some": lambda x: x.flatten(1, -2),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "squeeze": lambda x: x.squeeze(),
    "squeeze one": lambda x: x.squeeze(1),
    "squeeze nothing": lambda x: x.squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "unbind": lambda x: x.unbind(2)[1],
    "unbind last": lambda x: x.unbind(-1)[3],
    "index int": lambda x: x[1],
    "index slice": lambda x: x[:, 0, 1:],
    "index ellipsis": lambda x: x[..., 2],
    "index none": lambda x: x[None, :, :, 0],
    "index list": lambda x: x[[1, 0, 1]],
    "index tensors": lambda x: x[:, :, torch.tensor([0, 2]), torch.tensor([1, 3])],
    "index mask": lambda x: x[torch.tensor([True, False])],
    "index mask of two dims": lambda x: x[torch.tensor([[True], [True]])],
    "clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES)
def test_a_spec_changes_shape_as_its_values_do(spec, op):
    torch.manual_seed(0)
    value = spec.rand()
    changed = op(spec)
    assert type(changed) is type(spec)
    assert changed.shape == op(value).shape
    assert changed.is_in(op(value)), list(changed.mismatches(op(value)))
    assert changed.rand((2,)).shape == (2, *changed.shape)
    assert changed.is_in(changed.rand((2,)))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_mask_follows_every_operation(op):
    spec = LEAVES["categorical masked"]
    only_choice = MASK.expand(*SHAPE, 5).long().argmax(-1)
    changed = op(spec)
    assert changed.rand().tolist() == op(only_choice).tolist()
    assert changed.mask.sum(-1).eq(1).all()
    assert changed.mask.long().argmax(-1).tolist() == op(only_choice).tolist()


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_bounds_follow_every_operation(op):
    low = LOW.expand(SHAPE)
    changed = op(LEAVES["bounded varying"])
    assert changed.low.tolist() == op(low).tolist()
    assert changed.high.tolist() == (op(low) + 0.5).tolist()


@pytest.mark.parametrize("op", [op for name, op in OPS.items() if "mask of" not in name and "tensors" not in name])
def test_a_composite_changes_its_batch_dims_and_carries_the_rest(op):
    spec = Composite(
        value=LEAVES["bounded varying"].unsqueeze(-1).expand(*SHAPE, 6),
        nested={"choice": LEAVES["categorical masked"]},
        text=NonTensor(shape=SHAPE, example_data=""),
        nothing=None,
        shape=SHAPE,
    )
    td = spec.rand()
    changed = op(spec)
    assert changed.shape == op(torch.zeros(SHAPE)).shape
    assert changed["value"].shape == (*changed.shape, 6)
    assert changed["nested"].shape == changed.shape
    assert changed["nothing"] is None
    assert changed["text"].shape == changed.shape
    assert changed["nested", "choice"].is_in(op(td["nested", "choice"]))
    assert changed.is_in(changed.rand())


def test_bounds_and_masks_cost_no_memory_until_they_vary():
    vocabulary = 150_000
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[7] = True
    spec = Categorical(vocabulary, shape=(1,), mask=mask).expand(64, 512)
    spec = spec.reshape(8, 8, 512).flatten(0, 1)[:10].unsqueeze(0)
    assert spec._mask.numel() == vocabulary
    assert spec.mask.shape == (1, 10, 512, vocabulary)
    assert Bounded(0, 1, shape=(10**6, 10**6))._low.numel() == 1


def test_a_dim_of_any_size_survives_and_takes_any_size():
    spec = Bounded(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 6.0]), shape=(4, -1, 2))
    assert spec.is_in(torch.tensor([0.5, 5.5]).expand(4, 9, 2))
    assert not spec.is_in(torch.tensor([0.5, 5.5]).expand(3, 9, 2))
    assert spec.expand(3, 4, -1, 2).shape == (3, 4, -1, 2)
    assert spec.flatten(0, 1).shape == (-1, 2)
    assert spec[1].shape == (-1, 2)
    assert spec[:, :7].shape == (4, -1, 2)
    assert spec[..., 1].low.unique().tolist() == [5.0]
    assert spec.unflatten(0, (2, 2)).low.shape == (2, 2, 1, 2)
    assert spec.reshape(2, 2, -1, 2).shape == (2, 2, -1, 2)
    assert spec.rand().shape == (4, 1, 2)
    assert [part.shape for part in spec.unbind(-1)] == [(4, -1), (4, -1)]
    with pytest.raises(ShapeError, match="has any size"):
        spec.unbind(1)
    with pytest.raises(ShapeError, match="cannot vary along dim 1"):
        spec.flatten(1, 2)


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (lambda spec: spec.expand(2, 5), r"Unbounded\w+: cannot expand to \(2, 5\) a spec of shape \(2, 3\)"),
        (lambda spec: spec.reshape(7), "cannot reshape to"),
        (lambda spec: spec.unflatten(0, (3, 3)), "cannot unflatten"),
        (lambda spec: spec.unsqueeze(4), "cannot unsqueeze dim 4"),
        (lambda spec: spec.unbind(2), "cannot take dim 2"),
        (lambda spec: spec[0, 0, 0], "cannot have more dims than the spec"),
        (lambda spec: spec[5], "cannot index with 5"),
        (lambda spec: spec[torch.ones(3, dtype=torch.bool)], "must have the shape of what it masks"),
        (lambda spec: spec[..., 0, ...], "one Ellipsis"),
        (lambda spec: spec[True], "cannot hold True"),
    ],
)
def test_what_a_tensor_refuses_is_a_shape_error(op, match):
    with pytest.raises(ShapeError, match=match):
        op(Unbounded(shape=(2, 3)))


def test_shape_operations_leave_the_spec_they_came_from_alone():
    spec = Composite(a=Bounded(LOW, LOW + 1), shape=(3,))
    spec.expand(5, 3)["b"] = Unbounded(shape=(5, 3))
    assert list(spec.keys()) == ["a"]
    assert spec["a"].shape == (3, 4)
    assert math.prod(spec.unsqueeze(0).shape) == 3
