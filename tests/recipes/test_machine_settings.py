"""Steps of the updater with settings that change arithmetic or kernels, beside the plain one."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial

import pytest
import torch

from llmrl.errors import ConfigError, DataError, MissingDependencyError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model, meta_model
from llmrl.train.updater import make_updater
from tests.support.training_rows import config, losses, policy_of, random_rows, step, worst


def gradients(session, model, dtype=None, **changes):
    """Metrics and gradients of a step; the arithmetic is ``dtype``, float32 by default."""
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return step(config(**changes), session, copy.deepcopy(model), random_rows())


def test_a_float32_head_is_nearer_to_float32_than_a_bfloat16_one(session):
    model = tiny_model(hidden_size=32, heads=2)
    exact, reference = gradients(session, model)
    errors = []
    for in_float32 in (False, True):
        model.get_output_embeddings().in_float32 = in_float32
        metrics, found = gradients(session, model, torch.bfloat16)
        name = "lm_head.weight"
        assert worst(found, reference) < 0.02
        errors.append((found[name] - reference[name]).abs().mean() / reference[name].abs().mean())
        assert metrics["loss"] == pytest.approx(exact["loss"], abs=0.02)
    assert errors[1] < 0.8 * errors[0], errors
    model.get_output_embeddings().in_float32 = True
    assert worst(gradients(session, model)[1], reference) == 0, "in float32 it changes nothing"


@pytest.mark.parametrize("is_tiny", [True, False], ids=["tiny", "files"])
def test_the_options_of_a_model_reach_it(tmp_path, is_tiny):
    tiny_model(tiny_tokenizer(), heads=2).save_pretrained(tmp_path)
    name = {"heads": 2} if is_tiny else str(tmp_path)
    asked = config(model=name, model_options={"attn_implementation": "eager", "float32_head": True})
    with Session(asked) as session:
        model = load_model(asked, tiny_tokenizer(), session, runs=tmp_path)
        assert model.config._attn_implementation == "eager"
        assert model.get_output_embeddings().in_float32
        unknown = config(model=name, model_options={"attn_implementation": "flsh"})
        for load in (meta_model, partial(load_model, session=session)):
            with pytest.raises(DataError, match="flsh"):
                load(unknown, tiny_tokenizer(), runs=tmp_path)


def test_capped_attention_scores_are_capped_whatever_transformers_chooses(tmp_path):
    """Regression: with transformers before 5.24 a Gemma 2 was trained without its cap, unlike vLLM's."""
    made = tiny_model(architecture="gemma2", heads=2)
    made.config.attn_logit_softcapping = 1e-3  # all scores are nearly equal
    made.save_pretrained(tmp_path)
    ids = torch.arange(5, 25)[None]
    asked = config(model=str(tmp_path))
    with Session(asked) as session:
        model = load_model(asked, tiny_tokenizer(), session, runs=tmp_path)
        shape = meta_model(asked, tiny_tokenizer(), runs=tmp_path)
        assert model.config._attn_implementation == shape.config._attn_implementation == "eager"
        with torch.no_grad():
            uncapped = copy.deepcopy(model)
            for layer in uncapped.model.layers:
                layer.self_attn.attn_logit_softcapping = None
            assert (model(ids).logits - uncapped(ids).logits).abs().max() > 1e-3
        sdpa = config(model=str(tmp_path), model_options={"attn_implementation": "sdpa"})
        with pytest.raises(ConfigError, match="attn_logit_softcapping: got sdpa"):
            load_model(sdpa, tiny_tokenizer(), session, runs=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_layers_have_the_gradients_of_plain_ones(session):
    model = tiny_model(hidden_size=32, heads=2, layers=1)
    exact, reference = gradients(session, model)
    metrics, found = gradients(session, model, memory={"compile": True})
    assert worst(found, reference) < 1e-5
    assert metrics["loss"] == pytest.approx(exact["loss"], abs=1e-5)


def test_adamw_in_8_bits_follows_adamw_or_names_the_package_that_it_needs(session):
    rows, plain = random_rows(), tiny_model(hidden_size=128, heads=2)  # moments of 4096 numbers and more are in 8 bits
    optim = {"lr": 1e-3, "clip_norm": 1e9}

    def trained(name):
        actor = policy_of(copy.deepcopy(plain))
        updater = make_updater(config(optim=optim | {"name": name}), session, actor, steps=3)
        for number in (1, 2, 3):
            updater.step(losses(actor)["token"], rows, number)
        return dict(actor.model.named_parameters())

    if importlib.util.find_spec("torchao") is None:
        with pytest.raises(MissingDependencyError, match=r"optim\.name=adamw_8bit.*llmrl\[optim\]"):
            trained("adamw_8bit")
        return
    exact, found = trained("adamw"), trained("adamw_8bit")
    moved = max((value - exact[name]).abs().max() for name, value in plain.named_parameters())
    assert worst(found, exact) < 0.5 * moved


def test_a_run_with_adamw_in_8_bits_is_resumed_exactly_or_refused_before_weights_are_loaded(place):
    eight_bit = {"steps": 4, "checkpoint": {"every": 2}, "optim": {"name": "adamw_8bit"}, "model": {"hidden_size": 64}}
    if importlib.util.find_spec("torchao") is None:
        settings = place.recipe("mine", "sft", **eight_bit)
        for arguments in (["--dry-run"], ["--name", "run"]):
            place.run("sft", settings, *arguments, code=3, words=["optim.name=adamw_8bit", "llmrl[optim]"])
        assert not (place.path / "runs/run/metrics.jsonl").exists()
        return
    place.train("sft", "run", **eight_bit)
    place.cut_back("run", "two", to=2)
    place.finish(place.process("resume", "two"))  # which has not imported torchao yet
    place.same("run", "two")
