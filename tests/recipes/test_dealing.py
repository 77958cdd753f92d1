"""Rows dealt over the ranks by cost: even parts, the gradients of one process."""

from __future__ import annotations

import math
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from llmrl.collectors.llm.batches import cat_rows
from llmrl.data.ragged.tensordicts import column
from llmrl.testing import tiny_model
from llmrl.train.dealing import attention_share, deal, deal_batch, imbalance, row_costs
from tests.support.training_rows import random_rows


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


class ThreadRank:
    """A rank of several in one process: `Session`'s collectives between threads, which count the bytes received."""

    device = torch.device("cpu")

    def __init__(self, rank, meeting, seen):
        self.rank = self.group = rank
        self.world_size = self.num_groups = meeting.parties
        self.received = 0
        self._meeting, self._seen = meeting, seen

    def _swap(self, mine):
        self._seen[self.rank] = mine
        self._meeting.wait()
        found = list(self._seen)
        self._meeting.wait()
        return found

    def gather(self, items):
        parts = self._swap(pickle.dumps(items))
        self.received += sum(map(len, parts))
        return [item for part in parts for item in pickle.loads(part)]

    def exchange(self, messages):
        mine = [part[self.rank] for part in self._swap(messages)]
        self.received += sum(map(len, mine))
        return mine


def dealt_to(parts, share=1e-4):
    """The rows of each rank, as `deal_batch` returns them, and the bytes that each received."""
    meeting, seen = threading.Barrier(len(parts)), [None] * len(parts)
    ranks = [ThreadRank(rank, meeting, seen) for rank in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        found = [pool.submit(deal_batch, rank, part, share) for rank, part in zip(ranks, parts, strict=True)]
        return [future.result()[0] for future in found], [rank.received for rank in ranks]


def named_rows(lengths, seed, **more):
    rows = random_rows(lengths, seed)
    rows["next"] = TensorDict({"reward": torch.randn(len(lengths), 1, 1)}, batch_size=[len(lengths)])
    rows["next", "reward"][0] = math.nan  # of one that failed
    rows["seed"] = torch.randint(1 << 62, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    rows["topic"] = column([f"of {seed}"] * len(lengths))
    return rows.update(more)


def same_rows(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in ("advantage", "group_id", "seed", ("next", "reward")):
        assert torch.equal(one[key].nan_to_num(7), other[key].nan_to_num(7))
        assert one[key].dtype == other[key].dtype
    for key in (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")):
        pairs = zip(one.get(key, as_list=True), other.get(key, as_list=True), strict=True)
        assert all(torch.equal(mine, its) and mine.dtype == its.dtype for mine, its in pairs)
    assert one.get("topic").tolist() == other.get("topic").tolist()


def test_a_rank_receives_its_own_rows_alone_with_every_bit():
    generator = random.Random(0)
    parts = [named_rows([generator.randrange(1000, 2000) for _ in range(64)], seed) for seed in range(16)]
    parts[5] = None  # a rank may have none
    dealt, received = dealt_to(parts)
    every = cat_rows([part for part in parts if part is not None])
    lengths = [len(ids) for ids in every.get(("tokens", "full"), as_list=True)]
    for rows, where in zip(dealt, deal(row_costs(lengths, 1e-4), 16), strict=True):
        same_rows(rows, every[torch.tensor(where)])
    assert max(received) < 2 << 20
    assert max(received) > 13 * sum(lengths) / 16, "13 bytes for each token: ids, masks and log-probs"


def test_columns_that_only_some_ranks_have_are_left_out_on_all():
    parts = [named_rows([9, 8, 7], 0, extra=torch.ones(3)), named_rows([5, 4], 1), None]
    dealt, _ = dealt_to(parts)
    for rows, where in zip(dealt, deal(row_costs([9, 8, 7, 5, 4], 1e-4), 3), strict=True):
        same_rows(rows, cat_rows([part for part in parts if part is not None])[torch.tensor(where)])
    assert dealt_to([None, None])[0] == [None, None]
    few, _ = dealt_to([named_rows([5], 0), None])
    assert [rows is None for rows in few] == [False, True]


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
