"""Direct preference optimisation: ``llmrl dpo sums_dpo``, or ``torchrun -m llmrl.recipes.dpo sums_dpo.yaml``.

Pairs of a chosen and a rejected answer are tokenised once, and scored once by the starting model, the reference. Each
step makes chosen answers likelier than rejected ones, both relative to the reference.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["dpo", *sys.argv[1:]]))

from functools import partial

from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.run.console import DPO_COLUMNS
from llmrl.train.data.preferences import ReferenceLogProbs, make_loss, tokenize_pairs
from llmrl.train.dealing import deal_epochs
from llmrl.train.distributed import Session
from llmrl.train.evaluation import evaluators
from llmrl.train.held_out import held_out_evaluator, with_held_out
from llmrl.train.models.loading import load_model
from llmrl.train.planning.plan import plan_recipe, read_data
from llmrl.train.run import Run, run_recipe
from llmrl.train.settings.preferences import DPOConfig
from llmrl.train.updater import make_updater

__all__ = ["plan", "run"]
SETTINGS = "llmrl.train.settings.preferences:DPOConfig"
ABOUT = "improve a model by pairs of answers"

tokenize = partial(with_held_out, tokenize_pairs)  # the pairs to train on, and those of eval.dataset


def train(config: DPOConfig, session: Session, run: Run) -> None:
    """Builds the parts of a run, then runs the training loop."""
    tokenizer, pairs, steps, steps_per_epoch = read_data("dpo", tokenize, config, session, run)
    model = load_model(run.source, tokenizer, session, runs=run.runs, checked=run.resume, adapter=run.adapter)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    updater = make_updater(config, session, policy, steps=steps, lengths=pairs.lengths)
    loss = make_loss(policy, config.dpo)
    reference = ReferenceLogProbs(pairs.held_out)  # scored by the starting model: no second model is kept
    rows = pairs.as_rows()
    buffer = deal_epochs(len(rows), config)

    held_out = held_out_evaluator(config, updater, loss, pairs)
    with evaluators(config, session, tokenizer, policy, held_out) as (evaluator, stop_evaluator):
        run.begin(model, tokenizer, data=pairs.record, optimizer=updater, sampler=buffer.sampler, reference=reference)
        if not loss.reference_free:  # simpo and orpo are
            # Once: the model is the reference until its first update.
            reference.compute(updater, loss, rows, held_out and held_out.rows)
        run.evaluate_before(evaluator)
        for step in run.steps(steps, DPO_COLUMNS):
            # 1. All ranks draw the same pairs, and each trains a part of them: more ranks give the same numbers.
            batch, imbalance = updater.deal(rows[buffer.sample()], everywhere=True)

            # 2. Micro-batches, loss, clipping, AdamW. The loss raises log p(chosen) - log p(rejected), each relative to
            #    its value under the reference; that of KTO raises or lowers log p of single answers.
            metrics = updater.train(loss, [batch], step)
            metrics |= {"data/epoch": step / steps_per_epoch, "perf/imbalance": imbalance}

            # 3. Evaluation, on answers that the model samples, or on held-out pairs.
            metrics |= run.evaluate_to_stop(stop_evaluator, config.stop)
            metrics |= run.evaluate_when_due(evaluator, config.eval.every)
            run.finish_step(step, metrics)
    run.print_end(pairs.samples(config.samples), evaluator)


plan = partial(plan_recipe, tokenize)
run = partial(run_recipe, train)
