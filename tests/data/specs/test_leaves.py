import copy
import math
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from llmrl.data import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Choice,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from llmrl.errors import ConfigError, DataError, ShapeError
from tests.support.refusals import refusals

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
    "multi categorical": MultiCategorical([3, 2]),
    "multi categorical by row": MultiCategorical(torch.tensor([[3, 2], [4, 5]]), shape=(3, 2, 2), dtype=torch.int32),
    "multi categorical masked": MultiCategorical([2, 2], shape=(2, 2), mask=MASK | ~MASK.roll(1, -1)),
    "multi categorical of one group": MultiCategorical([5]),
    "binary": Binary(6),
    "binary bool": Binary(shape=(2, 3), dtype=torch.bool),
    "one-hot": OneHot(4),
    "one-hot int": OneHot(4, shape=(3, 4), dtype=torch.int64),
    "one-hot masked": OneHot(4, shape=(3, 2, 4), mask=MASK),
    "multi one-hot": MultiOneHot([3, 2]),
    "multi one-hot masked": MultiOneHot([2, 2], shape=(2, 4), dtype=torch.float32, mask=MASK | ~MASK.roll(1, -1)),
    "stacked": torch.stack([Bounded(0, 3, (2,), dtype=torch.int64), Bounded(4, 9, (2,), dtype=torch.int64)]),
    "bounded bool": Bounded(False, True, (2,), dtype=torch.bool),
    "choice": Choice([Bounded(0, 3, (2,), dtype=torch.int64), Bounded(7, 9, (2,), dtype=torch.int64)]),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request) -> TensorSpec:
    return request.param


def test_rand_is_in_for_every_shape_and_follows_its_generator(spec):
    for shape in ((), (1,), (2, 3)):
        value = spec.rand(shape)
        assert value.shape == (*shape, *spec.shape)
        assert value.dtype == spec.dtype
        spec.assert_is_in(value)
    one, two = (spec.rand((4,), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.tolist() == two.tolist()


def test_zero_and_one_have_the_spec_s_shape_and_dtype_and_are_in_it(spec):
    for value, number in ((spec.zero((2,)), 0), (spec.ones((2,)), 1)):
        assert value.shape == (2, *spec.shape)
        assert value.dtype == spec.dtype
        spec.assert_is_in(value)
        plain = torch.full_like(value, number)
        assert value.equal(plain) == spec.is_in(plain)


def test_encode_inverts_to_numpy(spec):
    value = spec.rand()
    assert spec.encode(spec.to_numpy(value)).equal(value)
    if spec.dtype == torch.bool or not isinstance(spec, (OneHot, MultiOneHot)):
        assert spec.encode(value.tolist()).equal(value)


def test_encode_and_its_memory_share_nothing_with_what_they_were_given(spec):
    given = spec.to_numpy(spec.rand())
    spec = spec.clone()
    for memory in (False, True):
        spec.memoize_encode(memory)
        first = spec.encode(given)
        expected = first.clone()
        first.zero_() if first.any() else first.fill_(1)
        assert spec.encode(given).equal(expected)
        again = np.array(given)
        second = spec.encode(again)
        if isinstance(again, np.ndarray) and again.size:
            again.fill(0)
        assert second.equal(expected)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.clone().encode(given).equal(expected)


def test_project_is_identity_on_valid_values_and_ends_in_the_domain(spec):
    value = spec.rand((3,))
    assert spec.project(value) is value
    for wild in (
        torch.full((3, *spec.shape), 117).to(spec.dtype),
        torch.randint(-300, 300, (3, *spec.shape)),
        torch.randn(3, *spec.shape, dtype=torch.float64) * 1e30,
        torch.full((3, *spec.shape), math.nan),
        torch.rand(3, *spec.shape) < 0.5,
    ):
        before = wild.clone()
        projected = spec.project(wild)
        spec.assert_is_in(projected)
        assert projected.shape == wild.shape
        assert spec.project(projected) is projected
        assert wild.nan_to_num().equal(before.nan_to_num())


def test_copies_and_pickles_compare_equal(spec):
    for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.to("cpu"), spec.cpu()):
        assert other == spec
        assert type(other) is type(spec)
        assert repr(other) == repr(spec)
    assert spec != spec.unsqueeze(0)
    assert spec != spec.to(torch.int16)
    assert spec != "a spec"
    assert spec.clear_device_() is spec
    assert spec.device.type == "cpu"
    moved = spec.to("meta")
    assert spec != moved
    assert moved.device.type == moved.zero((2,)).device.type == "meta"
    assert moved.zero((2,)).shape == (2, *spec.shape)
    assert "meta" in repr(moved)


def test_type_check_and_domain_and_space_are_there(spec):
    assert spec.domain in ("continuous", "discrete")
    assert spec.space.shape == spec.shape
    spec.type_check(spec.rand())
    with pytest.raises(TypeError, match="declared"):
        spec.type_check(spec.rand().to(torch.complex64))
    with pytest.raises(TypeError, match="declared a tensor"):
        spec.type_check([1])
    assert not spec.contains(3)
    with pytest.raises(TypeError):
        hash(spec)


def test_a_finite_domain_lists_each_of_its_values_once(spec):
    if -1 in spec.shape or spec.cardinality() > 3000:
        with pytest.raises(ConfigError, match="at most"):
            spec.unsqueeze(0).expand(40, *spec.shape).enumerate()
        return
    listed = spec.enumerate(use_mask=True)
    assert listed.shape == (spec.cardinality(), *spec.shape)
    assert listed.dtype == spec.dtype
    spec.assert_is_in(listed)
    assert len(listed.flatten(1).unique(dim=0)) == len(listed) if spec.shape else len(listed.unique()) == len(listed)
    assert len(spec.enumerate()) >= len(listed)


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
    assert Binary(shape=(2, 3)) == Binary(Binary(shape=(2, 3)).n, shape=(2, 3))
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
    assert Bounded(torch.tensor([0, 3]), 5).dtype == torch.int64
    assert Bounded(0.1, 1, dtype=torch.float64).low.item() == 0.1
    assert Bounded(0.5, 2.5, domain="discrete").enumerate().tolist() == [1, 2]
    with pytest.raises(ConfigError, match="domain must be discrete"):
        BoundedDiscrete(0, 1, domain="continuous")


def test_a_class_of_ones_own_has_the_domain_of_its_base_whatever_its_name():
    for name in ("Box", "Discrete"):
        kind = type(name, (BoundedContinuous,), {})
        spec = kind(0, 1, shape=(2,))
        assert type(spec) is kind
        assert (spec.domain, spec.dtype) == ("continuous", torch.float32)
        with pytest.raises(ConfigError, match=f"{name}: .*continuous: got 'discrete'"):
            kind(0, 1, domain="discrete")


def test_bounds_are_inclusive():
    dice = Bounded(1, 6, dtype=torch.int64)
    torch.manual_seed(0)
    assert set(dice.rand((500,)).tolist()) == {1, 2, 3, 4, 5, 6}
    assert [dice.is_in(torch.tensor(eyes)) for eyes in (6, 7)] == [True, False]
    assert dice.project(torch.tensor([0, 3, 9])).tolist() == [1, 3, 6]
    assert Bounded(0.0, 1.0).project(torch.tensor([math.nan, math.inf, -2.0])).tolist() == [0.0, 1.0, 0.0]
    assert Bounded(0, 4, domain="discrete", dtype=torch.float32).project(torch.tensor(2.6)).item() == 3.0


def test_encode_refuses_what_it_would_have_to_change():
    spec = Bounded(0, 9, shape=(3, 4), dtype=torch.int64)
    assert spec.encode(np.ones((3, 4), dtype=np.float32)).dtype == torch.int64
    with pytest.raises(ShapeError, match=r"got \(4, 3\), expected \(3, 4\)"):
        spec.encode(np.ones((4, 3)))
    with pytest.raises(DataError, match="whole numbers"):
        spec.encode(np.full((3, 4), 0.5))
    with pytest.raises(DataError, match="within its range"):
        Unbounded(shape=(), dtype=torch.int8).encode(300)
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    assert Unbounded(shape=(2,)).encode(read_only).tolist() == [0, 0]
    with pytest.raises(DataError, match=r"within \[0, 9\]"):
        spec.encode(np.full((3, 4), 10))
    assert Unbounded(shape=(1,)).encode(2.5).tolist() == [2.5]


test_impossible_domains_are_refused = refusals(
    (ConfigError, "low must not exceed high", lambda: Bounded(1, 0)),
    (ConfigError, "low must not exceed high", lambda: Bounded(float("nan"), 1)),
    (ShapeError, r"low must broadcast to the shape \(2,\)", lambda: Bounded(torch.zeros(3), 1, shape=(2,))),
    (ConfigError, "at least 1", lambda: Categorical(0)),
    (ShapeError, "last dim of mask must be .* 2", lambda: Categorical(2, mask=torch.ones(3, dtype=torch.bool))),
    (ConfigError, "at least one choice", lambda: Categorical(2, mask=torch.zeros(2, dtype=torch.bool))),
    (ConfigError, "mask must be bool", lambda: Categorical(2, mask=torch.ones(2))),
    (ConfigError, "dims must be sizes", lambda: Unbounded(shape=(-2,))),
    (ConfigError, "high .*torch.int8", lambda: Bounded(0, 255, dtype=torch.int8)),
    (ConfigError, "high .*torch.int64", lambda: Bounded(0, math.inf, dtype=torch.int64)),
    (ConfigError, "low must not exceed high", lambda: Bounded(0.5, 0.7, dtype=torch.int64)),
    (ConfigError, "needs n", Binary),
    (ConfigError, "must end with n", lambda: Binary(3, shape=(2,))),
    (ShapeError, "last dim .*choices, 3", lambda: OneHot(3, shape=(2,))),
    (ShapeError, "last dim of mask must be .* 3", lambda: OneHot(3, mask=torch.ones(4, dtype=torch.bool))),
    (ShapeError, "last dim .*choices, 5", lambda: MultiOneHot([2, 3], shape=(6,))),
    (ConfigError, "at least 1", lambda: MultiOneHot([2, 0])),
    (ShapeError, "end with the number of groups", lambda: MultiCategorical([2, 3], shape=(3,))),
    (ShapeError, "number of choices, 5", lambda: MultiCategorical([2, 3], mask=torch.ones(6, dtype=torch.bool))),
    (ConfigError, "feature_dims", lambda: NonTensor(shape=(2,), batched=True, feature_dims=1)),
    (ConfigError, "at least one spec", lambda: Choice([])),
    (ConfigError, "choices must be specs: got 3, a int", lambda: Choice([3])),
    (ConfigError, "one shape", lambda: Choice([Bounded(0, 1), Bounded(0, 1, (2,))])),
)


def test_non_tensor_checks_shape_and_type_of_what_it_can_see():
    spec = NonTensor(shape=(2,), example_data="text")
    assert spec.is_in(NonTensorStack("a", "b"))
    assert spec.is_in(NonTensorStack("a", None))
    wrong = (NonTensorStack("a", 3), NonTensorStack("a", "b", "c"), torch.zeros(2), "a", TensorDict(batch_size=[2]))
    assert not any(spec.is_in(value) for value in wrong)
    assert NonTensor(shape=(2,)).is_in(TensorDict(batch_size=[2]))  # a container of any kind
    assert not NonTensor(shape=(2,)).is_in(TensorDict(batch_size=[3]))
    assert NonTensor(shape=(), example_data="text").is_in("a")
    assert spec.encode(["a", "b"]).tolist() == ["a", "b"]
    assert spec.to_numpy(NonTensorStack("a", "b")) == ["a", "b"]
    for other in (spec, NonTensor(shape=(2, 2), example_data="x", batched=True), NonTensor((), example_data=[1])):
        value = other.rand()
        assert other.to_numpy(other.encode(other.to_numpy(value))) == other.to_numpy(value)
        assert pickle.loads(pickle.dumps(other)) == other
        assert other.project(value) is value
    assert spec.expand(3, 2).shape == (3, 2)
    assert (spec.feature_dims, spec.expand(3, 2).feature_dims) == (1, 2)  # all of its dims
