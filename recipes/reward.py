"""A reward model: ``llmrl reward sums_reward``, or ``torchrun -m llmrl.recipes.reward sums_reward.yaml``.

Pairs of a chosen and a rejected answer are tokenised once. Each step makes the rewards of chosen answers larger than
those of rejected ones. GRPO asks the model by ``rewards: [{reward_model: {model: CHECKPOINT}}]``.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.run.cli import main

    sys.exit(main(["reward", *sys.argv[1:]]))

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.modules.llm.reward_scorer import RewardScorer
from llmrl.objectives.llm import RewardLoss
from llmrl.run.console import REWARD_COLUMNS, Sample
from llmrl.train.dealing import attention_share, deal_batch
from llmrl.train.distributed import Session
from llmrl.train.memory import GPU
from llmrl.train.model_shape import model_shape
from llmrl.train.models import load_tokenizer, meta_model
from llmrl.train.plan import pairs_plan, sft_steps
from llmrl.train.preference_data import train_and_held_out
from llmrl.train.preference_settings import RewardConfig
from llmrl.train.reward_model import PairEvaluator, load_reward_model
from llmrl.train.run import Run
from llmrl.train.updater import make_updater, step_metrics

__all__ = ["plan", "run"]

LOSS = {
    "sequence": "-log sigmoid(r chosen - r rejected), after the last token",
    "token": "-log sigmoid(r chosen - r rejected), mean over the tokens from where answers part",
}


def words(config: RewardConfig, measured: str) -> dict[str, str]:
    """The plan's words on the loss, and on the pairs that are measured."""
    share = config.reward.first_share
    first = f"; {share:.0%} of it at the first of them" if share else ""
    return {"loss": LOSS[config.reward.level] + first, "measured": measured}


def plan(config: RewardConfig, *, runs: Path, gpu: GPU | None = None) -> list[tuple[str, str]]:
    """Rows of label and text that describe a run of ``config``, on the machine that is here or on ``gpu``.

    Loads the tokenizer and the data, no weights.
    """
    tokenizer = load_tokenizer(config, runs=runs)
    with Session(config) as session:
        shape = model_shape(meta_model(config, tokenizer, runs=runs))
        pairs, _, measured = train_and_held_out(config, tokenizer)
        return pairs_plan(config, session, tokenizer, pairs, shape, gpu, **words(config, measured))


def run(
    config: RewardConfig, *, run_dir: Path, resume: bool = False, on_start: Callable[[], None] | None = None
) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint.

    ``on_start`` is called on the first rank when all is loaded, before the first step.
    """
    with Session(config) as session, Run(config, session, run_dir, resume=resume, on_start=on_start) as run:
        train(config, session, run)
        return run.exit_code


def train(config: RewardConfig, session: Session, run: Run) -> None:
    """The parts, put together once, and the loop over them."""
    tokenizer = load_tokenizer(run.source, runs=run.runs)
    pairs, held_out, measured = train_and_held_out(config, tokenizer)
    shape = model_shape(meta_model(run.source, tokenizer, runs=run.runs))
    rows = pairs_plan(config, session, tokenizer, pairs, shape, **words(config, measured))
    run.print_plan(f"reward · {pairs.source}", rows)
    steps, steps_per_epoch = sft_steps(config, len(pairs))

    model = load_reward_model(run.source, tokenizer, session, runs=run.runs, checked=run.resume)
    policy = SimpleNamespace(scorer=RewardScorer(model))
    updater = make_updater(config, session, policy, steps=steps)
    loss = RewardLoss(updater.scorer, **config.reward.model_dump())
    share = attention_share(model)
    evaluator = None
    if held_out is not None:
        rows = held_out.as_rows()
        evaluator = PairEvaluator(session, updater, loss, rows, split=config.eval.split, share=share)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(pairs)),
        sampler=SamplerWithoutReplacement(),  # every pair once per epoch, in another order each time
        batch_size=config.batch_size,
        generator=torch.Generator().manual_seed(config.seed),
    )
    buffer.extend(pairs.as_rows())

    run.begin(model, tokenizer, optimizer=updater, sampler=buffer.sampler)
    if evaluator:
        run.evaluate_before(evaluator)
    for step in run.steps(steps, REWARD_COLUMNS):
        # 1. All ranks draw the same pairs and train a part of them each: one more rank changes no number.
        batch, imbalance = deal_batch(session, buffer.sample(), share, everywhere=True)

        # 2. Micro-batches, loss, clipping, AdamW.
        clock = time.perf_counter()
        update = updater.step(loss, batch, step)
        seconds = time.perf_counter() - clock
        metrics = step_metrics([update], seconds) | updater.speed(seconds)
        metrics |= {"data/epoch": step / steps_per_epoch, "perf/imbalance": imbalance}

        # 3. Evaluation: the share of held-out pairs that the model ranks right.
        if evaluator and run.due(config.eval.every):
            metrics |= run.evaluate(evaluator)
        run.finish_step(step, metrics)
    run.print_end([Sample(pieces, label=label) for label, pieces in pairs.samples(config.samples)], evaluator)
