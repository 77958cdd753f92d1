from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from llmrl.data import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    NonTensor,
    TensorSpec,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from llmrl.errors import ConfigError, DataError, ShapeError

MASK = torch.tensor([[True, False, True, False], [False, False, False, True]])

SPECS = {
    "bounded": Bounded(-2.0, 3.0, shape=(2, 3)),
    "bounded one value": Bounded(1, 1, shape=(2,)),
    "bounded float64": Bounded(0, 1, dtype=torch.float64),
    "bounded half infinite": Bounded(0, math.inf, shape=(50,)),
    "bounded infinite": Bounded(-math.inf, math.inf, shape=(50,)),
    "bounded wide": Bounded(-3e38, 3e38, shape=(50,)),
    "bounded discrete": Bounded(torch.tensor([0, -5]), torch.tensor([3, 7])),
    "bounded uint8": Bounded(0, 255, shape=(200,), dtype=torch.uint8),
    "bounded int64 range": Bounded(-(2**63), 2**63 - 1, shape=(20,), dtype=torch.int64),
    "bounded whole floats": Bounded(0, 4, shape=(9,), domain="discrete", dtype=torch.float32),
    "unbounded": Unbounded(),
    "unbounded half": Unbounded(shape=(2, 3), dtype=torch.float16),
    "unbounded int": Unbounded(shape=(20,), dtype=torch.int8),
    "unbounded bool": Unbounded(shape=(20,), dtype=torch.bool),
    "categorical": Categorical(4),
    "categorical bool": Categorical(2, shape=(3, 1), dtype=torch.bool),
    "categorical masked": Categorical(4, shape=(3, 2), mask=MASK),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request) -> TensorSpec:
    return request.param


def test_rand_is_in_for_every_shape(spec):
    for shape in ((), (1,), (2, 3)):
        value = spec.rand(shape)
        assert value.shape == (*shape, *spec.shape)
        assert value.dtype == spec.dtype
        spec.assert_is_in(value)


def test_rand_follows_its_generator(spec):
    one, two = (spec.rand((4,), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.tolist() == two.tolist()


def test_zero_and_one_have_the_spec_s_shape_and_dtype(spec):
    for value, number in ((spec.zero((2,)), 0), (spec.ones((2,)), 1)):
        assert value.shape == (2, *spec.shape)
        assert value.dtype == spec.dtype
        assert value.eq(number).all()


def test_encode_inverts_to_numpy(spec):
    value = spec.rand()
    assert spec.encode(spec.to_numpy(value)).equal(value)
    assert spec.encode(value.tolist()).equal(value)


def test_project_is_identity_on_valid_values_and_ends_in_the_domain(spec):
    value = spec.rand((3,))
    assert spec.project(value) is value
    wild = torch.full((3, *spec.shape), 117).to(spec.dtype)
    projected = spec.project(wild)
    spec.assert_is_in(projected)
    assert spec.project(projected) is projected


def test_copies_and_pickles_compare_equal(spec):
    for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.to("cpu")):
        assert other == spec
        assert type(other) is type(spec)
    assert spec != spec.unsqueeze(0)


def test_every_field_counts_for_equality():
    base = Bounded(0, 1, shape=(2,))
    assert base == Bounded(torch.zeros(2), torch.ones(2))
    for other in (
        Bounded(0, 2, shape=(2,)),
        Bounded(-1, 1, shape=(2,)),
        Bounded(0, 1, shape=(3,)),
        Bounded(0, 1, shape=(2,), dtype=torch.float64),
        Bounded(0, 1, shape=(2,), domain="discrete"),
        Unbounded(shape=(2,)),
    ):
        assert base != other
    assert Categorical(4, shape=(2,), mask=MASK) != Categorical(4, shape=(2,))
    assert Categorical(4, shape=(2,), mask=MASK) != Categorical(4, shape=(2,), mask=~MASK)
    assert Categorical(4) != Categorical(5)
    assert NonTensor(example_data="a") != NonTensor(example_data="b")


def test_dtype_or_domain_choose_the_class():
    assert type(Bounded(0, 1)) is BoundedContinuous
    assert type(Bounded(0, 1, dtype=torch.int32)) is BoundedDiscrete
    assert Bounded(0, 5, domain="discrete").dtype == torch.int64
    assert BoundedDiscrete(0, 5).dtype == torch.int64
    assert type(Unbounded()) is UnboundedContinuous
    assert type(Unbounded(dtype=torch.bool)) is UnboundedDiscrete
    assert Unbounded(domain="discrete").dtype == torch.int64
    assert isinstance(UnboundedDiscrete(), Unbounded)
    assert type(Bounded(0, 5).to(torch.int64)) is BoundedDiscrete
    assert Bounded(0, 5).to(torch.int64).low.dtype == torch.int64
    with pytest.raises(ConfigError, match="domain must be discrete"):
        BoundedDiscrete(0, 1, domain="continuous")


def test_bounds_are_inclusive():
    dice = Bounded(1, 6, dtype=torch.int64)
    torch.manual_seed(0)
    assert set(dice.rand((500,)).tolist()) == {1, 2, 3, 4, 5, 6}
    assert dice.is_in(torch.tensor(6))
    assert not dice.is_in(torch.tensor(7))
    assert dice.project(torch.tensor([0, 3, 9])).tolist() == [1, 3, 6]
    assert Bounded(0.0, 1.0).project(torch.tensor([math.nan, math.inf, -2.0])).tolist() == [0.0, 1.0, 0.0]
    assert Bounded(0, 4, domain="discrete", dtype=torch.float32).project(torch.tensor(2.6)).item() == 3.0


def test_a_masked_choice_is_never_drawn_and_each_other_one_is():
    spec = Categorical(4, shape=(2,), mask=MASK)
    torch.manual_seed(0)
    drawn = spec.rand((400,))
    assert set(drawn[:, 0].tolist()) == {0, 2}
    assert set(drawn[:, 1].tolist()) == {3}
    assert not spec.is_in(torch.tensor([1, 3]))
    assert spec.project(torch.tensor([3, 0])).tolist() == [2, 3]
    assert spec.project(torch.tensor([1, 0])).tolist() == [0, 3]  # 0 and 2 are as near: the lower


def test_is_in_checks_dtype_shape_and_domain():
    spec = Bounded(0, 1, shape=(2,))
    assert spec.is_in(torch.tensor([0.0, 1.0]))
    assert torch.tensor([[0.5, 0.5]]) in spec  # extra leading dims are a batch
    assert not spec.is_in(torch.tensor([0, 1]))
    assert not spec.is_in(torch.zeros(3))
    assert not spec.is_in(torch.zeros(()))
    assert not spec.is_in([0.0, 1.0])
    assert not spec.is_in(torch.tensor([0.0, math.nan]))
    with pytest.raises(AssertionError, match=r"declared within \[0.0, 1.0\], got 2.0 at \[1\]"):
        spec.assert_is_in(torch.tensor([0.0, 2.0]))
    with pytest.raises(TypeError, match=r"declared torch.float32, got torch.int64"):
        spec.type_check(torch.tensor([0, 1]))


def test_encode_refuses_what_it_would_have_to_change():
    spec = Bounded(0, 9, shape=(3, 4), dtype=torch.int64)
    assert spec.encode(np.ones((3, 4), dtype=np.float32)).dtype == torch.int64
    with pytest.raises(ShapeError, match=r"got \(4, 3\), expected \(3, 4\)"):
        spec.encode(np.ones((4, 3)))
    with pytest.raises(DataError, match="whole numbers"):
        spec.encode(np.full((3, 4), 0.5))
    with pytest.raises(DataError, match=r"within \[0, 9\]"):
        spec.encode(np.full((3, 4), 10))
    assert Unbounded(shape=(1,)).encode(2.5).tolist() == [2.5]


def test_finite_domains_can_be_counted_and_listed():
    assert Bounded(0, 2, shape=(2,), dtype=torch.int64).cardinality() == 9
    listed = Bounded(torch.tensor([0, 5]), torch.tensor([1, 6])).enumerate()
    assert listed.tolist() == [[0, 5], [0, 6], [1, 5], [1, 6]]
    assert Categorical(2, shape=(2,)).enumerate().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    masked = Categorical(4, shape=(2,), mask=MASK)
    assert masked.cardinality() == 2
    assert masked.enumerate(use_mask=True).tolist() == [[0, 3], [2, 3]]
    assert len(masked.enumerate()) == 16
    assert Unbounded().cardinality() == Bounded(0, 1).cardinality() == math.inf
    with pytest.raises(ConfigError, match="at most"):
        Bounded(0, 1).enumerate()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Bounded(1, 0), ConfigError, "low must not exceed high"),
        (lambda: Bounded(torch.zeros(3), 1, shape=(2,)), ShapeError, r"low must broadcast to the shape \(2,\)"),
        (lambda: Categorical(0), ConfigError, "at least 1"),
        (lambda: Categorical(2, mask=torch.ones(3, dtype=torch.bool)), ShapeError, "mask must broadcast"),
        (lambda: Categorical(2, mask=torch.zeros(2, dtype=torch.bool)), ConfigError, "at least one choice"),
        (lambda: Categorical(2, mask=torch.ones(2)), ConfigError, "mask must be bool"),
        (lambda: Unbounded(shape=(-2,)), ConfigError, "a dim is a size"),
    ],
)
def test_impossible_domains_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_non_tensor_draws_a_batch_without_a_cost_per_row():
    spec = NonTensor(shape=(64,), example_data="hello")
    value = spec.rand((3,))
    assert isinstance(value, NonTensorData)
    assert value.batch_size == (3, 64)
    assert spec.is_in(value)
    rows = NonTensor(shape=(4,), example_data="hello", batched=True).rand((2,))
    assert rows.tolist() == [["hello"] * 4] * 2
    assert NonTensor(shape=(4,)).is_in(rows)


def test_non_tensor_checks_shape_and_type_of_what_it_can_see():
    spec = NonTensor(shape=(2,), example_data="text")
    assert spec.is_in(NonTensorStack("a", "b"))
    assert spec.is_in(NonTensorStack("a", None))
    assert not spec.is_in(NonTensorStack("a", 3))
    assert not spec.is_in(NonTensorStack("a", "b", "c"))
    assert not spec.is_in(torch.zeros(2))
    assert not spec.is_in("a")
    assert not spec.is_in(TensorDict(batch_size=[2]))
    assert NonTensor(shape=(2,)).is_in(TensorDict(batch_size=[2]))  # a container of any kind
    assert not NonTensor(shape=(2,)).is_in(TensorDict(batch_size=[3]))
    assert NonTensor(shape=(), example_data="text").is_in("a")
    assert spec.encode(["a", "b"]).tolist() == ["a", "b"]
    assert spec.to_numpy(NonTensorStack("a", "b")) == ["a", "b"]
    assert spec.expand(3, 2).shape == (3, 2)
