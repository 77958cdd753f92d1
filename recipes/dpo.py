"""Direct preference optimisation: ``llmrl dpo sums_dpo``, or ``torchrun -m llmrl.recipes.dpo sums_dpo.yaml``.

Pairs of a chosen and a rejected answer are tokenised once and scored once by the model that the run starts from, the
reference. Each step makes chosen answers likelier than rejected ones, both against the reference.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.run.cli import main

    sys.exit(main(["dpo", *sys.argv[1:]]))

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import torch

from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import DPOLoss
from llmrl.run.console import DPO_COLUMNS, Sample
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from llmrl.train.evaluation import make_evaluators
from llmrl.train.memory import GPU
from llmrl.train.model_shape import model_shape
from llmrl.train.models import load_model, load_tokenizer, meta_model
from llmrl.train.plan import dpo_plan, sft_steps
from llmrl.train.preference_data import ReferenceLogProbs, tokenize_pairs
from llmrl.train.preference_settings import DPOConfig
from llmrl.train.run import Run
from llmrl.train.tasks import Task
from llmrl.train.updater import make_updater, step_metrics

__all__ = ["plan", "run"]


def plan(config: DPOConfig, *, runs: Path, gpu: GPU | None = None) -> list[tuple[str, str]]:
    """Rows of label and text that describe a run of ``config``, on the machine that is here or on ``gpu``.

    Loads the tokenizer and the data, no weights.
    """
    tokenizer = load_tokenizer(config, runs=runs)
    with Session(config) as session:
        shape = model_shape(meta_model(config, tokenizer, runs=runs))
        return dpo_plan(config, session, tokenizer, tokenize_pairs(config, tokenizer), shape, gpu)


def run(config: DPOConfig, *, run_dir: Path, resume: bool = False, on_start: Callable[[], None] | None = None) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint.

    ``on_start`` is called on the first rank when all is loaded, before the first step.
    """
    with Session(config) as session, Run(config, session, run_dir, resume=resume, on_start=on_start) as run:
        train(config, session, run)
        return run.exit_code


def train(config: DPOConfig, session: Session, run: Run) -> None:
    """The parts, put together once, and the loop over them."""
    tokenizer = load_tokenizer(run.source, runs=run.runs)
    pairs = tokenize_pairs(config, tokenizer)
    shape = model_shape(meta_model(run.source, tokenizer, runs=run.runs))
    run.print_plan(f"dpo · {pairs.source}", dpo_plan(config, session, tokenizer, pairs, shape))
    steps, steps_per_epoch = sft_steps(config, len(pairs))

    model = load_model(run.source, tokenizer, session, runs=run.runs, checked=run.resume, adapter=run.adapter)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    task = Task(config.env, tokenizer) if config.env else None
    evaluator, stop_evaluator = make_evaluators(config, session, task, policy) if task else (None, None)
    updater = make_updater(config, session, policy, steps=steps)
    settings = config.dpo.model_dump(exclude={"reference"})
    loss = DPOLoss(updater.scorer, **settings, reference_free=config.dpo.reference == "none")
    reference = ReferenceLogProbs()
    rows = pairs.as_rows()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(pairs)),
        sampler=SamplerWithoutReplacement(),  # every pair once per epoch, in another order each time
        batch_size=config.batch_size,
        generator=torch.Generator().manual_seed(config.seed),
    )
    buffer.extend(rows)
    share = attention_share(model)

    with closing(task) if task else nullcontext():
        run.begin(model, tokenizer, optimizer=updater, sampler=buffer.sampler, reference=reference)
        if not loss.reference_free:
            reference.compute(session, updater, loss, rows, share)
        if evaluator:
            run.evaluate_before(evaluator)
        for step in run.steps(steps, DPO_COLUMNS):
            # 1. All ranks draw the same pairs and train a part of them each: one more rank changes no number.
            batch = buffer.sample()
            if not loss.reference_free:
                batch.set("reference_log_probs", reference.values[batch["row"]])
            batch, imbalance = deal_batch(session, batch, share, everywhere=True)

            # 2. Micro-batches, loss, clipping, AdamW.
            clock = time.perf_counter()
            update = updater.step(loss, batch, step)
            seconds = time.perf_counter() - clock
            metrics = step_metrics([update], seconds) | updater.speed(seconds)
            metrics |= {"data/epoch": step / steps_per_epoch, "perf/imbalance": imbalance}

            # 3. Evaluation: answers of the model itself, which the loss does not look at.
            if stop_evaluator and step >= config.stop.after and step % config.stop.every == 0:
                metrics |= run.evaluate(stop_evaluator)
                if stop_evaluator.score >= config.stop.at_least:
                    run.end_after_step()
            if evaluator and run.due(config.eval.every):
                metrics |= run.evaluate(evaluator)
            run.finish_step(step, metrics)
    run.print_end([Sample(pieces, label=label) for label, pieces in pairs.samples(config.samples)], evaluator)
