"""Scores turns with the user's own plain function, and keeps a failing one from spoiling or stopping the run.

What the policy said comes from `completions`, calls are made by `llmrl.tools.calls` or, in a process, by
`reward_process`; advantages and the dropping of
unscored rows are MCAdvantage's. A reward that failed is NaN: neither zero nor an exception in the middle of a batch,
but a row that is ignored and counted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column_values
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.completions import completion_texts, tokenizer_of
from llmrl.envs.llm.scoring import ScoringTransform
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.envs.llm.transforms.reward_process import SHOWN, ProcessRunner, plain_number, plain_numbers
from llmrl.envs.llm.transforms.reward_source import Parameters, Reward, load_reward, runs_apart
from llmrl.envs.specs import DONE_KEYS
from llmrl.errors import ConfigError, ShapeError, did_you_mean
from llmrl.tools.calls import AsyncRunner, Calls, Outcome, ThreadRunner

if TYPE_CHECKING:
    from llmrl.envs.base import EnvBase

__all__ = ["RewardFunction", "load_reward"]

_KEPT = ("group_id", "policy_version", "stop_reason")  # what every batch has beside the dataset's columns
_LARGEST = 1e17  # of a reward: in float32 the squares of the differences in a group of thousands add up
_COROUTINES = 64  # how many run at a time unless told otherwise


class RewardFunction(ScoringTransform):
    """Calls ``fn`` on every turn and writes what it returns as the reward.

    Reads   the response as text (see `completion_texts`), ``answer_key``, and the columns that ``fn`` names
    Calls   ``fn(completion: str, answer: str | None, ...)`` per row; with ``batched=True`` (or ``fn.batched``) once, on
            lists of all rows. Further parameters are dataset columns by name, a tensor's row as a tensor; ``**kwargs``
            receives every column that is no tensor. ``fn`` may be a coroutine function, or a name that `load_reward`
            takes. ``concurrency`` (or ``fn.concurrency``) rows are scored at a time: by default one, of a coroutine
            function 64
    Writes  "reward"          float32[B, 1, 1]  += weight * value, in the ``next`` tensordict
            "reward_<name>"   float32[B, 1, 1]  the value itself; with weight 0 it is only reported
    Raises  ConfigError for a parameter that cannot be filled: at construction, or from `check_columns` once columns are
            known; ShapeError where ``fn`` returns something else than a number per row

    A row is NaN where ``fn`` raised (``retries`` times more than once), returned None or NaN, a number that is infinite
    or with its weight beyond 1e17, or was not done ``deadline_s`` seconds after its batch began; rows that were done by
    then keep their values. ``counters`` counts each kind; ``first_error`` keeps the first traceback.

    With ``process`` the function runs in a process of its own, which is started once, loads it by its name, and is
    killed at the deadline: by default where ``fn`` is a name outside of llmrl. Its module is imported in both, and what
    it keeps in variables is there, not here. Otherwise it runs in a thread (a coroutine in an event loop), which Python
    cannot stop: one that hangs is left behind, where it may go on using a core. One that hangs with the interpreter's
    lock, inside C code, ends this process with the places of all threads, a minute after the deadline.

    >>> def exact(completion, answer):
    ...     return completion.strip() == answer
    >>> RewardFunction(exact).name
    'exact'
    """

    def __init__(
        self,
        fn: Reward | str,
        *,
        name: str | None = None,
        weight: float = 1.0,
        deadline_s: float | None = 30.0,
        retries: int = 0,
        concurrency: int | None = None,
        answer_key: str = "answer",
        batched: bool | None = None,
        tokenizer: Any | None = None,
        process: bool | None = None,
    ):
        apart = runs_apart(fn, process)
        fn = load_reward(fn) if isinstance(fn, str) else fn
        if not callable(fn):
            raise ConfigError(f"RewardFunction: the reward must be a function: got {type(fn).__name__}.")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(
                f"RewardFunction: deadline_s must be positive, or None to wait forever: got {deadline_s}."
            )
        if not math.isfinite(weight):
            raise ConfigError(f"RewardFunction: weight must be finite: got {weight}.")
        asynchronous = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        if concurrency is None:
            concurrency = getattr(fn, "concurrency", _COROUTINES if asynchronous else 1)
        if retries < 0 or concurrency < 1:
            raise ConfigError(
                f"RewardFunction: retries must not be negative and concurrency at least 1: got {retries} and "
                f"{concurrency}."
            )
        super().__init__()
        self.fn = fn
        self.name = name or getattr(fn, "__name__", None) or getattr(fn, "name", None) or type(fn).__name__
        self.weight = weight
        self.deadline_s = deadline_s
        self.retries = retries
        self.answer_key = answer_key
        self.batched = getattr(fn, "batched", False) if batched is None else batched
        self.tokenizer = tokenizer
        self.counters = {"rows": 0, "errors": 0, "timeouts": 0, "none": 0, "retries": 0}
        self.first_error: str | None = None
        self._owns_fn = True
        self._parameters = Parameters.of(fn, self.name)
        self._runner: AsyncRunner | ThreadRunner | ProcessRunner
        if apart is not None:
            options = {"concurrency": concurrency, "asynchronous": asynchronous, "batched": self.batched}
            self._runner = ProcessRunner(self.name, apart, **options)
        else:
            self._runner = (AsyncRunner if asynchronous else ThreadRunner)(f"reward-{self.name}", concurrency)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises ConfigError where ``fn`` asks for a column that the dataset does not have, with a near name."""
        known = list(columns)
        for name in self._parameters.required:
            if name not in known:
                raise ConfigError(
                    f"RewardFunction {self.name!r}: its parameter {name!r} must be a column of the dataset: the "
                    f"columns are {', '.join(known)}.{did_you_mean(name, known)}"
                )

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        for transform in container.transform.leaves():
            if isinstance(transform, DataLoadingPrimer) and (columns := transform.columns) is not None:
                self.check_columns([*columns, *_KEPT])

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        completions = completion_texts(td, tokenizer_of(self), who=f"RewardFunction {self.name!r}")
        values = self._score(completions, self._arguments(td, len(completions)))
        scores_B = torch.tensor(values, dtype=torch.float32, device=td.device).view(-1, 1, 1)
        next_td.set(f"reward_{self.name}", scores_B)
        # With weight 0 a score that failed costs nothing: 0 * NaN would be NaN.
        weighted_B = scores_B * self.weight if self.weight else torch.zeros_like(scores_B)
        before = next_td.get("reward", None)
        next_td.set("reward", weighted_B if before is None else before + weighted_B)
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key in ("reward", f"reward_{self.name}"):
            reward_spec[key] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec

    def clone(self) -> Self:
        """A copy for another env, with threads and counters of its own; ``fn`` and its process stay this one's."""
        other = super().clone()
        other.counters, other.first_error = dict.fromkeys(self.counters, 0), None
        other._owns_fn = False
        if not isinstance(self._runner, ProcessRunner):
            other._runner = type(self._runner)(self._runner.name, self._runner.concurrency)
        return other

    def close(self) -> None:
        """Ends the threads and, but for a clone, the process and what ``fn`` holds if it has a ``close`` too."""
        if self._owns_fn or not isinstance(self._runner, ProcessRunner):
            self._runner.close()
        if self._owns_fn and callable(close := getattr(self.fn, "close", None)):
            close()

    def _arguments(self, td: TensorDictBase, count: int) -> dict[str, list[Any]]:
        objects = [key for key in td.keys() if isinstance(td.get(key), (NonTensorStack, NonTensorData))]
        present = [*objects, *(key for key in td.keys() if isinstance(td.get(key), Tensor) and key not in DONE_KEYS)]
        asked = self._parameters
        self.check_columns([*present, *_KEPT])
        names = asked.required + [n for n in asked.optional if n in present]
        if asked.takes_all:
            names += [n for n in objects if n not in names and n not in ("answer", self.answer_key)]
        columns = {name: _values(td, name) or [None] * count for name in names}
        if asked.answer:
            answers = column_values(td, self.answer_key) or [None] * count
            columns["answer"] = [a if a is None or isinstance(a, str) else str(a) for a in answers]
        return columns

    def _score(self, completions: list[str], columns: dict[str, list[Any]]) -> list[float]:
        count = len(completions)
        if self.batched:
            calls = Calls([partial(self.fn, completions, **columns)], self.retries, convert=plain_numbers)
        else:
            names = list(columns)
            rows = zip(*columns.values(), strict=True) if names else ((),) * count
            arguments = (dict(zip(names, row, strict=True)) for row in rows)
            scored = [partial(self.fn, c, **named) for c, named in zip(completions, arguments, strict=True)]
            calls = Calls(scored, self.retries, convert=plain_number)
        outcomes = self._runner.run(calls, timeout_s=self.deadline_s)
        self.counters["rows"] += count
        self.counters["retries"] += calls.retried
        values = self._of_batch(outcomes[0], count) if self.batched else self._of_rows(outcomes)
        self.counters["none"] += sum(value is None for value in values)
        return [math.nan if value is None else value for value in values]

    def _of_rows(self, outcomes: list[Outcome]) -> list[float | None]:
        late = next((number for number, outcome in enumerate(outcomes, 1) if not outcome.done), None)
        if late is not None:
            self._keep(f"row {late} of {len(outcomes)} was not done {self.deadline_s} s after its batch began")
        values = []
        for number, outcome in enumerate(outcomes, 1):
            failed = self._failed(outcome, rows=1)
            values.append(math.nan if failed else self._number(outcome.value, f"row {number} of {len(outcomes)}"))
        return values

    def _of_batch(self, outcome: Outcome, count: int) -> list[float | None]:
        if not outcome.done:
            self._keep(f"the batch was not done {self.deadline_s} s after it began")
        if self._failed(outcome, rows=count):
            return [math.nan] * count
        values = outcome.value
        if isinstance(values, str) or len(values) != count:
            got = values if isinstance(values, str) else f"{len(values)}"
            raise ShapeError(
                f"RewardFunction {self.name!r}: a batched reward must return one value per row, {count}: got {got}."
            )
        return [self._number(value, f"row {number} of {count}") for number, value in enumerate(values, 1)]

    def _failed(self, outcome: Outcome, *, rows: int) -> bool:
        if outcome.error is not None:
            self._keep(outcome.error)
        self.counters["errors" if outcome.done else "timeouts"] += rows * (
            not outcome.done or outcome.error is not None
        )
        return not outcome.done or outcome.error is not None

    def _number(self, value: float | str | None, where: str) -> float | None:
        """What `plain_number` gave; None where there is no number to use. Raises ShapeError where it is not one."""
        if isinstance(value, str):
            kind, _, shown = value.partition(SHOWN)
            raise ShapeError(
                f"RewardFunction {self.name!r}: a reward must be one number, or None where there is none: got {kind} "
                f"for {where}: {shown}."
            )
        if value is None or math.isnan(value):
            return None
        if abs(value) > _LARGEST or abs(value * self.weight) > _LARGEST:
            self._keep(f"{where}: a reward must lie within {_LARGEST:g}, also with its weight: got {value:g}")
            self.counters["errors"] += 1
            return math.nan
        return value

    def _keep(self, text: str) -> None:
        if self.first_error is None:
            self.first_error = text


def _values(td: TensorDictBase, name: str) -> list[Any] | None:
    """A column, one value per row: tensors of more than one number stay tensors."""
    value = td.get(name, None)
    return list(value) if isinstance(value, Tensor) and value.ndim > 1 else column_values(td, name)
