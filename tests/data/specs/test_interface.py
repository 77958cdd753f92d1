"""What every kind of spec takes and gives in the same way: arguments, errors, views, locks."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from llmrl.data import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from llmrl.errors import MissingKeyError, ShapeError

SPECS = {
    "bounded": lambda: Bounded(-1, 1, (2,)),
    "bounded whole numbers": lambda: Bounded(0, 3, (2,), dtype=torch.int64),
    "unbounded": lambda: Unbounded((2,)),
    "categorical": lambda: Categorical(4, (2,)),
    "multi categorical": lambda: MultiCategorical([3, 2], (2, 2)),
    "binary": lambda: Binary(3, (2, 3)),
    "one-hot": lambda: OneHot(3, (2, 3)),
    "multi one-hot": lambda: MultiOneHot([3, 2], (2, 5)),
    "non-tensor": lambda: NonTensor((2,), example_data="text"),
    "choice": lambda: Choice([Bounded(0, 1, (2,)), Bounded(4, 5, (2,))]),
    "composite": lambda: Composite(a=Bounded(0, 1, (2,)), b={"c": Categorical(3, (2,))}, shape=(2,)),
    "stacked": lambda: torch.stack([Bounded(0, 1), Bounded(2, 3)]),
    "stacked composite": lambda: torch.stack([Composite(a=Bounded(0, 1)), Composite(a=Bounded(2, 3), b=Unbounded())]),
}
"""One of each kind, of shape (2,), or with that as the first dim."""


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request) -> TensorSpec:
    return request.param()


@pytest.mark.parametrize("method", ["rand", "sample", "zero", "zeros", "one", "ones"])
def test_the_extra_shape_of_a_value_is_a_sequence_a_number_or_none(spec, method):
    make = getattr(spec, method)
    for extra, lead in ((None, ()), (3, (3,)), ([3, 1], (3, 1)), (torch.Size([3]), (3,))):
        value = make(extra)
        assert (*value.shape[: len(lead) + 1],) == (*lead, 2)
        assert spec.is_in(value)


@pytest.mark.parametrize(
    "index",
    [5, -3, (0,) * 4, [0, 7], torch.tensor([2]), torch.tensor([0.5]), 1.5, True, (..., ...), ["x"], {}, slice("a")],
)
def test_an_index_that_a_spec_does_not_have_is_an_index_error_and_a_shape_error(spec, index):
    for error in (IndexError, ShapeError):
        with pytest.raises(error):
            spec[index]


def test_every_kind_is_itself_when_moved_to_nowhere_and_encodes_its_own_arrays(spec):
    assert spec.to(None) is spec
    assert spec.encode(spec.to_numpy(spec.zero(), safe=True)).shape == spec.zero().shape


@pytest.mark.parametrize(
    ("spec", "outside"),
    [
        (Bounded(0, 1, (2,)), torch.tensor([0.5, 7.0])),
        (Bounded(0, 1, (2,)), torch.tensor([0, 1])),  # the dtype
        (Categorical(3), torch.tensor(5)),
        (OneHot(3), torch.tensor([True, True, False])),
        (Choice([Bounded(0, 1), Bounded(4, 5)]), torch.tensor(2.0)),
        (NonTensor((), example_data="text"), NonTensorData(3)),
        (Composite(a=Bounded(0, 1)), TensorDict(a=torch.tensor(3.0))),
        (torch.stack([Bounded(0, 1), Bounded(2, 3)]), torch.zeros(2)),
    ],
)
def test_a_value_outside_is_converted_unless_it_must_be_safe(spec, outside):
    for safe in (None, False):
        spec.to_numpy(outside, safe=safe)
    with pytest.raises(AssertionError):
        spec.to_numpy(outside, safe=True)


def test_encode_can_leave_a_value_on_its_device():
    spec = Composite(a=Unbounded((2,), device="meta"), device="meta")
    value = {"a": np.array([0.0, 1.0])}
    assert spec.encode(value)["a"].is_meta
    encoded = spec.encode(value, ignore_device=True)
    assert (encoded.device, encoded["a"].tolist()) == (None, [0.0, 1.0])
    assert torch.stack([spec, spec.clone().set("b", None)]).encode([value, value], ignore_device=True)["a"].is_cpu


def test_type_check_names_the_entry_and_a_composite_checks_the_given_one():
    with pytest.raises(TypeError, match=r"'obs': declared torch.float32"):
        Unbounded((2,)).type_check(torch.zeros(2, dtype=torch.int64), "obs")
    spec = Composite(a=Unbounded(), b={"c": Categorical(3)}, d=None)
    value = TensorDict(a=torch.zeros(1), b=TensorDict(c=torch.zeros(())))
    spec.type_check(value, "a")
    spec.type_check(value, "d")
    spec.type_check(torch.zeros(1), "a")  # the entry itself
    for key in (None, "b", ("b", "c")):
        with pytest.raises(TypeError, match=r"\('b', 'c'\): declared torch.int64, got torch.float32"):
            spec.type_check(value, key)
    with pytest.raises(MissingKeyError, match="'e'"):
        spec.type_check(value, "e")


def test_keys_values_and_items_are_views_that_walk_the_nesting():
    spec = Composite(a=Unbounded(), b={"c": Categorical(3), "d": {"e": None}})
    keys = spec.keys(include_nested=True, leaves_only=True)
    assert list(keys) == list(keys) == ["a", ("b", "c"), ("b", "d", "e")]
    assert list(spec.keys(include_nested=True)) == ["a", "b", ("b", "c"), ("b", "d"), ("b", "d", "e")]
    assert (list(spec.keys()), list(spec.keys(leaves_only=True)), len(spec)) == (["a", "b"], ["a"], 2)
    assert list(spec.values(True, True)) == [spec["a"], spec["b", "c"], None]
    assert len(keys) == len(spec.items(True, True)) == 3
    for key in ("a", ("a",), ("b", "c"), ("b", "d", "e")):
        assert key in keys
        assert key in spec
    assert not any(key in keys for key in ("b", ("b", "d"), "c", ("a", "c"), 3, (), ("b", 0)))
    assert [key in spec.keys() for key in (("b",), ("b", "c"))] == [True, False]
    assert [key in spec.keys(True) for key in (("b", ("c",)), (("b",), "c"), ("b", ("x",)))] == [True, True, False]
    assert ("b", "d") in spec.keys(include_nested=True)
    assert spec.keys() == {"a", "b"}
    assert spec.keys() & {"b", "z"} == {"b"}
    assert (("b", "c"), Categorical(3)) in spec.items(True)
    spec["f"] = Unbounded()
    assert len(keys) == 4


def test_an_entry_of_some_members_of_a_stack_is_not_a_key_of_it_but_can_be_deleted():
    spec = torch.stack([Composite(a=Unbounded(), b={"c": Unbounded()}), Composite(a=Unbounded(), d=Unbounded())])
    keys = spec.keys(True)
    assert (len(keys), ("a",) in keys, "d" in keys) == (1, True, False)
    del spec["d"]
    del spec["b", "c"]
    assert [list(member.keys(True)) for member in spec.members] == [["a", "b"], ["a"]]
    with pytest.raises(MissingKeyError):
        del spec["d"]
    outer = Composite(stack=torch.stack([Composite(x=None, y=None), Composite(x=None)]), shape=(2,))
    del outer["stack", "y"]
    assert list(outer["stack"][0].keys()) == ["x"]


@pytest.mark.parametrize(
    "put",
    [
        lambda outer, inner: Composite(outer, shape=(3, 2), inner=inner),
        lambda outer, inner: outer.set("inner", inner),
        lambda outer, inner: outer.update({"inner": inner}),
    ],
    ids=["constructor", "set", "update"],
)
def test_a_nested_composite_of_fewer_dims_takes_the_shape(put):
    inner = Composite(x=Unbounded((3, 2, 4)), deep=Composite(y=Unbounded((3, 2))), shape=(3,))
    outer = put(Composite(shape=(3, 2)), inner)
    assert outer["inner"].shape == outer["inner", "deep"].shape == (3, 2)
    assert inner.shape == (3,)  # what was given stays as it was
    assert put(Composite(shape=(3, 2)), Composite(shape=(3, 2, 5)))["inner"].shape == (3, 2, 5)
    for wrong in (Composite(shape=(2, 3)), Composite(x=Unbounded((2, 3)), shape=())):
        with pytest.raises(ShapeError, match="must begin with"):
            put(Composite(shape=(3, 2)), wrong)
    assert outer.rand()["inner"].batch_size == (3, 2)


def test_setting_the_shape_takes_nested_composites_along_or_changes_nothing():
    spec = Composite(x=Unbounded((3, 2, 4)), nested={"y": Unbounded((3, 2))})
    spec["nested"].shape = (3, 2)
    spec.shape = (3,)
    assert (spec.shape, spec.batch_size, spec["nested"].shape) == ((3,), (3,), (3, 2))  # it begins with it already
    spec["nested"].shape = ()
    spec.shape = (3, 2)
    assert (spec.shape, spec["nested"].shape, spec.rand((5,)).batch_size) == ((3, 2), (3, 2), (5, 3, 2))
    for wrong, error in itertools.product(((3, 2, 4), (4,), 7), (ShapeError, ValueError)):
        with pytest.raises(error, match="must begin with"):
            spec.shape = wrong
        assert (spec.shape, spec["nested"].shape) == ((3, 2), (3, 2))
    with pytest.raises(ShapeError):
        Composite(x=OneHot(3)).shape = (3,)  # the dim of the vector
    family = type("Family", (Composite,), {})
    outer = Composite(inner=family())
    outer.shape = (3,)
    assert outer["inner"].shape == (3,)
    with pytest.raises(RuntimeError, match="locked"):
        spec.lock_().shape = ()
    stack = torch.stack([Composite(x=Unbounded((2,))), Composite(x=Unbounded((2,)), y=None)])
    with pytest.raises(AttributeError):
        stack.shape = (5,)
    with pytest.raises(ShapeError):
        Composite(stack=stack, shape=(2,)).shape = (2, 2)
    with pytest.raises(ShapeError):
        Composite(stack=stack, shape=(2, 2))
    for member in stack.members:
        member.shape = (2,)
    assert stack.shape == (2, 2)


def locked(recurse: bool = True) -> Composite:
    return Composite(a={"b": {"x": Unbounded()}}, c=Unbounded()).lock_(recurse)


def stacked() -> Composite:
    return torch.stack([locked().unlock_(), Composite(a={"b": {"x": Unbounded(), "y": None}})]).lock_()


@pytest.mark.parametrize(
    "make",
    [
        locked,
        stacked,
        lambda: copy.copy(locked()),
        lambda: copy.deepcopy(locked()),
        lambda: copy.deepcopy(stacked()),
        lambda: pickle.loads(pickle.dumps(locked())),
        lambda: Composite(deeper=locked()).lock_(),
    ],
)
def test_a_part_of_a_locked_spec_cannot_be_unlocked_by_itself(make):
    spec = make()
    before = spec.leaf_keys
    for key in spec.keys(include_nested=True):
        if isinstance(spec[key], Composite):
            for recurse in (True, False):
                with pytest.raises(RuntimeError, match="part of a locked spec"):
                    spec[key].unlock_(recurse)
            with pytest.raises(RuntimeError, match="locked"):
                spec[key]["new"] = Unbounded((*spec.shape, 1))
    assert spec.leaf_keys == before
    for part in (spec, spec["a"] if "a" in spec else spec["deeper"]):
        spec.unlock_()
        part["new"] = Unbounded((*part.shape, 1))
    assert len(spec.leaf_keys) == len(before) + 2


def test_a_stack_has_a_dim_and_a_device_where_all_its_members_have_it():
    spec = torch.stack([Composite(x=Unbounded((3,)), device="cpu", shape=(3,)), Composite(x=None, shape=(3,))], 1)
    assert (spec.dim, spec.stack_dim, spec.shape, spec.device) == (1, 1, (3, 2), None)
    assert torch.stack([Bounded(0, 1), Bounded(2, 3)]).dim == 0
    spec = torch.stack([Composite(x=Unbounded()), Composite(x=Unbounded(), device="cpu")])
    assert (spec.device, spec["x"].shape) == (None, (2, 1))
    assert spec.is_in(spec.rand())
    with pytest.raises(RuntimeError, match="Devices differ"):
        torch.stack([Composite(device="cpu"), Composite(device="meta"), Composite()])


# --- what has gone wrong before ---
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
    spec.erase_memoize_cache()
    assert spec["a"]._memo == {}
    spec.memoize_encode(False)
    assert spec["a"]._memo is None
