"""Rows dealt over the ranks by cost: even parts, the gradients of one process."""

from __future__ import annotations

import random

import pytest

from llmrl.testing import tiny_model
from llmrl.train.dealing import attention_share, deal, imbalance, row_costs


def step_lengths(ranks, generator, kept=1.0):
    """Lengths of the answers of a step, a few very long: 4 groups of 8 for each rank, of which a share is kept."""
    groups = [[min(8192, round(generator.lognormvariate(6, 1))) for _ in range(8)] for _ in range(4 * ranks)]
    owners = [group // 4 for group in range(len(groups))]
    chosen = [index for index in range(len(groups)) if generator.random() < kept]
    lengths, own = [], [[] for _ in range(ranks)]
    for index in chosen:
        for length in groups[index]:
            own[owners[index]].append(len(lengths))
            lengths.append(length)
    return lengths, own


@pytest.mark.parametrize(("ranks", "kept"), [(8, 1.0), (8, 0.6), (32, 1.0)])
def test_the_slowest_rank_is_within_a_twentieth_of_the_mean(ranks, kept):
    """7B, 28 layers of 3584. Without dealing it takes 1.4 times the mean and more."""
    share = 28 * 3584 / 7.6e9
    generator, before, after = random.Random(0), [], []
    for _ in range(50):
        lengths, own = step_lengths(ranks, generator, kept)
        costs = row_costs(lengths, share)
        before.append(imbalance(costs, own))
        after.append(imbalance(costs, deal(costs, ranks)))
    assert sum(after) / len(after) < 1.05
    assert sum(before) / len(before) > 1.25


def test_every_row_is_dealt_once_and_too_few_rows_leave_ranks_without_any():
    ranks = deal([3.0, 1.0, 2.0, 2.0, 5.0], 3)
    assert sorted(row for rows in ranks for row in rows) == [0, 1, 2, 3, 4]
    assert deal([1.0], 3) == [[0], [], []]
    assert deal([], 2) == [[], []]
    assert imbalance([], [[], []]) == 1.0
    # 10 tokens and 100 squared times .01; the attention of a small model with long rows is a part of its cost.
    assert row_costs([10, 0], 0.01) == [11.0, 0.0]


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "qwen3_moe"])
def test_the_share_of_attention_is_over_what_a_token_is_multiplied_with(architecture):
    model = tiny_model(architecture=architecture, hidden_size=64, layers=2, heads=2)
    config, multiplied = model.config, model.lm_head.weight.numel()
    for name, weight in model.named_parameters():
        if ".layers." in name or ".h." in name:
            of_expert = weight.ndim == 3  # those of all experts in one tensor, of which each token takes some
            chosen = config.num_experts_per_tok / config.num_experts if of_expert else weight.ndim == 2
            multiplied += weight.numel() * chosen
    width = config.num_attention_heads * getattr(config, "head_dim", 32)
    assert attention_share(model) == pytest.approx(2 * width / multiplied)


GRADIENTS = """
import torch
from llmrl.testing import tiny_model, tiny_processor
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from tests.support.images import image_rows
from tests.support.training_rows import check_steps, config, in_one_piece, random_rows

SMALL, WIDE = (16, 24), (40, 20)
IMAGES = [  # of each row
    [(SMALL,), (SMALL, WIDE), ((8, 60),), ((9, 9),)],
    [(SMALL,), (), (WIDE, SMALL), (), (SMALL,), ()],
    [(WIDE, WIDE), (), (), ()],  # one rank has no image,
    [(), (SMALL,)],  # or its last micro-batch has none,
    [(SMALL,)],  # or it has no row
]

def check_images(session, settings):
    processor = tiny_processor()
    for sizes in IMAGES:
        rows = image_rows(processor, sizes)
        for name in ("token", "sft"):
            model = tiny_model(processor, architecture="qwen2_vl", heads=2)
            expected = in_one_piece(model, rows, name)
            read = max(grad.abs().max() for key, grad in expected[1].items() if "visual" in key)
            assert name == "token" or read > 1e-2, "without a token whose ratio is clipped"
            half = max(1, len(sizes) // 2)
            own = rows[half * session.rank : half * (session.rank + 1)]
            mine, _ = deal_batch(session, own if len(own) else None, attention_share(model))
            check_steps(session, settings, model, mine, lambda plain: in_one_piece(plain, rows, name), name)

def main():
    whole = random_rows()  # without dealing, rank 0 has all of the long ones
    whole["group_id"] = torch.tensor([7, 8, 7, 8, 7, 8, 9, 9])
    for mode in ("ddp", "fsdp2"):
        settings = config(parallel={"mode": mode}, tokens_per_microbatch=64)
        with Session(settings) as session:
            for name in ("token", "sequence", "group"):
                model = tiny_model(hidden_size=32, layers=1, heads=2)
                expected = in_one_piece(model, whole, name)
                share = attention_share(model)
                mine, imbalance = deal_batch(session, whole[4 * session.rank : 4 * session.rank + 4], share)
                assert imbalance < 1.05, imbalance
                groups = session.gather(sorted(zip(mine["group_id"].tolist(), mine["advantage"].flatten().tolist())))
                assert sorted(groups) == sorted(zip(whole["group_id"].tolist(), whole["advantage"].flatten().tolist()))
                check_steps(session, settings, model, mine, lambda plain: in_one_piece(plain, whole, name), name)
                assert max(grad.abs().max().item() for grad in expected[1].values()) > 1e-3
            again, _ = deal_batch(session, whole, share, everywhere=True)
            assert sorted(session.gather(again["group_id"].tolist())) == sorted(whole["group_id"].tolist())
            nothing, _ = deal_batch(session, whole[:1] if session.rank else None, share)
            assert (nothing is None) == (session.rank == 1)
            check_images(session, settings)

main()  # nothing of it is left when the interpreter ends
"""


@pytest.mark.slow
def test_gradients_of_dealt_rows_are_those_of_one_process_and_rows_keep_group_advantage_and_images(place):
    place.module("gradients", GRADIENTS)
    place.ranks(module="gradients")
