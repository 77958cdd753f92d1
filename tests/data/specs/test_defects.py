"""What has gone wrong in specs before, each as a test of its own."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

from llmrl.data.specs import Bounded, Categorical, Composite, MultiCategorical, NonTensor, OneHot, Unbounded

MASK = torch.tensor([True, False, True])
ROWS = torch.stack([Bounded(0, 1, (3,)), Bounded(5, 6, (3,))])
LISTS = NonTensor((2,), example_data=[1], batched=True)
MASKED = Composite(action=Categorical(3, shape=(2, 3), mask=MASK), shape=(2,))


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (lambda: MASKED.expand(4, 2)["action"].mask, MASK.expand(4, 2, 3, 3)),
        (lambda: MASKED[0].to(torch.int32)["action"].mask, MASK.expand(3, 3)),
        (lambda: set(MASKED.expand(40, 2).rand()["action"].flatten().tolist()), {0, 2}),
        (lambda: MASKED["action"].squeeze() == MASKED["action"], True),
        (lambda: [Composite().get("b"), Composite().get("b", 7)], [None, 7]),
        (lambda: [part.zero().tolist() for dim in (1, -1) for part in ROWS.unbind(dim)], [[0, 5]] * 6),
        (lambda: [ROWS.to("meta") == ROWS, ROWS.to("cpu") == ROWS], [False, True]),
        (lambda: [int(OneHot(3).project(torch.tensor(v)).int().argmax()) for v in ([-3, -1, -2], [0, 0, 0])], [1, 0]),
        (lambda: Bounded(torch.tensor([0.0, 5.0]), 6.0).unbind(-1), (Bounded(0.0, 6.0), Bounded(5.0, 6.0))),
        (lambda: Bounded(3, 6, (2,)).zero().tolist() + Bounded(-6, -3, ()).one().view(1).tolist(), [3, 3, -3]),
        (lambda: OneHot(3, mask=~MASK).zero().tolist(), [False, True, False]),
        (lambda: [Categorical(2, mask=torch.tensor([False, True])).zero(), *MultiCategorical([1, 4]).one()], [1, 0, 1]),
        (lambda: Bounded(-(2**63), 2**63 - 1, dtype=torch.int64).cardinality(), 2**64),
        (lambda: Bounded(0, 3, (10**6,), dtype=torch.int64).cardinality() > 2**10**6, True),  # entries are not listed
        (lambda: [LISTS.is_in(value) for value in (LISTS.rand(), NonTensorStack([1], [2]))], [True, True]),
    ],
)
def test_a_defect_does_not_come_back(got, expected):
    got = got()
    assert got.equal(expected) if isinstance(expected, torch.Tensor) else got == expected


def test_setting_the_device_of_a_composite_moves_its_entries():
    spec = Composite(a=Unbounded(), n={"b": Categorical(3), "none": None})
    spec.device = "meta"
    assert spec.device == spec["a"].device == spec["n", "b"].device == torch.device("meta")
    with pytest.raises(RuntimeError, match="locked"):
        spec.lock_().device = "cpu"
    assert spec["a"].device.type == "meta"


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
