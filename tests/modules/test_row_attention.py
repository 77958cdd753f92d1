"""Rows of a pack that are attended to one by one score like padded ones, or the pack has a mask as before."""

import pytest
import torch

from llmrl.errors import ShapeError
from llmrl.modules.llm import packing as module
from llmrl.modules.llm.log_probs import token_logprobs
from llmrl.modules.llm.row_attention import no_mask, rows_apart
from llmrl.train.data.lengths import RowLengths
from llmrl.train.models.shape import model_shape
from llmrl.train.updater import recompute_blocks
from tests.modules.test_packing import DENSE, LENGTHS, build, padded, sequences, shapes_seen
from tests.support.causal_models import assert_same_gradients, naive_scores, weighted_gradients

pytestmark = pytest.mark.usefixtures("large")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models count as large."""
    monkeypatch.setattr(module, "LEAST_HIDDEN_SIZE", 0)


@pytest.mark.parametrize("name", [*DENSE, "mixtral"])
def test_rows_of_one_pack_are_attended_to_one_by_one(name: str):
    """Without filling, and without a mask of all pairs."""
    model = build(name)
    ids, mask, select = padded(sequences())
    for _ in range(3):
        expected = naive_scores(model, ids, mask, select)
        seen = shapes_seen(model)
        scores = token_logprobs(model, ids, mask, select, entropy=True, packing="on")
        assert seen == [(1, sum(LENGTHS))]
        torch.testing.assert_close(scores.log_probs, expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.entropy, expected[1], atol=1e-5, rtol=1e-5)
        assert_same_gradients(weighted_gradients(model, scores), weighted_gradients(model, expected))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-2 * parameter.grad.sign()


def test_rows_attended_to_one_by_one_are_recomputed_so():
    found = []
    for recomputes in (False, True):
        model = build("llama")
        if recomputes:
            recompute_blocks(model)
        scores = token_logprobs(model, *padded(sequences()), entropy=True, packing="on")
        found.append(weighted_gradients(model, scores))
    assert_same_gradients(*found)


def test_other_attention_is_not_computed_by_row(monkeypatch: pytest.MonkeyPatch):
    assert module.attends_by_row(build("llama"))
    assert not module.attends_by_row(build("llama", "eager"))
    assert not module.attends_by_row(build("gemma2", "eager")), "it has a window"
    compiled = build("llama")
    compiled.model.layers[0].compile()
    assert not module.attends_by_row(compiled)
    rows = build("llama"), torch.tensor([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="size"), torch.no_grad():
        rows[0](input_ids=rows[1], attention_mask=no_mask(3, torch.device("cpu")))
    with pytest.raises(ShapeError, match=r"\[1, heads, 4, size\] of one pack"), rows_apart([2, 2]), torch.no_grad():
        rows[0](input_ids=rows[1], attention_mask=no_mask(3, torch.device("cpu")))
    monkeypatch.setattr(module, "LEAST_HIDDEN_SIZE", 32)
    assert not module.attends_by_row(build("llama")), "it is too small to gain from it"


def test_the_memory_plan_counts_no_filling_and_no_mask_of_rows_attended_to_one_by_one():
    lengths, model = RowLengths(tuple(LENGTHS)), build("llama")
    assert model_shape(model).by_row
    assert lengths.most_at_once(1, 100, "on", by_row=True) == (max(LENGTHS), 0)
    tokens, mask = RowLengths((9,)).most_at_once(8, 30, "on", by_row=True)
    assert (tokens, mask) == (27, 0), "three rows are the most of 30 tokens"
