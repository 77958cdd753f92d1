"""Checks that a curriculum by levels learns `chain_sum` in fewer steps than uniform order, from several seeds.

    python scripts/bench/learning_curriculum.py --seeds 0 1 2

The levels are sums of 2, 4 and 6 numbers of one digit. A tiny model is taught by examples, which add one number after
the other, until it has 0.12 of the answers of all levels right. Then GRPO trains it on prompts of all levels in uniform
order, and from the same weights with `curriculum.levels`, both with the same other settings. Of both the table has the
steps until the greedy accuracy on held-out items of all levels reaches the goal; a run that does not has all its steps.
Exits with 1 if the steps of the curriculum are more than 0.7 of those of uniform order, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from llmrl.envs.llm import ReasoningGymEnv

TERMS = (2, 4, 6)
TASK = {
    "task": "chain_sum",
    "config": {"min_digits": 1, "max_digits": 1},
    "levels": [{"min_terms": terms, "max_terms": terms} for terms in TERMS],
}
SYSTEM, EXAMPLES, FIRST_EXAMPLE = "Add.", 16000, 10_000_000  # a seed far from those of trained and of held-out items
SHARE = 0.7

Config = dict[str, object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    totals = [0, 0]
    print(f"{'seed':>4}  {'before':>7}  {'uniform':>8}  {'levels':>8}  {'share':>6}")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            before, *steps = _measure(Path(folder), seed, options.goal, options.steps)
        totals = [total + own for total, own in zip(totals, steps, strict=True)]
        print(f"{seed:>4}  {before:>7.3f}  {steps[0]:>8}  {steps[1]:>8}  {steps[1] / steps[0]:>6.2f}", flush=True)
    print(f" all  {'':>7}  {totals[0]:>8}  {totals[1]:>8}  {totals[1] / totals[0]:>6.2f}")
    return int(totals[1] > SHARE * totals[0])


def _measure(folder: Path, seed: int, goal: float, steps: int) -> tuple[float, int, int]:
    """The accuracy before GRPO, and the steps to the goal in uniform order and with levels."""
    _write_examples(folder / "examples.jsonl")
    env = {"name": "reasoning_gym", "system_prompt": SYSTEM}
    taught = {
        "model": {"architecture": "qwen2", "hidden_size": 96, "layers": 3, "heads": 3},
        "data": {"path": str(folder / "examples.jsonl")},
        "batch_size": 32,
        "steps": 1500,
        "optim": {"lr": 3e-3, "warmup": 30, "betas": [0.9, 0.98]},
        "env": env | {"options": {**TASK, "items": 2000}},
        "eval": {"rows": 1, "max_tokens": 72},
        "stop": {"at_least": 0.12, "after": 150, "every": 25},
        "checkpoint": {"every": 0},
    }
    trained = {
        "model": str(folder / "taught"),
        "env": env | {"options": {**TASK, "items": 4000}},
        "steps": steps,
        "prompts_per_step": 32,
        "updates_per_step": 2,
        "sampling": {"max_tokens": 72},
        "optim": {"lr": 5e-4, "warmup": 5, "betas": [0.9, 0.98]},
        "eval": {"rows": 200, "max_tokens": 72, "every": 2},
        "checkpoint": {"every": 0},
    }
    _train(folder, "sft", "taught", seed, taught)
    found = []
    for name, more in (("uniform", {}), ("levels", {"curriculum": {"levels": {}}})):
        scores = _train(folder, "grpo", name, seed, trained | more)
        found.append(next((step for step, score in scores if score >= goal), steps))
    return scores[0][1], found[0], found[1]


def _write_examples(path: Path) -> None:
    rows = list(ReasoningGymEnv.rows(items=EXAMPLES, items_seed=FIRST_EXAMPLE, **TASK))
    random.Random(0).shuffle(rows)
    with path.open("w") as file:
        for row in rows:
            texts = (SYSTEM, row["question"], work_out(row["question"]))
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("system", "user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def work_out(question: str) -> str:
    """The answer, added from left to right.

    >>> work_out("State the final answer to the following arithmetic problem: 4 - 9 + 7 =")
    '4-9=-5, -5+7=2\\n<answer>2</answer>'
    """
    first, *words = question.partition(": ")[2].removesuffix(" =").split()
    total, parts = int(first), []
    for sign, number in zip(words[::2], words[1::2], strict=True):
        after = total + int(number) if sign == "+" else total - int(number)
        parts.append(f"{total}{sign}{number}={after}")
        total = after
    return f"{', '.join(parts)}\n<answer>{total}</answer>"


def _train(folder: Path, command: str, name: str, seed: int, config: Config) -> list[tuple[int, float]]:
    """Runs a recipe; returns the steps and the scores of its evaluations."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))  # which is YAML
    arguments = [command, str(file), f"seed={seed}", "--runs", str(folder), "--name", name]
    subprocess.run([sys.executable, "-m", "llmrl.commands.cli", *arguments], check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    measured = "eval/reasoning_gym.chain_sum/mean"
    return [(row["step"], row[measured]) for row in rows if measured in row]


if __name__ == "__main__":
    sys.exit(main())
