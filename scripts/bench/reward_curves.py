"""Reward curves of GRPO on SmolLM2-135M-Instruct: llmrl's recipe and TRL's GRPOTrainer with equal settings and seeds.

    scripts/real_model && python scripts/bench/reward_curves.py [--seeds 0 1] [--steps 20] [--side llmrl]

Both have the same arithmetic problems (`real_grpo`'s, four for each step), 8 answers of at most 24 tokens to each at
temperature 1, the same reward (the last number is right), one AdamW update per step at a rate of 3e-5 with betas of .9
and .95 and no decay, gradients clipped to 1, advantages divided by the standard deviation of their group, no KL term,
float32, one thread. Which problems a step has, and what is sampled, differ: a curve is a draw, so look at several.

Prints the mean reward of every fifth of the steps, and the processor time of the whole run, of each side and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

MODEL = Path(__file__).parents[2] / "models" / "smollm2"
PROMPTS, GROUP, TOKENS, RATE, BETAS = 4, 8, 24, 3e-5, (0.9, 0.95)
REWARD = "llmrl.envs.llm.tasks.arithmetic:arithmetic_reward"


def problems(seed: int, steps: int) -> list[dict[str, Any]]:
    from llmrl.envs.llm.tasks.arithmetic import SYSTEM_PROMPT, arithmetic_problems

    rows = random.Random(seed).sample(arithmetic_problems(), PROMPTS * steps)
    system = {"role": "system", "content": SYSTEM_PROMPT}
    chats = [[system, {"role": "user", "content": row["question"]}] for row in rows]
    return [{"prompt": chat, "answer": row["answer"]} for chat, row in zip(chats, rows, strict=True)]


def by_llmrl(seed: int, steps: int, folder: Path) -> list[float]:
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems(seed, steps)))
    settings = {
        "model": str(MODEL),
        "env": {"name": "chat", "dataset": "problems.jsonl", "reward": REWARD},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "sampling": {"max_tokens": TOKENS},
        "optim": {"lr": RATE, "betas": BETAS},
        "checkpoint": {"every": 0},
        "samples": 0,
        "seed": seed,
    }
    (folder / "curve.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "llmrl.commands.cli", "grpo", "curve.yaml", "--name", "curve"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (folder / "runs" / "curve" / "metrics.jsonl").read_text().splitlines())
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def by_trl(seed: int, steps: int, folder: Path) -> list[float]:
    command = [sys.executable, __file__, "--worker", "--seeds", str(seed), "--steps", str(steps)]
    ran = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


def trl_worker(seed: int, steps: int) -> None:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl_side import QUIET

    from llmrl.envs.llm.tasks.arithmetic import arithmetic_reward

    torch.set_num_threads(1)
    means: list[float] = []

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        scores = [arithmetic_reward(one[0]["content"], right) for one, right in zip(completions, answer, strict=True)]
        means.append(sum(scores) / len(scores))
        return scores

    own = {"learning_rate": RATE, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "weight_decay": 0.0}
    settings = trl.GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        max_grad_norm=1.0,
        seed=seed,
        use_vllm=False,
        **{**QUIET, **own, "max_steps": steps},
    )
    trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(problems(seed, steps)),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    ).train()
    print(json.dumps(means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side", choices=["llmrl", "TRL"], help="this side alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if options.worker:
        return trl_worker(options.seeds[0], options.steps)
    sides = {"llmrl": by_llmrl, "TRL": by_trl}
    for seed in options.seeds:
        for side in [options.side] if options.side else sides:
            before = getrusage(RUSAGE_CHILDREN)
            with tempfile.TemporaryDirectory() as folder:
                means = sides[side](seed, options.steps, Path(folder))
            after = getrusage(RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            size = max(1, len(means) // 5)
            fifths = [sum(part) / len(part) for part in (means[i : i + size] for i in range(0, len(means), size))]
            print(f"{side:6} seed {seed}  " + "  ".join(f"{mean:.3f}" for mean in fifths) + f"  {seconds:.0f} s")
            print(json.dumps([round(mean, 3) for mean in means]), flush=True)


if __name__ == "__main__":
    main()
