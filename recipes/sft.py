"""Supervised fine-tuning: ``llmrl sft sums_sft``, or ``torchrun -m llmrl.recipes.sft sums_sft.yaml``.

Conversations are rendered and tokenised once, and a replay buffer returns each once per epoch. The loss is the mean
over all trained tokens of a step, for any micro-batches. Read `train` from top to bottom: it is the recipe.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["sft", *sys.argv[1:]]))

from functools import partial

from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import SFTLoss
from llmrl.run.console import SFT_COLUMNS
from llmrl.train.data.sft import tokenize_chats
from llmrl.train.dealing import deal_epochs
from llmrl.train.distributed import Session
from llmrl.train.evaluation import evaluators
from llmrl.train.held_out import held_out_evaluator, with_held_out
from llmrl.train.models.loading import load_model
from llmrl.train.planning.plan import plan_recipe, read_data
from llmrl.train.run import Run, run_recipe
from llmrl.train.settings.sft import SFTConfig
from llmrl.train.updater import make_updater

__all__ = ["plan", "run"]
SETTINGS = "llmrl.train.settings:SFTConfig"
ABOUT = "teach a model by examples"

tokenize = partial(with_held_out, tokenize_chats)  # the rows to train on, and those of eval.dataset


def train(config: SFTConfig, session: Session, run: Run) -> None:
    """Builds the parts of a run, then runs the training loop."""
    # Conversations come first, so that errors in them are reported before weights are loaded.
    tokenizer, chats, steps, steps_per_epoch = read_data("sft", tokenize, config, session, run)
    model = load_model(run.source, tokenizer, session, runs=run.runs, checked=run.resume, adapter=run.adapter)
    # The policy scores given tokens in chunks: there is never a tensor of all logits. The updater has the optimizer.
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    updater = make_updater(config, session, policy, steps=steps, lengths=chats.lengths)
    loss = SFTLoss(policy)

    # The buffer holds row numbers, and returns each once per epoch, reshuffled every epoch.
    rows = chats.as_rows()
    buffer = deal_epochs(len(rows), config)

    held_out = held_out_evaluator(config, updater, loss, chats)
    with evaluators(config, session, tokenizer, policy, held_out) as (evaluator, stop_evaluator):
        run.begin(model, tokenizer, data=chats.record, optimizer=updater, sampler=buffer.sampler)
        run.evaluate_before(evaluator)
        for step in run.steps(steps, SFT_COLUMNS):
            # 1. All ranks draw the same rows, and each trains a part of them: more ranks give the same numbers.
            batch, imbalance = updater.deal(rows[buffer.sample()], everywhere=True)

            # 2. Micro-batches, loss, clipping, AdamW. The loss is -log p of the tokens that the assistant wrote.
            metrics = updater.train(loss, [batch], step)
            metrics |= {"data/epoch": step / steps_per_epoch, "perf/imbalance": imbalance}

            # 3. Evaluation. Early stopping uses other problems: a score that decides when to stop is biased upwards.
            metrics |= run.evaluate_to_stop(stop_evaluator, config.stop)
            metrics |= run.evaluate_when_due(evaluator, config.eval.every)
            run.finish_step(step, metrics)
    run.print_end(chats.samples(config.samples), evaluator)


plan = partial(plan_recipe, tokenize)
run = partial(run_recipe, train)
