"""Two processes under DDP and FSDP2 compute the gradients of one process in three steps, though their shares differ."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from tensordict import TensorDict, lazy_stack
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.concurrency.gloo_threads import wait_for_gloo_threads
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives import total_loss
from llmrl.objectives.llm import GRPOLoss, SFTLoss, count_step


def scorer(tied):
    torch.manual_seed(0)
    sizes = dict(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    sizes["tie_word_embeddings"] = tied
    return TokenScorer(Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2)).double())


def row(index, prompt, response):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 29, (prompt + response,), generator=generator)
    return TensorDict(
        tokens=TensorDict(full=ids),
        masks=TensorDict(all_assistant_mask=torch.arange(len(ids)) >= prompt),
        log_probs=TensorDict(full=torch.full((len(ids),), -3.4, dtype=torch.float64)),
        advantage=torch.randn(1, 1, generator=generator, dtype=torch.float64),
    )


def gradients(wrapped, td, counts, ranks):
    for loss in (GRPOLoss(wrapped, entropy_coeff=0.1), SFTLoss(wrapped)):
        (total_loss(loss(td, counts)) * ranks).backward()
    found = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in wrapped.parameters()]
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter -= 0.3 * parameter.grad
            parameter.grad = None
    return found


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
rows = [row(i, p, r) for i, (p, r) in enumerate([(3, 0), (2, 6), (4, 1), (1, 3)])]
whole = lazy_stack(rows)
mine = lazy_stack(rows[:1] if rank == 0 else rows[1:])  # rank 0 has nothing to train
counts = count_step(mine).over_ranks()
assert counts == count_step(whole), counts
for tied in (False, True):
    sharded = scorer(tied)
    for layer in sharded.model.model.layers:
        fully_shard(layer)
    for wrapped in (DistributedDataParallel(scorer(tied)), fully_shard(sharded)):
        plain = scorer(tied)
        for step in range(3):
            expected = gradients(plain, whole, None, 1)
            for got, want in zip(gradients(wrapped, mine, counts, ranks), expected, strict=True):
                torch.testing.assert_close(got, want, atol=1e-12, rtol=0, msg=lambda m: f"{tied=} {step=} {m}")
wait_for_gloo_threads()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_equal_one_even_when_one_of_them_has_nothing_to_train(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
