"""Mixtures of experts over vLLM: what they sample, and that new weights reach the experts as they reach the rest."""

from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.modules.llm.log_probs import token_logprobs
from llmrl.modules.llm.routers import Routers
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.vllm import stepped, trainer_log_probs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]


def mixture(architecture, **settings):
    model = tiny_model(tiny_tokenizer(), architecture=architecture, heads=2)
    if settings:
        model.config.update(settings)
        model = AutoModelForCausalLM.from_config(model.config)
    return model.eval()


def difference(model, engine):
    """The largest between what an engine and a trainer's model say of what the engine draws."""
    drawn = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    rows = zip(drawn.log_probs, trainer_log_probs(model, PROMPTS, drawn), strict=True)
    return max((said - right).abs().max().item() for said, right in rows)


# vLLM 0.32 on a CPU packs experts once, and fills those of 48 up to 64: a reload by itself would leave them unpacked.
@pytest.mark.parametrize("own_process", [False, True], ids=["here", "own process"])
@pytest.mark.parametrize(
    ("architecture", "settings"), [("mixtral", {}), ("qwen3_moe", {"moe_intermediate_size": 48})], ids=str
)
def test_new_weights_reach_the_experts(architecture, settings, own_process):
    torch.manual_seed(0)
    model = mixture(architecture, **settings)
    with closing(VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128, own_process=own_process)) as engine:
        assert difference(model, engine) < 1e-4
        for version in (1, 2):
            assert difference(stepped(model, version, size=0.05), engine) > 0.1, "it has the old weights"
            engine.update_weights(model.state_dict(), version=version)
            assert difference(model, engine) < 1e-4


def test_an_update_that_broke_off_leaves_experts_that_a_whole_one_can_replace():
    model = mixture("mixtral")
    with closing(VLLMEngine(model, eos_token_ids=(), seed=0, max_model_len=128)) as engine:
        weights = stepped(model, size=0.05).state_dict()

        def broken():
            yield from list(weights.items())[:5]
            raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="the trainer died"):
            engine.core.call_workers("llmrl_load_weights", float("inf"), weights=broken())
        engine.update_weights(weights, version=1)
        assert difference(model, engine) < 1e-4


def test_replayed_routes_bring_the_trainer_closer_to_an_engine_that_rounds():
    """An engine in bfloat16 over a model in float32: near a tie its routers choose other experts."""
    torch.manual_seed(0)
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 3, "layer_types": None}
    model = mixture("qwen3_moe", **sizes)
    for name, parameter in model.named_parameters():
        if "down_proj" in name:
            parameter.data.mul_(30)  # experts that differ
    shared = torch.arange(5, 60)
    prompts = [*PROMPTS, shared, shared]
    settings = {"eos_token_ids": (), "seed": 0, "max_model_len": 128, "dtype": "bfloat16", "own_process": True}
    with closing(VLLMEngine(model, enable_return_routed_experts=True, **settings)) as engine:
        for version in range(2):
            own, replayed, differing = [], [], []
            for _ in range(2):  # the second time prompts are in the prefix cache
                drawn = engine.generate(prompts, SamplingParams(max_new_tokens=40))
                for prompt, ids, said, routes in zip(prompts, drawn.ids, drawn.log_probs, drawn.routes, strict=True):
                    whole = torch.cat([prompt, ids])
                    assert routes.shape == (len(whole), 3, 4)
                    assert (routes[:-1] >= 0).all(), "of every token that was read, prompts included"
                    assert (routes[-1] == -1).all()
                    everywhere = torch.ones(1, len(whole), dtype=torch.bool)
                    with torch.no_grad(), Routers.of(model).recording():
                        own_scores = token_logprobs(model, whole[None], everywhere, everywhere).log_probs
                        chosen = Routers.of(model).choices()
                    differing.append((chosen[:-1].sort(-1).values != routes[:-1].sort(-1).values).any(-1))
                    with torch.no_grad():
                        scores = token_logprobs(model, whole[None], everywhere, everywhere, routes=routes[None])
                    own.append((own_scores[0, len(prompt) :] - said).abs())
                    replayed.append((scores.log_probs[0, len(prompt) :] - said).abs())
            assert torch.equal(drawn.routes[2][:54], drawn.routes[3][:54]), "one prompt, one set of routes"
            share = torch.cat(differing).float().mean().item()
            means = [torch.cat(values).mean().item() for values in (own, replayed)]
            print(f"version {version}: {share:.2%} differ; mean difference {means[0]:.5f}, replayed {means[1]:.5f}")
            assert 0.001 < share < 0.2
            assert means[1] < 0.7 * means[0]
            engine.update_weights(stepped(model, version, size=0.01).state_dict(), version=version + 1)
        assert engine.score([prompts[0]])[0].shape == prompts[0].shape
