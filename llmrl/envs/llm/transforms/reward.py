"""Rewards from the user's plain functions: a single one (`RewardFunction`), or a weighted list (`make_rewards`).

`llmrl.concurrency.deadline` calls the functions or, in another process, `reward_process`. A reward that failed is NaN:
MCAdvantage ignores and counts that row. Zero would be a wrong score, and an exception would lose the batch.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from llmrl.concurrency.deadline import AsyncRunner, Calls, ThreadRunner, is_coroutine_function, runner_of
from llmrl.data.llm.row_reading import CHAT_COLUMNS, PROMPT_COLUMNS
from llmrl.data.ragged.tensordicts import column_values
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.completions import ScoringTransform, add_reward, completion_texts, tokenizer_of, unpadded_ids
from llmrl.envs.llm.transforms.dataloading import primers_of
from llmrl.envs.llm.transforms.reward_process import FAILED, SHOWN, ProcessRunner, plain_number, plain_numbers
from llmrl.envs.transforms.base import innermost
from llmrl.errors import ConfigError, DataError, ShapeError, check_at_least, check_choice, did_you_mean
from llmrl.modules.llm.policies.columns import RESERVED, refuse_reserved

Reward = Callable[..., Any]
Spec = Mapping[str, Any] | str | Reward

_KEPT = ("answer", "group_id", "policy_version", "stop_reason")  # allowed parameters besides the dataset's columns
_OF_TRL = ("prompts", "completions", "completion_ids")
_LARGEST = 1e17  # of a reward: sums of squared differences over a group of thousands must fit float32
_COROUTINES = 64  # default concurrency of coroutine functions
_KINDS = ("fn", "judge", "reward_model", "code")
_OPTIONS = ("name", "weight", "deadline_s", "retries", "concurrency", "answer_key", "batched", "process", "style")
_BATCH_DEADLINE_S = 600.0  # default for judges, reward models and code, which also have their own per-row deadlines


def load_reward(name: str) -> Reward:
    """Loads the function ``"package.module:function"``, also from modules in the working directory.

    Raises  ConfigError if the name has another form, the module cannot be imported, or it lacks the function

    >>> load_reward("math:isfinite")(1.0)
    True
    """
    from llmrl.loading import load_function

    return load_function(name, what="reward")


class RewardFunction(ScoringTransform):
    """Calls ``fn`` on every turn and writes its value as the reward.

    Reads   the response as text (see `completion_texts`), ``answer_key``, and the columns that ``fn`` names
    Calls   ``fn(completion: str, answer: str | None, ...)`` per row; with ``batched=True`` (or ``fn.batched``) once, on
            lists of all rows. A function with a parameter ``completions`` or ``completion_ids`` (or ``style="trl"``) is
            called as TRL's trainer calls it, see `_trl_arguments`. Further parameters are dataset columns by name, a
            tensor's row as a tensor; ``**kwargs`` receives all of them. ``fn`` may be a coroutine function, or a name
            for `load_reward`. ``concurrency`` (or ``fn.concurrency``) rows are scored at a time; default 1, or 64 for a
            coroutine function
    Writes  "reward"          float32[B, 1, 1]  += weight * value, in the ``next`` tensordict
            "reward_<name>"   float32[B, 1, 1]  the value itself; with weight 0 it is only reported
    Raises  ConfigError for a parameter without a matching column, and DataError for a column that has the name of
            another argument, as soon as the columns are known; ShapeError if ``fn`` returns anything but a number per
            row

    None (or NaN) means that ``fn`` does not apply to the row: the reward is the sum over the functions that returned a
    number, NaN if none did. A row is also NaN if ``fn`` raised (also in all ``retries``) or, batched, returned an
    exception for it; if ``fn`` returned an infinite number
    or one beyond 1e17 (also after weighting), or was not done ``deadline_s`` seconds after its batch began.
    ``counters`` counts each kind;
    ``first_error`` keeps the first traceback.

    With ``process`` (default: if ``fn`` is a name outside of llmrl) the function runs in another process, which is
    killed at the deadline; both processes import its module, and its global variables change only in the other one.
    Otherwise it runs in a thread or an event loop: a call that hangs is abandoned. If it hangs while holding the GIL,
    this process dumps the stacks of all threads and exits one minute after the deadline.

    >>> RewardFunction(lambda completion, answer: completion.strip() == answer, name="exact").name
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
        style: str | None = None,
    ):
        importable = _name_for_process(fn, process)
        fn = load_reward(fn) if isinstance(fn, str) else fn
        if not callable(fn):
            raise ConfigError(f"RewardFunction: the reward must be a function: got {type(fn).__name__}.")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(f"RewardFunction: deadline_s must be positive, or None for no limit: got {deadline_s}.")
        if not math.isfinite(weight):
            raise ConfigError(f"RewardFunction: weight must be finite: got {weight}.")
        if concurrency is None:
            concurrency = getattr(fn, "concurrency", _COROUTINES if is_coroutine_function(fn) else 1)
        check_at_least("RewardFunction", 0, retries=retries)
        check_at_least("RewardFunction", 1, concurrency=concurrency)
        super().__init__()
        self.fn = fn
        self.name = name or getattr(fn, "__name__", None) or getattr(fn, "name", None) or type(fn).__name__
        self.weight = weight
        self.deadline_s = deadline_s
        self.retries = retries
        self.answer_key = answer_key
        if style is None:  # the parameters of TRL's reward functions; functions of llmrl say that they are batched
            of_trl = not hasattr(fn, "batched") and {"completions", "completion_ids"} & _parameter_names(fn)
            style = "trl" if of_trl else "llmrl"
        check_choice("RewardFunction", "style", style, ("trl", "llmrl"))
        self.style = style
        self.batched = style == "trl" or (getattr(fn, "batched", False) if batched is None else batched)
        self.tokenizer = tokenizer
        self.counters = {"rows": 0, "errors": 0, "timeouts": 0, "none": 0, "retries": 0}
        self.first_error: str | None = None
        self._owns_fn = True
        first = None if style == "trl" else "completion"
        self._parameters = Parameters.of(fn, f"RewardFunction {self.name!r}", first)
        self._runner: AsyncRunner | ThreadRunner | ProcessRunner
        if importable is None:
            self._runner = runner_of(fn, f"reward-{self.name}", concurrency)
        else:
            self._runner = ProcessRunner(self.name, importable, concurrency=concurrency, batched=self.batched)

    def reads(self, column: str) -> bool:
        """True if the function has this column as a parameter."""
        asked = self._parameters
        return asked.takes_all or column in (*asked.required, *asked.optional, self.answer_key)

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        self._parameters.check_datasets(container, *_KEPT, given=_OF_TRL if self.style == "trl" else ())
        for primer in primers_of(container):
            self._refuse_own(primer.columns)

    def _refuse_own(self, columns: Iterable[str]) -> None:
        own = {f"reward_{self.name}": "the value of this function"}
        refuse_reserved(columns, f"RewardFunction {self.name!r}", own)

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        self._refuse_own(reset_td.keys())  # columns that were not known before
        return super()._reset(td, reset_td)

    @property
    def none_message(self) -> str:
        """How many rows had no reward; "" if all had one."""
        none, rows = self.counters["none"], self.counters["rows"]
        return f"reward {self.name!r} returned None for {none} of {rows} rows." if none else ""

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        completions = completion_texts(td, tokenizer_of(self), who=f"RewardFunction {self.name!r}")
        values = self._score(completions, self._arguments(td, completions))
        numbers = [math.nan if value is None else value for value in values]
        scores_B = torch.tensor(numbers, dtype=torch.float32, device=td.device).view(-1, 1, 1)
        next_td.set(f"reward_{self.name}", scores_B)
        if not self.weight:  # only reported: a failed score must not affect the reward, but 0 * NaN would be NaN
            add_reward(next_td, torch.zeros_like(scores_B))
            return next_td
        applies_B = torch.tensor([value is not None for value in values], device=td.device)
        add_reward(next_td, scores_B * self.weight, applies_B=applies_B)
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key in ("reward", f"reward_{self.name}"):
            reward_spec[key] = Unbounded((*reward_spec.shape, 1, 1))
        if self.weight:
            reward_spec["scored"] = Unbounded((*reward_spec.shape, 1, 1), dtype=torch.bool)
        return reward_spec

    def clone(self) -> Self:
        """A copy for another env, with its own threads and counters; ``fn`` and its process are shared."""
        other = super().clone()
        other.counters, other.first_error = dict.fromkeys(self.counters, 0), None
        other._owns_fn = False
        if not isinstance(self._runner, ProcessRunner):
            other._runner = type(self._runner)(self._runner.name, self._runner.concurrency)
        return other

    def close(self) -> None:
        """Ends the threads; except in a clone, also ends the process and calls ``fn.close`` if it exists."""
        if self._owns_fn or not isinstance(self._runner, ProcessRunner):
            self._runner.close()
        if self._owns_fn and callable(close := getattr(self.fn, "close", None)):
            close()

    def _arguments(self, td: TensorDictBase, completions: list[str]) -> dict[str, list[Any]]:
        count = len(completions)
        given = self._trl_arguments(td, completions) if self.style == "trl" else {}
        asked = self._parameters
        columns = asked.columns(td, self.container, *_KEPT, given=given)
        if asked.takes_all or "answer" in asked.required + asked.optional:
            answers = column_values(td, self.answer_key) or [None] * count
            # References in a file may be numbers, but functions compare strings.
            is_number = [isinstance(a, (int, float)) and not isinstance(a, bool) for a in answers]
            columns["answer"] = [str(a) if number else a for a, number in zip(answers, is_number, strict=True)]
        return columns | {n: v for n, v in given.items() if asked.takes_all or n in asked.required + asked.optional}

    def _trl_arguments(self, td: TensorDictBase, completions: list[str]) -> dict[str, list[Any]]:
        """What TRL passes besides the columns: ``prompts``, as the data have them; ``completions``, lists of messages
        where the prompt is one, else text; ``completion_ids``, from the first sampled token on, if there are ids."""
        container = None if self.container is None else innermost(self.container)
        prompts = column_values(td, getattr(container, "data_key", "query")) or [""] * len(completions)
        history = td.get("history", None)
        chats = None if history is None else history.chats("full")
        shown: list[Any] = []
        for row, (prompt, text) in enumerate(zip(prompts, completions, strict=True)):
            if isinstance(prompt, str):
                shown.append(text)
                continue
            chat = chats[row] if chats else []
            has_system = bool(chat) and chat[0]["role"] == "system" and prompt[0]["role"] != "system"
            shown.append([*chat[len(prompt) + has_system : -1], {"role": "assistant", "content": text}])
        given = {"prompts": prompts, "completions": shown}
        full, masks = unpadded_ids(td, "full"), td.get(("masks", "all_assistant_mask"), None, as_list=True)
        if full is not None and masks is not None and all(map(len, masks)):
            starts = [int(mask.to(torch.uint8).argmax()) for mask in masks]
            given["completion_ids"] = [ids[start:].tolist() for ids, start in zip(full, starts, strict=True)]
        elif (rows := unpadded_ids(td, "response")) is not None:
            given["completion_ids"] = [row.tolist() for row in rows]
        return given

    def _score(self, completions: list[str], columns: dict[str, list[Any]]) -> list[float | None]:
        count = len(completions)
        if self.batched:
            call = partial(self.fn, **columns) if self.style == "trl" else partial(self.fn, completions, **columns)
            calls = Calls([call], self.retries, convert=plain_numbers)
        else:
            rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            arguments = rows if columns else ({} for _ in completions)
            scored = [partial(self.fn, c, **named) for c, named in zip(completions, arguments, strict=True)]
            calls = Calls(scored, self.retries, convert=plain_number)
        outcomes = self._runner.run(calls, timeout_s=self.deadline_s)
        self.counters["rows"] += count
        self.counters["retries"] += calls.retried
        values: list[float | None] = []
        for outcome in outcomes:
            rows_of_call = count if self.batched else 1
            if outcome.error is not None or not outcome.done:
                late = "the call" if self.batched else f"row {len(values) + 1} of {count}"
                late += f" was not done {self.deadline_s} s after its batch began"
                self.first_error = self.first_error or outcome.error or late
                self.counters["errors" if outcome.done else "timeouts"] += rows_of_call
                # NaN, not 0: a failed reward function must not rate the answers as bad.
                values += [math.nan] * rows_of_call
                continue
            found = outcome.value if self.batched else [outcome.value]
            if isinstance(found, str) or len(found) != rows_of_call:
                got = found if isinstance(found, str) else f"{len(found)}"
                raise ShapeError(
                    f"RewardFunction {self.name!r}: a batched reward must return one value per row, {count}: got {got}."
                )
            values += [self._number(value, f"row {len(values) + n} of {count}") for n, value in enumerate(found, 1)]
        self.counters["none"] += sum(value is None for value in values)
        return values

    def _number(self, value: float | str | None, where: str) -> float | None:
        """The value of `plain_number`: None or NaN for an unusable number. Raises ShapeError if it is not a number."""
        if isinstance(value, str) and value.startswith(FAILED):
            self.first_error = self.first_error or f"{where}: {value.removeprefix(FAILED)}"
            self.counters["errors"] += 1
            return math.nan
        if isinstance(value, str):
            kind, _, shown = value.partition(SHOWN)
            problem = f"a reward must be one number, or None for no reward: got {kind} for {where}: {shown}"
            raise ShapeError(f"RewardFunction {self.name!r}: {problem}.")
        if value is None or math.isnan(value):
            return None
        if abs(value) > _LARGEST or abs(value * self.weight) > _LARGEST:
            problem = f"{where}: a reward must lie within {_LARGEST:g}, also with its weight: got {value:g}"
            self.first_error = self.first_error or problem
            self.counters["errors"] += 1
            return math.nan
        return value


def make_rewards(specs: Sequence[Spec], *, tokenizer: Any | None = None, load: bool = True) -> list[RewardFunction]:
    """The transforms of a list of weighted rewards; each adds to "reward" and writes its own "reward_<name>".
    Without ``load``, reward models are left out: only their files are checked.

    Reads   per reward, one of ``fn`` (a function or its name), ``judge``, ``reward_model``, ``code`` (the arguments of
            `JudgeReward`, `RewardModelScorer.load`, `CodeReward`), and ``weight``, ``name``, ``deadline_s``,
            ``retries``, ``concurrency``, ``answer_key``, ``batched``, ``process``, the arguments of `RewardFunction`. A
            function or a name alone is ``{fn: ...}``
    Raises  ConfigError naming the entry for an unknown key, none or several of the four, or a duplicate name

    >>> [(r.name, r.weight) for r in make_rewards([{"fn": "math:isfinite", "weight": 0.5}, {"fn": len}])]
    [('isfinite', 0.5), ('len', 1.0)]
    """
    if isinstance(specs, (str, Mapping)) or not specs:
        raise ConfigError(f"rewards: must be a list with at least one reward: got {specs!r:.80}.")
    made = [_make(spec, f"rewards[{number}]", tokenizer, load) for number, spec in enumerate(specs)]
    rewards = [reward for reward in made if reward is not None]
    for name, count in Counter(reward.name for reward in rewards).items():
        if count > 1:
            raise ConfigError(f"rewards: each must have a unique name: {count} are called {name!r}; set name.")
    return rewards


def _make(spec: Spec, where: str, tokenizer: Any | None, load: bool) -> RewardFunction | None:
    if not isinstance(spec, Mapping):
        spec = {"fn": spec}
    known = (*_KINDS, *_OPTIONS)
    for key in spec:
        if key not in known:
            raise ConfigError(f"{where}: {key!r} is not a setting of a reward.{did_you_mean(key, known)}")
    kinds = [kind for kind in _KINDS if spec.get(kind) is not None]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of them"
        raise ConfigError(f"{where}: must have exactly one of {', '.join(_KINDS)}: got {got}.")
    options = {key: spec[key] for key in _OPTIONS if spec.get(key) is not None}
    [kind] = kinds
    function = spec[kind]
    if kind != "fn":
        from llmrl.envs.llm import rewards  # imported here because most runs need none of them

        scorer = rewards.RewardModelScorer
        made = {"judge": rewards.JudgeReward, "reward_model": scorer.load if load else scorer.check}
        try:
            function = made.get(kind, rewards.CodeReward)(**function)
        except TypeError as error:  # an unknown or a missing argument
            raise ConfigError(f"{where}.{kind}: {error}.") from error
        if function is None:  # only checked
            return None
        options.setdefault("deadline_s", _BATCH_DEADLINE_S)
    return RewardFunction(function, tokenizer=tokenizer, **options)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a user's function after the first: columns of the data, passed by name.

    first  the name of the first, which is passed by position, if it could also be passed by name
    """

    who: str
    required: list[str]
    optional: list[str]
    takes_all: bool
    first: str | None = None

    @classmethod
    def of(cls, fn: Callable[..., Any], who: str, first: str | None) -> Parameters:
        """Reads the signature. Raises ConfigError if it does not accept ``first`` by position and columns by name.

        Without ``first`` all parameters are passed by name.
        """
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some builtins have no signature
            return cls(who, required=[], optional=["answer"], takes_all=False)
        parameters = list(signature.parameters.values())
        if first is None:
            parameters = [inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY), *parameters]
        if not parameters or parameters[0].kind in (parameters[0].KEYWORD_ONLY, parameters[0].VAR_KEYWORD):
            raise ConfigError(
                f"{who}: its first parameter must take the {first} by position, as in def f({first}, answer): its "
                f"signature is {signature}."
            )
        required, optional = [], []
        for parameter in parameters[1:]:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"{who}: the parameters after the first are passed by name, but {parameter.name!r} is "
                    f"positional-only; its signature is {signature}."
                )
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                (required if parameter.default is parameter.empty else optional).append(parameter.name)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        by_name = first is not None and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        return cls(who, required, optional, takes_all, parameters[0].name if by_name else None)

    def check(self, columns: Iterable[str], *others: str, given: Iterable[str] = ()) -> None:
        """Checks the parameters against the ``columns`` of the data; ``others`` may be asked for as well, and ``given``
        are passed besides.

        Raises  ConfigError for a parameter without a default that is not a column, suggesting a close name; DataError
                for a column that has the name of another argument
        """
        columns = list(columns)
        known = list(dict.fromkeys([*columns, *others, *given]))
        for name in self.required:
            if name not in known:
                hint = did_you_mean(name, known)
                if name in RESERVED:
                    hint = f" In a batch that is {RESERVED[name]}, which is not passed."
                elif name in (*CHAT_COLUMNS, *PROMPT_COLUMNS) and "query" in known:
                    hint = " The prompt is 'query'."
                raise ConfigError(
                    f"{self.who}: its parameter {name!r} must be a column of the dataset: they are {', '.join(known)}."
                    f"{hint}"
                )
        taken = [name for name in given if self.takes_all or name in self.required + self.optional]
        taken += [self.first] if self.takes_all and self.first else []
        if twice := next((name for name in taken if name in columns), None):
            both = f", or write def f({twice}, /, **columns), which takes both" if twice == self.first else ""
            raise DataError(
                f"{self.who}: a column of the dataset must not have the name of another argument: got {twice!r}; "
                f"rename the column{both}."
            )

    def check_datasets(self, env: EnvBase, *others: str, given: Iterable[str] = ()) -> None:
        """`check` against the datasets that start conversations of ``env``, where their columns are known."""
        for primer in primers_of(env):
            self.check(primer.columns, *others, given=given)

    def columns(
        self, td: TensorDictBase, env: EnvBase | None, *others: str, given: Iterable[str] = ()
    ) -> dict[str, list[Any]]:
        """The values of the columns that the function takes, one per row; None for ``others`` that are missing.

        ``**kwargs`` takes those that are not tensors, and tensors that come from the data of ``env``. Raises as `check`
        """
        # Views of the conversation (text, tokens, masks) are containers, not columns of the dataset.
        entries = {key: td.get(key) for key in td.keys()}
        objects = [key for key, value in entries.items() if isinstance(value, (NonTensorStack, NonTensorData))]
        tensors = [key for key, value in entries.items() if isinstance(value, Tensor)]
        tensors = [key for key in tensors if key not in RESERVED or key in others]
        self.check(objects, *tensors, *others, given=given)
        names = [*self.required, *(name for name in self.optional if name in objects + tensors)]
        if self.takes_all:
            loaded = {name for primer in primers_of(env) for name in primer.columns}
            names += [name for name in entries if name in objects or (name in tensors and name in loaded)]
        empty = [None] * td.batch_size.numel()
        return {name: _values(td, name) or empty for name in dict.fromkeys(names) if name not in given}


def _parameter_names(fn: Reward) -> set[str]:
    try:
        return set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return set()


def _name_for_process(fn: Reward | str, process: bool | None) -> str | None:
    """The name by which another process loads the function; None if it runs in this process."""
    if isinstance(fn, str):
        own = fn.partition(":")[0].partition(".")[0] == "llmrl"
        return fn if process or (process is None and not own) else None
    if not process:
        return None
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module or ""), name, None) is not fn:
        raise ConfigError(
            f"RewardFunction: with process=True the reward must be importable by name, as my_pkg.rewards:exact: got "
            f"{getattr(fn, '__name__', type(fn).__name__)!r} of module {module!r}."
        )
    return f"{module}:{name}"


def _values(td: TensorDictBase, name: str) -> list[Any] | None:
    """A column, one value per row; rows of tensors with several numbers stay tensors."""
    value = td.get(name, None)
    return list(value) if isinstance(value, Tensor) and value.ndim > 1 else column_values(td, name)
