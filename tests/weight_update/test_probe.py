"""The probe finds an update that did not arrive, at the smallest learning rates, and never ends a healthy run."""

import copy

import pytest
import torch

from llmrl.errors import ConfigError, ShapeError, WeightSyncError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import SyncProbe, publish

IDS = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
MASKS = [torch.tensor([True, True, True]), torch.tensor([False, True])]
LONG = [torch.arange(1, 60), torch.arange(300, 340)]
SAMPLED = [torch.arange(59) >= 9, torch.arange(40) >= 4]


def scorer(*rows):
    return lambda sequences: [torch.tensor(row) for row in rows]


class Noisy:
    """Both sides score ``count`` tokens: the trainer what its weights say, the engine that and noise of its kernels,
    with a few tokens far off, as where another expert was chosen. A push gives the engine the trainer's weights.
    """

    def __init__(self, level, count=400, seed=0):
        self.level, self.generator = level, torch.Generator().manual_seed(seed)
        self.ids, self.mask = torch.arange(count), torch.arange(count) >= 50
        self.weights = -2 * torch.rand(count, generator=self.generator)
        self.arrive()

    def update(self, size=1e-5):
        self.weights = self.weights + size * torch.randn(len(self.weights), generator=self.generator)

    def arrive(self):
        noise = torch.empty_like(self.weights).exponential_(generator=self.generator)
        far = torch.rand(len(noise), generator=self.generator) < 0.02
        noise = torch.where(far, 15 * noise, noise) / 1.28  # the mean of such noise is 1.28
        self.engine = self.weights + self.level * noise * torch.randn(len(noise), generator=self.generator).sign()

    def scorers(self):
        return lambda rows: [self.engine], lambda rows: [self.weights]

    def probe(self):
        probe = SyncProbe()
        probe.use([self.ids], [self.mask], *self.scorers())
        return probe


BETWEEN = [pytest.param(level, marks=pytest.mark.slow) for level in (0.011, 0.041)]


@pytest.mark.parametrize("level", [1e-6, 0.036, 0.067, *BETWEEN])  # float32, a dense model, FP8; another, a mixture
def test_a_thousand_healthy_pushes_have_no_warning(level):
    sides = Noisy(level)
    probe = sides.probe()
    for push in range(1000):
        sides.update()
        mean, warning = probe.prove(sides.arrive, *sides.scorers())
        assert warning == ""
        if push % 100 == 0:
            assert mean == pytest.approx(level, rel=0.5)


def test_noise_that_grows_slowly_is_followed():
    sides = Noisy(0.01)
    probe = sides.probe()
    for _ in range(1000):
        sides.level *= 1.004  # 54 times as much in the end
        sides.update()
        assert probe.prove(sides.arrive, *sides.scorers())[1] == ""


@pytest.mark.parametrize("level", [0.011, 0.067])
def test_a_lost_push_is_a_warning_and_the_second_one_helps(level):
    sides = Noisy(level)
    probe = sides.probe()
    lost = iter([True, False])
    sides.update(1e-6)
    mean, warning = probe.prove(lambda: None if next(lost) else sides.arrive(), *sides.scorers())
    assert "those of an earlier version, to the last bit" in warning
    assert warning.endswith("a second push helped")
    assert mean < 2 * level


def test_pushes_that_never_arrive_end_the_run_at_the_third_version():
    sides = Noisy(0.04)
    probe = sides.probe()
    pushes = []
    for _ in range(2):
        sides.update(1e-6)
        assert probe.prove(lambda: pushes.append(1), *sides.scorers())[1].endswith("a second push did not help")
    sides.update(1e-6)
    with pytest.raises(WeightSyncError, match=r"3 versions in a row, each sent twice, .* to the last bit"):
        probe.prove(lambda: pushes.append(1), *sides.scorers())
    assert len(pushes) == 6


def test_a_difference_unusual_for_this_run_is_drift_and_a_usual_one_ends_the_count():
    sides = Noisy(0.02)
    probe = sides.probe()

    def damage():
        sides.arrive()
        sides.engine = sides.engine - 0.3

    for _ in range(5):
        sides.update()
        probe.prove(sides.arrive, *sides.scorers())
    for push, unsolved in ((damage, True), (damage, True), (sides.arrive, False), (damage, True), (damage, True)):
        sides.update()
        warning = probe.prove(push, *sides.scorers())[1]
        assert ("more than 4 times the 0.0" in warning) == unsolved
    sides.update()
    with pytest.raises(WeightSyncError, match="usual in this run"):
        probe.prove(damage, *sides.scorers())


def test_a_problem_of_another_rank_pushes_again_here_too():
    sides, pushes = Noisy(0.02), []
    probe = SyncProbe(any_problem=lambda problem: problem or ("rank 1 says so" if len(pushes) == 1 else ""))
    probe.use([sides.ids], [sides.mask], *sides.scorers())
    sides.update()
    _, warning = probe.prove(lambda: (pushes.append(1), sides.arrive()), *sides.scorers())
    assert (len(pushes), warning) == (2, "rank 1 says so; a second push helped")


def test_only_sampled_tokens_count():
    # |-2 - -1.5| = 0.5, |-3 - -3| = 0, and 0.25 of the token that both masks' first rows add: 0.75 / 3.
    trainer, engine = scorer([9.0, -1.0, -2.0], [7.0, -3.0]), scorer([0.0, -1.25, -1.5], [0.0, -3.0])
    assert SyncProbe().use(IDS, MASKS, engine, trainer) == pytest.approx(0.25, abs=1e-7)
    masks = [torch.tensor([False, False, True]), MASKS[1]]
    assert SyncProbe().use(IDS, masks, engine, trainer) == pytest.approx(0.25, abs=1e-7)  # 0.5 / 2
    nothing = [torch.zeros(3, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)]
    probe = SyncProbe()
    assert probe.use(IDS, nothing, engine, trainer) == 0.0  # a rank without a group
    assert probe.check(engine, trainer) == (0.0, "")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scores_that_are_not_finite_never_pass(value):
    trainer, engine = scorer([0.0, -1.0, -2.0], [0.0, -3.0]), scorer([0.0, -1.0, -2.0], [0.0, value])
    with pytest.raises(WeightSyncError, match="the engine scores token 1 of row 1"):
        SyncProbe().use(IDS, MASKS, engine, trainer)


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"score every token: got shapes \[\(3,\)\]"):
        SyncProbe().use(IDS, MASKS, scorer([0.0, -1.0, -2.0]), scorer([0.0, -1.0, -2.0], [0.0, -3.0]))
    with pytest.raises(ShapeError, match=r"got \(1,\) and \(1,\) in row 0"):
        SyncProbe().use([torch.tensor([1])], [torch.tensor([True])], None, None)
    with pytest.raises(ConfigError, match="factor must be above 1: got 1"):
        SyncProbe(factor=1)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=str)
def test_a_dropped_push_of_a_real_model_is_found_at_a_learning_rate_of_a_millionth(precision):
    """The trainer keeps float32 weights and computes in ``precision``; the engine has its weights in ``precision``."""
    model = tiny_model(tiny_tokenizer(), hidden_size=64, layers=2, heads=2)
    trainer = TransformersEngine(model, eos_token_ids=(), pad_token_id=0)
    engine = TransformersEngine(copy.deepcopy(model).to(precision), eos_token_ids=(), pad_token_id=0)

    def trainer_scores(sequences):
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            return trainer.score(sequences)

    probe = SyncProbe()
    assert probe.use(LONG, SAMPLED, engine.score, trainer_scores) < (0.05 if precision == torch.bfloat16 else 1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    for step in range(6):
        ids = torch.randint(1, 400, (2, 30), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lost = iter([step == 3, False])
        push = lambda lost=lost: next(lost) or publish(model, engine)  # noqa: E731
        mean, warning = probe.prove(push, engine.score, trainer_scores)
        assert ("to the last bit" in warning) == (step == 3), (step, mean, warning)
