"""On-policy distillation: ``llmrl distill sums_distill distill.teacher=runs/RUN``.

The loop is that of ``grpo.py``: the student answers, and `Distill` (llmrl/objectives/llm/distill.py) compares each of
its tokens with what a teacher would have written there.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["distill", *sys.argv[1:]]))

from llmrl.recipes.grpo import plan, plan_with_engine, run

__all__ = ["plan", "plan_with_engine", "run"]
SETTINGS = "llmrl.train.settings.algorithms:DistillConfig"
ABOUT = "train a model towards a teacher, on its own answers"
