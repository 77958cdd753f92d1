"""Choices written as numbers and as one-hot vectors: masks, conversions, unknown numbers of choices, registers."""

import math

import pytest
import torch

from llmrl.data.specs import Categorical, MultiCategorical, MultiOneHot, OneHot
from llmrl.errors import ConfigError, DataError, ShapeError

MASK = torch.tensor([[True, False, True, False], [False, False, False, True]])
PAIR_MASK = torch.tensor([[True, False, True, True, False], [True, True, False, False, True]])  # groups of 2 and 3


def test_numbers_and_vectors_convert_into_each_other_with_their_masks():
    numbers = Categorical(4, shape=(3, 2), mask=MASK)
    vectors = numbers.to_one_hot_spec()
    assert vectors == OneHot(4, shape=(3, 2, 4), mask=MASK)
    assert vectors.to_categorical_spec() == numbers
    assert numbers.to_categorical_spec() is numbers
    assert vectors.to_one_hot_spec() is vectors
    assert vectors.mask.equal(MASK.expand(3, 2, 4))
    value = numbers.rand((5,))
    hot = numbers.to_one_hot(value)
    assert hot.equal(torch.nn.functional.one_hot(value, 4).bool())
    assert vectors.is_in(hot)
    assert vectors.to_categorical(hot).equal(value)
    assert numbers.to_categorical(value).equal(value)


def test_groups_of_numbers_and_of_vectors_convert_into_each_other_with_their_masks():
    numbers = MultiCategorical([2, 3], shape=(2, 2), mask=PAIR_MASK)
    vectors = numbers.to_one_hot_spec()
    assert vectors == MultiOneHot([2, 3], shape=(2, 5), mask=PAIR_MASK)
    assert vectors.to_categorical_spec() == numbers
    assert numbers.mask.equal(PAIR_MASK)
    assert vectors.mask.equal(PAIR_MASK)
    value = torch.tensor([[0, 1], [1, 2]])
    hot = numbers.to_one_hot(value)
    assert hot.int().tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1]]
    assert vectors.to_categorical(hot).equal(value)
    assert vectors.cardinality() == numbers.cardinality() == (1 * 2) * (2 * 1)
    assert MultiCategorical([2, 3], (4, 2))[:0].to_one_hot_spec().shape == (0, 6)  # no rows: groups of any size fit
    alone = MultiCategorical([3])
    assert alone.to_one_hot(torch.tensor([2, 0])).int().tolist() == [[0, 0, 1], [1, 0, 0]]


def test_a_conversion_refuses_what_is_not_in_the_spec_unless_safe_is_false():
    with pytest.raises(AssertionError, match="mask allows, got 1"):
        Categorical(4, shape=(2,), mask=MASK).to_one_hot(torch.tensor([1, 3]))
    spec, wrong = OneHot(3, dtype=torch.float32), torch.tensor([[0.2, 0.7, 0.1]])
    with pytest.raises(AssertionError, match="one-hot over 3"):
        spec.to_categorical(wrong)
    assert spec.to_categorical(wrong, safe=False).tolist() == [1]


def test_the_groups_split_into_one_spec_each():
    first, second = PAIR_MASK.split([2, 3], -1)
    hot = {"dtype": torch.int64}
    parts = MultiOneHot([2, 3], shape=(2, 5), mask=PAIR_MASK, **hot).split()
    assert parts == (OneHot(2, shape=(2, 2), mask=first, **hot), OneHot(3, shape=(2, 3), mask=second, **hot))
    parts = MultiCategorical([2, 3], shape=(2, 2), mask=PAIR_MASK).split()
    assert parts == (Categorical(2, shape=(2,), mask=first), Categorical(3, shape=(2,), mask=second))
    assert MultiCategorical([3]).split() == (Categorical(3),)
    with pytest.raises(ShapeError, match="same groups in every row"):
        MultiCategorical([[2, 3], [4, 5]]).split()


def test_the_nearest_one_hot_vector_is_at_the_largest_allowed_entry():
    spec = OneHot(4, shape=(2, 4), mask=MASK, dtype=torch.float32)
    value = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.0, 0.0, 0.0, -5.0]])
    assert spec.project(value).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    pair = MultiOneHot([2, 2], dtype=torch.int64)
    assert pair.project(torch.tensor([0, 1, 7, 9])).tolist() == [0, 1, 0, 1]  # the valid group is kept
    # by brute force: no allowed vector is nearer
    torch.manual_seed(0)
    spec = MultiOneHot([2, 3], dtype=torch.float64)
    for value in torch.randn(50, 5, dtype=torch.float64):
        listed = spec.enumerate()
        assert spec.project(value).equal(listed[(listed - value).square().sum(-1).argmin()])


def test_a_number_of_choices_that_is_not_known_yet():
    spec = Categorical(-1, shape=(2,))
    assert [spec.is_in(torch.tensor([0, n])) for n in (10**12, -1)] == [True, False]
    assert spec.cardinality() == math.inf
    for use in (spec.rand, spec.to_one_hot_spec):
        with pytest.raises(ConfigError, match="set_provisional_n"):
            use()
    spec.set_provisional_n(3)
    assert spec.n == -1
    assert set(spec.rand((200,)).flatten().tolist()) == {0, 1, 2}
    assert not spec.is_in(torch.tensor([0, 3]))
    spec.set_provisional_n(5)
    assert spec.to_one_hot_spec().shape == (2, 5)
    with pytest.raises(ConfigError, match="for a spec with n=-1"):
        Categorical(3).set_provisional_n(4)


def test_numbers_of_choices_may_differ_from_row_to_row():
    spec = MultiCategorical([[2, 3], [4, 5]], shape=(7, 2, 2))
    assert (spec.nvec.shape, spec._counts.numel()) == ((7, 2, 2), 4)
    assert spec.is_in(torch.tensor([[1, 2], [3, 4]]).expand(7, 2, 2))
    assert not spec.is_in(torch.tensor([[1, 2], [3, 5]]).expand(7, 2, 2))
    assert spec.project(torch.full((7, 2, 2), 9))[0].tolist() == [[1, 2], [3, 4]]
    assert spec[0].cardinality() == 2 * 3 * 4 * 5
    assert spec.cardinality() == 120**7
    torch.manual_seed(0)
    drawn = spec.rand((100,)).flatten(0, 1)
    assert (drawn.amin(0).tolist(), drawn.amax(0).tolist()) == ([[0, 0], [0, 0]], [[1, 2], [3, 4]])


def test_a_register_gives_each_new_value_the_next_place():
    spec = OneHot(3, use_register=True)
    assert [spec.encode(value).int().argmax().item() for value in (17, -4, 17, 99, -4)] == [0, 1, 0, 2, 1]
    assert spec.to_numpy(torch.tensor([False, False, True])) == 99
    with pytest.raises(DataError, match=r"cannot fit all: got \[5\]"):
        spec.encode(5)
    assert spec.encode(99).tolist() == [False, False, True]
    with pytest.raises(DataError, match="still empty"):
        OneHot(2, use_register=True).to_numpy(torch.tensor([True, False]))


def test_a_mask_can_be_changed_in_place_and_no_copy_sees_it():
    for spec, other in (
        (Categorical(4, shape=(2,), mask=MASK), ~MASK),
        (OneHot(4, shape=(2, 4), mask=MASK), ~MASK),
        (MultiCategorical([2, 3], shape=(2, 2), mask=PAIR_MASK), torch.ones(5).bool()),
        (MultiOneHot([2, 3], shape=(2, 5), mask=PAIR_MASK), torch.ones(5).bool()),
    ):
        copy, before = spec.clone(), spec.mask.clone()
        spec.update_mask(other)
        assert spec.mask.equal(other.expand(spec.mask.shape))
        assert copy.mask.equal(before)
        spec.update_mask(None)
        assert spec.mask is None
        with pytest.raises(ConfigError, match="at least one choice"):
            spec.update_mask(torch.zeros_like(before))
        assert spec.mask is None
