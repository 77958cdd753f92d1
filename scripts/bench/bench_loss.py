"""Memory and time of one micro-batch of GRPO, SFT, DPO or distillation, forwards and backwards, against full logits.

    python scripts/bench/bench_loss.py [--vocab 60000] [--batch 4] [--length 512] [--repeats 3]

Each row runs in a separate process. *Peak* is the rise of the resident set above its level before the step (the
kernel's high-water mark, reset before the first step), in units of one float32 logits tensor [B, T, V]; it includes the
gradients. *CPU time* is the minimum of the repeats (the machine may be busy with other work); *x naive* is its ratio to
the naive row that computes the same numbers. *Gradient* is the largest difference from the gradients of that naive row,
relative to the largest gradient.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from table import Row, benchmark
from tensordict import TensorDict
from timing import best, memory_mb
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from llmrl.modules.llm.log_probs import TokenScorer, TokenScores
from llmrl.objectives import total_loss
from llmrl.objectives.llm import DistillLoss, DPOLoss, GRPOLoss, SFTLoss

MEASURED = {"entropy_bonus": True}
TRAINED = {"entropy_bonus": True, "entropy_coeff": 0.01, "kl_to_ref_coeff": 0.05}
VARIANTS = {  # name: (actor, settings of the loss in the name); the naive variant comes before llmrl's
    "naive": ("naive", {"entropy_bonus": False}),
    "GRPOLoss": ("chunked", {"entropy_bonus": False}),
    "naive + entropy": ("naive", MEASURED),
    "GRPOLoss + entropy": ("chunked", MEASURED),
    "naive, entropy bonus and KL": ("naive", TRAINED),
    "GRPOLoss, entropy bonus and KL": ("chunked", TRAINED),
    "naive SFT and KL": ("naive", {"kl_to_ref_coeff": 0.05}),
    "SFTLoss and KL": ("chunked", {"kl_to_ref_coeff": 0.05}),
    "naive DPO": ("naive", {}),
    "DPOLoss": ("chunked", {}),
    "naive distillation": ("naive", {}),
    "DistillLoss": ("chunked", {}),
}
LIMITS = {"GRPOLoss, entropy bonus and KL": 0.7, "SFTLoss and KL": 0.7}  # in logits tensors; 0.6 for the others


class FullLogits(nn.Module):
    """The direct way: all logits, log-softmax in float32, gather."""

    def __init__(self, model: nn.Module, train_entropy: bool) -> None:
        super().__init__()
        self.model = model
        self.train_entropy = train_entropy

    def token_scores(
        self, input_ids: Tensor, attention_mask: Tensor, select: Tensor, *, entropy: bool = False
    ) -> TokenScores:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        log_p_BTV = logits[:, :-1].float().log_softmax(-1)
        log_prob_BT = log_p_BTV.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        entropy_BT = None
        if entropy:
            with torch.set_grad_enabled(self.train_entropy):  # else only measured, the losses' default
                entropy_BT = nn.functional.pad(-(log_p_BTV.exp() * log_p_BTV).sum(-1), (1, 0))
        return TokenScores(nn.functional.pad(log_prob_BT, (1, 0)).masked_fill(~select, 0.0), entropy_BT)


class FullDivergence(nn.Module):
    """KL(student || teacher) the direct way, from all logits of both."""

    def __init__(self, model: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.model, self.teacher = model, teacher

    def forward(self, td: TensorDict) -> dict[str, Tensor]:
        inputs = {"input_ids": td["tokens", "full"], "use_cache": False}
        with torch.no_grad():
            log_q_BTV = self.teacher(**inputs).logits[:, :-1].float().log_softmax(-1)
        log_p_BTV = self.model(**inputs).logits[:, :-1].float().log_softmax(-1)
        value_BT = (log_p_BTV.exp() * (log_p_BTV - log_q_BTV)).sum(-1)
        mask_BT = td["masks", "all_assistant_mask"][:, 1:]
        return {"loss_distill": (value_BT * mask_BT).sum() / mask_BT.sum()}


def build(args: argparse.Namespace) -> tuple[nn.Module, TensorDict]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shape = (args.batch, args.length)
    whole = args.length // 2 if "DPO" in args.variant else args.length  # a row of DPO is two conversations
    prompt = int(args.prompt_share * whole) or 1  # no logits predict the first token
    mask = (torch.arange(args.length) % whole >= prompt).expand(shape)

    def log_probs() -> TensorDict:
        uniform = -torch.tensor(float(args.vocab)).log()
        return TensorDict(full=uniform + 0.1 * torch.randn(shape), batch_size=[args.batch])

    td = TensorDict(
        tokens=TensorDict(full=torch.randint(0, args.vocab, shape), batch_size=[args.batch]),
        masks=TensorDict(
            all_assistant_mask=mask, all_attention_mask=torch.ones(shape, dtype=torch.bool), batch_size=[args.batch]
        ),
        log_probs=log_probs(),
        advantage=torch.randn(args.batch, 1, 1),
        num_chosen=torch.full((args.batch,), args.length // 2),
        reference_log_probs=torch.zeros(args.batch, 2),
        next=TensorDict(ref_log_probs=log_probs(), batch_size=[args.batch]),
        batch_size=[args.batch],
    )
    return Qwen2ForCausalLM(config), td


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    model, td = build(args)
    kind, settings = VARIANTS[args.variant]
    naive = FullLogits(model, train_entropy="entropy_coeff" in settings)
    loss_class = SFTLoss if "SFT" in args.variant else DPOLoss if "DPO" in args.variant else GRPOLoss
    if "istill" in args.variant:
        torch.manual_seed(1)
        teacher = Qwen2ForCausalLM(model.config).requires_grad_(False)
        chunked = DistillLoss(TokenScorer(model), teacher=TokenScorer(teacher)) if kind == "chunked" else None
        loss = chunked or FullDivergence(model, teacher)
    else:
        loss = loss_class(TokenScorer(model) if kind == "chunked" else naive, **settings)

    def step(batch: TensorDict) -> None:
        model.zero_grad(set_to_none=True)
        total_loss(loss(batch)).backward()

    small = td[:1].clone()
    for key in td.keys(True, True):
        if td[key].shape == (args.batch, args.length):
            small[key] = td[key][:1, :8]
    small["masks", "all_assistant_mask"] = torch.ones(1, 8, dtype=torch.bool)
    small["num_chosen"] = torch.tensor([4])
    step(small)  # thread pools, lazy imports
    model.zero_grad(set_to_none=True)
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    step(td)
    peak = memory_mb("VmHWM") - before
    [fastest] = best(lambda: step(td), repeats=args.repeats, clock=time.process_time)
    torch.save({"peak": peak, "seconds": fastest / 1e3, "gradients": [p.grad for p in model.parameters()]}, args.result)


def main(**options: Any) -> list[Row] | None:
    args = argparse.Namespace(**options)
    if args.variant:
        return worker(args)
    logits_mb = args.batch * args.length * args.vocab * 4 / 2**20
    print(
        f"B={args.batch} T={args.length} V={args.vocab} H={args.hidden}, {args.threads} thread(s), torch "
        f"{torch.__version__}; one logits tensor = {logits_mb:.0f} MB"
    )
    print(f"{'':12} {'':30} {'peak':>8} {'x logits':>9} {'CPU time':>8} {'x naive':>8} {'gradient':>9}")
    rows = []
    for share in (0.0, 0.5):
        results: dict[str, dict] = {}
        for name, (kind, _) in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result.pt"
                command = [sys.executable, __file__, "--variant", name, "--result", str(result)]
                for option in ("batch", "length", "vocab", "hidden", "threads", "repeats"):
                    command += [f"--{option}", str(getattr(args, option))]
                subprocess.run([*command, "--prompt-share", str(share)], check=True)
                results[name] = got = torch.load(result)
            floor = name.replace("GRPOLoss", "naive").replace("SFTLoss", "naive SFT").replace("DPOLoss", "naive DPO")
            floor = floor.replace("DistillLoss", "naive distillation")
            naive = results[floor]
            largest = max(g.abs().max() for g in naive["gradients"])
            gap = max((a - b).abs().max() for a, b in zip(got["gradients"], naive["gradients"], strict=True)) / largest
            print(
                f"{f'prompt {share:.0%}':12} {name:30} {got['peak']:5.0f} MB {got['peak'] / logits_mb:9.2f} "
                f"{got['seconds']:6.2f} s {got['seconds'] / naive['seconds']:8.2f} "
                f"{'' if kind == 'naive' else f'{gap:9.0e}'}",
                flush=True,
            )
            if kind == "naive":
                continue
            what = f"{name}, {share:.0%} prompt: "
            rows.append(Row(f"{what}peak memory / one logits tensor", got["peak"] / logits_mb, LIMITS.get(name, 0.6)))
            rows.append(Row(f"{what}CPU time / naive", got["seconds"] / naive["seconds"], 1.0 if share == 0 else 0.5))
            rows.append(Row(f"{what}gradient difference", float(gap), 1e-5, ""))
            if name == "DistillLoss":
                ratio = got["peak"] / results["GRPOLoss + entropy"]["peak"]
                rows.append(Row(f"{what}peak memory / GRPOLoss + entropy", ratio, 1.2))
    return rows


if __name__ == "__main__":
    benchmark(
        main,
        __doc__,
        batch=4,
        length=(512, "tokens per conversation"),
        vocab=60_000,
        hidden=64,
        threads=1,
        repeats=3,
        variant={"choices": VARIANTS, "help": argparse.SUPPRESS},
        prompt_share=(0.0, argparse.SUPPRESS),
        result={"help": argparse.SUPPRESS},
    )
