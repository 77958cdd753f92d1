"""Checks that preferences are learned on `sums`, from several seeds: by DPO, and by GRPO on a trained reward model.

    python scripts/bench/learning_preferences.py --seeds 0 1 2

Each seed is five real runs in a temporary folder, about 25 minutes of one core: a policy (`sums_sft`), DPO on it, a
model that adds (`sums_sft stop=null`), a reward model from that (`sums_reward`), and GRPO of the policy on this reward
model. The table has the accuracy on held-out problems before, after DPO and after GRPO, and the share of held-out pairs
that the reward model ranks correctly. Exits with 1 if a bound is missed: DPO at least 0.2 above before, 0.95 of the
pairs, and the 95% interval of GRPO entirely above that of before.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, run

TRUTH = "llmrl.envs.llm.tasks.sums:sums_reward"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    missed = 0
    print(f"{'seed':>4}  {'before':>7}  {'dpo':>7}  {'pairs':>7}  {'grpo':>7}  ok")
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            before, dpo, pairs, grpo = _measure(Path(folder), f"seed={seed}")
        scores = [found["mean"] for found in (before, dpo, pairs, grpo)]
        fine = scores[1] >= scores[0] + 0.2 and scores[2] >= 0.95 and grpo["interval"][0] > before["interval"][1]
        missed += not fine
        print(f"{seed:>4}  {'  '.join(f'{score:>7.3f}' for score in scores)}  {'yes' if fine else 'NO'}", flush=True)
    return int(missed > 0)


def _measure(runs: Path, seed: str) -> list[dict]:
    judge = f"env.rewards=[{{reward_model: {{model: {runs / 'judge'}}}}}]"
    _llmrl(runs, "sft", "sums_sft", seed, "--name", "policy")
    _llmrl(runs, "dpo", "sums_dpo", seed, f"model={runs / 'policy'}", "--name", "dpo")
    _llmrl(runs, "sft", "sums_sft", "stop=null", seed, "--name", "adds")
    _llmrl(runs, "reward", "sums_reward", seed, f"model={runs / 'adds'}", "--name", "judge")
    policy = f"model={runs / 'policy'}"
    _llmrl(runs, "grpo", "sums_grpo", seed, policy, "env.reward=null", judge, "grpo.kl=0.1", "--name", "grpo")
    truth = ["env.reward=null", f"env.rewards=[{{fn: '{TRUTH}'}}]"]
    asked = {"policy": [], "dpo": [], "judge": [], "grpo": truth}
    return [json.loads(_llmrl(runs, "eval", str(runs / name), *given, "--json")) for name, given in asked.items()]


def _llmrl(runs: Path, command: str, *arguments: str) -> str:
    place = [] if command == "eval" else ["--runs", str(runs)]
    command_line = [sys.executable, "-m", "llmrl.commands.cli", command, *arguments, *place]
    return run(command_line, check=True, stdout=PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
