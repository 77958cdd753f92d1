"""`Run`: run folder, logs, checkpoints, display, interruption and summary, shared by all recipes.

It is not a trainer: it handles only step numbers, metrics, and the ``state_dict`` of the recipe's parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from llmrl.errors import ConfigError, DataError, LLMRLError
from llmrl.report.refresher import ReportRefresher
from llmrl.report.run_files import read_run
from llmrl.report.warnings import findings
from llmrl.run.checkpoint import CheckpointStore, InterruptGuard
from llmrl.run.console import (
    Column,
    Sample,
    StepDisplay,
    format_duration,
    print_conversations,
    print_plan,
    print_summary,
    warn,
)
from llmrl.run.console.numbers import counted
from llmrl.run.metrics import METRICS, MetricsLog
from llmrl.run.model_names import resolve_model
from llmrl.run.rollout_log import Rollout, RolloutLog
from llmrl.run.run_dir import RunDir
from llmrl.train.adapter_files import ADAPTER, adapter_in
from llmrl.train.checkpointing import (
    Stateful,
    load_part,
    load_state,
    restore_cuda_random,
    save_state,
    try_writing,
)
from llmrl.train.distributed import Session
from llmrl.train.models.loading import save_made_model
from llmrl.train.optimizers import import_optimizer
from llmrl.train.settings.model import TinyModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.objectives.metric import Metric
    from llmrl.train.evaluation import Evaluator, MixedEvaluator
    from llmrl.train.held_out import HeldOutEvaluator
    from llmrl.train.settings.model import ModelSource
    from llmrl.train.settings.sft import StopSettings

    AnyEvaluator = Evaluator | MixedEvaluator | HeldOutEvaluator


def run_recipe(
    train: Callable[[Any, Session, Run], None],
    config: ModelSource,
    *,
    run_dir: Path,
    resume: bool = False,
    on_start: Callable[[], None] | None = None,
) -> int:
    """Trains by ``train(config, session, run)``; returns exit code 0, or 130 after an interruption that left a
    checkpoint. ``on_start`` is called on the first rank when everything is loaded, before the first step.
    """
    with Session(config) as session, Run(config, session, run_dir, resume=resume, on_start=on_start) as run:
        train(config, session, run)
        return run.exit_code


class _Closable(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closable)


@dataclass
class RunTotals:
    """Sums and first values of a run, saved in its checkpoints so that a resumed run prints the same summary."""

    first_reward: float | None = None
    rollouts: int = 0
    trained: int = 0  # tokens


class Run(AbstractContextManager):
    """A run of ``config`` in the folder ``path``; ``session`` is this process's part in it. Used as a context manager.

    ``resume``    continues from the newest intact checkpoint; damaged ones are reported and set aside
    ``on_start``  called on the first rank by `begin`, when everything is loaded
    ``source``    ``config`` with the model to load: the checkpoint, or what ``config.model`` names
    ``adapter``   folder of the adapters to continue from, in a resumed run with ``config.lora``; ``source`` is the base
    ``origin``    the model that the run started from, also after it is resumed
    ``start``     number of steps that were done before it was resumed
    ``exit_code`` 0, or 130 after an interruption

    Order of calls: `print_plan`, `begin`, `evaluate_before`; then for each of `steps` optionally `due` and `evaluate`,
    and always `finish_step`; after the loop `print_end`.

    Raises  DataError if there is no checkpoint to resume from, or it cannot be read
    """

    def __init__(
        self,
        config: ModelSource,
        session: Session,
        path: Path,
        *,
        resume: bool = False,
        on_start: Callable[[], None] | None = None,
    ):
        self.config, self.session, self.path, self.resume = config, session, path, resume
        self.runs = path.parent
        self._on_start = on_start if session.is_first else None
        self._started = time.perf_counter()
        self._stack = ExitStack()
        session.check_shared(path)
        with session.raises_on_all():
            self._store = CheckpointStore(path, keep=config.checkpoint.keep, writer=session.is_first, who=session.who)
        self._stack.callback(self._store.close)
        self._state: dict[str, Any] = {}
        import_optimizer(config.optim)  # before a checkpoint is read, which may hold tensors of its classes
        if resume:
            folder, faults = session.on_first(self._store.restore)
            for fault in faults:
                warn(session.console, f"{fault} It is kept as damaged-*; going on from {folder.name}.")
            with session.raises_on_all():
                self._folder, self._state = folder, load_state(folder)
            self.origin = self._state.get("origin") or config.model
        else:
            self.origin = resolve_model(config.model, runs=self.runs)
            if config.model_options.base_model and adapter_in(self.origin) is None:
                raise ConfigError(f"model_options.base_model: needs adapters in model: got {self.origin} without any.")
            if config.lora and isinstance(self.origin, TinyModelSettings):
                self.origin = save_made_model(config, path / "base", session)
        self.adapter = folder / ADAPTER if resume and config.lora else None
        loaded = str(folder) if resume and not config.lora else self.origin
        self.source = config.model_copy(update={"model": loaded})
        self.start: int = self._state.get("step", 0)
        try:
            # Until 2026-11 it held the scores before training too, which are now read from metrics.jsonl.
            earlier = ("before", "called_before")
            self.totals = RunTotals(**{k: v for k, v in self._state.get("course", {}).items() if k not in earlier})
            if odd := [name for name, n in asdict(self.totals).items() if not isinstance(n, int | float | None)]:
                raise TypeError(f"{', '.join(odd)} must be a number")
        except TypeError as error:  # an unknown key
            raise DataError(f"{self._folder / 'trainer.pt'}: its part 'course' does not fit: {error}.") from error
        self._in_steps = ExitStack()
        self._guard = InterruptGuard()
        self._total = self._step = self.start
        self._metrics: dict[str, float] = {}  # of the last step
        self._ending = self._interrupted = False
        self._interrupt_checked = 0  # the last step in which the ranks agreed on whether to stop
        self._notes: list[str] = []
        self._plan: list[list[str]] = []
        self._declared: dict[str, str] = {}
        self._charts: dict[str, str] = {}
        self._report: ReportRefresher | None = None  # on the first rank, during the steps
        self._profiler: torch.profiler.profile | None = None
        self._eval_seconds = 0.0

    def close_at_end(self, part: Part) -> Part:
        """Registers ``part``: its ``close`` is called when the run ends, even by an error; last in, first out."""
        self._stack.callback(part.close)
        return part

    def print_plan(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints the plan; to be called before any weights are loaded."""
        self._plan = [list(row) for row in rows]
        print_plan(self.session.console, title, rows, right=str(self.path))

    def declare_metrics(self, metrics: Iterable[Metric]) -> None:
        """Accepts metrics that are not in llmrl's own table, with meaning and chart; called before `begin`."""
        own = [metric for metric in metrics if metric.name not in METRICS]
        self._declared |= {metric.name: metric.meaning for metric in own}
        self._charts |= {metric.name: metric.chart for metric in own if metric.chart}

    def begin(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **parts: Stateful) -> None:
        """Restores ``parts`` if the run is resumed, and opens the logs. Checkpoints hold the model and all parts."""
        self._model, self._tokenizer, self._parts = model, tokenizer, parts
        if self.resume:
            for name, part in parts.items():
                if name == "data" and name not in self._state:  # GRPO until 2026-11
                    warn(self.session.console, f"{self._folder.name} has no record of its data: they are not compared.")
                    continue
                self._restore(name, part)
            restore_cuda_random(self._state, self.session)
        options = {"enabled": self.session.is_first, "resume_step": self.start if self.resume else None}
        settings = self.config.model_dump(mode="json")
        with self.session.raises_on_all():
            if self.session.is_first:
                try_writing(model, tokenizer)
            about = {"config": settings, "plan": self._plan, "declared": self._declared}
            log = MetricsLog(self.path, mirrors=self.config.log, **about, **options)
            self._log = self._stack.enter_context(log)
            self._rollout_log = RolloutLog(self.path, **options)
            if self._on_start:  # last: it must write nothing if a log could not be opened
                self._on_start()
            self._write_info(plan=self._plan, metrics=self._declared or None, charts=self._charts or None, ended=None)

    def _restore(self, name: str, part: Stateful) -> None:
        try:
            load_part(self._folder, part, self._state[name])
        except LLMRLError:
            raise
        except Exception as error:  # a state of another form fails anywhere
            raise DataError(
                f"{self._folder / 'trainer.pt'}: must hold the state of {name!r}, as this version of llmrl writes it: "
                f"{type(error).__name__}: {error}; resume from another checkpoint, or start a new run from this one."
            ) from error

    def evaluate_before(self, evaluator: AnyEvaluator | None) -> None:
        """Evaluates and logs as step 0, unless the run is resumed."""
        if evaluator and not self.resume:
            evaluator.run()
            self._log.log(0, evaluator.metrics)
            if evaluator.warning:
                warn(self.session.console, f"before step 1: {evaluator.warning}")

    def steps(self, total: int, columns: Sequence[Column]) -> Iterator[int]:
        """The numbers of the remaining steps of ``total``; ends early after Ctrl-C, or `evaluate_to_stop`.

        During the loop signals only set a flag, so that the step is finished and saved. Before the first step there is
        nothing to save, and Ctrl-C ends the run at once.
        """
        self._total = total
        self._display = StepDisplay(
            total, columns, console=self.session.console, title=self.path.name, start=self.start
        )
        if self.session.is_first:
            self._report = ReportRefresher(self.path, lambda text: warn(self.session.console, text))
            self._in_steps.enter_context(self._report)
        self._in_steps.enter_context(self._guard)
        self._in_steps.enter_context(self._display)
        for step in range(self.start + 1, total + 1):
            self._profile(step)
            self._step, self._began = step, time.perf_counter()
            self._notes, self._eval_seconds = [], 0.0
            yield step
            if self._is_last:
                break
        self._in_steps.close()

    def _profile(self, step: int) -> None:
        """Starts the trace at its first step; `_end_profile` writes it after the last."""
        asked = self.config.profile
        if asked and step == max(asked.steps[0], self.start + 1) <= asked.steps[1]:
            self._profiler = torch.profiler.profile()  # every activity that it supports here
            self._profiler.start()

    def _end_profile(self) -> None:
        if self._profiler is not None and (self._is_last or self._step >= self.config.profile.steps[1]):
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.path / f"profile-rank{self.session.rank}.json"))
            self._profiler = None

    @property
    def _is_last(self) -> bool:
        """True if the run ends with this step."""
        # Signals reach the ranks at different times, so the ranks agree once in each step: one that stopped alone would
        # leave the others waiting in a collective.
        if self._interrupt_checked != self._step:
            self._interrupted = self.session.any(self._guard.requested)
            self._interrupt_checked = self._step
        return self._interrupted or self._ending or self._step == self._total

    def due(self, every: int) -> bool:
        """True if an evaluation is due: after every ``every`` steps (0: none) and the last, unless interrupted."""
        return (self._is_last or bool(every and self._step % every == 0)) and not self._interrupted

    def evaluate(self, evaluator: AnyEvaluator) -> dict[str, float]:
        """Runs the evaluator and returns its metrics; its summary is appended to the line of this step."""
        clock = time.perf_counter()
        evaluator.run()
        self._eval_seconds += time.perf_counter() - clock
        self._notes.append(evaluator.summary)
        if evaluator.warning:
            warn(self.session.console, f"step {self._step}: {evaluator.warning}")
        return evaluator.metrics

    def evaluate_when_due(self, evaluator: AnyEvaluator | None, every: int) -> dict[str, float]:
        """`evaluate`, if there is an evaluator and this step is `due`."""
        return self.evaluate(evaluator) if evaluator and self.due(every) else {}

    def evaluate_to_stop(self, evaluator: AnyEvaluator | None, stop: StopSettings | None) -> dict[str, float]:
        """`evaluate` every ``stop.every`` steps; a score of at least ``stop.at_least`` makes this step the last one."""
        if not evaluator or self._step < stop.after or self._step % stop.every:
            return {}
        metrics = self.evaluate(evaluator)
        self._ending = evaluator.score >= stop.at_least
        return metrics

    @property
    def step_seconds(self) -> float:
        """Seconds since this step began."""
        return time.perf_counter() - self._began

    def finish_step(
        self, step: int, metrics: dict[str, float], *, rollouts: Sequence[Rollout] | None = None, warning: str = ""
    ) -> None:
        """Logs and displays the step, and writes a checkpoint if one is due; first checks the previous one.

        Raises  RunFolderError, CheckpointError if something cannot be written, or the previous checkpoint failed
        """
        is_last, every = self._is_last, self.config.checkpoint.every  # a collective: before the block without any
        with self.session.raises_on_all():
            self._store.check()
            self._log_step(step, metrics, rollouts)
            self._display.step(step, metrics, "  ".join(self._notes))
            if self._report is not None:
                self._report.refresh()
            if warning:
                warn(self.session.console, f"step {step}: {warning}")
        if is_last or (every and step % every == 0):
            self._save(step)

    def _log_step(self, step: int, metrics: dict[str, float], rollouts: Sequence[Rollout] | None) -> None:
        metrics["time/step"] = self.step_seconds
        self._end_profile()
        if self._eval_seconds:
            metrics["time/eval"] = self._eval_seconds
        self._metrics = metrics
        self._log.log(step, metrics)
        if rollouts is not None:
            self._rollout_log.write(step, rollouts)
            self._log.log_rollouts(step, rollouts)
            self.totals.rollouts += len(rollouts)
            if self.totals.first_reward is None:
                self.totals.first_reward = metrics["reward/mean"]
        self.totals.trained += int(metrics.get("tokens/trained", 0))

    def _save(self, step: int) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}  # collectives: on every rank
        state["course"] = asdict(self.totals)
        state["origin"] = self.origin if isinstance(self.origin, str) else None
        later = self.config.checkpoint.asynchronous and not self._is_last  # the run waits for the last one
        options = {"whole_model": self._is_last, "background": later}
        save_state(self._store, step, self.session, self._model, self._tokenizer, state, **options)

    def print_end(self, samples: Sequence[Sample], evaluator: AnyEvaluator | None = None) -> None:
        """Prints sample conversations and the summary: totals, scores before and after, commands to run next."""
        with self.session.raises_on_all():
            self._write_info(ended="interrupted" if self._interrupted else "done")
        console, totals = self.session.console, self.totals
        print_conversations(console, samples)
        headline = ["interrupted" if self._interrupted else counted(self._step, "step")]
        headline.append(format_duration(time.perf_counter() - self._started))
        changes = []
        if totals.rollouts:
            headline.append(f"{totals.rollouts:,} rollouts".replace(",", " "))
            changes.append(("reward", totals.first_reward, self._metrics.get("reward/mean")))
        headline.append(f"{totals.trained:,} trained tokens".replace(",", " "))
        files = read_run(self.path) if self.session.is_first else None
        if evaluator and files:
            before = next((row for row in files.steps if row["step"] == 0), {})
            for metric, label in evaluator.measures.items():
                changes.append((label, before.get(metric), self._metrics.get(metric)))
        logs = "metrics.jsonl, rollouts/*.parquet" if totals.rollouts else "metrics.jsonl"
        env = getattr(self.config, "env", None)
        measured = "eval" if evaluator is not None or env is not None else "show"
        following = [f"llmrl {'resume' if self._interrupted else measured} {self.path}"]
        # Those of the report, because a run that is read in a terminal must not end as if all were well.
        warnings = findings(files) if files else []
        print_summary(
            console,
            headline,
            changes=changes,
            warnings=[f"{warning.text} Try: {warning.remedy}" for warning in warnings],
            facts=[("report", str(self.path / "report.html"))],
            files=f"{self.path}/{{config.yaml, {logs}, checkpoints/step{self._step}}}",
            following=[*following, f"llmrl show {self.path}"] if totals.rollouts else following,
        )

    def _write_info(self, **values: Any) -> None:
        """Adds ``values`` to ``run.json``: the plan, and how the run ended (missing if it was killed)."""
        folder = RunDir(self.path)
        if self.session.is_first and folder.info.exists():  # the command creates it; a user's own loop may not
            known = folder.read_info() | values
            folder.write_info({name: value for name, value in known.items() if value is not None})

    @property
    def exit_code(self) -> int:
        return 130 if self._interrupted else 0

    def __exit__(self, *exception: object) -> None:
        with self._stack:  # closes all parts, even if one fails
            self._in_steps.close()
