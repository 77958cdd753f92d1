"""Weights into a vLLM engine of this process: that it runs what was sent, whole, or what it ran before."""

from __future__ import annotations

import copy

import pytest
import torch

from llmrl.errors import RolloutError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import WeightPublisher

pytestmark = pytest.mark.vllm
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [5] * 20)]
SAMPLING = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def make_model(tokenizer, architecture, tied):
    model = tiny_model(tokenizer, architecture=architecture, heads=2)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(config).eval()


@pytest.fixture(scope="module", params=[("qwen2", True), ("qwen2", False), ("llama", True)], ids=str)
def pair(tokenizer, request):
    """A trainer's model, and an engine that began with its weights."""
    model = make_model(tokenizer, *request.param)
    engine = VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128)
    yield model, engine
    engine.close()


def stepped(model, seed):
    """The model after something like an optimizer step on every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def largest_difference(model, engine, temperature=1.0):
    """Between what the engine says of what it draws and a full forward of the trainer's model; and of its scoring."""
    params = SamplingParams(max_new_tokens=8, temperature=temperature)
    drawn = engine.generate(PROMPTS, params)
    full = [torch.cat(row) for row in zip(PROMPTS, drawn.ids, strict=True)]
    expected = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score(full, temperature=temperature)
    scored = engine.score(full, temperature=temperature)
    rows = zip(PROMPTS, drawn.log_probs, scored, expected, strict=True)
    return max(
        max((said - right[len(prompt) :]).abs().max().item(), (score - right).abs().max().item())
        for prompt, said, score, right in rows
    )


def test_log_probs_equal_the_trainers_before_and_after_twenty_updates(pair):
    model, engine = pair
    assert largest_difference(model, engine) < 1e-4
    old = copy.deepcopy(model)
    for version in range(engine.version + 1, engine.version + 21):
        engine.update_weights(stepped(model, version).state_dict(), version=version)
        assert engine.generate(PROMPTS, SAMPLING).version == version
        assert largest_difference(model, engine) < 1e-4
    for temperature in (0.5, 1.3):
        assert largest_difference(model, engine, temperature) < 1e-4
    assert largest_difference(old, engine) > 0.1  # the bound means something: other weights are far from it


def test_the_head_of_a_tied_model_follows_its_embedding(pair):
    """vLLM keeps a packed copy of the head on a CPU. Only the embedding is changed: all of the difference is there."""
    model, engine = pair
    before = engine.score(PROMPTS)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    engine.update_weights(model.state_dict(), version=engine.version + 1)
    after = engine.score(PROMPTS)
    assert max((a - b).abs().max() for a, b in zip(after, before, strict=True)) > 0.01
    assert largest_difference(model, engine) < 1e-4


def test_a_prompt_seen_before_is_not_answered_from_the_old_weights(pair):
    model, engine = pair
    long = torch.arange(1, 100)  # several blocks of the prefix cache
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    engine.generate([long], params)
    engine.update_weights(stepped(model, 99).state_dict(), version=engine.version + 1)
    reference = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).generate([long], params)
    again = engine.generate([long], params)
    assert again.ids[0].tolist() == reference.ids[0].tolist()
    torch.testing.assert_close(again.log_probs[0], reference.log_probs[0], atol=1e-4, rtol=0)


def test_one_name_of_tied_weights_is_enough(pair):
    model, engine = pair
    weights = stepped(model, 7).state_dict()
    if model.config.tie_word_embeddings:
        for alone in ("lm_head.weight", "model.embed_tokens.weight"):
            sent = {k: v for k, v in weights.items() if k == alone or "norm" in k or "layers" in k}
            engine.update_weights(sent, version=engine.version + 1)
            assert largest_difference(model, engine) < 1e-4
    else:
        with pytest.raises(WeightSyncError, match=r"missing lm_head.weight"):
            engine.update_weights({k: v for k, v in weights.items() if k != "lm_head.weight"}, version=10**6)
        engine.update_weights(weights, version=engine.version + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.nrom.weight": w["model.norm.weight"]}, "Did you mean 'model.norm.weight'"),
        (lambda w: {k: v for k, v in w.items() if "q_proj.weight" not in k}, "missing model.layers.0.self_attn.q_proj"),
        (lambda w: w | {"model.norm.weight": torch.ones(3)}, r"keep its shape: got \(3,\), expected \(64,\)"),
        (lambda w: w | {"model.norm.weight": torch.ones(64).long()}, "must hold torch.float32 .* got torch.int64"),
        (lambda w: w | {"model.norm.weight": torch.ones(64, device="meta")}, "got torch.float32 on meta"),
        (lambda w: None, "weights must be given"),
    ],
    ids=["unknown", "missing", "shape", "kind", "empty", "none"],
)
def test_what_is_not_whole_is_refused_and_the_old_version_serves(pair, change, message):
    model, engine = pair
    engine.update_weights(model.state_dict(), version=engine.version + 1)
    version, before = engine.version, engine.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3])
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights(change(stepped(copy.deepcopy(model), 3).state_dict()), version=version + 1)
    after = engine.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3])
    assert (engine.version, after.version) == (version, version)
    assert [row.tolist() for row in after.log_probs] == [row.tolist() for row in before.log_probs]


def test_an_update_that_broke_off_serves_nothing_until_a_whole_one_came(pair, monkeypatch):
    model, engine = pair
    engine.update_weights(model.state_dict(), version=engine.version + 1)
    version, worker = engine.version, engine.core.llm.llm_engine.model_executor.driver_worker.worker
    load = type(worker.model_runner.get_model()).load_weights
    sent = stepped(copy.deepcopy(model), 11)

    def half(self, weights):
        sent = list(weights)
        load(self, sent[:9])
        if sent:
            raise RuntimeError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(type(worker.model_runner.get_model()), "load_weights", half)
        with pytest.raises(WeightSyncError, match=r"version .* could not be loaded: RuntimeError: no memory left"):
            engine.update_weights(sent.state_dict(), version=version + 1)
    for call in (lambda: engine.generate(PROMPTS, SAMPLING), lambda: engine.score(PROMPTS)):
        with pytest.raises(RolloutError, match="update broke off in the middle"):
            call()
    assert engine.version == version
    engine.update_weights(sent.state_dict(), version=version + 2)
    assert largest_difference(sent, engine) < 1e-4


def test_a_publisher_moves_the_version_of_the_engine(pair):
    model, engine = pair
    publisher = WeightPublisher([engine])
    assert publisher.publish(stepped(model, 5).state_dict()) == engine.version
    assert largest_difference(model, engine) < 1e-4
    with pytest.raises(WeightSyncError, match="names must be those of the model"):
        publisher.publish({"weight": torch.zeros(2)})


def test_weights_of_another_precision_are_cast_to_the_engines(pair):
    model, engine = pair
    half = {name: value.bfloat16() for name, value in model.state_dict().items()}
    engine.update_weights(half, version=engine.version + 1)
    rounded = copy.deepcopy(model)
    rounded.load_state_dict({name: value.float() for name, value in half.items()})
    assert largest_difference(rounded, engine) < 1e-4
