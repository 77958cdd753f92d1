"""Supervised fine-tuning. ``llmrl sft sums_sft``, or ``torchrun -m llmrl.recipes.sft sums_sft.yaml`` on several devices.

Conversations are rendered and tokenised once, into a replay buffer that deals each out once per epoch; the loss is the mean
over all trained tokens of a step, however it is cut. Read `_train` from top to bottom: that is the whole recipe.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from llmrl.recipes.conversations import TokenizedChats, tokenize_chats
from llmrl.recipes.evaluation import Evaluation
from llmrl.recipes.models import load_model, load_tokenizer
from llmrl.recipes.planning import sft_plan
from llmrl.recipes.session import Session
from llmrl.recipes.settings import EvalSettings
from llmrl.recipes.sft_config import SFTConfig
from llmrl.recipes.state import load_state, save_state
from llmrl.recipes.tasks import eval_rows
from llmrl.recipes.updates import Updater

from llmrl.checkpoint import CheckpointStore, InterruptGuard
from llmrl.console import (
    SFT_COLUMNS,
    Sample,
    StepDisplay,
    format_duration,
    print_conversations,
    print_plan,
    print_summary,
)
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.metrics import MetricsLog
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import SFTLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["plan", "run"]


def plan(config: SFTConfig, *, runs: Path) -> list[tuple[str, str]]:
    """What a run of ``config`` would do, in rows of label and text; loads the tokenizer and the data, no weights."""
    tokenizer = load_tokenizer(config, runs=runs)
    with Session(config) as session:
        return sft_plan(config, session, tokenizer, tokenize_chats(config, tokenizer))


def run(config: SFTConfig, *, run_dir: Path, resume: bool = False) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint."""
    with Session(config) as session:
        store = CheckpointStore(run_dir, keep=config.checkpoint.keep, writer=session.is_first)
        return _train(config, session, run_dir, store, resume)


def _train(config: SFTConfig, session: Session, run_dir: Path, store: CheckpointStore, resume: bool) -> int:
    started = time.perf_counter()
    state = load_state(store.latest()) if resume else None
    source = config.model_copy(update={"model": str(store.latest())}) if resume else config
    tokenizer = load_tokenizer(source, runs=run_dir.parent)
    chats = tokenize_chats(config, tokenizer)
    print_plan(
        session.console, f"sft · {chats.source}", sft_plan(config, session, tokenizer, chats), right=str(run_dir)
    )

    steps, steps_per_epoch = num_steps(config, len(chats)), math.ceil(len(chats) / config.batch_size)
    model = load_model(source, tokenizer, runs=run_dir.parent).to(session.device)
    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="history", generate=False)
    student, source = policy, None  # who is examined: the policy itself, or a whole copy if its parameters are sharded
    if session.sharded and config.env is not None:
        student, source = policy.get_new_version(model=copy.deepcopy(model)), model
    updater = Updater(
        session,
        policy.scorer,
        config.optim,
        steps=steps,
        tokens_per_microbatch=config.tokens_per_microbatch,
        packing=config.packing,
    )
    policy.scorer = updater.scorer
    loss = SFTLoss(policy)
    buffer = _buffer(chats, config)
    final_exam = _evaluation(config, session, student, config.eval, source)
    stop_exam = None
    if config.stop is not None:
        stop_settings = config.eval.model_copy(update={"split": config.stop.split, "rows": config.stop.rows})
        stop_exam = _evaluation(config, session, student, stop_settings, source)

    start, before = 0, None
    if state is not None:
        start, before = state["step"], state["before"]
        updater.load_state_dict(state["optimizer"])
        buffer.sampler.load_state_dict(state["sampler"])
    elif final_exam is not None:
        before = final_exam.run()

    metrics: dict[str, float] = {}
    step, trained, status = start, 0, 0
    log = MetricsLog(run_dir, enabled=session.is_first, resume_step=start if resume else None, mirrors=config.log)
    display = StepDisplay(steps, SFT_COLUMNS, console=session.console, title=run_dir.name, start=start)
    with InterruptGuard() as guard, log, display:
        for step in range(start + 1, steps + 1):
            began = time.perf_counter()
            batch = buffer.sample()[session.rank :: session.world_size]
            update = updater.step(loss, batch.to(session.device) if len(batch) else None, step)
            updated = time.perf_counter() - began
            metrics = {
                "policy/loss": update["loss_sft"],
                "policy/grad_norm": update["grad_norm"],
                "policy/lr": update["lr"],
                "tokens/trained": update["tokens"],
                "data/epoch": step / steps_per_epoch,
                "time/update": updated,
                "perf/train_tok_s": update["tokens"] / updated,
            }
            trained += int(update["tokens"])
            remark, enough = "", False
            if final_exam is not None and config.eval.every and step % config.eval.every == 0 and step < steps:
                metrics[f"eval/{final_exam.name}/mean"] = score = final_exam.run()
                remark = f"{final_exam.name} {score:.3f}"
            if stop_exam is not None and step >= config.stop.after and step % config.stop.every == 0:
                score = stop_exam.run()
                metrics[f"eval/{stop_exam.name}-{config.stop.split}/mean"] = score
                remark, enough = f"{stop_exam.name} {config.stop.split} {score:.3f}", score >= config.stop.at_least
            metrics["time/step"] = time.perf_counter() - began
            stopped = session.any(guard.requested)
            last = enough or stopped or step == steps
            if last and not stopped and final_exam is not None:
                metrics[f"eval/{final_exam.name}/mean"] = final_exam.run()
            log.log(step, metrics)
            display.step(step, metrics, remark)
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                save_state(
                    store,
                    step,
                    session=session,
                    model=model,
                    tokenizer=tokenizer,
                    updater=updater,
                    sampler=buffer.sampler.state_dict(),
                    before=before,
                    finished=last and not stopped,
                )
            if stopped:
                status = 130
            if last:
                break
    _report(
        config,
        session,
        chats,
        run_dir,
        status,
        step,
        trained,
        time.perf_counter() - started,
        before,
        metrics,
        final_exam,
    )
    return status


def num_steps(config: SFTConfig, num_chats: int) -> int:
    """Optimizer steps of a run: as configured, or as many as its epochs have."""
    return config.steps or max(1, math.ceil(config.epochs * math.ceil(num_chats / config.batch_size)))


def _buffer(chats: TokenizedChats, config: SFTConfig) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(chats)),
        sampler=SamplerWithoutReplacement(),
        batch_size=config.batch_size,
        generator=torch.Generator().manual_seed(config.seed),
    )
    buffer.extend(chats.as_rows())
    return buffer


def _evaluation(
    config: SFTConfig,
    session: Session,
    policy: TransformersWrapper,
    settings: EvalSettings,
    source: PreTrainedModel | None,
) -> Evaluation | None:
    rows = None if config.env is None else eval_rows(config.env, settings)
    if rows is None:
        return None
    return Evaluation(
        session,
        policy.get_new_version(generate=True, input_key=None),
        config.env,
        rows,
        batch_size=settings.batch_size,
        max_tokens=settings.max_tokens,
        source=source,
    )


def _report(
    config: SFTConfig,
    session: Session,
    chats: TokenizedChats,
    run_dir: Path,
    status: int,
    step: int,
    trained: int,
    seconds: float,
    before: float | None,
    metrics: dict[str, float],
    exam: Evaluation | None,
) -> None:
    console = session.console
    print_conversations(console, [Sample(pieces, label="trained") for pieces in chats.samples(config.samples)])
    after = metrics.get(f"eval/{exam.name}/mean") if exam else None
    print_summary(
        console,
        [
            "interrupted" if status else f"{step} steps",
            format_duration(seconds),
            f"{trained:,} trained tokens".replace(",", " "),
        ],
        changes=[(f"{exam.name} {config.eval.split}", before, after)] if exam else [],
        files=f"{run_dir}/{{config.yaml, metrics.jsonl, checkpoints/step{step}}}",
        following=[f"llmrl {'resume' if status else 'eval'} {run_dir}"],
    )


if __name__ == "__main__":
    from llmrl.cli import main

    sys.exit(main(["sft", *sys.argv[1:]]))
