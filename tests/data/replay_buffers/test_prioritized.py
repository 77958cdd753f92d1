"""Draws by priority, against probabilities that are written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from llmrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from llmrl.data.replay_buffers.samplers.sum_tree import SumTree
from llmrl.errors import DataError, ShapeError
from tests.support.buffers import holding, refusals_after_fork


def build(priorities=(), capacity: int = 10, alpha: float = 1.0, beta: float = 1.0, **arguments) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, alpha, beta, **arguments)
    buffer = ReplayBuffer(storage=ListStorage(capacity), sampler=sampler, generator=torch.Generator().manual_seed(0))
    if len(priorities):
        buffer.extend(list(range(len(priorities))))
        buffer.update_priority(torch.arange(len(priorities)), torch.tensor(priorities, dtype=torch.float64))
    return buffer


# --- the tree ---
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tree_finds_what_a_running_sum_finds(data):
    capacity = data.draw(st.sampled_from([1, 2, 15, 16, 17, 300, 5000, 70_000]))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tree, flat = SumTree(capacity), np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 5))):
        index = generator.integers(capacity, size=data.draw(st.integers(1, 400)))
        masses = generator.integers(0, 4, size=index.size).astype(float)  # whole numbers: sums are exact
        tree.update(index, masses)
        for position, mass in zip(index, masses, strict=True):
            flat[position] = mass
    assert np.array_equal(tree.masses, flat)
    assert tree.total == flat.sum()
    assert tree.minimum == (flat[flat > 0].min() if flat.any() else np.inf)
    if flat.any():
        points = np.concatenate([generator.random(200) * tree.total, np.arange(min(tree.total, 200.0))])
        assert np.array_equal(tree.find(points), np.searchsorted(flat.cumsum(), points, side="right"))


def test_a_tree_never_finds_a_row_without_mass():
    """Sums of parts may differ from the sum of all in the last digit, and a point lies behind the last mass then."""
    generator = np.random.default_rng(0)
    for capacity in (7, 100, 70_000):
        tree = SumTree(capacity)
        masses = np.where(generator.random(capacity) < 0.3, generator.random(capacity) ** 20, 0.0)
        masses[capacity // 2] = 1e-300
        tree.rebuild(masses)
        points = np.concatenate([generator.random(20_000), [0.0, 1.0, np.nextafter(1, 0)]]) * tree.total
        assert (tree.masses[tree.find(points)] > 0).all()


# --- probabilities and weights ---


@pytest.mark.parametrize(("alpha", "beta", "eps"), [(0.0, 0.4, 1e-8), (0.6, 0.4, 1e-3), (2.0, 0.0, 0.5)])
def test_draws_follow_the_masses(alpha, beta, eps):
    priorities = [0.0, 0.5, 1.0, 2.0, 4.0]
    buffer = build(priorities, alpha=alpha, beta=beta, eps=eps, dtype=torch.float64)
    masses = [(p + eps) ** alpha for p in priorities]
    assert buffer.sampler.probabilities().tolist() == pytest.approx([mass / sum(masses) for mass in masses])
    batch, info = buffer.sample(20_000, return_info=True)
    counts = torch.bincount(torch.tensor(batch), minlength=5).double()
    expected = torch.tensor(masses, dtype=torch.float64) / sum(masses) * 20_000
    likely = expected > 5
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 18.5  # 4 degrees of freedom: 0.1 %
    weights = [(masses[row] / min(masses)) ** -beta for row in batch]
    assert info["priority_weight"].tolist() == pytest.approx(weights)


def test_rows_without_any_mass_are_never_drawn_and_do_not_count_for_the_weights():
    buffer = build([0.0, 2.0, 4.0, 0.0], eps=0.0)
    batch, info = buffer.sample(100, return_info=True)
    assert set(batch) == {1, 2}
    assert set(info["priority_weight"].tolist()) == {1.0, 0.5}


def test_alpha_and_beta_may_change():
    buffer = build([1.0, 3.0, 9.0], eps=0.0)
    buffer.extend(["written since"])  # priority 9
    buffer.sampler.alpha, buffer.sampler.beta = 0.5, 2.0
    masses = np.array([1.0, 3.0, 9.0, 9.0]) ** 0.5
    assert buffer.sampler.probabilities().tolist() == pytest.approx((masses / masses.sum()).tolist())
    index, info = buffer.sampler.sample(buffer.storage, 20)
    assert info["priority_weight"].tolist() == pytest.approx((masses[index] ** -2.0).tolist())
    for name in ("alpha", "beta"):
        with pytest.raises(ValueError, match=f"{name} .*got -1"):
            setattr(buffer.sampler, name, -1.0)
    assert (buffer.sampler.alpha, buffer.sampler.beta) == (0.5, 2.0)


# --- what a new row gets ---
def probabilities(buffer: ReplayBuffer, total: float) -> list[float]:
    return (buffer.sampler.probabilities() * total).tolist()


@pytest.mark.parametrize("within", [False, True])
def test_priorities_agree_with_a_list_after_any_operations(within):
    generator = torch.Generator().manual_seed(int(within))

    def number(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for _ in range(40):
        buffer = build(eps=0.0, capacity=5, max_priority_within_buffer=within)
        oracle: dict[int, float] = {}
        largest, cursor = 1.0, 0
        for _ in range(30):
            if number(2) or not oracle:
                at_once = number(2)
                count = 1 + number(5 if at_once else 3)  # five are all rows: then the largest is 1 again
                buffer.extend(list(range(count))) if at_once else [buffer.add(0) for _ in range(count)]
                written = [(cursor + i) % 5 for i in range(count)]
                # One by one or at once, no update in between: of the rows that stay.
                left = [value for row, value in oracle.items() if row not in written]
                new = max(left, default=1.0) if within else largest
                oracle |= dict.fromkeys(written, new)
                cursor = (cursor + count) % 5
                if within:
                    buffer.sampler.probabilities()
            else:
                rows = [number(len(oracle)) for _ in range(1 + number(3))]
                values = [number(8) / 4 + 0.125 for _ in rows]  # also below 1, the priority of a first row
                buffer.update_priority(torch.tensor(rows), torch.tensor(values))
                oracle |= dict(zip(rows, values, strict=True))
                largest = max(largest, *values)
            expected = [oracle[row] for row in range(len(oracle))]
            assert probabilities(buffer, sum(expected)) == pytest.approx(expected)


# --- updates ---
def test_updates_take_one_number_or_one_per_position_and_pass_over_minus_one():
    buffer = build([1.0, 1.0, 1.0, 1.0], eps=0.0)
    buffer.update_priority(torch.tensor([0, -1, 2]), torch.tensor([2.0, 99.0, 3.0]))
    assert probabilities(buffer, 7) == pytest.approx([2, 1, 3, 1])
    buffer.update_priority(torch.tensor([1, 3]), 4.0)
    buffer.update_priority(0, torch.tensor(5.0))
    assert probabilities(buffer, 16) == pytest.approx([5, 4, 3, 4])
    buffer.update_priority(torch.tensor([2, 2]), torch.tensor([8.0, 6.0]))  # of equal positions the last counts
    assert probabilities(buffer, 19) == pytest.approx([5, 4, 6, 4])
    buffer.update_priority(torch.tensor([], dtype=torch.int64), torch.tensor([]))


@pytest.mark.parametrize(
    ("reduction", "expected"), [("max", 4.0), ("min", 1.0), ("median", 2.0), ("mean", 7 / 3), ("sum", 7.0)]
)
def test_priorities_with_several_numbers_are_reduced(reduction, expected):
    buffer = build([1.0, 1.0], eps=0.0, reduction=reduction)
    buffer.update_priority(torch.tensor([1]), torch.tensor([[[1.0], [4.0], [2.0]]]))
    assert probabilities(buffer, 1 + expected) == pytest.approx([1, expected])


@pytest.mark.parametrize(
    ("index", "priority", "error", "match"),
    [
        ([0, 1], [1.0, -0.5], DataError, r"got -0.5 for position 1"),
        ([0, 1], [float("nan"), 1.0], DataError, r"got nan for position 0"),
        ([0, 1], [1.0, float("inf")], DataError, r"got inf for position 1"),
        ([0, 3], [1.0, 1.0], IndexError, r"got position 3 of 3 rows"),
        ([0, -2], [1.0, 1.0], IndexError, r"got position -2"),
        ([0, 1, 2], [1.0, 2.0], RuntimeError, r"got \[2\] for 3 positions"),
        ([0], [1.0, 2.0], RuntimeError, r"got \[2\] for 1 positions"),
    ],
)
def test_an_impossible_priority_is_refused_and_nothing_changes(index, priority, error, match):
    buffer = build([1.0, 2.0, 3.0], eps=0.0)
    before = buffer.sampler.state_dict()
    with pytest.raises(error, match=match):
        buffer.update_priority(torch.tensor(index), torch.tensor(priority))
    after = buffer.sampler.state_dict()
    assert torch.equal(before["masses"], after["masses"])
    assert before["largest"] == after["largest"]


def test_a_mass_that_overflows_is_refused_and_nothing_changes():
    buffer = build([1.0, 2.0], alpha=3.0)
    with pytest.raises(DataError, match="must be finite"):
        buffer.update_priority(0, 1e200)
    with pytest.raises(DataError, match="must be finite"):
        buffer.sampler.alpha = 2000.0
    assert buffer.sampler.alpha == 3.0
    assert probabilities(buffer, 9) == pytest.approx([1, 8])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"alpha": -0.1}, "alpha .*got -0.1"),
        ({"beta": -1}, "beta must be"),
        ({"alpha": float("nan")}, "alpha must be"),
        ({"eps": -1e-3}, "eps must not be negative"),
        ({"max_capacity": 0}, "at least 1"),
        ({"reduction": "men"}, "Did you mean 'mean'"),
    ],
)
def test_impossible_settings_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        PrioritizedSampler(**({"max_capacity": 10, "alpha": 1.0, "beta": 1.0} | arguments))


def test_sampling_needs_a_row_with_mass_and_a_tree_of_the_storage_s_size():
    buffer = build(capacity=3)
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample(2)
    with pytest.raises(RuntimeError, match="priority above 0"):
        build([0.0, 0.0], eps=0.0).sample(2)
    large = holding(["a", "b", "c"], ListStorage(10), sampler=PrioritizedSampler(3, 1.0, 1.0))
    large.sample(2)
    large.add("d")
    with pytest.raises(ValueError, match="got 3, 4 rows of at most 10"):
        large.sample(2)


# --- processes ---


def test_a_forked_process_cannot_use_it():
    buffer = build([1.0, 2.0])
    answers = refusals_after_fork(
        lambda: buffer.sample(2), lambda: buffer.update_priority(0, 2.0), lambda: buffer.add("c")
    )
    assert "went through" not in answers
    assert sum("process" in answer for answer in answers) >= 3


# --- the buffers ---
def test_priorities_come_with_tensordicts_and_go_back_with_their_batch():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=lambda: LazyTensorStorage(10), batch_size=1000, priority_key=("a", "td")
    )
    data = TensorDict(x=torch.arange(4), a=TensorDict(td=torch.tensor([0.0, 1.0, 3.0, 0.0])), batch_size=[4])
    buffer.extend(data)
    batch = buffer.sample()
    assert set(batch["x"].tolist()) == {1, 2}
    assert torch.equal(batch["priority_weight"], torch.where(batch["x"] == 1, 1.0, 1 / 3))
    batch["a", "td"] = batch["x"].double().mul(2).view(-1, 1)
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.probabilities().tolist() == pytest.approx([0, 2 / 6, 4 / 6, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_rows_with_an_impossible_priority_are_not_written(bad):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), batch_size=2)
    good = TensorDict(a=torch.arange(2), td_error=torch.tensor([2.0, 3.0]), batch_size=[2])
    buffer.extend(good)
    probabilities = buffer.sampler.probabilities()
    row = good[0].clone().set("td_error", torch.tensor(bad))
    for write, data in (
        (buffer.extend, torch.stack([good[1], row])),
        (buffer.extend, [good[1], row]),
        (buffer.add, row),
    ):
        with pytest.raises(DataError, match="finite and not negative"):
            write(data)
    assert (len(buffer), buffer.write_count) == (2, 2)
    assert torch.equal(buffer.sampler.probabilities(), probabilities)


def test_a_step_of_several_streams_brings_its_priorities():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(6, ndim=2))
    for errors in ([1.0, 3.0], [4.0, 2.0]):
        buffer.add(TensorDict(a=torch.zeros(2), td_error=torch.tensor(errors), batch_size=[2]))
    assert buffer.sampler.probabilities().tolist() == [0.1, 0.3, 0.4, 0.2]
    with pytest.raises(ShapeError, match="2 dimensions"):
        buffer.extend(TensorDict(a=torch.zeros(2), td_error=torch.ones(2), batch_size=[2]))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_on_a_grid_every_cell_has_a_priority(kind):
    storage = LazyTensorStorage(12, ndim=2)
    buffer = kind(storage=storage, sampler=PrioritizedSampler(12, 1.0, 1.0, eps=0.0), batch_size=100)
    for start in (0, 3):
        time = torch.arange(start, start + 3).expand(2, 3)
        index = buffer.extend(TensorDict(time=time, stream=torch.tensor([[0] * 3, [1] * 3]), batch_size=[2, 3]))
    assert index.shape == (6, 2)
    buffer.update_priority(index, 0.0)
    buffer.update_priority(torch.tensor([[0, 0], [1, 0], [2, 0], [0, 1], [2, 1]]), 0.0)
    batch, info = buffer.sample(return_info=True)
    assert (batch["time"] == 1).all()
    assert (batch["stream"] == 1).all()
    assert info["index"].tolist() == [[1, 1]] * 100
    buffer.sampler.update_priority(torch.tensor([[3, 0]]), 1.0, storage=storage)
    assert {tuple(pair) for pair in buffer.sample(return_info=True)[1]["index"].tolist()} == {(1, 1), (3, 0)}


def test_the_presets_make_their_own_sampler():
    buffer = PrioritizedReplayBuffer(alpha=0.5, beta=0.9, eps=1e-3, dtype=torch.float64)
    assert buffer.storage.max_size == buffer.sampler.max_capacity == 1000
    assert (buffer.sampler.alpha, buffer.sampler.beta, buffer.sampler.eps) == (0.5, 0.9, 1e-3)
    assert TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, reduction="mean").sampler.reduction == "mean"
    with pytest.raises(TypeError, match="makes its own sampler"):
        PrioritizedReplayBuffer(alpha=1, beta=1, sampler=RandomSampler())


def test_other_samplers_warn_that_they_have_no_priorities():
    buffer = ReplayBuffer(storage=ListStorage(3), sampler=RandomSampler())
    buffer.add("a")
    with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
        buffer.update_priority(0, 1.0)
