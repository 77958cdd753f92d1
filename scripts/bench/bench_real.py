"""A step of SFT and of GRPO on a real model, SmolLM2-135M-Instruct: llmrl, a loop by hand, and TRL's trainers.

    scripts/real_model && python scripts/bench/bench_real.py [--kinds sft packed grpo] [--steps 3]

Every side runs in a process of its own, on one thread, with the same weights, rows, optimizer and learning rate:

sft     8 conversations of 56 to 192 tokens, padded; the loss is of the answers
packed  the same rows, end to end: llmrl and the loop in packs as wide as the longest row, TRL in those of `packing`
grpo    2 prompts x 8 completions of 32 tokens by `generate`, as in bench_grpo_step.py

A figure is the least processor time of the steps, and the peak of the resident memory above that of the loaded model.
The losses of SFT's steps are compared with the loop by hand: the first one, and the largest relative difference of all.
The latter shows rounding: AdamW's first step moves each weight by the sign of its gradient, and in float32 the loop's
gradients differ by 8e-5 of their norm from those in float64, llmrl's by 3e-5. TRL also trains the line break behind an
answer, which the model never writes, so its first loss is compared with a loop that does so too.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_grpo_step import TRL, ByHand, Ours, make_prompts
from table import Row, benchmark
from timing import memory_mb
from torch import nn
from trl_side import LEARNING_RATE, QUIET, train

MODEL = Path(__file__).parents[2] / "models" / "smollm2"
PROMPTS, PACK = 2, 192
LINE_BREAKS = "by hand, with line breaks"
TARGETS = {"sft": (0.62, 0.9, 0.6), "packed": (0.68, 0.75, 0.6), "grpo": (0.55, 1.0, 0.6)}  # TRL, by hand; TRL's memory


def make_chats() -> list[list[dict[str, str]]]:
    """Questions with answers of very different lengths."""
    from llmrl.envs.llm.tasks.arithmetic import arithmetic_demonstrations

    shown = [row["messages"] for row in arithmetic_demonstrations()]
    chats = []
    for row, count in enumerate((1, 1, 1, 2, 2, 3, 4, 5)):
        some = shown[8 * row : 8 * row + count]
        texts = [" ".join(chat[place]["content"] for chat in some) for place in (1, 2)]
        chats.append([{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}])
    return chats


def sft_by_hand(model: nn.Module, tokenizer: Any, packed: bool, line_breaks: bool = False) -> Callable[[], float]:
    """Full logits in float32, cross-entropy of the answers; packs by the position ids of Transformers."""
    rows = []
    for chat in make_chats():
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        end = len(whole) if line_breaks else len(whole) - whole[::-1].index(tokenizer.eos_token_id)
        rows.append((whole, [-100] * len(prompt) + whole[len(prompt) : end] + [-100] * (len(whole) - end)))
    rows.sort(key=lambda row: -len(row[0]))
    width = len(rows[0][0])
    parts: list[list[int]] = []
    for number, (ids, _) in enumerate(rows):  # first fit
        room = (part for part in parts if sum(len(rows[row][0]) for row in part) + len(ids) <= width)
        part = next(room, None) if packed else None
        parts.append([number]) if part is None else part.append(number)
    filling = torch.full((len(parts), width), tokenizer.pad_token_id)
    ids_PS, labels_PS, mask_PS = filling.clone(), torch.full_like(filling, -100), torch.zeros_like(filling)
    positions_PS = torch.zeros_like(filling)
    for pack, part in enumerate(parts):
        start = 0
        for row in part:
            ids, labels = map(torch.tensor, rows[row])
            place = slice(start, start := start + len(ids))
            ids_PS[pack, place], labels_PS[pack, place], mask_PS[pack, place] = ids, labels, 1
            labels_PS[pack, place.start] = -100
            positions_PS[pack, place] = torch.arange(len(ids))
    inputs = {"position_ids": positions_PS} if packed else {"attention_mask": mask_PS}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def step() -> float:
        logits = model(input_ids=ids_PS, use_cache=False, **inputs).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels_PS[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def sft_by_llmrl(model: nn.Module, tokenizer: Any, packed: bool, folder: str) -> Callable[[], float]:
    """The body of the loop of `llmrl.recipes.sft`."""
    from llmrl.modules.llm.policies import TransformersWrapper
    from llmrl.objectives.llm import SFTLoss
    from llmrl.train.data.sft import tokenize_chats
    from llmrl.train.distributed import Session
    from llmrl.train.settings.sft import SFTConfig
    from llmrl.train.updater import make_updater

    file = Path(folder) / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in make_chats()))
    settings = {"model": str(MODEL), "data": {"path": str(file)}, "packing": "on" if packed else "off"}
    config = SFTConfig(**settings, optim={"lr": LEARNING_RATE, "warmup": 0, "schedule": "constant"}, batch_size=8)
    rows = tokenize_chats(config, tokenizer).as_rows()
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    updater = make_updater(config, Session(config), policy, steps=1_000_000)
    loss, done = SFTLoss(policy), 0

    def step() -> float:
        nonlocal done
        done += 1
        batch, _ = updater.deal(rows[torch.arange(len(rows))], everywhere=True)
        return updater.train(loss, [batch], done)["policy/loss"]

    return step


def sft_by_trl(model: nn.Module, tokenizer: Any, packed: bool, folder: str) -> Any:
    import trl
    from datasets import Dataset

    rows = [{"prompt": chat[:1], "completion": chat[1:]} for chat in make_chats()]
    packing = {"packing": True, "max_length": PACK} if packed else {}
    settings = trl.SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=len(rows),  # all rows, or all packs
        **packing,
        **{**QUIET, "logging_strategy": "steps", "logging_steps": 1},  # its losses
    )
    data = Dataset.from_list(rows)
    return trl.SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)


def with_endless_answers(model: nn.Module, tokenizer: Any) -> nn.Module:
    """Its end-of-turn token is never sampled, so all completions have the same length; the weights stay tied."""
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    head.weight, head.bias = model.lm_head.weight, nn.Parameter(torch.zeros(model.config.vocab_size))
    head.bias.data[[tokenizer.eos_token_id, tokenizer.pad_token_id]] = -1e9
    model.lm_head = head
    return model


def worker(kind: str, side: str, steps: int) -> None:
    """Measures one side, and prints its figures."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # of a mapped file: read now, not in the first step
    seconds: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        if kind == "grpo":
            model = with_endless_answers(model, tokenizer)
            sides = {"by hand": ByHand, "llmrl": Ours}
            texts = make_prompts(PROMPTS)
            built = TRL(model, tokenizer, texts, folder) if side == "TRL" else sides[side](model, tokenizer, texts)
        elif side in ("by hand", LINE_BREAKS):
            built = sft_by_hand(model, tokenizer, kind == "packed", side == LINE_BREAKS)
        else:
            built = (sft_by_trl if side == "TRL" else sft_by_llmrl)(model, tokenizer, kind == "packed", folder)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        loaded = memory_mb("VmRSS")
        if side == "TRL":
            trainer = built.trainer if kind == "grpo" else built
            train(trainer, time.process_time, lambda took: seconds.append(took) or len(seconds) < steps)
            losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        else:
            for _ in range(steps):
                start = time.process_time()
                losses.append(built())
                seconds.append(time.process_time() - start)
        peak = memory_mb("VmHWM") - loaded
    print(json.dumps({"seconds": min(seconds), "peak": peak, "losses": losses}))


def measured(kind: str, side: str, steps: int) -> dict[str, Any]:
    """The figures of one side."""
    command = [sys.executable, __file__, "--kinds", kind, "--steps", str(steps), "--side", side]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def apart(one: dict[str, Any], other: dict[str, Any], steps: int) -> float:
    """The largest relative difference of two sides' first losses."""
    return max(
        abs(here / there - 1) for here, there in zip(one["losses"][:steps], other["losses"][:steps], strict=True)
    )


def main(kinds: list[str], steps: int, side: str) -> list[Row] | None:
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if side:
        return worker(kinds[0], side, steps)
    if not (MODEL / "complete").exists():
        print("the model is not here: scripts/real_model makes it")
        return []
    names = ["by hand", "llmrl", *(["TRL"] if importlib.util.find_spec("trl") else [])]
    rows = []
    for kind in kinds:
        found = {name: measured(kind, name, steps) for name in names}
        for name, figures in found.items():
            print(f"{kind}: {name:8} {figures['seconds']:6.2f} s, {figures['peak']:6.0f} MB", flush=True)
        trl_target, hand_target, memory_target = TARGETS[kind]
        ours, hand = found["llmrl"], found["by hand"]
        what = f"{kind} step of SmolLM2-135M, llmrl / "
        rows.append(Row(f"{what}by hand", ours["seconds"] / hand["seconds"], hand_target))
        rows.append(Row(f"{what}by hand, peak memory", ours["peak"] / hand["peak"]))
        if "TRL" in found:
            rows.append(Row(f"{what}TRL", ours["seconds"] / found["TRL"]["seconds"], trl_target))
            rows.append(Row(f"{what}TRL, peak memory", ours["peak"] / found["TRL"]["peak"], memory_target))
        if kind != "grpo":
            rows.append(Row(f"{kind}: first loss, llmrl and by hand", apart(ours, hand, 1), 1e-4, ""))
            rows.append(Row(f"{kind}: losses, llmrl and by hand", apart(ours, hand, steps), 1e-3, ""))
        if kind != "grpo" and "TRL" in found:
            breaks = measured(kind, LINE_BREAKS, 1)
            rows.append(Row(f"{kind}: first loss, TRL and by hand", apart(breaks, found["TRL"], 1), 1e-4, ""))
    return rows


if __name__ == "__main__":
    benchmark(
        main,
        __doc__,
        kinds=["sft", "packed", "grpo"],
        steps=3,
        side=("", "measure this side alone, in this process"),
    )
