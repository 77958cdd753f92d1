"""TransformersEngine: what it samples, what it says about it, and whether rows keep out of each other's way."""

import math

import pytest
import torch

from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.modules.llm.engines.sampling import draw, penalize_repetition, row_uniforms, truncate
from llmrl.testing import tiny_model
from tests.support.refusals import refusals
from tests.support.vllm import random_prompts

NO_STOP = 100_000  # an id that no model here can draw


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer)


def make_engine(model, tokenizer=None, **options):
    options = {"eos_token_ids": NO_STOP, "pad_token_id": 0, "seed": 0} | options
    return TransformersEngine(model, tokenizer=tokenizer, **options)


def test_greedy_equals_hugging_face(model, tokenizer):
    prompts = random_prompts(5, model.config.vocab_size)
    engine = make_engine(model, eos_token_ids=tokenizer.eos_token_id)
    ours = engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    for prompt, ids in zip(prompts, ours.ids, strict=True):
        inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        theirs = model.generate(**inputs, **ends, do_sample=False, max_new_tokens=12)
        assert ids.tolist() == theirs[0, len(prompt) :].tolist()


def test_splitting_a_call_changes_nothing(model):
    prompts, params = random_prompts(8, model.config.vocab_size), SamplingParams(max_new_tokens=5)
    whole, split = make_engine(model), make_engine(model, max_batch_tokens=30)
    drawn = [engine.generate(prompts, params, seeds=range(8)).ids for engine in (whole, split)]
    torch.testing.assert_close(*drawn, atol=0, rtol=0)
    torch.testing.assert_close(split.score(prompts), whole.score(prompts), atol=1e-5, rtol=0)


def test_rows_run_in_waves_that_the_cache_has_memory_for_and_draw_what_they_draw_together(model, monkeypatch):
    prompts, params = random_prompts(8, model.config.vocab_size), SamplingParams(max_new_tokens=5)
    prompts += [prompts[0], prompts[3]]  # of one group
    engine, seen = make_engine(model), []
    forward = engine.forward
    monkeypatch.setattr(engine, "forward", lambda ids, *rest: seen.append(len(ids)) or forward(ids, *rest))
    together = engine.generate(prompts, params, seeds=range(10))
    assert max(seen) == 10
    seen.clear()
    longest = max(map(len, prompts)) + 5
    engine.max_cached_tokens = 3 * longest + 1
    waves = engine.generate(prompts, params, seeds=range(10))
    torch.testing.assert_close(waves.ids, together.ids, atol=0, rtol=0)
    torch.testing.assert_close(waves.log_probs, together.log_probs, atol=1e-5, rtol=0)
    assert sum(1 for rows in seen if rows == 3) >= 5, "a wave of the longest rows, and a step for each token"
    engine.max_cached_tokens = 1
    assert [ids.tolist() for ids in engine.generate(prompts, params, seeds=range(10)).ids] == [
        ids.tolist() for ids in together.ids
    ], "a row alone always runs"


def test_the_edges_of_the_cdf_never_draw_an_impossible_token():
    log_probs = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 0.5, 1 - 2**-24, 1.0):
        assert draw(log_probs, torch.tensor([uniform])).item() == 1


def test_uniforms_of_neighbouring_seeds_and_steps_are_uncorrelated():
    table = row_uniforms(range(1000), 50)
    assert table.min() >= 0
    assert table.max() < 1
    assert abs(table.mean() - 0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([table[:-1].flatten(), table[1:].flatten()]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([table[:, :-1].flatten(), table[:, 1:].flatten()]))[0, 1]) < 0.02


def kept(logits, **options):
    return (truncate(torch.tensor([logits]), SamplingParams(**options))[0] > -math.inf).tolist()


def test_truncation_keeps_what_it_says():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert kept(logits, top_k=2) == [True, True, False, False]
    assert kept(logits, top_p=0.75) == [True, True, False, False]  # 0.5 does not suffice, 0.8 does
    assert kept(logits, top_p=0.81) == [True, True, True, False]
    assert kept(logits, top_p=0.0) == [True, False, False, False]  # one always stays
    assert kept(logits, min_p=0.2) == [True, True, True, False]  # the floor is 0.2 * 0.5 = 0.1
    assert kept(logits, top_k=3, top_p=0.9) == [True, True, True, False]  # after top-k: 0.526, 0.316, 0.158


def test_the_short_cut_for_top_p_equals_sorting_everything():
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0))
    logits *= torch.tensor([0.1, 1, 2, 5] * 2)[:, None]
    ours = truncate(logits, SamplingParams(top_p=0.9)) > -math.inf
    values, order = logits.softmax(-1).sort(descending=True)
    inside = values.cumsum(-1) - values < 0.9
    expected = torch.zeros_like(ours).scatter(-1, order, inside)
    assert ours.sum(-1).max() > 256  # some rows need more than the short cut looks at
    assert torch.equal(ours, expected)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits, seen = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0]]


def test_training_flags_and_gradients_survive_a_call(tokenizer):
    model = tiny_model(tokenizer, hidden_size=16, heads=2).train()
    frozen = model.model.layers[0].eval()
    make_engine(model).generate(random_prompts(2, 100), SamplingParams(max_new_tokens=3))
    assert model.training
    assert not frozen.training
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None


def test_tied_weights_need_one_name_and_must_agree(tokenizer):
    model = tiny_model(tokenizer, hidden_size=16, heads=2, layers=1, seed=2)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    engine = make_engine(model)
    weights = {name: value + 1 for name, value in model.state_dict().items()}
    engine.update_weights({name: value for name, value in weights.items() if name != "lm_head.weight"}, version=1)
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    with pytest.raises(WeightSyncError, match="tied"):
        engine.update_weights(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, version=2)


test_sampling_params_are_checked = refusals(
    (ConfigError, "max_new_tokens must be positive", lambda: SamplingParams(max_new_tokens=0)),
    (ConfigError, "stop_strings", lambda: SamplingParams(stop_strings="abc")),
    (
        ConfigError,
        "stop_strings need tokenizer=",
        lambda: make_engine(tiny_model()).generate(random_prompts(1, 50), SamplingParams(stop_strings=("x",))),
    ),
)
