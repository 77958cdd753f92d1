"""``llmrl eval RUN``: scores a checkpoint on held-out problems, with one greedy or several sampled answers to each; or
measures the loss on held-out rows, and for pairs the share that is ranked correctly."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmrl.commands.suites import evaluate_suites
from llmrl.envs.llm.answers import extract_tags, last_boxed, normalize_answer
from llmrl.errors import ConfigError
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.reward_scorer import RewardScorer
from llmrl.objectives.llm import DPOLoss, KTOLoss, RewardLoss, SFTLoss
from llmrl.report.intervals import interval
from llmrl.run.checkpoint import check_files
from llmrl.run.console import format_duration, print_summary, warn
from llmrl.run.metrics import METRICS
from llmrl.run.run_dir import RunDir
from llmrl.train.checkpointing import load_state
from llmrl.train.data.preferences import held_out_pairs, make_loss, reference_log_probs, tokenize_pairs
from llmrl.train.data.sft import TokenizedRows, tokenize_chats
from llmrl.train.distributed import Session
from llmrl.train.evaluation import Evaluator
from llmrl.train.held_out import HeldOutEvaluator, tokenize_held_out
from llmrl.train.models.loading import load_model, load_tokenizer
from llmrl.train.models.reward import load_reward_model
from llmrl.train.settings.environment import EvalSettings, SetSettings, SourceSettings
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.preferences import DPOConfig, PairsConfig, RewardConfig
from llmrl.train.settings.sft import SFTConfig
from llmrl.train.tasks import eval_rows, make_task
from llmrl.train.updater import Updater, make_updater

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answers = Sequence[tuple[Sequence[float], Sequence[str]]]


def evaluate(
    run: RunDir,
    *,
    config: SFTConfig | GRPOConfig | RewardConfig,
    checkpoint: Path,
    data: Sequence[str],
    suite: Sequence[str],
    samples: int,
    temperature: float | None,
    as_json: bool,
) -> int:
    """Prints the scores of ``checkpoint``, a line or a JSON object for each set of problems, and returns 0.

    ``data``         files or hub names, with ``:SPLIT`` for another split; empty: the run's own evaluation data
    ``suite``        tasks of other programs in place of these, see `evaluate_suites`
    ``samples``      answers to each problem; more than one are sampled with ``temperature`` (default: the run's, or 1)

    Raises  ConfigError if the run's settings name no task, problems or pairs to measure on; DataError if the
            checkpoint is damaged
    """
    command, run_dir = run.read_info()["command"], run.path
    if samples < 1:
        raise ConfigError(f"--samples  must be at least 1: got {samples}")
    if suite:
        if data or samples > 1 or isinstance(config, RewardConfig):
            other = "--data" if data else "--samples" if samples > 1 else "a reward model, which does not answer"
            raise ConfigError(f"--suite  has its own problems and scores, of a model that answers: got {other} too")
        check_files(checkpoint)
        return evaluate_suites(run_dir, config, checkpoint, suite, temperature=temperature or 0.0, as_json=as_json)
    asked = _asked(config.eval, data)
    if config.env is None and (isinstance(config, RewardConfig) or asked[0].dataset is not None):
        if samples > 1 or temperature is not None:
            raise ConfigError("--samples, --temperature  are for answers that are scored: here rows are measured")
        return _measure_rows(run_dir, command, config, checkpoint, asked, as_json=as_json)
    sets = _sets(run_dir, command, config, asked)
    if temperature is None:
        temperature = 0.0 if samples == 1 else config.sampling.temperature if isinstance(config, GRPOConfig) else 1.0
    check_files(checkpoint)
    with Session(config) as session:
        if config.env.agent is not None and config.parallel.mode == "fsdp2" and session.world_size > 1:
            raise ConfigError(
                "llmrl eval: env.agent needs a whole model in each process, because those of a sharded one generate in "
                "lockstep: got parallel.mode fsdp2; give parallel.mode=ddp."
            )
        source = config.model_copy(update={"model": str(checkpoint), "lora": None})  # merged
        tokenizer = load_tokenizer(source, runs=run_dir.parent)
        with closing(make_task(config.env, tokenizer)) as task:
            for settings, rows in sets:  # before weights are loaded
                measured = task.measured(settings)
                measured.longest_prompt(rows)
                if not measured.scored(rows):
                    raise ConfigError(
                        f"llmrl eval: answers are measured by a reward: the {command} run {run_dir.name} has none; "
                        "give env.reward=..."
                    )
            model = load_model(source, tokenizer, session, runs=run_dir.parent, checked=True)
            policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="history")
            for settings, rows in sets:
                asking = {"samples": samples, "temperature": temperature}
                if isinstance(config, GRPOConfig):
                    asking["concurrency"] = config.rollout.concurrency
                measured = task.measured(settings)
                for part, own in measured.parts(measured.scored(rows)):
                    make = partial(Evaluator, session, policy, part, own, settings, **asking)
                    _measure(run_dir, session, checkpoint, settings, make, as_json=as_json)
    if isinstance(config, SFTConfig) and config.eval.loss and not data:
        return _measure_rows(run_dir, command, config, checkpoint, asked, as_json=as_json)
    return 0


def _measure_rows(
    run_dir: Path, command: str, config: SFTConfig, checkpoint: Path, sets: Sequence[EvalSettings], *, as_json: bool
) -> int:
    """Measures the loss of an sft, dpo or reward run on held-out rows."""
    check_files(checkpoint)
    with Session(config) as session:
        source = config.model_copy(update={"model": str(checkpoint), "lora": None})  # merged
        tokenizer = load_tokenizer(source, runs=run_dir.parent)
        read = [_read_rows(config.model_copy(update={"eval": settings}), tokenizer) for settings in sets]
        if None in read:
            raise ConfigError(f"llmrl eval: the {command} run {run_dir.name} has no held-out pairs; give --data FILE")
        references = [None] * len(sets)
        if isinstance(config, DPOConfig) and config.dpo.has_reference:
            start = source.model_copy(update={"model": load_state(checkpoint).get("origin") or config.model})
            updater, loss = _loss(start, tokenizer, session, run_dir.parent)
            references = [reference_log_probs(updater, loss, rows.as_rows()) for rows in read]
            del updater, loss  # before another model is loaded
        updater, loss = _loss(source, tokenizer, session, run_dir.parent, checked=True)
        for settings, rows, reference in zip(sets, read, references, strict=True):
            evaluator = HeldOutEvaluator(updater, loss, rows, split=settings.split)
            if reference is not None:
                evaluator.rows.set("reference_log_probs", reference)
            _measure(run_dir, session, checkpoint, settings, lambda made=evaluator: made, as_json=as_json)
    return 0


def _read_rows(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedRows | None:
    if isinstance(config, RewardConfig):
        return held_out_pairs(config, tokenizer)[0]
    return tokenize_held_out(tokenize_pairs if isinstance(config, PairsConfig) else tokenize_chats, config, tokenizer)


def _loss(
    source: SFTConfig, tokenizer: PreTrainedTokenizerBase, session: Session, runs: Path, *, checked: bool = False
) -> tuple[Updater, SFTLoss | DPOLoss | KTOLoss | RewardLoss]:
    """The loss of the run's recipe for the model of ``source``, and an updater that measures it."""
    if isinstance(source, RewardConfig):
        model = load_reward_model(source, tokenizer, session, runs=runs, checked=checked)
        updater = make_updater(source, session, SimpleNamespace(scorer=RewardScorer(model)), steps=1)
        return updater, RewardLoss(updater.scorer, **source.reward.model_dump())
    model = load_model(source, tokenizer, session, runs=runs, checked=checked)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    updater = make_updater(source, session, policy, steps=1)
    return updater, make_loss(policy, source.dpo) if isinstance(source, DPOConfig) else SFTLoss(policy)


def _asked(settings: EvalSettings, data: Sequence[str]) -> list[EvalSettings]:
    """The evaluation settings of each requested data set."""
    if not data:
        return [settings]
    parts = [name.rpartition(":") if not Path(name).exists() else (name, "", "") for name in data]
    named = [(name, split) if name else (split, settings.split) for name, _, split in parts]
    one = settings.model_copy(update={"sets": None})
    return [one.model_copy(update={"dataset": name, "split": split or "test"}) for name, split in named]


def _sets(
    run_dir: Path, command: str, config: SFTConfig | GRPOConfig, asked: Sequence[EvalSettings]
) -> list[tuple[EvalSettings, Sequence[Mapping[str, Any]]]]:
    sets = [(settings, config.env and eval_rows(config.env, settings)) for settings in asked]
    if any(rows is None for _, rows in sets):
        remedy = "--data FILE, whose loss is measured, or env=..." if config.env is None else "eval.dataset=..."
        raise ConfigError(f"llmrl eval: the {command} run {run_dir.name} has no held-out problems; give {remedy}")
    return sets


def sample_metrics(answers: Answers) -> dict[str, Any]:
    """Metrics of problems with K answers each, given as scores (NaN if scoring failed) and texts.

    "mean" is avg@K, the mean over problems of their mean score, and "interval" its 95% interval over problems. For K
    above 1 also "pass@k" for k = 1, 2, 4, ... K, the unbiased estimate from K answers of the chance that at least one
    of k is right (scores 1 or more; Chen et al. 2021, eq. 1), and "majority", the mean score of the most common answer.

    >>> found = sample_metrics([([1, 0, 0, 0], ["4", "5", "5", "6"]), ([1, 1, 0, 1], ["7", "7", "8", "7"])])
    >>> found["mean"], found["pass@2"], found["majority"]
    (0.5, 0.75, 0.5)
    """
    rows = [
        (kept, [text for score, text in zip(scores, texts, strict=True) if math.isfinite(score)])
        for scores, texts in answers
        if (kept := [score for score in scores if math.isfinite(score)])
    ]
    if not rows:
        return {"mean": math.nan, "interval": None}
    means = [statistics.fmean(scores) for scores, _ in rows]
    mean = statistics.fmean(means)
    found: dict[str, Any] = {"mean": mean, "interval": interval(mean, statistics.pstdev(means), len(means))}
    num_samples = max(len(scores) for scores, _ in answers)
    if num_samples == 1:
        return found
    found["samples"] = num_samples
    sizes = [2**power for power in range(num_samples.bit_length()) if 2**power < num_samples] + [num_samples]
    for size in sizes:
        whole = [_pass_at(size, len(scores), sum(score >= 1 for score in scores)) for scores, _ in rows]
        found[f"pass@{size}"] = statistics.fmean(whole)
    found["majority"] = statistics.fmean(_majority(*row) for row in rows)
    return found


def _pass_at(size: int, count: int, right: int) -> float:
    """The share of subsets of ``size`` out of ``count`` answers that contain at least one of the ``right`` ones."""
    size = min(size, count)  # fewer are left if scoring some failed
    # One minus the share of subsets without a right answer, drawn without replacement.
    return 1.0 - math.comb(count - right, size) / math.comb(count, size)


def _majority(scores: Sequence[float], texts: Sequence[str]) -> float:
    """The mean score of the most frequent answer; of equally frequent ones, the one given first counts."""
    final = [_final_answer(text) for text in texts]
    chosen = max(final, key=final.count)
    return statistics.fmean(score for score, answer in zip(scores, final, strict=True) if answer == chosen)


def _final_answer(text: str) -> str:
    """The final answer of a text, normalised for comparison: its last answer block or box, else all of it."""
    answer = extract_tags(text)[1]
    return normalize_answer(next(part for part in (answer, last_boxed(text), text) if part is not None))


def _measure(
    run_dir: Path,
    session: Session,
    checkpoint: Path,
    settings: EvalSettings,
    make: Callable[[], Evaluator | HeldOutEvaluator],
    *,
    as_json: bool,
) -> None:
    """Measures one set of problems or rows; rank 0 prints the result."""
    clock = time.perf_counter()
    evaluator = make()
    mean = evaluator.run()
    if not session.is_first:
        return
    answers = isinstance(evaluator, Evaluator)
    found: dict[str, Any] = {"run": str(run_dir), "checkpoint": checkpoint.name}
    task = evaluator.task.settings if answers else None
    found |= {"env": task.name} if answers else {}
    is_set = isinstance(task, SetSettings)
    found |= {"set" if is_set else "source": task.label} if isinstance(task, SourceSettings) else {}
    data = task if is_set else settings
    found |= {"dataset": data.dataset, "split": data.split, "rows": evaluator.num_rows}
    if answers:
        found |= {"failed": evaluator.failed} | ({"failure": evaluator.warning} if evaluator.warning else {})
        found |= sample_metrics(evaluator.answers)
        found |= {} if evaluator.call_rate is None else {"call_rate": evaluator.call_rate}
    else:
        std = evaluator.metrics.get(f"eval/{evaluator.unit}/std")
        found |= {} if std is None else {"mean": mean, "interval": interval(mean, std, evaluator.num_rows)}
        found |= {name[5:]: evaluator.metrics[name] for name in METRICS if name in evaluator.metrics}
    if as_json:
        print(json.dumps(found))
        return
    counted = f"{evaluator.num_rows} {'problems' if answers else evaluator.unit}"
    counted += " (the first, by eval.rows)" if settings.rows == evaluator.num_rows else ""
    name = evaluator.name if settings.dataset is None else f"{settings.dataset} {settings.split}"
    name += "" if "mean" in found else " loss"
    bounds = "" if found.get("interval") is None else " [{:.3f}, {:.3f}]".format(*found["interval"])
    average = f"avg@{found['samples']} " if "samples" in found else ""
    called = "" if evaluator.call_rate is None else f", {evaluator.call_rate:.0%} call"
    lost = f" · {evaluator.failed} failed" if evaluator.failed else ""
    shown = ("majority", "perplexity", "margin", *(["loss"] if "mean" in found else []))
    others = [f"{key} {value:.3f}" for key, value in found.items() if key.startswith("pass@") or key in shown]
    if evaluator.warning:
        warn(session.console, evaluator.warning)
    print_summary(
        session.console,
        [
            f"{name} {average}{mean if not answers else found['mean']:.3f}{bounds}{called}",
            f"{counted}{lost}",
            format_duration(time.perf_counter() - clock),
        ],
        facts=[("samples" if answers else "measured", " · ".join(others))] if others else [],
        files=str(checkpoint),
    )
