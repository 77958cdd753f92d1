"""Supervised fine-tuning: ``llmrl sft sums_sft``, or ``torchrun -m llmrl.recipes.sft sums_sft.yaml``.

Conversations are rendered and tokenised once, into a replay buffer that deals each out once per epoch; the loss is the
mean over all trained tokens of a step, however it is cut. Read `_train` from top to bottom: that is the whole recipe.
"""

from __future__ import annotations

import copy
import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.run.cli import main

    sys.exit(main(["sft", *sys.argv[1:]]))

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from llmrl.errors import DataError
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.objectives.llm import SFTLoss
from llmrl.run.checkpoint import CheckpointStore, InterruptGuard
from llmrl.run.console import (
    SFT_COLUMNS,
    Sample,
    StepDisplay,
    format_duration,
    print_conversations,
    print_plan,
    print_summary,
)
from llmrl.run.metrics import MetricsLog
from llmrl.train.checkpointing import restore_state, save_state
from llmrl.train.distributed import Session
from llmrl.train.evaluation import Evaluation
from llmrl.train.models import load_model, load_tokenizer
from llmrl.train.plan import sft_plan, sft_steps
from llmrl.train.settings import EvalSettings
from llmrl.train.sft_config import SFTConfig
from llmrl.train.sft_data import TokenizedChats, tokenize_chats
from llmrl.train.tasks import Task, eval_rows
from llmrl.train.updater import Updater

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["plan", "run"]


def plan(config: SFTConfig, *, runs: Path) -> list[tuple[str, str]]:
    """What a run of ``config`` would do, in rows of label and text; loads the tokenizer and the data, no weights."""
    tokenizer = load_tokenizer(config, runs=runs)
    with Session(config) as session:
        return sft_plan(config, session, tokenizer, tokenize_chats(config, tokenizer))


def run(config: SFTConfig, *, run_dir: Path, resume: bool = False, on_start: Callable[[], None] | None = None) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint.

    ``on_start`` is called on the first rank when all is loaded, before the first step.
    """
    with Session(config) as session:
        return _train(config, session, run_dir, resume, on_start if session.is_first else None)


@dataclass
class _Course:
    """What the run has seen so far: saved with it, so that a resumed run ends in the same summary."""

    before: float | None = None  # evaluation before the first step
    trained: int = 0


def _train(
    config: SFTConfig, session: Session, run_dir: Path, resume: bool, on_start: Callable[[], None] | None
) -> int:
    started = time.perf_counter()
    runs = run_dir.parent
    store = CheckpointStore(run_dir, keep=config.checkpoint.keep, writer=session.is_first)
    folder, state = restore_state(store, session) if resume else (None, None)
    source = config.model_copy(update={"model": str(folder)}) if resume else config
    tokenizer = load_tokenizer(source, runs=runs)
    chats = tokenize_chats(config, tokenizer)
    title = f"sft · {chats.source}"
    print_plan(session.console, title, sft_plan(config, session, tokenizer, chats), right=str(run_dir))

    steps, per_epoch = sft_steps(config, len(chats))
    model = load_model(source, tokenizer, runs=runs, checked=resume).to(session.device)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    exam, stop_exam = _exams(config, session, policy, model)
    microbatch = config.tokens_per_microbatch
    updater = Updater(
        session, policy.scorer, config.optim, steps=steps, tokens_per_microbatch=microbatch, packing=config.packing
    )
    policy.scorer = updater.scorer
    loss = SFTLoss(policy)
    buffer = _buffer(chats, config)
    start, course = (state["step"], _Course(**state["course"])) if state else (0, _Course())
    if state:
        updater.load_state_dict(state["optimizer"])
        buffer.sampler.load_state_dict(state["sampler"])
    resumed = start if resume else None
    log = MetricsLog(run_dir, enabled=session.is_first, resume_step=resumed, mirrors=config.log)
    display = StepDisplay(steps, SFT_COLUMNS, console=session.console, title=run_dir.name, start=start)

    def save(step: int) -> None:
        parts = {"sampler": buffer.sampler.state_dict(), "course": asdict(course)}
        save_state(store, step, session=session, model=model, tokenizer=tokenizer, updater=updater, **parts)

    metrics: dict[str, float] = {}
    step, stopped = start, False
    with log:
        if on_start:
            on_start()
        if exam and not state:
            course.before = exam.run()
            log.log(0, exam.metrics)
        with InterruptGuard() as guard, display:  # before, there is nothing to save: Ctrl-C ends the run at once
            for step in range(start + 1, steps + 1):
                began = time.perf_counter()
                batch = buffer.sample()[session.rank :: session.world_size]
                metrics = _update(updater, loss, batch, step) | {"data/epoch": step / per_epoch}
                course.trained += int(metrics["tokens/trained"])
                remark, enough = "", False
                if stop_exam and step >= config.stop.after and step % config.stop.every == 0:
                    enough = stop_exam.run() >= config.stop.at_least
                    metrics |= stop_exam.metrics
                    remark = stop_exam.remark
                stopped = session.any(guard.requested)
                last = enough or stopped or step == steps
                if exam and not stopped and (last or (config.eval.every and step % config.eval.every == 0)):
                    exam.run()
                    metrics |= exam.metrics
                    remark = f"{remark}  {exam.remark}".strip()
                metrics["time/step"] = time.perf_counter() - began
                log.log(step, metrics)
                display.step(step, metrics, remark)
                if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    save(step)
                if last:
                    break
    if exam:
        exam.task.close()
    console = session.console
    print_conversations(console, [Sample(pieces, label="trained") for pieces in chats.samples(config.samples)])
    trained = f"{course.trained:,} trained tokens".replace(",", " ")
    print_summary(
        console,
        ["interrupted" if stopped else f"{step} steps", format_duration(time.perf_counter() - started), trained],
        changes=[(exam.name, course.before, metrics.get(exam.metric))] if exam else [],
        files=f"{run_dir}/{{config.yaml, metrics.jsonl, checkpoints/step{step}}}",
        following=[f"llmrl {'resume' if stopped else 'eval'} {run_dir}"],
    )
    return 130 if stopped else 0


def _update(updater: Updater, loss: SFTLoss, batch: TensorDictBase, step: int) -> dict[str, float]:
    clock = time.perf_counter()
    update = updater.step(loss, batch.to(updater.session.device) if len(batch) else None, step)
    seconds = time.perf_counter() - clock
    return {
        "policy/loss": update["loss_sft"],
        "policy/grad_norm": update["grad_norm"],
        "policy/lr": update["lr"],
        "tokens/trained": update["tokens"],
        "time/update": seconds,
        "perf/train_tok_s": update["tokens"] / seconds,
    }


def _buffer(chats: TokenizedChats, config: SFTConfig) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(chats)),
        sampler=SamplerWithoutReplacement(),
        batch_size=config.batch_size,
        generator=torch.Generator().manual_seed(config.seed),
    )
    buffer.extend(chats.as_rows())
    return buffer


def _exams(
    config: SFTConfig, session: Session, policy: TransformersWrapper, model: PreTrainedModel
) -> tuple[Evaluation | None, Evaluation | None]:
    """The evaluation that is reported, and the one that decides when to stop, on problems of its own."""
    if config.env is None:
        return None, None
    task = Task(config.env, policy.tokenizer)
    student, source = policy.get_new_version(generate=True), None
    if session.sharded:  # a model whose parameters are sharded cannot generate: a whole copy takes the exam
        student, source = student.get_new_version(model=copy.deepcopy(model)), model

    def exam(settings: EvalSettings) -> Evaluation | None:
        rows = eval_rows(config.env, settings)
        if rows is None:
            return None
        options = settings.model_dump(include={"split", "batch_size", "max_tokens"})
        return Evaluation(session, student, task, rows, source=source, **options)

    if config.stop is None:
        return exam(config.eval), None
    stop = config.eval.model_copy(update={"split": config.stop.split, "rows": config.stop.rows})
    deciding = exam(stop)
    if deciding is None:
        raise DataError(
            f"sft: stop needs problems that are not trained on: env {config.env.label} has none of its own; name "
            "them in eval.dataset, or leave stop out."
        )
    return exam(config.eval), deciding
