"""Mixtures of experts in training: the load-balancing loss of a whole step, however the step is cut."""

from __future__ import annotations

import copy

import pytest
import torch

from llmrl.objectives.base import total_loss
from llmrl.testing import tiny_model
from llmrl.train.distributed import Session
from tests.support.training_rows import config, losses, policy_of, random_rows, step, worst


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


def expected(model, rows, coefficient, name="token"):
    """The loss and its gradients in one piece: the objective, and the balance by Transformers' own function."""
    plain = copy.deepcopy(model)
    auxiliary = balance_of(plain, rows)
    loss = total_loss(losses(policy_of(plain))[name](rows)) + coefficient * auxiliary
    loss.backward()
    return loss.item(), auxiliary.item(), {key: p.grad for key, p in plain.named_parameters()}


@pytest.fixture(scope="module")
def session():
    with Session(config()) as session:
        yield session


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_the_auxiliary_loss_of_a_step_in_parts_is_that_of_the_batch_in_one_piece(
    session, family, checkpointing, packing
):
    model, rows = tiny_model(architecture=family, hidden_size=32, heads=2), random_rows()
    for parameter in model.parameters():
        if parameter.shape == (4, 32):
            parameter.data.mul_(20)  # routers that prefer some experts
    loss, auxiliary, gradients = expected(model, rows, 0.5)
    without = expected(model, rows, 0.0)[2]
    assert worst(without, gradients) > 1e-3, "the loss must show in the gradients"
    for budget in (10_000, 64):  # one micro-batch, and several
        settings = config(
            tokens_per_microbatch=budget,
            packing=packing,
            model_options={"router_aux_loss": 0.5},
            memory={"checkpointing": checkpointing},
        )
        metrics, found = step(settings, session, copy.deepcopy(model), rows)
        assert worst(found, gradients) < 1e-6
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["expert_aux_loss"] == pytest.approx(auxiliary, abs=1e-5)
        assert 1 < metrics["expert_load_max"] <= 2  # two of four experts per token


def test_the_weight_is_that_of_the_model_unless_it_is_given_and_a_dense_model_has_none(session):
    model, rows = tiny_model(architecture="mixtral", hidden_size=32, heads=2), random_rows()
    model.config.router_aux_loss_coef = 0.3
    for given, weight in ((None, 0.3), (0.0, 0.0), (0.7, 0.7)):
        settings = config(model_options={"router_aux_loss": given})
        metrics, found = step(settings, session, copy.deepcopy(model), rows)
        loss, auxiliary, gradients = expected(model, rows, weight)
        assert worst(found, gradients) < 1e-6
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["expert_aux_loss"] == pytest.approx(auxiliary, abs=1e-5), "measured also where it is not trained"
    metrics, _ = step(config(), session, tiny_model(hidden_size=32, heads=2), rows)
    assert not metrics.keys() & {"expert_aux_loss", "expert_load_max"}


RANKS = """
import copy
from llmrl.testing import tiny_model
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from tests.recipes.test_mixtures import expected
from tests.support.training_rows import config, random_rows, step, worst

def main():
    rows = random_rows()
    for mode in ("ddp", "fsdp2"):
        settings = config(
            parallel={"mode": mode}, tokens_per_microbatch=64, model_options={"router_aux_loss": 0.5}
        )
        with Session(settings) as session:
            for family in ("qwen2_moe", "qwen3_moe", "mixtral"):
                for name in ("token", "sft"):
                    model = tiny_model(architecture=family, hidden_size=32, heads=2)
                    loss, auxiliary, gradients = expected(model, rows, 0.5, name)
                    batch = rows if name == "token" else rows[:3]
                    if name == "sft":  # one micro-batch on each rank, and one rank has no row
                        loss, auxiliary, gradients = expected(model, rows[:1], 0.5, name)
                        batch = rows[:1]
                    mine, _ = deal_batch(session, batch, attention_share(model), everywhere=True)
                    model = session.shard(model) if session.sharded else model
                    metrics, found = step(settings, session, model, mine, name)
                    error = worst(found, gradients)
                    assert error < 1e-6, (mode, family, name, error)
                    assert abs(metrics["loss"] - loss) < 2e-6, (mode, family, name, metrics["loss"], loss)
                    assert abs(metrics["expert_aux_loss"] - auxiliary) < 1e-5, (mode, family, metrics, auxiliary)

main()
"""


@pytest.mark.slow
def test_the_auxiliary_loss_over_ranks_is_that_of_one_process(place):
    place.module("balance", RANKS)
    result = place.finish(place.process(ranks=2, module="balance"))
    assert result.code == 0, result.err


def test_a_weight_for_a_model_without_experts_is_an_error_of_the_plan(place, sft):
    settings = place.recipe("sums", sft, model_options={"router_aux_loss": 0.1})
    result = place.run("sft", settings, "--dry-run")
    assert result.code == 2
    assert "router_aux_loss must be 0 or null" in result.err
    assert "Qwen2ForCausalLM" in result.err
