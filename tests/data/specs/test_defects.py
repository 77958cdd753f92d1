"""What has gone wrong in specs before, each as a test of its own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from llmrl.data.specs import Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

MASK = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "op",
    [
        lambda spec: spec.expand(4, 2, 3),
        lambda spec: spec.reshape(3, 2),
        lambda spec: spec.unflatten(1, (3, 1)),
        lambda spec: spec[0],
        lambda spec: spec.squeeze(),
        lambda spec: spec.to(torch.int32),
        lambda spec: spec.to("cpu"),
        lambda spec: Composite(action=spec, shape=(2,)).expand(4, 2)["action"],
        lambda spec: Composite(action=spec, shape=(2,))[0]["action"],
    ],
)
def test_a_masked_choice_keeps_its_mask_whatever_is_done_to_it(op):
    spec = op(Categorical(3, shape=(2, 3), mask=MASK))
    assert spec.mask.shape == (*spec.shape, 3)
    assert set(spec.rand((100,)).flatten().tolist()) == {0, 2}
    assert not spec.is_in(torch.ones(spec.shape, dtype=spec.dtype))


def test_get_of_a_missing_key_is_none_or_the_default_not_something_equal_to_0():
    assert Composite(a=Unbounded()).get("b") is None
    assert Composite(a=Unbounded()).get("b", 7) == 7


def test_setting_the_device_of_a_composite_moves_its_entries():
    spec = Composite(a=Unbounded(), n={"b": Categorical(3), "none": None})
    spec.device = "meta"
    assert spec.device == spec["a"].device == spec["n", "b"].device == torch.device("meta")
    with pytest.raises(RuntimeError, match="locked"):
        spec.lock_().device = "cpu"
    assert spec["a"].device.type == "meta"


def test_a_stack_unbinds_along_every_dim():
    spec = torch.stack([Bounded(0, 1, (3,)), Bounded(5, 6, (3,))])
    assert [part.zero().tolist() for part in spec.unbind(1)] == [[0, 5]] * 3
    assert [part.zero().tolist() for part in spec.unbind(-1)] == [[0, 5]] * 3


def test_stacks_on_different_devices_compare_unequal():
    spec = torch.stack([Bounded(0, 1), Bounded(5, 6)])
    assert spec != spec.to("meta")
    assert spec == spec.to("cpu")


def test_projection_to_one_hot_takes_negatives():
    spec = OneHot(3, dtype=torch.int64)
    for value, nearest in (([-3, -1, -2], 1), ([0, 0, 0], 0)):
        assert int(spec.project(torch.tensor(value)).argmax()) == nearest


def test_bounds_unbind_along_the_last_dim():
    spec = Bounded(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 6.0]))
    assert spec.unbind(-1) == (Bounded(0.0, 1.0), Bounded(5.0, 6.0))


def test_zeros_and_ones_are_in_the_domain():
    assert Bounded(3, 6, (2,)).zero().tolist() == [3, 3]
    assert Bounded(-6, -3, (2,)).one().tolist() == [-3, -3]
    assert OneHot(3, mask=~MASK).zero().tolist() == [False, True, False]
    assert Categorical(3, mask=torch.tensor([False, False, True])).zero() == 2
    assert MultiCategorical([1, 4]).one().tolist() == [0, 1]


def test_a_spec_that_remembers_what_it_encoded_can_be_pickled():
    spec = Composite(a=Categorical(3), n={"b": Bounded(0, 9, (2,))})
    spec.memoize_encode()
    value = {"a": 2, "n": {"b": np.array([1.0, 2.0])}}
    for _ in range(2):
        td = spec.encode(value)
        assert td["a"] == 2
        td["n", "b"].zero_()  # what was handed out is not what is remembered
    assert len(spec["n", "b"]._memo) == 1
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.encode(value)["n", "b"].tolist() == [1, 2]
    assert again["a"].to(torch.int32).encode(2).dtype == torch.int32
    spec.memoize_encode(False)
    assert spec["a"]._memo is None


def test_a_bounded_spec_of_whole_numbers_counts_its_values():
    assert Bounded(0, 3, (2,), dtype=torch.int64).cardinality() == 16
    assert Bounded(-(2**63), 2**63 - 1, dtype=torch.int64).cardinality() == 2**64
