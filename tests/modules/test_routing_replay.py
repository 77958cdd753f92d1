"""Routing replay: the trainer's forward pass with the experts that an engine chose, the gates by its own routers."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from llmrl.envs.llm import ChatEnv
from llmrl.errors import ShapeError
from llmrl.modules.llm import TransformersWrapper
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.modules.llm.engines.base import StopReason
from llmrl.modules.llm.engines.vllm.answer import Answer, as_generation
from llmrl.modules.llm.engines.vllm.core import Completion
from llmrl.modules.llm.log_probs import token_logprobs
from llmrl.modules.llm.routers import Routers, router_modules, why_not_replayed
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.recipes.test_mixtures import add_routes
from tests.support.training_rows import losses, policy_of, random_rows

FAMILIES = ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3"]
LENGTHS = [9, 4, 6, 2]


def mixture(family: str):
    """Two layers of four experts, two per token, whose routers prefer some; of deepseek_v3 the first layer is dense."""
    if family in ("qwen2_moe", "qwen3_moe", "mixtral"):
        model = tiny_model(architecture=family, hidden_size=32, heads=2)
    else:
        sizes = {"num_experts": 4} if family == "olmoe" else {"num_local_experts": 4, "head_dim": 16}
        if family == "deepseek_v3":
            sizes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
            sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
            sizes |= {"v_head_dim": 16, "first_k_dense_replace": 1}
        config = AutoConfig.for_model(
            family,
            **{"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, **sizes},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for module in router_modules(model):
        module.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    return model


def batch():
    ids = torch.randint(3, 400, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def scores(model, routes=None, packing="off"):
    """Log-probs of a batch, and the gradients of a sum over them."""
    ids, attention = batch()
    model.zero_grad()
    found = token_logprobs(model, ids, attention, attention, packing=packing, routes=routes).log_probs
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    return found.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def own_routes(model):
    ids, attention = batch()
    with Routers.of(model).recording():
        model(input_ids=ids, attention_mask=attention)
        return Routers.of(model).choices().unflatten(0, ids.shape)


def other_routes(model):
    """Two different experts for each token, drawn at random; none in layers without a router."""
    own = own_routes(model)
    drawn = torch.rand(*own.shape[:3], 4, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :2]
    return torch.where(own < 0, own, drawn.to(own.dtype))


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_a_models_own_choices_changes_no_bit_of_its_scores_and_gradients(family, packing):
    model = mixture(family)
    assert why_not_replayed(model) is None
    if family in ("gpt_oss", "deepseek_v3") and packing == "on":
        packing = "auto"
    expected, gradients = scores(model, packing=packing)
    found, replayed = scores(model, own_routes(model), packing)
    assert torch.equal(found, expected)
    assert all(torch.equal(replayed[name], value) for name, value in gradients.items())


def gates_by_hand(family, router, logits, routes):
    """The weights of these experts as the papers of the families have them."""
    chosen = logits.gather(-1, routes)
    if family in ("granitemoe", "gpt_oss"):  # softmax over the chosen ones
        return chosen.softmax(-1)
    if family == "deepseek_v3":  # sigmoids, whose sum is made 1, scaled
        chosen = chosen.sigmoid()
        return chosen / chosen.sum(-1, keepdim=True) * router.routed_scaling_factor
    probs = logits.softmax(-1).gather(-1, routes)
    if family == "mixtral" or router.norm_topk_prob:
        return probs / probs.sum(-1, keepdim=True)
    return probs


@pytest.mark.parametrize("family", FAMILIES)
def test_other_choices_equal_a_forward_pass_written_by_hand(family, monkeypatch):
    model = mixture(family)
    routes = other_routes(model)
    found, gradients = scores(model, routes)
    plain = mixture(family)
    scores(plain)  # which tries its head, on a few tokens of its own
    for layer, router in zip(Routers.of(model).layers, router_modules(plain), strict=True):
        routes_NK = routes[:, :, layer].flatten(0, 1).long()
        indices_first = not router(torch.zeros(1, router.weight.shape[-1]))[0].is_floating_point()

        def forward(hidden, router=router, routes_NK=routes_NK, indices_first=indices_first):
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
            parts = logits, gates_by_hand(family, router, logits, routes_NK), routes_NK
            return parts[::-1] if indices_first else parts

        monkeypatch.setattr(router, "forward", forward)
    expected, by_hand = scores(plain)
    assert (found - expected).abs().max() < 1e-5
    assert max((gradients[name] - value).abs().max() for name, value in by_hand.items()) < 1e-5
    routers = [value for name, value in gradients.items() if "gate.weight" in name or "router" in name]
    assert any(value.abs().max() > 1e-6 for value in routers), "the gates of replayed experts train the routers"
    assert (found - scores(model)[0]).abs().max() > 1e-3, "other experts give other scores"


def test_a_token_without_routes_is_routed_by_the_model():
    model = mixture("qwen3_moe")
    own, other = own_routes(model), other_routes(model)
    some = torch.where(torch.arange(own.shape[1])[:, None, None] < 3, own, -1)
    assert torch.equal(scores(model, some)[0], scores(model)[0])
    mixed = torch.where(torch.arange(own.shape[1])[:, None, None] < 3, -1, other)
    expected, found = scores(model)[0], scores(model, mixed)[0]
    assert torch.equal(found[:, :4], expected[:, :4])  # token 3 is scored by what read token 2
    assert not torch.equal(found[:, 4:], expected[:, 4:])


def test_routes_of_another_model_are_refused():
    model = mixture("mixtral")
    routes = own_routes(model)
    for wrong in (routes[:, :, :1], routes[:, 1:]):
        with pytest.raises(ShapeError, match="from another model, or from other tokens"):
            scores(model, wrong)
    with pytest.raises(ShapeError, match="must choose its experts by one topk"):
        scores(model, routes[..., :1])
    with pytest.raises(ShapeError, match="routes must be"):
        scores(tiny_model(hidden_size=32, heads=2), routes)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_the_transformers_engine_reports_the_routes_by_which_it_drew(family):
    model = mixture(family)
    engine = TransformersEngine(model, eos_token_ids=range(3, 100), pad_token_id=0, seed=0)
    engine.reports_routes = True
    same = torch.tensor([20, 21, 22])
    prompts = [same, torch.tensor([30, 31, 32, 33, 34]), same, torch.tensor([40])]
    drawn = engine.generate(prompts, SamplingParams(max_new_tokens=12))
    assert len({len(ids) for ids in drawn.ids}) > 1, "rows end at different steps"
    for prompt, ids, log_probs, routes in zip(prompts, drawn.ids, drawn.log_probs, drawn.routes, strict=True):
        whole = torch.cat([prompt, ids])
        with Routers.of(model).recording():
            model(input_ids=whole[None])
            expected = Routers.of(model).choices()
        assert routes.shape == (len(whole), 2, 2)
        assert routes.dtype == torch.int16
        assert torch.equal(routes[:-1].sort(-1).values, expected[:-1].sort(-1).values)
        assert (routes[-1] == -1).all()
        moved = copy.deepcopy(model)  # whose routers would choose others
        for module in router_modules(moved):
            module.weight.data.neg_()
        everywhere = torch.ones(1, len(whole), dtype=torch.bool)
        given = token_logprobs(moved, whole[None], everywhere, everywhere, routes=routes[None]).log_probs
        assert given.shape == (1, len(whole))
        by_engine = token_logprobs(model, whole[None], everywhere, everywhere, routes=routes[None]).log_probs
        assert torch.allclose(by_engine[0, len(prompt) :], log_probs, atol=1e-5)


def test_an_answer_in_pieces_keeps_the_routes_by_which_each_id_was_read_first():
    def piece(ids, num_read, expert):
        routes = torch.full((num_read, 1, 2), expert, dtype=torch.int16)
        return Completion(torch.tensor(ids), torch.zeros(len(ids)), StopReason.LENGTH, routes=routes)

    first, second = Answer([1, 2, 3], 0), Answer([1], 0)
    first.add(piece([4, 5], 4, 7), version=0)
    first.add(piece([6], 5, 8), version=1)  # it has read all again, by newer weights
    second.add(Completion(torch.tensor([9]), torch.zeros(1), StopReason.EOS), version=0)
    drawn = as_generation([first, second], 1, truncated=False, mixed=True)
    assert drawn.routes[0][:, 0, 0].tolist() == [7, 7, 7, 7, 8, -1]
    assert drawn.routes[1][:, 0, 0].tolist() == [-1, -1]
    assert as_generation([second], 1, truncated=False, mixed=False).routes is None


@pytest.mark.parametrize("pad_output", [False, True])
def test_routes_of_a_turn_stay_while_the_conversation_goes_on(pad_output):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, architecture="qwen3_moe", hidden_size=32, heads=2)
    options = {"max_new_tokens": 5, "seed": 0}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=options, pad_output=pad_output)
    policy.engine.reports_routes = True
    env = ChatEnv(batch_size=(2,), tokenizer=tokenizer)
    td = env.reset(TensorDict(query=["Hi", "What is 2 + 2?"], batch_size=[2]))
    first = env.step(policy(td))
    before = [row.clone() for row in first.get(("log_probs", "routes"), as_list=True)]
    with torch.no_grad():
        for module in router_modules(model):
            module.weight.neg_()  # by which every token is sent elsewhere
    second = policy(env.step_mdp(first))
    for row, (old, new) in enumerate(zip(before, second.get(("log_probs", "routes"), as_list=True), strict=True)):
        ids = second.get(("tokens", "full"), as_list=True)[row]
        assert new.shape == (len(ids), 2, 2)
        if pad_output:
            real = first["masks"].all_attention_mask[row]
            old, new = old[real], new[second["masks"].all_attention_mask[row]]
        assert torch.equal(new[: len(old) - 1], old[:-1])
        assert (new[len(old) - 1 : -1] >= 0).all(), "the last id of the first turn was read by the second"
        assert (new[-1] == -1).all()


def test_a_loss_replays_the_routes_that_are_in_its_batch():
    rows = random_rows()
    model = tiny_model(architecture="qwen3_moe", hidden_size=32, heads=2)
    before = losses(policy_of(model))["token"](rows).mismatch_mean
    add_routes(rows)
    assert not torch.equal(losses(policy_of(model))["token"](rows).mismatch_mean, before)
