"""Stacks of specs that differ: what `torch.stack` gives, reading, writing, consolidating; `Choice` and old names."""

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict

import llmrl.data
from llmrl.data.specs import (
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
)
from llmrl.errors import MissingKeyError, ShapeError
from tests.support.refusals import refusals


class Pair(TensorClass["nocast"]):
    left: torch.Tensor = None


def agents() -> StackedComposite:
    """Two agents: other sizes of the observation, a message that only the first has."""
    return torch.stack(
        [
            Composite(obs=Bounded(0, 1, (3,)), info={"id": Categorical(5), "message": Bounded(0, 1, (4, 2))}),
            Composite(obs=Bounded(5, 6, (2,)), info={"id": Categorical(7)}),
        ]
    )


def test_equal_specs_stack_into_a_dense_one():
    masked = OneHot(4, (2, 4), mask=torch.arange(4) > 1)
    for spec in (Bounded(0, 1, (2,)), masked, Composite(a=masked, shape=(2,)), NonTensor((2,))):
        for dim in (0, 1, -2 if spec is masked else -1):
            stacked = torch.stack([spec, spec.clone(), spec], dim)
            assert type(stacked) is type(spec)
            at = dim if dim >= 0 else 1
            assert stacked.shape == (*spec.shape[:at], 3, *spec.shape[at:])
            assert all(row == spec for row in stacked.unbind(at))


test_specs_that_do_not_stack_are_refused = refusals(
    (RuntimeError, "Found more than one type of specs", lambda: torch.stack([Bounded(0, 1), Unbounded(())])),
    (RuntimeError, "Found more than one type of specs", lambda: torch.stack([Composite(), Bounded(0, 1)])),
    (RuntimeError, "Dtypes differ", lambda: torch.stack([Unbounded(), Unbounded(dtype=torch.float64)])),
    (RuntimeError, "Ndims differ", lambda: torch.stack([Unbounded((2,)), Unbounded((2, 1))])),
    (RuntimeError, "Devices differ", lambda: torch.stack([Unbounded(), Unbounded(device="meta")])),
)


def test_a_stack_of_other_shapes_has_nested_values():
    spec = torch.stack([Bounded(0, 1, (2,)), Bounded(5, 6, (3,))])
    assert spec.shape == (2, -1)
    value = spec.rand()
    assert value.is_nested
    assert [len(row) for row in value.unbind()] == [2, 3]
    assert spec.is_in(value)
    assert [row.tolist() for row in spec.zero().unbind()] == [[0, 0], [5, 5, 5]]
    assert spec.project(value) is value
    assert spec.encode(spec.to_numpy(value)).unbind()[1].equal(value.unbind()[1])
    assert not spec.is_in(torch.zeros(2, 3))
    assert not spec.is_in(torch.nested.as_nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged))
    with pytest.raises(ShapeError, match="do not form a tensor along dim 1"):
        spec.rand((4,))
    assert (spec.unsqueeze(1).shape, spec[1].low.tolist()) == ((2, 1, -1), [5, 5, 5])
    with pytest.raises(ShapeError, match="has any size"):
        spec.unbind(1)
    whole = Composite(obs=spec, shape=(2,))
    assert whole.is_in(whole.rand())


def test_a_stack_of_composites_is_read_and_written_as_one():
    spec = agents()
    assert type(spec) is StackedComposite
    assert isinstance(spec, Composite)
    assert list(spec.keys(True, True)) == ["obs", ("info", "id")]
    assert (spec.shape, spec["obs"].shape, spec["info", "id"].shape) == ((2,), (2, -1), (2,))
    assert (("info", "message") in spec[0], ("info", "message") in spec) == (True, False)
    with pytest.raises(MissingKeyError, match=r"keys present: obs, info, info.id"):
        spec["info", "message"]
    spec["reward"] = Bounded(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    assert spec[1]["reward"] == Bounded(2.0, 3.0)
    spec["info"]["seen"] = None
    assert spec[1]["info", "seen"] is None
    assert isinstance(spec.pop(("info", "id")), Stacked)
    assert ("info", "id") not in spec[0]
    spec.update({"info": {"step": Unbounded((2, 1))}})
    assert spec[0]["info", "step"].shape == (1,)
    spec.update(agents())
    assert ("info", "message") in spec[0]
    del spec["reward"]
    assert "reward" not in spec[1]
    assert spec.separates("obs")[1] == Composite(obs=Bounded(5, 6, (2,)))
    assert (spec.empty().is_empty(), spec.is_empty(), len(spec)) == (True, False, 2)
    with pytest.raises(ShapeError, match=r"must begin with \(2,\)"):
        spec["bad"] = Unbounded((3,))
    with pytest.raises(TypeError, match="must be a spec"):
        spec["bad"] = 3
    with pytest.raises(AttributeError, match="cannot be named"):
        spec["shape"] = Unbounded((2,))
    assert spec == spec.clone()
    assert "bad" not in spec[0]


def test_values_of_a_stack_of_composites_are_lazy_stacks():
    spec = agents()
    for value in (spec.rand((4,)), spec.zero((4,)), spec.one((4,))):
        assert isinstance(value, LazyStackedTensorDict)
        assert value.batch_size == (4, 2)
        assert spec.is_in(value)
        assert spec[1].is_in(value[:, 1])
    value = spec.rand()
    assert spec.encode(spec.to_numpy(value))[0]["obs"].equal(value[0]["obs"])
    wrong = spec.rand()
    wrong[1]["obs"].zero_()
    assert not spec.is_in(wrong)
    assert spec.project(wrong)[1]["obs"].tolist() == [5, 5]
    assert wrong[1]["obs"].tolist() == [0, 0]
    found = next(spec.mismatches(wrong))
    assert found.key == ("obs",)
    assert "entry 1 of the stack" in found.text
    assert not spec.is_in(spec.rand()[:1])
    assert not spec.is_in(torch.zeros(2))
    dense = torch.stack([Composite(a=Bounded(0, 1)), Composite(a=Bounded(2, 3))])
    assert dense.is_in(TensorDict(a=torch.tensor([0.5, 2.5]), batch_size=[2]))
    assert not dense.is_in(TensorDict(a=torch.tensor([2.5, 0.5]), batch_size=[2]))


def test_consolidating_gives_every_member_every_key():
    spec = agents()
    assert (check_no_exclusive_keys(spec), check_no_exclusive_keys(spec, recurse=False)) == (False, True)
    done = consolidate_spec(spec)
    assert check_no_exclusive_keys(done)
    assert done[0] == spec[0]
    assert done[1]["info", "message"].shape == (0, 0)
    assert type(done[1]["info", "message"]) is type(spec[0]["info", "message"])
    assert ("info", "message") not in spec[1]  # a copy
    assert done["info", "message"].shape == (2, -1, -1)
    assert done.is_in(done.rand())
    assert not check_no_exclusive_keys(consolidate_spec(spec, recurse_through_entries=False))
    inside = Composite(agents=agents(), shape=(2,))
    assert not check_no_exclusive_keys(inside)
    assert check_no_exclusive_keys(consolidate_spec(inside))
    assert consolidate_spec(inside, recurse_through_entries=False) == inside
    nested = torch.stack([Composite(deep=agents(), n=Unbounded()), Composite()])
    assert check_no_exclusive_keys(consolidate_spec(nested))
    members = consolidate_spec(nested, recurse_through_stack=False)
    assert set(members[1].keys()) == {"deep", "n"}


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        (OneHot(3, (2, 3)), (2, 0)),
        (MultiOneHot([2, 3], (2, 4, 5)), (2, 0, 0)),
        (Categorical(3, (2, 4)), (2, 0)),
        (Categorical(3, (2,)), (2,)),
        (Unbounded((2, -1)), (2, 0)),
        (NonTensor((2, 3), example_data="a"), (2, 0)),
        (torch.stack([Bounded(0, 1, (2, 3)), Bounded(0, 5, (2, 3))], 1), (2, 2, 0)),
        (Choice([Bounded(0, 1, (2, 3)), Bounded(5, 6, (2, 3))]), (2, 0)),
    ],
)
def test_an_absent_entry_gets_a_spec_of_the_same_type_without_values(leaf, shape):
    spec = consolidate_spec(torch.stack([Composite(shape=(2,)), Composite(x=leaf, none=None, shape=(2,))]))
    assert (spec[0]["x"].shape, spec[0]["none"]) == (shape, None)
    assert spec[0].is_in(spec[0].rand())
    assert spec[0].is_in(spec[0].zero())
    assert spec["x"].ndim == leaf.ndim + 1
    assert spec.is_in(spec.rand())


def test_a_choice_draws_from_each_of_its_specs():
    spec = Choice([Bounded(0, 1), Bounded(5, 6)])
    torch.manual_seed(0)
    drawn = spec.rand((200,))
    assert spec.is_in(drawn)
    assert {int(value) for value in drawn} == {0, 5}
    assert not spec.is_in(torch.tensor([0.5, 3.0]))
    assert spec.project(torch.tensor([0.5, 2.0, 4.0, 9.0])).tolist() == [0.5, 1.0, 5.0, 6.0]
    assert spec.encode(5.5) == 5.5
    assert spec == spec.clone() != Choice([Bounded(0, 1)])
    numbers = Choice([Categorical(3), Categorical(5, mask=torch.tensor([True, False, False, True, True]))])
    assert (numbers.cardinality(), numbers.enumerate(use_mask=True).tolist()) == (5, [0, 1, 2, 3, 4])
    whole = Choice([Composite(a=Bounded(0, 1)), Composite(a=Bounded(5, 6))])
    assert whole.is_in(whole.rand((3,)))
    assert whole.project(TensorDict(a=torch.tensor(9.0)))["a"] == 1
    assert Composite(c=whole).is_in(Composite(c=whole).rand())
    texts = Choice([NonTensor((), example_data="yes"), NonTensor((), example_data=1)])
    assert texts.is_in(texts.rand())


OLD = {
    "BinaryDiscreteTensorSpec": ("Binary", (3,)),
    "BoundedTensorSpec": ("Bounded", (0, 1)),
    "CompositeSpec": ("Composite", ()),
    "DiscreteTensorSpec": ("Categorical", (3,)),
    "LazyStackedCompositeSpec": ("StackedComposite", (Composite(), Composite(a=None))),
    "LazyStackedTensorSpec": ("Stacked", (Bounded(0, 1), Bounded(0, 2))),
    "MultiDiscreteTensorSpec": ("MultiCategorical", ([3, 4],)),
    "MultiOneHotDiscreteTensorSpec": ("MultiOneHot", ([3, 4],)),
    "NonTensorSpec": ("NonTensor", ()),
    "OneHotDiscreteTensorSpec": ("OneHot", (3,)),
    "UnboundedContinuousTensorSpec": ("UnboundedContinuous", ()),
    "UnboundedDiscreteTensorSpec": ("UnboundedDiscrete", ()),
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_warns_and_makes_its_successor(name):
    successor, args = OLD[name]
    old, new = getattr(llmrl.data, name), getattr(llmrl.data, successor)
    with pytest.warns(DeprecationWarning, match=f"{name} .*use llmrl.data.{successor}"):
        spec = old(*args)
    assert spec == new(*args)
    assert [isinstance(value, old) for value in (spec, new(*args), 3)] == [True, True, False]
    assert [isinstance(value, old | None) for value in (spec, None)] == [True, True]
    assert [issubclass(cls, old) for cls in (new, llmrl.data.TensorSpec)] == [True, False]
    assert issubclass(old, new)
    assert pickle.loads(pickle.dumps(old)) is old

    class Mine(old):
        pass

    assert issubclass(Mine, new)
    assert type(Mine(*args)) is Mine
    assert isinstance(Mine(*args), old)
    assert not isinstance(new(*args), Mine)


def test_counts_and_lists_of_stacks_combine_their_members():
    spec = torch.stack([Categorical(2), Categorical(3)])
    both = torch.stack([Composite(a=Categorical(2)), Composite(a=Categorical(3))])
    assert spec.cardinality() == both.cardinality() == 6
    assert spec.enumerate().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert both.enumerate()["a"].tolist() == spec.enumerate().tolist()


def test_a_stack_of_tensorclasses_gives_tensorclasses():
    spec = torch.stack([Composite(left=Bounded(0, 1, (n,)), data_cls=Pair) for n in (1, 2)])
    value = spec.rand()
    assert isinstance(value, Pair)
    assert spec.is_in(value)
    assert spec.data_cls is Pair


def test_stacks_stack_again_and_in_the_middle_of_a_composite():
    rows = [torch.stack([Bounded(a, a + 1), Bounded(b, b + 1)]) for a, b in ((0, 2), (4, 6))]
    spec = torch.stack(rows, 1)
    assert spec.zero().tolist() == [[0, 4], [2, 6]]
    assert (spec.flatten().zero().tolist(), spec[1].zero().tolist()) == ([0, 4, 2, 6], [2, 6])
    whole = Composite(a=spec, b=Unbounded((2, 3)), shape=(2,))
    assert whole[0]["a"].zero().tolist() == [0, 4]
    assert whole.expand(3, 2)["a"].zero().tolist() == [[[0, 4], [2, 6]]] * 3
    dense = Composite(b=Unbounded((2, 3)), n={"x": None})
    assert [contains_lazy_spec(each) for each in (whole, dense, Unbounded())] == [True, False, False]
