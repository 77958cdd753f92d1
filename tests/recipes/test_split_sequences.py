"""Sequences split over ranks: log-probs, losses and gradients of one process, and the settings that cannot be."""

from __future__ import annotations

import pytest
import torch

from llmrl.modules.llm.sequence_split import why_not_split
from llmrl.testing import tiny_model
from llmrl.train.models.shape import model_shape
from llmrl.train.planning.memory import plan_memory
from llmrl.train.settings import SFTConfig

RANKS = """
import copy
import sys
import torch
from llmrl.testing import tiny_model
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from llmrl.train.updater import make_updater
from tests.support.training_rows import check_steps, config, in_one_piece, losses, policy_of, random_rows, worst
from tests.recipes.test_mixtures import add_routes, expected as expected_mixture

LENGTHS = [30, 27, 26, 23, 5, 4, 6, 3]  # of which few are multiples of the ranks

def check(session, settings, model, rows, name, expected, bound=1e-5):
    mine, _ = deal_batch(session, rows, attention_share(model), everywhere=True)
    assert max(value.abs().max() for value in expected(copy.deepcopy(model))[1].values()) > 1e-3
    return check_steps(session, settings, model, mine, expected, name, bound=bound)

def check_scores(session, settings, model, rows, routes=None):
    plain = copy.deepcopy(model)
    session.split.prepare(model)
    for side in ("right", "left"):
        ids = rows.get(("tokens", "full"), as_list=True)
        width = max(map(len, ids))
        pads = [(width - len(row)) for row in ids]
        pads = [(0, pad) if side == "right" else (pad, 0) for pad in pads]
        ids_BT = torch.stack([torch.nn.functional.pad(row, pad) for row, pad in zip(ids, pads)])
        mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), pad) for row, pad in zip(ids, pads)]).bool()
        options = {"entropy": True}
        if routes is not None:
            padded = [torch.nn.functional.pad(row, (0, 0, 0, 0, *pad), value=-1) for row, pad in zip(routes, pads)]
            options["routes"] = torch.stack(padded)
        with torch.no_grad():
            expected = policy_of(plain).token_scores(ids_BT, mask, mask, **options)
            actor = policy_of(model)
            unsplit = actor.token_scores(ids_BT, mask, mask, **options)
            with session.split_sequences():
                found = actor.token_scores(ids_BT, mask, mask, **options)
        for got in (found, unsplit):
            assert (got.log_probs - expected.log_probs).abs().max() < 1e-5, side
            assert (got.entropy - expected.entropy).abs().max() < 1e-5
            assert torch.equal(got.top1, expected.top1)

def check_replay(session, settings):
    # each rank sends the tokens of its slice to the experts that are given for them
    model, rows = tiny_model(architecture="qwen3_moe", hidden_size=32, heads=4), random_rows(LENGTHS)
    own = expected_mixture(model, rows, 0.0)[2]
    add_routes(rows)
    gradients = expected_mixture(model, rows, 0.0)[2]
    assert worst(own, gradients) > 1e-3, "the routes must show in the gradients"
    check_scores(session, settings, copy.deepcopy(model), rows, rows.get(("log_probs", "routes"), as_list=True))
    replayed = lambda m: expected_mixture(m, rows, 0.0)[::2]
    metrics = check(session, settings, model, rows, "token", replayed, bound=1e-6)
    assert abs(metrics["expert_replayed"] - (1 - len(LENGTHS) / sum(LENGTHS))) < 1e-6, metrics
    assert 0.5 < metrics["expert_differing"] < 1, metrics

def main():
    size = int(sys.argv[1])
    rows = random_rows(LENGTHS)
    for mode in sys.argv[2:]:
        shared = {"parallel": {"mode": mode, "context": size}, "tokens_per_microbatch": 64}
        shared["memory"] = {"checkpointing": "on"}
        settings = config(**shared)
        with Session(settings) as session:
            families = {"qwen2": ("token", "sequence", "group", "sft"), "gemma3_text": ("token",), "gpt2": ("sft",)}
            for family, names in families.items():  # half as many key heads, a window, learned positions
                model = tiny_model(architecture=family, hidden_size=32, heads=4)
                check_scores(session, settings, copy.deepcopy(model), rows)
                for name in names:
                    check(session, settings, copy.deepcopy(model), rows, name, lambda m: in_one_piece(m, rows, name))
            few = rows[:1]  # for one group only
            check(session, settings, copy.deepcopy(model), few, "sft", lambda m: in_one_piece(m, few, "sft"))
            model = tiny_model(architecture="qwen3_moe", hidden_size=32, heads=4)
            model.config.router_aux_loss_coef = 0.5
            auxiliary = expected_mixture(model, rows, 0.5)[1]
            metrics = check(session, settings, model, rows, "token", lambda m: expected_mixture(m, rows, 0.5)[::2])
            assert abs(metrics["expert_aux_loss"] - auxiliary) < 1e-5
            check_replay(session, config(**shared, model_options={"router_aux_loss": 0.0}))
            plain = tiny_model(hidden_size=32, heads=4)
            model = copy.deepcopy(plain)
            session.split.prepare(model)
            model = session.shard(model) if session.sharded else model
            actor, (mine, _) = policy_of(model), deal_batch(session, rows, 0.0, everywhere=True)
            updater = make_updater(settings, session, actor, steps=1)
            loss = losses(actor)["token"]
            updater.add_proximal(loss, mine)
            alone = losses(policy_of(plain))["token"].proximal_log_probs(mine)
            got = mine.get(("proximal_log_probs", "full"), as_list=True)
            assert all((own - row[: len(own)]).abs().max() < 1e-5 for own, row in zip(got, alone))
            updater.step(loss, mine, 1)
            speed = updater.speed(1.0)
            assert 0 <= speed["perf/padding_frac"] < 0.3, speed
            assert session.gather([session.group]) == [rank // size for rank in range(session.world_size)]

main()
"""


@pytest.mark.slow
def test_split_sequences_have_the_log_probs_losses_and_gradients_of_one_process(place):
    place.module("split", RANKS)
    place.ranks("2", "ddp", "fsdp2", ranks=4, module="split")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_run_with_split_sequences_has_the_numbers_of_one_process(place, recipe):
    own = {"grpo": {"kl": 0.1}} if recipe == "grpo" else {"batch_size": 9, "eval": {"dataset": "sums", "rows": 5}}
    changes = {"steps": 3, "optim": {"lr": 1e-2, "warmup": 1}, "tokens_per_microbatch": 150, **own}
    overrides, words = ("parallel.context=2", "parallel.mode=fsdp2"), ["2 processes, FSDP2, sequences split over 2"]
    place.train_as_one_and_as_ranks(recipe, *overrides, step=3, words=words, **changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "size", "words"),
    [
        ("qwen2", {}, 4, None),
        ("qwen2", {}, 3, "4 attention heads and 2 key/value heads cannot be shared by 3 ranks"),
        ("qwen2", {"_attn_implementation": "eager"}, 2, "its attention is eager, not sdpa"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, 2, "linear_attention"),
    ],
)
def test_what_a_model_must_have_for_its_sequences_to_be_split(architecture, changes, size, words):
    model = tiny_model(architecture=architecture, hidden_size=32, heads=4)
    for name, value in changes.items():
        setattr(model.config, name, value)
    fault = why_not_split(model, size)
    assert fault is None if words is None else words in fault


def test_a_model_that_reads_images_is_not_split():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))
    assert why_not_split(model, 2) == "it reads more than text"


def test_a_split_that_divides_the_gpus_is_planned_for(place):
    place.plan("sft", "parallel.context=2", "--gpu", "H100:8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_process_on_a_gpu_splits_nothing(place):
    count = torch.cuda.device_count()
    place.run("sft", place.recipe("sums", "sft"), f"parallel.context={2 * count}", code=2, words=["parallel.context"])


def test_the_memory_plan_divides_what_is_kept_of_a_long_row_by_the_ranks_that_share_it():
    shape = model_shape(tiny_model())
    kept = {}
    for size in (1, 2, 4):
        settings = SFTConfig(model={}, data={"path": "sums"}, max_length=40_000, parallel={"context": size})
        plan = plan_memory(settings, shape, num_gpus=8, low_precision=False, checkpointing=False)
        kept[size] = plan.training["activations"]
    assert kept[1] == pytest.approx(2 * kept[2]) == pytest.approx(4 * kept[4])
