"""Training throughput packed against padded, on conversations of skewed lengths. Prints one table.

    python scripts/bench/bench_packing.py [--batch 64] [--longest 1024] [--repeats 3]

One step is the forward and backward pass over the whole batch, in micro-batches of at most ``--tokens`` padded tokens;
lengths are log-normal (median 256, sigma 0.7) between 64 and ``--longest``. Four ways to form the micro-batches:

    padded           in random order, as a plain trainer does
    padded, sorted   rows of similar length together, as the recipes do
    packed           in random order, rows end to end
    packed, sorted   rows of similar length together, and end to end

All compute the same loss (*loss*: the largest relative difference) and gradients (*gradient*: the largest difference
over the largest gradient). The four run in turn; the fastest of the repeats counts, in CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from table import Row, benchmark
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.packing import Packing, lay_out
from llmrl.objectives import total_loss
from llmrl.objectives.base import LossModule
from llmrl.objectives.llm import GRPOLoss, SFTLoss, count_step

WAYS: dict[str, tuple[Packing, bool]] = {  # name: (packing, sorted by length)
    "padded": ("off", False),
    "padded, sorted": ("off", True),
    "packed": ("on", False),
    "packed, sorted": ("on", True),
}
LOSSES = {"SFTLoss": SFTLoss, "GRPOLoss": GRPOLoss}


def draw_lengths(args: argparse.Namespace, generator: torch.Generator) -> list[int]:
    drawn = torch.empty(args.batch).log_normal_(5.545, 0.7, generator=generator)  # e^5.545 = 256
    return drawn.clamp(64, args.longest).int().tolist()


def conversation(length: int, vocabulary: int, generator: torch.Generator) -> TensorDict:
    mask = torch.arange(length) >= length // 4
    return TensorDict(
        tokens=TensorDict(full=torch.randint(0, vocabulary, (length,), generator=generator)),
        masks=TensorDict(all_assistant_mask=mask, all_attention_mask=torch.ones(length, dtype=torch.bool)),
        log_probs=TensorDict(full=-torch.tensor(float(vocabulary)).log() * mask),
        advantage=torch.randn(1, 1, generator=generator),
    )


def micro_batches(lengths: list[int], budget: int, by_length: bool) -> list[list[int]]:
    """Groups rows, in their order or sorted by length, into parts of at most ``budget`` padded tokens."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row]) if by_length else range(len(lengths))
    parts: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, lengths[row])
        if parts and (len(parts[-1]) + 1) * longest <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest = lengths[row]
    return parts


def step(model: nn.Module, loss: LossModule, td: TensorDictBase, parts: list[list[int]]) -> Callable[[], float]:
    counts = count_step(td)
    cut = [td[torch.tensor(rows)] for rows in parts]

    def run() -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for part in cut:
            output = total_loss(loss(part, normalizer=counts))
            output.backward()
            total += float(output.detach())
        return total

    return run


def grads(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main(**options: Any) -> list[Row]:
    args = argparse.Namespace(**options)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    generator = torch.Generator().manual_seed(args.seed)
    lengths = draw_lengths(args, generator)
    td = lazy_stack([conversation(length, args.vocab, generator) for length in lengths])
    print(
        f"{args.batch} conversations, {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all; "
        f"H={args.hidden}, {args.layers} layers, {args.threads} thread(s), torch {torch.__version__}"
    )
    heads = {"parts": 6, "tokens": 9, "CPU time": 12, "tokens/s": 10, "speed": 8, "loss": 9, "gradient": 10}
    print(" " * 26 + "".join(f"{head:>{width}}" for head, width in heads.items()))
    rows = []
    for loss_name, loss_class in LOSSES.items():
        runs, through = {}, {}
        for name, (packing, by_length) in WAYS.items():
            parts = micro_batches(lengths, args.tokens, by_length)
            cut = [[lengths[row] for row in part] for part in parts]
            through[name] = sum(max(p) * len(p) if packing == "off" else lay_out(p).num_tokens for p in cut), len(parts)
            runs[name] = step(model, loss_class(TokenScorer(model, packing=packing)), td, parts)
        seconds = dict.fromkeys(WAYS, float("inf"))
        losses, gradients = {}, {}
        for _ in range(args.repeats):
            for name, run in runs.items():
                start = time.process_time()
                losses[name] = run()
                seconds[name] = min(seconds[name], time.process_time() - start)
                gradients[name] = grads(model)
        for name in WAYS:
            gap = (gradients[name] - gradients["padded"]).abs().max() / gradients["padded"].abs().max()
            loss_gap = abs(losses[name] - losses["padded"]) / max(abs(losses["padded"]), 1e-3)
            tokens, num_parts = through[name]
            speed = seconds["padded"] / seconds[name]
            print(
                f"{loss_name:10}{name:16}{num_parts:6}{tokens:9}{seconds[name]:10.2f} s"
                f"{sum(lengths) / seconds[name]:10.0f}{speed:7.2f}x{loss_gap:9.0e}{gap:10.0e}"
            )
            if name.startswith("packed"):
                base = name.replace("packed", "padded")
                target = 1 / 1.5 if base == "padded" else None
                rows.append(Row(f"{loss_name}: time of {name} / {base}", seconds[name] / seconds[base], target))
                rows.append(Row(f"{loss_name}: gradient difference, {name}", float(gap), 1e-5, ""))
    return rows


if __name__ == "__main__":
    benchmark(
        main,
        __doc__,
        batch=(64, "conversations of a step"),
        longest=(1024, "tokens of the longest conversation"),
        tokens=(16384, "padded tokens per forward pass"),
        hidden=64,
        layers=2,
        vocab=1024,
        threads=1,
        repeats=3,
        seed=0,
    )
