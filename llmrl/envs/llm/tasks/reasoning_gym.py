"""Tasks of the package reasoning-gym: its questions, and its own scores of the answers (the ``reasoning`` extra).

`reasoning_gym_process` generates and scores in separate processes that can be killed: some generators take seconds per
item, the package imports a plotting library, and some of its items depend on the order of sets in a process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.concurrency.worker_process import WorkerPool
from llmrl.data.llm.row_reading import place_of
from llmrl.envs.llm.answers import extract_tags
from llmrl.envs.llm.tasks import reasoning_gym_process
from llmrl.envs.llm.tasks.task import Row, TaskEnv
from llmrl.envs.llm.transforms.reward import RewardFunction
from llmrl.errors import ConfigError, DataError, DeadlineError, MissingDependencyError, check_choice
from llmrl.optional import check_installed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 1, 25)  # with all 106 tasks; its items are those that the tests were run with
ITEMS, EVAL_ITEMS = 1000, 200  # by default
LEVEL = "level"  # the column that a curriculum by levels reads
# The library draws item i from Random(seed + i): seeds that are close share items. numpy takes seeds below 2 ** 32.
_SEEDS = {"train": 0, "validation": 1 << 30, "test": 1 << 31}
_SCORE = f"{reasoning_gym_process.__name__}:score"


class ReasoningGymEnv(TaskEnv):
    """A task of reasoning-gym: its question, an answer block, and the score that the library gives to the answer.

    Arguments of its own, which are ``env.options`` in a recipe:
    task         a registered name, as "chain_sum", or "composite"
    config       its settings, as {"min_terms": 3}; of composite {"datasets": [{"name", "weight": 1, "config": {}}]}
    items        training items; ``eval_items``: of "validation" and "test" each
    items_seed   of the training items, which are those of ``create_dataset(task, size=items, seed=items_seed)``
    prompt       a system prompt of the library by name, as "default", in place of `SYSTEM_PROMPT`
    deadline_s   seconds in which the items of a split must be generated
    levels       of difficulty, from easy to hard, among which the items are divided: their number in the library's own
                 curriculum, of which ``config`` changes settings; or a list of settings, each beside ``config``

    The other arguments are those of `TaskEnv`. ``dataset``, a file or rows with "question", "answer" and "item" as
    `rows` returns them, replaces ``task``: other versions of the library make other items of the same seed.
    Raises  MissingDependencyError without the package or with an older one; ConfigError for what the library refuses;
            DataError for a generator that fails or is too slow, or if all items of a split are training items
    """

    SYSTEM_PROMPT = (
        "Think step by step. Then give the final answer alone, in the form that the question asks for, between "
        "<answer> and </answer>."
    )

    def __init__(
        self,
        *,
        task: str | None = None,
        config: Mapping[str, Any] | None = None,
        items: int = ITEMS,
        eval_items: int = EVAL_ITEMS,
        items_seed: int = 0,
        deadline_s: float = 300.0,
        levels: int | Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        dataset: str | Path | Sequence[Row] | None = None,
        name: str | None = None,
        split: str | None = None,
        system_prompt: str | None = None,
        **options: Any,
    ):
        if prompt is not None:
            if system_prompt is not None:
                raise ConfigError("reasoning_gym: must have system_prompt or prompt: got both; leave one out.")
            check_choice("reasoning_gym", "prompt", prompt, prompts := _prompts())
            system_prompt = prompts[prompt]
        if isinstance(dataset, str | Path | None):
            made = {"task": task, "config": config, "items": items, "eval_items": eval_items}
            made |= {"items_seed": items_seed, "deadline_s": deadline_s, "levels": levels}
            dataset = self.rows(dataset, name=name, split=split, **made)
        super().__init__(dataset=dataset, system_prompt=system_prompt, **options)

    @classmethod
    def rows(
        cls,
        dataset: str | Path | None = None,
        *,
        name: str | None = None,
        split: str | None = None,
        task: str | None = None,
        config: Mapping[str, Any] | None = None,
        items: int = ITEMS,
        eval_items: int = EVAL_ITEMS,
        items_seed: int = 0,
        deadline_s: float = 300.0,
        levels: int | Sequence[Mapping[str, Any]] | None = None,
    ) -> Sequence[Row]:
        """The items of a split: "question", "answer" (None where the library has no solution of its own), and "item",
        which the score reads; with ``levels`` also "level", from 0. Held-out items that are trained too are left out.
        """
        package_version()
        if dataset is not None:
            return super().rows(dataset, name=name, split=split)
        split = split or "train"
        check_choice("reasoning_gym", "split", split, _SEEDS)
        if not isinstance(task, str):
            raise ConfigError(
                f"reasoning_gym: env.options.task must name a task of the library: got {task!r}; as options: {{task: "
                "chain_sum}."
            )
        for key, value, least in (("items", items, 1), ("eval_items", eval_items, 0), ("items_seed", items_seed, 0)):
            if not isinstance(value, int) or not least <= value < _SEEDS["validation"]:
                raise ConfigError(
                    f"reasoning_gym: env.options.{key} must be a whole number from {least} to 2**30 - 1: got {value!r}."
                )
        if not isinstance(deadline_s, int | float) or not deadline_s > 0:
            raise ConfigError(f"reasoning_gym: env.options.deadline_s must be seconds, above 0: got {deadline_s!r}.")
        if not isinstance(config, Mapping | None):
            raise ConfigError(f"reasoning_gym: env.options.config must be a mapping: got {config!r:.80}.")
        given = {"config": config, "levels": levels, "deadline_s": float(deadline_s)}
        trained = _of_levels(task, items_seed, items, "items", **given)
        if split == "train":
            return trained
        made = _of_levels(task, items_seed + _SEEDS[split], eval_items, "eval_items", **given) if eval_items else ()
        questions = {row["question"] for row in trained}
        kept = [row for row in made if row["question"] not in questions]
        if made and not kept:
            raise DataError(
                f"reasoning_gym: held-out items must not be trained on: all {len(made)} items of {split} are among the "
                f"{items} training items of {task}; set env.options.items lower, a config with more questions, or "
                "eval_items to 0."
            )
        return kept

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        if not all(isinstance(row.get(column), str) for column in ("question", "item")):
            raise DataError(
                f"reasoning_gym: rows must have the columns question and item, as ReasoningGymEnv.rows returns them: "
                f"{place_of(row, number)} has {', '.join(row)}."
            )
        level = {LEVEL: row[LEVEL]} if LEVEL in row else {}
        return {"query": row["question"], "answer": row.get("answer"), "item": row["item"], **level}

    @classmethod
    def scorer(cls, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> RewardFunction:
        """`ReasoningGymReward`; ``options`` are arguments of `RewardFunction`."""
        return ReasoningGymReward(tokenizer=tokenizer, **options)

    @classmethod
    def about(cls, eval_split: str | None, *, at_once: int, prompt: str | None = None, **options: Any) -> str:
        words = [f"reasoning-gym {package_version()}"]
        if options:
            items, eval_items = options.get("items", ITEMS), options.get("eval_items", EVAL_ITEMS)
            words.append(f"{options.get('task')}, {items} items of seed {options.get('items_seed', 0)}")
            if levels := options.get("levels"):
                words.append(f"{levels if isinstance(levels, int) else len(levels)} levels")
            left_out = eval_items - len(cls.rows(split=eval_split, **options)) if eval_split else 0
            if left_out:
                words.append(f"{left_out} of {eval_items} held-out items are trained on too: left out")
        return " · ".join(words)


class ReasoningGymReward(RewardFunction):
    """The library's ``score_answer`` of the last answer block outside thinking, None without one; in a process of its
    own. Partial credit is as the library gives it; an answer on which its function raises has 0.
    """

    def __init__(self, **options: Any):
        super().__init__(_SCORE, **{"name": "score", **options, "process": True})

    def _score(self, completions: list[str], columns: dict[str, list[Any]]) -> list[float | None]:
        answers = [extract_tags(text)[1] for text in completions]
        return super()._score([answer if answer is None else answer.strip() for answer in answers], columns)


def package_version() -> str:
    """The installed version. Raises MissingDependencyError without the package, or with one that is too old."""
    check_installed("reasoning_gym", extra="reasoning", used_by="reasoning_gym")
    version = metadata.version("reasoning-gym")  # the module's own __version__ is behind
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingDependencyError(
            f"reasoning_gym: needs reasoning-gym {oldest} or newer: got {version}; run: pip install -U "
            "'llmrl[reasoning]'.",
            name="reasoning_gym",
        )
    return version


def _of_levels(
    task: str,
    seed: int,
    count: int,
    option: str,
    *,
    config: Mapping[str, Any] | None,
    levels: int | Sequence[Mapping[str, Any]] | None,
    deadline_s: float,
) -> Sequence[Row]:
    """The items of all levels, of which the first have one more where they cannot have equally many."""
    own = [{}] * levels if isinstance(levels, int) else [{}] if levels is None else levels
    if (
        isinstance(levels, str | bool)
        or not own
        or not all(isinstance(each, Mapping) for each in own)
        or count < len(own)
    ):
        raise ConfigError(
            f"reasoning_gym: env.options.levels must be a number, or a list of settings, of at most {count} levels, as "
            f"many as there are {option}: got {levels!r:.80}."
        )
    rows: list[Row] = []
    for level, changes in enumerate(own):
        settings = json.dumps({**(config or {}), **changes}, sort_keys=True, default=str)
        share = count // len(own) + (level < count % len(own))
        of_library = level if isinstance(levels, int) else None
        made = _generated(task, settings, seed, share, option, deadline_s, of_library)
        rows += made if levels is None else [{**row, LEVEL: level} for row in made]
    return rows


@lru_cache(maxsize=64)  # the plan, the run and the evaluation ask for the same items
def _generated(
    task: str, config: str, seed: int, count: int, option: str, deadline_s: float, level: int | None
) -> tuple[Row, ...]:
    rows: list[Row] = []
    try:
        for reply in _asked([task, config, seed, count, level], deadline_s):
            if "refused" in reply:
                raise ConfigError(f"reasoning_gym: env.options.{reply['refused']}")
            if "failed" in reply:
                raise DataError(f"reasoning_gym: {task} must generate {count} items: {reply['failed']}.")
            rows.append(reply)
    except DeadlineError:
        raise DataError(
            f"reasoning_gym: {task} must generate {count} items within {deadline_s:g} s: got {len(rows)}; set "
            f"env.options.{option} lower, env.options.deadline_s higher, or an easier env.options.config."
        ) from None
    return tuple(rows)


@lru_cache(maxsize=1)
def _prompts() -> dict[str, str]:
    package_version()
    return next(iter(_asked(None, 60.0)))


def _asked(request: Any, timeout_s: float) -> Iterator[Any]:
    who = "reasoning_gym"
    pool = WorkerPool(Path(reasoning_gym_process.__file__), [], size=1, who=who, quiet=True)
    with closing(pool), pool.worker() as worker:
        yield from worker.ask(request, timeout_s)
