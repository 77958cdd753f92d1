"""The probe says how far engine and trainer are apart, and stops a run in which they are."""

from __future__ import annotations

import pytest
import torch

from llmrl.errors import ConfigError, ShapeError, WeightSyncError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import SyncProbe, publish

IDS = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]


def scorer(*rows):
    return lambda sequences: [torch.tensor(row) for row in rows]


def test_it_returns_the_mean_difference_over_all_scored_tokens():
    # |-1 - -1.25| = 0.25, |-2 - -1.5| = 0.5, |-3 - -3| = 0: 0.75 / 3. The first tokens (9, 7) are not looked at.
    trainer, engine = scorer([9.0, -1.0, -2.0], [7.0, -3.0]), scorer([0.0, -1.25, -1.5], [0.0, -3.0])
    assert SyncProbe(IDS, bound=0.3)(engine, trainer) == pytest.approx(0.25, abs=1e-7)
    message = r"after version 4 .* 3 tokens differ by 0.25 on average, by up to 0.5 \(token 2 of sequence 0\)"
    with pytest.raises(WeightSyncError, match=message):
        SyncProbe(IDS, bound=0.2)(engine, trainer, version=4)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_never_passes(value):
    trainer, engine = scorer([0.0, -1.0, -2.0], [0.0, -3.0]), scorer([0.0, -1.0, -2.0], [0.0, value])
    with pytest.raises(WeightSyncError, match="token 1 of sequence 1"):
        SyncProbe(IDS, bound=1e6)(engine, trainer)


def test_a_scorer_that_answers_for_other_tokens_is_named():
    with pytest.raises(ShapeError, match=r"the engine must score every token: got shapes \[\(3,\)\]"):
        SyncProbe(IDS, bound=1.0)(scorer([0.0, -1.0, -2.0]), scorer([0.0, -1.0, -2.0], [0.0, -3.0]))


def test_a_probe_without_tokens_or_bound_is_refused():
    for sequences, bound, message in (
        ([], 1.0, "got none"),
        ([torch.tensor([1])], 1.0, r"T > 1: got \(1,\) in row 0"),
        (IDS, 0.0, "bound must be positive"),
    ):
        with pytest.raises((ConfigError, ShapeError), match=message):
            SyncProbe(sequences, bound=bound)


def test_it_tells_an_engine_with_the_trainers_weights_from_one_without():
    engine = TransformersEngine(tiny_model(tiny_tokenizer(), seed=0), eos_token_ids=(), pad_token_id=0)
    trainer = TransformersEngine(tiny_model(tiny_tokenizer(), seed=1), eos_token_ids=(), pad_token_id=0)
    probe = SyncProbe(IDS, bound=1e-3)
    with pytest.raises(WeightSyncError, match="does not have these weights"):
        probe(engine.score, trainer.score)
    version = publish(trainer.model, engine)
    assert probe(engine.score, trainer.score, version=version) < 1e-6
    with torch.no_grad():  # one tensor that did not arrive
        engine.model.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    with pytest.raises(WeightSyncError, match="does not have these weights"):
        probe(engine.score, trainer.score)
