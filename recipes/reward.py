"""A reward model: ``llmrl reward sums_reward``, or ``torchrun -m llmrl.recipes.reward sums_reward.yaml``.

Pairs of a chosen and a rejected answer are tokenised once. Each step makes the rewards of chosen answers larger than
those of rejected ones. GRPO uses the model with ``rewards: [{reward_model: {model: CHECKPOINT}}]``.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["reward", *sys.argv[1:]]))

from functools import partial
from types import SimpleNamespace

from llmrl.modules.llm.reward_scorer import RewardScorer
from llmrl.objectives.llm import RewardLoss
from llmrl.run.console import REWARD_COLUMNS
from llmrl.train.data.preferences import tokenize_with_held_out
from llmrl.train.dealing import deal_epochs
from llmrl.train.distributed import Session
from llmrl.train.held_out import held_out_evaluator
from llmrl.train.models.reward import load_reward_model
from llmrl.train.planning.plan import plan_recipe, read_data
from llmrl.train.run import Run, run_recipe
from llmrl.train.settings.preferences import RewardConfig
from llmrl.train.updater import make_updater

__all__ = ["plan", "run"]
SETTINGS = "llmrl.train.settings.preferences:RewardConfig"
ABOUT = "train a reward model on pairs of answers"


def train(config: RewardConfig, session: Session, run: Run) -> None:
    """Builds the parts of a run, then runs the training loop."""
    tokenizer, pairs, steps, steps_per_epoch = read_data("reward", tokenize_with_held_out, config, session, run)
    given = {"runs": run.runs, "checked": run.resume, "adapter": run.adapter}
    model = load_reward_model(run.source, tokenizer, session, **given)
    policy = SimpleNamespace(scorer=RewardScorer(model))
    updater = make_updater(config, session, policy, steps=steps, lengths=pairs.lengths)
    loss = RewardLoss(updater.scorer, **config.reward.model_dump())
    evaluator = held_out_evaluator(config, updater, loss, pairs)
    rows = pairs.as_rows()
    buffer = deal_epochs(len(rows), config)

    run.begin(model, tokenizer, data=pairs.record, optimizer=updater, sampler=buffer.sampler)
    run.evaluate_before(evaluator)
    for step in run.steps(steps, REWARD_COLUMNS):
        # 1. All ranks draw the same pairs, and each trains a part of them: more ranks give the same numbers.
        batch, imbalance = updater.deal(rows[buffer.sample()], everywhere=True)

        # 2. Micro-batches, loss, clipping, AdamW. The loss is -log sigmoid of the difference of the rewards of a pair.
        metrics = updater.train(loss, [batch], step)
        metrics |= {"data/epoch": step / steps_per_epoch, "perf/imbalance": imbalance}

        # 3. Evaluation on held-out pairs: the share that the model ranks correctly, and the loss.
        metrics |= run.evaluate_when_due(evaluator, config.eval.every)
        run.finish_step(step, metrics)
    run.print_end(pairs.samples(config.samples), evaluator)


plan = partial(plan_recipe, tokenize_with_held_out)
run = partial(run_recipe, train)
