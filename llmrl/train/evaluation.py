"""Evaluation on held-out problems, with the tools and the user of the training task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm.completions import completion_texts
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
    ):
        split, size = settings.split, max(1, settings.batch_size // samples)
        self.session = session
        self.task = task
        env = task.settings
        self.name = f"{env.label} {split}"
        self.metric = f"eval/{env.label}/mean" if split == "test" else f"eval/{env.label}-{split}/mean"
        self.num_rows = len(rows)
        self.failed = 0
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
        mine = list(rows[session.rank :: session.world_size])
        batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        self._samples = samples
        options = {"shuffle": False, "repeats": samples, "group_repeats": True}
        self._envs = [task.make_env(batch, num_envs=len(batch), **options) for batch in batches]

    def run(self) -> float:
        scores: list[float] = []
        texts: list[str] = []
        called: list[bool] = []
        for env in self._envs:
            env.reset_dataloader()  # every evaluation uses the same rows
        options = {"policy": self._policy, "yield_only_last_steps": True, "retries": self._retries}
        with self.session.autocast(), self.session.in_step(self._policy):
            results = [LLMCollector(env, **options).rollout() for env in self._envs]
        for rollouts in results:
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
        if self._has_tools:
            called = self.session.gather(called)
            self.call_rate = sum(called) / max(1, len(called))
        self.num_scored = len(valid)
        self.score, self.std = (statistics.fmean(valid), statistics.pstdev(valid)) if valid else (math.nan, math.nan)
        return self.score

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last run."""
        return eval_metrics(self.metric, self.score, self.std, self.num_scored, call_rate=self.call_rate)

    @property
    def measures(self) -> dict[str, str]:
        """The metrics of a run's summary, and their labels in it."""
        calls = {self.metric.removesuffix("mean") + "call_rate": "calls"} if self._has_tools else {}
        return {self.metric: self.name, **calls}

    @property
    def summary(self) -> str:
        """The result of the last run, in words."""
        return f"{self.name} {self.score:.3f}" + ("" if self.call_rate is None else f", {self.call_rate:.0%} call")


class MixedEvaluator:
    """The evaluators of the sources of a mix, as one."""

    def __init__(self, parts: Sequence[Evaluator]):
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


def make_evaluator(
    session: Session,
    policy: LLMWrapperBase,
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    settings: EvalSettings,
) -> Evaluator | MixedEvaluator:
    """The evaluator of the rows; of a mix, one for each source that has any."""
    parts = [Evaluator(session, policy, part, own, settings) for part, own in task.parts(rows)]
    return parts[0] if len(parts) == 1 else MixedEvaluator(parts)


def eval_metrics(name: str, mean: float, std: float, count: int, *, call_rate: float | None = None) -> dict[str, float]:
    """The metrics of an evaluation, named like ``name`` = ".../mean"; without ``call_rate`` if it is None.

    >>> eval_metrics("eval/sums/mean", 0.75, 0.433, 500)
    {'eval/sums/mean': 0.75, 'eval/sums/std': 0.433, 'eval/sums/count': 500}
    """
    values = {"mean": mean, "std": std, "count": count, "call_rate": call_rate}
    return {f"{name.removesuffix('mean')}{key}": value for key, value in values.items() if value is not None}


@contextmanager
def evaluators(
    config: SFTConfig,
    session: Session,
    tokenizer: PreTrainedTokenizerBase,
    policy: LLMWrapperBase,
    held_out: HeldOutEvaluator | None,
) -> Iterator[tuple[Evaluator | HeldOutEvaluator | None, Evaluator | None]]:
    """Context with the evaluator that is reported and the one for early stopping; each is None if not configured.
    Without an env the first is ``held_out``.
    """
    if config.env is None:
        yield held_out, None
        return
    sampler = policy.get_new_version(generate=True)
    with closing(Task(config.env, tokenizer)) as task:

        def evaluator(settings: EvalSettings | None) -> Evaluator | None:
            rows = settings and eval_rows(config.env, settings)
            return None if rows is None else Evaluator(session, sampler, task, rows, settings)

        yield evaluator(config.eval), evaluator(config.stop_eval)
