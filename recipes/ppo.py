"""PPO with a critic: ``llmrl ppo sums_ppo``, or ``torchrun -m llmrl.recipes.ppo sums_ppo.yaml``.

The loop is that of ``grpo.py``; `llmrl.objectives.llm.ppo` has what differs: the values of a second model, the critic,
take the place of the group's mean, so one answer to each prompt is enough.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["ppo", *sys.argv[1:]]))

from llmrl.recipes.grpo import plan, plan_with_engine, run

__all__ = ["plan", "plan_with_engine", "run"]
SETTINGS = "llmrl.train.settings.algorithms:PPOConfig"
ABOUT = "improve a model by reward, with a critic"
