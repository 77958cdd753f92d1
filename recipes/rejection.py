"""Rejection sampling: ``llmrl rejection sums_rejection``, or under torchrun ``-m llmrl.recipes.rejection``.

The loop is that of ``grpo.py``; `llmrl.objectives.llm.rejection` has what differs: instead of advantages, the best of
the answers to each prompt are chosen, and learned as in ``sft.py``. The next step samples with what that made (expert
iteration).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["rejection", *sys.argv[1:]]))

from llmrl.recipes.grpo import plan, plan_with_engine, run

__all__ = ["plan", "plan_with_engine", "run"]
SETTINGS = "llmrl.train.settings.algorithms:RejectionConfig"
ABOUT = "learn the best of several own answers"
