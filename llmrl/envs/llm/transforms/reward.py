"""Scores turns with the user's own plain function, and keeps a failing one from spoiling or stopping the run.

What the policy said comes from `completions`; advantages and the dropping of unscored rows are MCAdvantage's. A reward
that failed is NaN: neither zero nor an exception in the middle of a batch, but a row that is ignored and counted.
"""

from __future__ import annotations

import importlib
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from llmrl.data.llm.columns import column_values
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.completions import completion_texts
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.envs.transforms.base import Transform
from llmrl.errors import ConfigError, near

if TYPE_CHECKING:
    from llmrl.envs.base import EnvBase

__all__ = ["RewardFunction", "load_reward"]

Reward = Callable[..., Any]

_KEPT = ("group_id", "policy_version", "stop_reason")  # what every batch has beside the dataset's columns


class RewardFunction(Transform):
    """Calls ``fn`` on every turn and writes what it returns as the reward.

    Reads   the response as text (see `completion_texts`), ``answer_key``, and the columns that ``fn`` names
    Calls   ``fn(completion: str, answer: str | None, ...)`` per row; with ``batched=True`` (or ``fn.batched``) once, on
            lists of all rows. Further parameters are dataset columns by name; ``**kwargs`` receives every column
    Writes  "reward"          float32[B, 1, 1]  += weight * value, in the ``next`` tensordict
            "reward_<name>"   float32[B, 1, 1]  the value itself
    Raises  ConfigError for a parameter that cannot be filled: at construction, or from `check_columns` once columns are
            known

    A row is NaN where ``fn`` raised, returned None or NaN, or was not done ``deadline_s`` seconds after its batch
    began. ``counters`` counts each kind; ``first_error`` keeps the first traceback. Python cannot stop a thread: one
    that hangs is left behind, where it may go on using a core; the next batch runs in a new one, and the process can
    end all the same.

    >>> def exact(completion, answer):
    ...     return completion.strip() == answer
    >>> RewardFunction(exact).name
    'exact'
    """

    def __init__(
        self,
        fn: Reward,
        *,
        name: str | None = None,
        weight: float = 1.0,
        deadline_s: float | None = 30.0,
        answer_key: str = "answer",
        batched: bool | None = None,
        tokenizer: Any | None = None,
    ):
        if not callable(fn):
            raise ConfigError(f"RewardFunction: the reward must be a function: got {type(fn).__name__}.")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(
                f"RewardFunction: deadline_s must be positive, or None to wait forever: got {deadline_s}."
            )
        if not math.isfinite(weight):
            raise ConfigError(f"RewardFunction: weight must be finite: got {weight}.")
        super().__init__()
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self.weight = weight
        self.deadline_s = deadline_s
        self.answer_key = answer_key
        self.batched = getattr(fn, "batched", False) if batched is None else batched
        self.tokenizer = tokenizer
        self.counters = {"rows": 0, "errors": 0, "timeouts": 0, "none": 0}
        self.first_error: str | None = None
        self._parameters = _Parameters.of(fn, self.name)
        self._worker: _Worker | None = None

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises ConfigError where ``fn`` asks for a column that the dataset does not have, with a near name."""
        known = list(columns)
        for name in self._parameters.required:
            if name not in known:
                raise ConfigError(
                    f"RewardFunction {self.name!r}: its parameter {name!r} must be a column of the dataset: the "
                    f"columns are {', '.join(known)}.{near(name, known)}"
                )

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        for transform in container.transform.leaves():
            if isinstance(transform, DataLoadingPrimer) and (columns := transform.columns) is not None:
                self.check_columns([*columns, *_KEPT])

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        completions = completion_texts(td, self.tokenizer, who=f"RewardFunction {self.name!r}")
        values = self._score(completions, self._arguments(td, len(completions)))
        scores_B = torch.tensor(values, dtype=torch.float32, device=td.device).view(-1, 1, 1)
        next_td.set(f"reward_{self.name}", scores_B)
        weighted_B = scores_B * self.weight
        before = next_td.get("reward", None)
        next_td.set("reward", weighted_B if before is None else before + weighted_B)
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key in ("reward", f"reward_{self.name}"):
            reward_spec[key] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec

    def close(self) -> None:
        """Lets the worker thread end."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _arguments(self, td: TensorDictBase, count: int) -> dict[str, list[Any]]:
        present = [key for key in td.keys() if isinstance(td.get(key), (NonTensorStack, NonTensorData))]
        asked = self._parameters
        self.check_columns([*present, *_KEPT])
        names = asked.required + [n for n in asked.optional if n in present]
        if asked.takes_all:
            names += [n for n in present if n not in names and n not in ("answer", self.answer_key)]
        columns = {name: column_values(td, name) or [None] * count for name in names}
        if asked.answer:
            answers = column_values(td, self.answer_key) or [None] * count
            columns["answer"] = [a if a is None or isinstance(a, str) else str(a) for a in answers]
        return columns

    def _score(self, completions: list[str], columns: dict[str, list[Any]]) -> list[float]:
        self.counters["rows"] += len(completions)
        batch = _Batch(completions, columns, [math.nan] * len(completions))
        run = self._run_batched if self.batched else self._run_rows
        if self.deadline_s is None:
            run(batch)
            return batch.values
        if self._worker is None:
            self._worker = _Worker(f"reward-{self.name}")
        if self._worker.run(lambda: run(batch), timeout_s=self.deadline_s):
            return batch.values
        self.close()  # and the thread ends if its call ever returns
        with batch.lock:
            batch.cancelled = True
            late = len(completions) - batch.reached
            self.counters["timeouts"] += late
            which = "the batch" if self.batched else f"row {batch.reached + 1} of {len(completions)}"
            self._keep(f"{which} was not done {self.deadline_s} s after its batch began")
            return batch.values[: batch.reached] + [math.nan] * late

    def _run_rows(self, batch: _Batch) -> None:
        names = list(batch.columns)
        rows = zip(*batch.columns.values(), strict=True) if names else ((),) * len(batch.completions)
        for completion, row in zip(batch.completions, rows, strict=True):
            error, value = None, None
            try:
                value = _number(self.fn(completion, **dict(zip(names, row, strict=True))))
            except (Exception, SystemExit):  # the boundary to the user's code
                error = traceback.format_exc()
            with batch.lock:
                if batch.cancelled:
                    return  # the rows after the one that hung are not started in the thread that was left behind
                batch.values[batch.reached] = self._counted([value], error, rows=1)[0]
                batch.reached += 1

    def _run_batched(self, batch: _Batch) -> None:
        count = len(batch.completions)
        error, values = None, [None] * count
        try:
            values = [_number(value) for value in self.fn(batch.completions, **batch.columns)]
            if len(values) != count:
                raise ValueError(f"a batched reward must return one value per row, {count}: got {len(values)}")
        except (Exception, SystemExit):
            error, values = traceback.format_exc(), [None] * count
        with batch.lock:
            if not batch.cancelled:
                batch.values[:] = self._counted(values, error, rows=count)
                batch.reached = count

    def _counted(self, values: list[float | None], error: str | None, *, rows: int) -> list[float]:
        if error is not None:
            self.counters["errors"] += rows
            self._keep(error)
        else:
            self.counters["none"] += values.count(None)
        return [math.nan if value is None else value for value in values]

    def _keep(self, text: str) -> None:
        if self.first_error is None:
            self.first_error = text


def load_reward(name: str) -> Reward:
    """The function that ``"package.module:function"`` names.

    Raises  ConfigError where the name has another form, the module cannot be imported, or it has no such function

    >>> load_reward("math:isfinite")(1.0)
    True
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"reward: must be 'package.module:function': got {name!r}.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module: whatever it raises, the setting cannot be run
        raise ConfigError(
            f"reward: {module_name!r} must be importable from here: importing it raises {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(
            f"reward: {module_name!r} has no function {attribute!r}: it has {', '.join(known) or 'none'}."
            f"{near(attribute, known)}"
        )
    fn = getattr(module, attribute)
    if not callable(fn):
        raise ConfigError(f"reward: {name!r} must be a function: it is a {type(fn).__name__}.")
    return fn


@dataclass(frozen=True)
class _Parameters:
    """What a reward function asks for beside the completion."""

    answer: bool
    required: list[str]
    optional: list[str]
    takes_all: bool

    @classmethod
    def of(cls, fn: Reward, name: str) -> _Parameters:
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # some builtins have no signature
            return cls(answer=True, required=[], optional=[], takes_all=False)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        takes_any = parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        if not parameters or not (takes_any or parameters[0].kind in positional):
            raise ConfigError(
                f"RewardFunction {name!r}: its first parameter must take the completion by position, as in "
                f"def {name}(completion, answer): its signature is {name}{inspect.signature(fn)}."
            )
        required, optional, takes_all = [], [], False
        for parameter in parameters[1:]:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                takes_all = True
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"RewardFunction {name!r}: the parameters after the first are passed by name, but "
                    f"{parameter.name!r} takes no name; its signature is {name}{inspect.signature(fn)}."
                )
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL and parameter.name != "answer":
                (required if parameter.default is inspect.Parameter.empty else optional).append(parameter.name)
        answer = takes_all or any(parameter.name == "answer" for parameter in parameters[1:])
        return cls(answer, required, optional, takes_all)


@dataclass
class _Batch:
    """One batch on its way through the reward function, shared with the thread that runs it."""

    completions: list[str]
    columns: dict[str, list[Any]]
    values: list[float]
    reached: int = 0
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Worker:
    """One daemon thread that runs calls in turn; a call that never returns cannot keep the process from ending."""

    def __init__(self, name: str):
        self._calls: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def run(self, call: Callable[[], None], *, timeout_s: float) -> bool:
        """True when ``call`` ended within ``timeout_s`` seconds."""
        done = threading.Event()
        self._calls.put((call, done))
        return done.wait(timeout_s)

    def close(self) -> None:
        self._calls.put(None)

    def _loop(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            call()
            done.set()


def _number(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
