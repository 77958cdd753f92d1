"""Mixtures of experts in training: the load-balancing loss of a whole step, however the step is cut."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.objectives.base import total_loss
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.saved_models import save_tiny
from tests.support.training_rows import check_steps, config, losses, policy_of, random_rows, step, worst


def close(metrics, loss, auxiliary):
    """The metrics of a step name the loss and the balance of the batch in one piece."""
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["expert_aux_loss"] == pytest.approx(auxiliary, abs=1e-5)


def balance_of(model, rows):
    """Transformers' loss over the batch in one piece, with router logits of the rows one by one."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    by_row = [
        model.model(input_ids=ids[None], output_router_logits=True).router_logits
        for ids in rows.get(("tokens", "full"), as_list=True)
    ]
    logits = tuple(torch.cat([row[layer] for row in by_row]) for layer in range(len(by_row[0])))
    sizes = model.config
    count = getattr(sizes, "num_local_experts", None) or sizes.num_experts
    return load_balancing_loss_func(logits, count, sizes.num_experts_per_tok)


def add_routes(rows):
    """Two of four experts in each of two layers, at random, for every token but the last of a row."""
    generator = torch.Generator().manual_seed(1)
    routes = []
    for ids in rows.get(("tokens", "full"), as_list=True):
        drawn = torch.rand(len(ids), 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.int16)
        drawn[-1] = -1
        routes.append(drawn)
    log_probs = {"full": rows.get(("log_probs", "full"), as_list=True), "routes": routes}
    rows.set("log_probs", LogProbs.from_rows(log_probs))


def expected(model, rows, coefficient, name="token"):
    """The loss and its gradients in one piece: the objective, and the balance by Transformers' own function."""
    plain = copy.deepcopy(model)
    auxiliary = balance_of(plain, rows)
    loss = total_loss(losses(policy_of(plain))[name](rows)) + coefficient * auxiliary
    loss.backward()
    return loss.item(), auxiliary.item(), {key: p.grad for key, p in plain.named_parameters()}


def saved(folder, family, tied):
    """A mixture that is read from files."""
    save_tiny(folder, tied=tied, architecture=family, layers=2)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


# In one micro-batch, in several, and in several that are computed twice.
CUTS = ((10_000, "off"), (64, "off"), (64, "on"))


@pytest.mark.parametrize(
    ("family", "tied", "packing"),
    [
        *(("qwen2_moe", True, "off"), ("qwen2_moe", False, "on")),
        *(("qwen3_moe", True, "on"), ("qwen3_moe", False, "off"), ("mixtral", False, "on")),
    ],
)
def test_the_auxiliary_loss_of_steps_in_parts_is_that_of_the_batch_in_one_piece(
    session, tmp_path, family, tied, packing
):
    model, rows = saved(tmp_path, family, tied), random_rows()
    for parameter in model.parameters():
        if parameter.shape == (4, 32):
            parameter.data.mul_(20)  # routers that prefer some experts
    loss, auxiliary, gradients = expected(model, rows, 0.5)
    without = expected(model, rows, 0.0)[2]
    assert worst(without, gradients) > 1e-3, "the loss must show in the gradients"
    for budget, checkpointing in CUTS:
        options = {"packing": packing, "memory": {"checkpointing": checkpointing}}
        settings = config(tokens_per_microbatch=budget, model_options={"router_aux_loss": 0.5}, **options)
        metrics = check_steps(
            session, settings, copy.deepcopy(model), rows, lambda plain: expected(plain, rows, 0.5)[::2]
        )
        close(metrics, loss, auxiliary)
        assert 1 < metrics["expert_load_max"] <= 2  # two of four experts per token


def test_the_weight_is_that_of_the_model_unless_it_is_given_and_a_dense_model_has_none(session, tmp_path):
    model, rows = saved(tmp_path, "mixtral", True), random_rows()
    model.config.router_aux_loss_coef = 0.3
    for given, weight in ((None, 0.3), (0.0, 0.0), (0.7, 0.7)):
        settings = config(model_options={"router_aux_loss": given})
        loss, auxiliary, _ = expected(model, rows, weight)
        in_one = partial(expected, rows=rows, coefficient=weight)
        metrics = check_steps(session, settings, copy.deepcopy(model), rows, lambda plain, one=in_one: one(plain)[::2])
        close(metrics, loss, auxiliary)  # measured also where it is not trained
    metrics, _ = step(config(), session, tiny_model(hidden_size=32, heads=2), rows)
    assert not metrics.keys() & {"expert_aux_loss", "expert_load_max"}


@pytest.mark.parametrize(
    ("family", "tied", "packing"), [("qwen2_moe", True, "on"), ("qwen2_moe", False, "off"), ("mixtral", True, "on")]
)
def test_steps_that_replay_routes_in_parts_are_those_of_the_batch_in_one_piece(
    session, tmp_path, family, tied, packing
):
    model, rows = saved(tmp_path, family, tied), random_rows()
    plain = expected(model, rows, 0.0)[2]
    add_routes(rows)
    gradients = expected(model, rows, 0.0)[2]
    assert worst(plain, gradients) > 1e-4, "the routes must show in the gradients"
    balance = set()
    for budget, checkpointing in CUTS:
        for weight in (0.0, 0.5):
            options = {"memory": {"checkpointing": checkpointing}, "model_options": {"router_aux_loss": weight}}
            settings = config(tokens_per_microbatch=budget, packing=packing, **options)
            if weight:
                metrics, _ = step(settings, session, copy.deepcopy(model), rows)
            else:
                one = lambda plain: expected(plain, rows, 0.0)[::2]  # noqa: E731
                metrics = check_steps(session, settings, copy.deepcopy(model), rows, one)
            balance.add((round(metrics["expert_aux_loss"], 4), round(metrics["expert_differing"], 4)))
            lengths = [len(row) for row in rows.get(("tokens", "full"), as_list=True)]
            assert metrics["expert_replayed"] == pytest.approx(1 - len(lengths) / sum(lengths))
    assert len(balance) == 1, "however a step is cut"
    assert 0.5 < balance.pop()[1] < 1  # two of four experts at random: five in six


RANKS = """
import copy
from llmrl.testing import tiny_model
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from tests.recipes.test_mixtures import add_routes, expected
from tests.support.training_rows import check_steps, config, random_rows

def main():
    rows = random_rows()
    for mode in ("ddp", "fsdp2"):
        shared = {"parallel": {"mode": mode}, "tokens_per_microbatch": 64}
        settings = config(**shared, model_options={"router_aux_loss": 0.5})
        with Session(settings) as session:
            for family in ("qwen2_moe", "qwen3_moe", "mixtral"):
                for name in ("token", "sft"):
                    model = tiny_model(architecture=family, hidden_size=32, heads=2)
                    batch = rows if name == "token" else rows[:1]  # which leaves one rank without a row
                    auxiliary = expected(model, batch, 0.5, name)[1]
                    mine, _ = deal_batch(session, batch, attention_share(model), everywhere=True)
                    one = lambda plain: expected(plain, batch, 0.5, name)[::2]
                    metrics = check_steps(session, settings, model, mine, one, name, loss_bound=2e-6)
                    assert abs(metrics["expert_aux_loss"] - auxiliary) < 1e-5, (mode, family, metrics, auxiliary)
            model, routed = tiny_model(architecture="qwen3_moe", hidden_size=32, heads=2), random_rows()
            add_routes(routed)
            mine, _ = deal_batch(session, routed, attention_share(model), everywhere=True)
            settings = config(**shared, model_options={"router_aux_loss": 0.0}, memory={"checkpointing": "on"})
            metrics = check_steps(session, settings, model, mine, lambda plain: expected(plain, routed, 0.0)[::2])
            assert 0.5 < metrics["expert_differing"] < 1, metrics

main()
"""


@pytest.mark.slow
def test_the_auxiliary_loss_over_ranks_is_that_of_one_process(place):
    place.module("balance", RANKS)
    place.ranks(module="balance")


@pytest.fixture
def mixture(place):
    """The folder of a mixture."""
    for part in (tiny_tokenizer(), tiny_model(architecture="qwen3_moe", hidden_size=32, heads=2)):
        part.save_pretrained(place.path / "mixture")
    return str(place.path / "mixture")


def test_a_run_replays_the_routes_that_its_engine_reports(place, mixture):
    for asked in ("auto", "off"):
        rollout = {"routing_replay": asked}
        place.train("grpo", asked, model=mixture, rollout=rollout, steps=1, updates_per_step=2, grpo={"kl": 0.1})
    [replayed], [own] = place.steps("auto"), place.steps("off")
    assert 0.9 < replayed["router/replayed_frac"] < 1, "all but the last token of each row"
    assert replayed["router/differ_frac"] < 0.02, "before the first update the trainer chooses as the engine did"
    assert replayed["mismatch/logp_abs_max"] < 1e-4
    assert "router/replayed_frac" not in own
    assert own["reward/mean"] == replayed["reward/mean"]


def test_a_replay_by_compiled_layers_is_refused_by_the_plan(place, mixture):
    overrides = ("rollout.routing_replay=on", "memory.compile=true")
    place.plan("grpo", *overrides, code=2, words=["compiled layers do not replay"], model=mixture)
