"""Evaluation on held-out problems, with the tools and the user of the training task, or by its agent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm.completions import completion_texts
from llmrl.envs.llm.transforms.dataloading import row_seeds
from llmrl.errors import caused_by
from llmrl.report.intervals import interval
from llmrl.train.agent_runs import AgentRuns, AgentTask
from llmrl.train.settings.environment import SetSettings
from llmrl.train.tasks import Task, eval_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.modules.llm.policies.base import LLMWrapperBase
    from llmrl.train.distributed import Session
    from llmrl.train.held_out import HeldOutEvaluator
    from llmrl.train.settings.environment import EvalSettings
    from llmrl.train.settings.sft import SFTConfig


class Evaluator:
    """Samples ``policy``'s answers to all rows, divided over the ranks: once and greedily, or ``samples`` times.

    `run` returns the mean of "success" if the environment writes it, else of the reward. Answers whose scoring failed
    are left out of the mean and counted in ``failed``. ``metrics`` contains the mean, standard deviation and count of
    the scores, and with tools the share of conversations that called one. ``answers`` contains the scores (NaN: failed)
    and texts of each row's answers.

    An agent answers all rows at the same time, at most ``eval.batch_size`` and ``concurrency`` of them; its score is
    its reward.
    """

    def __init__(
        self,
        session: Session,
        policy: LLMWrapperBase,
        task: Task,
        rows: Sequence[Mapping[str, Any]],
        settings: EvalSettings,
        *,
        samples: int = 1,
        temperature: float = 0.0,
        concurrency: int | None = None,
    ):
        split, size = settings.split, max(1, settings.batch_size // samples)
        self.session = session
        self.task = task
        env = task.settings
        self.name = env.label if isinstance(env, SetSettings) else f"{env.label} {split}"
        self.metric = f"eval/{env.label}/mean" if split == "test" else f"eval/{env.label}-{split}/mean"
        self.num_rows = len(rows)
        self.failed, self.first_error = 0, ""
        self.score = self.std = math.nan  # of the last run, like those below
        self.num_scored = 0
        self.answers: list[tuple[list[float], list[str]]] = []
        self.call_rate: float | None = None  # None without tools
        self._retries = env.retries
        self._has_tools = bool(env.tools)
        self._policy = policy.get_new_version(
            generate_kwargs={"max_new_tokens": settings.max_tokens, "temperature": temperature},
            prefer_tokens=True,  # nothing is trained, so a template may rewrite earlier turns
        )
        places = range(session.rank, len(rows), session.world_size)
        self._samples = samples
        self._concurrency = min(settings.batch_size, concurrency or settings.batch_size)
        self._envs, self._agent_tasks = [], []
        if env.agent is not None:
            for place in places:
                seeds = row_seeds(0, [place] * samples, range(samples)).tolist()
                self._agent_tasks += [AgentTask(rows[place], place, seed) for seed in seeds]
            return
        mine = [rows[place] for place in places]
        batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        options = {"shuffle": False, "repeats": samples, "group_repeats": True}
        self._envs = [task.make_env(batch, num_envs=len(batch), **options) for batch in batches]

    def run(self) -> float:
        scores: list[float] = []
        texts: list[str] = []
        called: list[bool] = []
        for rollouts in self._agent_rollouts() if self._agent_tasks else self._conversations():
            # A conversation may be several records; only the last is done. Sort answers by their row.
            ends = rollouts.get(("next", "done")).flatten().nonzero().flatten()
            ends = ends[rollouts.get("group_id")[ends].argsort(stable=True)]
            texts += completion_texts(rollouts[ends], self.task.tokenizer, who="Evaluator")
            after = rollouts.get("next")
            reward = after.get("reward")[ends].to(torch.float64).flatten(1).sum(1)
            success = after.get("success", None)
            # A failed conversation has a reward of NaN: it is left out, not counted as wrong.
            score = reward if success is None else success[ends].to(torch.float64).flatten(1).sum(1)
            scores += score.masked_fill(~reward.isfinite(), math.nan).tolist()
            if self._has_tools:
                called += (after.get("tool_use").get("calls")[ends] > 0).tolist()
        starts = range(0, len(scores), self._samples)
        own = [(scores[start : start + self._samples], texts[start : start + self._samples]) for start in starts]
        self.answers = self.session.gather(own)
        valid = [score for row, _ in self.answers for score in row if math.isfinite(score)]
        self.failed = len(self.answers) * self._samples - len(valid)
        self.first_error = next(filter(None, self.session.gather([self.first_error])), "")
        if self._has_tools:
            called = self.session.gather(called)
            self.call_rate = sum(called) / max(1, len(called))
        self.num_scored = len(valid)
        self.score, self.std = (statistics.fmean(valid), statistics.pstdev(valid)) if valid else (math.nan, math.nan)
        return self.score

    def _conversations(self) -> list[TensorDictBase]:
        """The rollouts of this rank's batches."""
        for env in self._envs:
            env.reset_dataloader()  # every evaluation uses the same rows
        options = {"policy": self._policy, "yield_only_last_steps": True, "retries": self._retries}
        with self.session.autocast(), self.session.in_step(self._policy):
            return [LLMCollector(env, **options).rollout() for env in self._envs]

    def _agent_rollouts(self) -> list[TensorDictBase]:
        """Those of an agent. Its endpoint is this evaluation's own, so nothing of it reaches what is trained."""
        limits = {"concurrency": self._concurrency, "modes": self.session.autocast}
        with closing(AgentRuns(self.task.settings, self._policy, by_seat=False, **limits)) as runs:
            rollouts = runs.run(self._agent_tasks)
            self.first_error = runs.first_error
        return [rollouts]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last run."""
        own = {"call_rate": self.call_rate, "failed": self.failed or None}
        return eval_metrics(self.metric, self.score, self.std, self.num_scored, **own)

    @property
    def warning(self) -> str:
        """The number of answers of the last run that are not in its score, and why; "" for none."""
        if not self.failed:
            return ""
        words = f"{self.name}: {self.failed} of {self.failed + self.num_scored} failed and are not in the mean"
        return f"{caused_by(words, self.first_error)}" if self.first_error else f"{words}."

    @property
    def measures(self) -> dict[str, str]:
        """The metrics of a run's summary, and their labels in it."""
        calls = {self.metric.removesuffix("mean") + "call_rate": "calls"} if self._has_tools else {}
        return {self.metric: self.name, **calls}

    @property
    def summary(self) -> str:
        """The result of the last run, in words."""
        bounds = interval(self.score, self.std, self.num_scored) if self.num_scored else None
        shown = f"{self.name} {self.score:.3f}" + ("" if bounds is None else " [{:.3f}, {:.3f}]".format(*bounds))
        return shown + ("" if self.call_rate is None else f", {self.call_rate:.0%} call")


class MixedEvaluator:
    """Several evaluators as one: of the sources of a mix, of sets, or of a task and of held-out rows."""

    def __init__(self, parts: Sequence[Evaluator | MixedEvaluator | HeldOutEvaluator]):
        self.parts = parts

    def run(self) -> None:
        for part in self.parts:
            part.run()

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.metrics.items()}

    @property
    def measures(self) -> dict[str, str]:
        return {name: label for part in self.parts for name, label in part.measures.items()}

    @property
    def summary(self) -> str:
        return "  ".join(part.summary for part in self.parts)

    @property
    def warning(self) -> str:
        return "  ".join(filter(None, (part.warning for part in self.parts)))


def make_evaluator(
    session: Session,
    policy: LLMWrapperBase,
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    settings: EvalSettings,
    *,
    concurrency: int | None = None,
) -> Evaluator | MixedEvaluator:
    """The evaluator of `eval_rows`; of a mix, one for each source that has any; one for each set of ``eval.sets``."""
    limits = {"concurrency": concurrency}
    own = task.measured(settings)
    parts = [Evaluator(session, policy, part, each, settings, **limits) for part, each in own.parts(rows)]
    return parts[0] if len(parts) == 1 else MixedEvaluator(parts)


def eval_metrics(name: str, mean: float, std: float, count: int, **others: float | None) -> dict[str, float]:
    """The metrics of an evaluation, named like ``name`` = ".../mean"; without those of ``others`` that are None.

    >>> eval_metrics("eval/sums/mean", 0.75, 0.433, 500)
    {'eval/sums/mean': 0.75, 'eval/sums/std': 0.433, 'eval/sums/count': 500}
    """
    values = {"mean": mean, "std": std, "count": count, **others}
    return {f"{name.removesuffix('mean')}{key}": value for key, value in values.items() if value is not None}


@contextmanager
def evaluators(
    config: SFTConfig,
    session: Session,
    tokenizer: PreTrainedTokenizerBase,
    policy: LLMWrapperBase,
    held_out: HeldOutEvaluator | None,
) -> Iterator[tuple[Evaluator | MixedEvaluator | HeldOutEvaluator | None, Evaluator | None]]:
    """Context with the evaluator that is reported and the one for early stopping; each is None if not configured.
    Without an env the first is ``held_out``, with one it has that beside it.
    """
    if config.env is None:
        yield held_out, None
        return
    sampler = policy.get_new_version(generate=True)
    with closing(Task(config.env, tokenizer)) as task:

        def evaluator(settings: EvalSettings | None) -> Any:
            rows = settings and eval_rows(config.env, settings)
            return None if rows is None else make_evaluator(session, sampler, task, rows, settings)

        reported = [part for part in (evaluator(config.eval), held_out) if part is not None]
        both = MixedEvaluator(reported) if len(reported) > 1 else next(iter(reported), None)
        yield both, evaluator(config.stop_eval)
