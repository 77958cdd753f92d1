"""Group-relative policy optimisation: ``llmrl grpo sums_grpo``, or ``torchrun -m llmrl.recipes.grpo sums_grpo.yaml``.

Each step is one `GRPORound`: rollouts, rewards, advantages, update, new weights. This file is the loop around it:
evaluation, logs, checkpoints, and what a person sees. Which GRPO it is (Dr. GRPO, DAPO, GSPO, CISPO, RLOO ...) is four
settings, printed at the start.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.run.cli import main

    sys.exit(main(["grpo", *sys.argv[1:]]))

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from llmrl.recipes.grpo_round import GRPORound
from llmrl.run.checkpoint import CheckpointStore, InterruptGuard
from llmrl.run.console import (
    StepDisplay,
    format_duration,
    grpo_columns,
    print_conversations,
    print_plan,
    print_summary,
)
from llmrl.run.metrics import MetricsLog
from llmrl.run.rollout_log import RolloutLog
from llmrl.train.checkpointing import restore_state, save_state
from llmrl.train.distributed import Session
from llmrl.train.evaluation import Evaluation
from llmrl.train.grpo_config import GRPOConfig
from llmrl.train.models import load_model, load_tokenizer, resolve_model
from llmrl.train.plan import grpo_plan
from llmrl.train.tasks import Task, eval_rows, training_rows

__all__ = ["plan", "run"]


def plan(config: GRPOConfig, *, runs: Path) -> list[tuple[str, str]]:
    """What a run of ``config`` would do, in rows of label and text; loads the tokenizer and the data, no weights."""
    tokenizer = load_tokenizer(config, runs=runs)
    with closing(Task(config.env, tokenizer)) as task, Session(config) as session:
        rows, dropped = task.fit_prompts(training_rows(config.env))
        counts = {"num_prompts": len(rows), "num_dropped": dropped}
        counts["num_eval"] = len(eval_rows(config.env, config.eval) or ())
        return grpo_plan(config, session, task, **counts)


def run(config: GRPOConfig, *, run_dir: Path, resume: bool = False, on_start: Callable[[], None] | None = None) -> int:
    """Trains and returns the exit code: 0, or 130 after an interruption that left a checkpoint.

    ``on_start`` is called on the first rank when all is loaded, before the first step.
    """
    with Session(config) as session:
        return _train(config, session, run_dir, resume, on_start if session.is_first else None)


@dataclass
class _Course:
    """What the run has seen so far: saved with it, so that a resumed run ends in the same summary."""

    before: float | None = None  # evaluation before the first step
    called_before: float | None = None  # share of its conversations that called a tool
    first_reward: float | None = None
    rollouts: int = 0
    trained: int = 0


def _train(
    config: GRPOConfig, session: Session, run_dir: Path, resume: bool, on_start: Callable[[], None] | None
) -> int:
    started = time.perf_counter()
    runs = run_dir.parent
    store = CheckpointStore(run_dir, keep=config.checkpoint.keep, writer=session.is_first)
    folder, state = restore_state(store, session) if resume else (None, None)
    origin = (state["origin"] or config.model) if state else resolve_model(config.model, runs=runs)
    source = config.model_copy(update={"model": str(folder) if resume else origin})
    tokenizer = load_tokenizer(source, runs=runs)
    task = Task(config.env, tokenizer)
    rows, dropped = task.fit_prompts(training_rows(config.env))
    exam_rows = eval_rows(config.env, config.eval) or ()
    counts = {"num_prompts": len(rows), "num_dropped": dropped, "num_eval": len(exam_rows)}
    title = f"grpo · {config.env.name}"
    print_plan(session.console, title, grpo_plan(config, session, task, **counts), right=str(run_dir))

    model = load_model(source, tokenizer, runs=runs, checked=resume).to(session.device)
    rounds = GRPORound(config, session, model, task, rows, origin=origin, runs=runs)
    exam = None
    if exam_rows:
        options = config.eval.model_dump(include={"split", "batch_size", "max_tokens"})
        exam = Evaluation(session, rounds.policy, task, exam_rows, **options)
    start, course = (state["step"], _Course(**state["course"])) if state else (0, _Course())
    resumed = start if resume else None
    columns = grpo_columns(tools=bool(config.env.tools))
    display = StepDisplay(config.steps, columns, console=session.console, title=run_dir.name, start=start)

    def save(step: int) -> None:
        parts = {
            "rounds": rounds.state_dict(),
            "origin": origin if isinstance(origin, str) else None,
            "course": asdict(course),
        }
        save_state(store, step, session=session, model=model, tokenizer=tokenizer, updater=rounds.updater, **parts)

    metrics: dict[str, float] = {}
    rollouts, step, stopped = None, start, False
    with closing(rounds), ExitStack() as stack:
        if state:
            rounds.updater.load_state_dict(state["optimizer"])
            rounds.load_state_dict(state["rounds"])
        log = stack.enter_context(
            MetricsLog(run_dir, enabled=session.is_first, resume_step=resumed, mirrors=config.log)
        )
        rollout_log = RolloutLog(run_dir, enabled=session.is_first, resume_step=resumed)
        if on_start:
            on_start()
        if exam and not state:
            course.before = exam.run()
            course.called_before = exam.call_rate
            log.log(0, exam.metrics)
        guard = stack.enter_context(InterruptGuard())  # before, there is nothing to save: Ctrl-C ends the run at once
        with display:
            for step in range(start + 1, config.steps + 1):
                began = time.perf_counter()
                rollouts, metrics = rounds.collect(step)
                metrics |= rounds.update(step)
                stopped = session.any(guard.requested)
                last = stopped or step == config.steps
                remark = ""
                if exam and not stopped and (last or (config.eval.every and step % config.eval.every == 0)):
                    clock = time.perf_counter()
                    rounds.settle()
                    exam.run()
                    metrics |= exam.metrics
                    metrics["time/eval"] = time.perf_counter() - clock
                    remark = exam.remark
                metrics["time/step"] = time.perf_counter() - began
                metrics |= rounds.idle(metrics["time/step"])
                log.log(step, metrics)
                rollout_log.write(step, rollouts.records(step))
                display.step(step, metrics, remark)
                if failed := metrics["rollout/failed"]:
                    display.warn(f"step {step}: {failed:.0f} rollouts failed. {rounds.new_error()}".rstrip())
                course.first_reward = metrics["reward/mean"] if course.first_reward is None else course.first_reward
                course.rollouts += rollouts.num_rows
                course.trained += int(metrics["tokens/trained"])
                if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    save(step)
                if stopped:
                    break
    if rollouts is not None:
        print_conversations(session.console, rollouts.samples(config.samples))
    changes = [("reward", course.first_reward, metrics.get("reward/mean"))]
    if exam:
        changes.append((exam.name, course.before, metrics.get(exam.metric)))
        if exam.call_rate is not None:
            changes.append(("calls", course.called_before, exam.call_rate))
    headline = ["interrupted" if stopped else f"{step} steps", format_duration(time.perf_counter() - started)]
    print_summary(
        session.console,
        [*headline, _count(course.rollouts, "rollouts"), _count(course.trained, "trained tokens")],
        changes=changes,
        files=f"{run_dir}/{{config.yaml, metrics.jsonl, rollouts/*.parquet, checkpoints/step{step}}}",
        following=[f"llmrl {'resume' if stopped else 'eval'} {run_dir}", f"llmrl show {run_dir}"],
    )
    return 130 if stopped else 0


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}".replace(",", " ")
