"""Checks, before torch is imported, that a run has its packages, its model, and data whose first row can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from llmrl.data.llm.dataset_files import first_row, local_files
from llmrl.data.llm.rows import read_answers, read_conversation, read_pair, read_prompt
from llmrl.errors import DataError
from llmrl.hub import check_repository
from llmrl.optional import check_installed
from llmrl.run.model_names import resolve_model
from llmrl.train.adapter_files import adapter_in, base_of
from llmrl.train.settings.environment import SetSettings, TaskSettings
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.model import ModelSource
from llmrl.train.settings.preferences import ANSWER_COLUMNS, PAIR_COLUMNS, PairsConfig
from llmrl.train.settings.sft import SFTConfig
from llmrl.train.settings.types import EMBEDDED

_EMBEDDED = (*EMBEDDED, "sums_mistakes")


def _tasks(config: ModelSource) -> list[TaskSettings]:
    """The task, or those of a mix, and the sets that are measured."""
    env, sets = getattr(config, "env", None), config.eval.sets if hasattr(config, "eval") else None
    return [*(env.tasks if env is not None else ()), *(sets or {}).values()]


def check_packages(config: ModelSource) -> None:
    """Raises MissingDependencyError for a package that a setting needs and that is not installed."""
    needed = {name: ("log", name, name) for name in config.log}
    if config.lora is not None:
        needed["peft"] = ("lora", "peft", "lora")
        if config.lora.quantize:
            needed["bitsandbytes"] = ("lora.quantize", config.lora.quantize, "qlora")
    if config.optim.name == "adamw_8bit":
        needed["torchao"] = ("optim.name", config.optim.name, "optim")
    if any(task.name == "reasoning_gym" for task in _tasks(config)):
        needed["reasoning_gym"] = ("env.name", "reasoning_gym", "reasoning")
    if any(task.name == "openenv" for task in _tasks(config)):
        needed["websockets"] = ("env.name", "openenv", "openenv")
    if isinstance(config, GRPOConfig):
        if config.rollout.ray:
            needed["ray"] = ("rollout.ray", config.rollout.ray, "ray")
        elif config.rollout.engine == "vllm" and not config.rollout.servers:
            needed["vllm"] = ("rollout.engine", "vllm", "vllm")
    for module, (setting, value, extra) in needed.items():
        check_installed(module, extra=extra, used_by=f"{setting}={value}" if setting != "lora" else "lora")


def check_model(model: Any, *, runs: Path, setting: str = "model") -> str:
    """Checks that a model's folder, run or name leads somewhere; see `check_repository`.

    Returns  a remark for the user, or ""
    Raises   DataError
    """
    found = resolve_model(model, runs=runs, setting=setting)
    return check_repository(found, setting=setting) if isinstance(found, str) else ""


def check_base(config: ModelSource, *, runs: Path) -> str:
    """`check_model` for the model below adapters, if ``config.model`` has any."""
    if (adapter := adapter_in(resolve_model(config.model, runs=runs))) is None:
        return ""
    try:
        return check_model(base_of(adapter, config.model_options.base_model), runs=runs, setting="base model")
    except DataError as error:
        if "model_options" in str(error):
            raise
        raise DataError(
            f"{error} The adapter {adapter} names it; model_options.base_model=... names another place."
        ) from None


def check_run(config: ModelSource, *, runs: Path) -> Iterator[str]:
    """Checks the model, the models of rewards, and the data of a new run; yields remarks for the user.

    Raises  DataError for what is not there, and for a first row that cannot be read
    """
    yield check_model(config.model, runs=runs)
    yield check_base(config, runs=runs)
    env, tasks = getattr(config, "env", None), _tasks(config)
    for reward in (reward for task in tasks for reward in task.rewards or ()):
        if reward.reward_model and isinstance(name := reward.reward_model.get("model"), str):
            yield check_model(name, runs=Path("runs"), setting="reward_model.model")
    if isinstance(config, SFTConfig):
        names, read = ("prompt_column", "completion_column", "system_prompt"), read_conversation
        if isinstance(config, PairsConfig):
            names, read = (ANSWER_COLUMNS, read_answers) if config.reads_answers else (PAIR_COLUMNS, read_pair)
        read = partial(read, **config.data.model_dump(include=set(names)))
        yield _check_dataset("data.path", config.data.path, config.data.split, read)
        if env is None:
            yield _check_dataset("eval.dataset", config.eval.dataset, config.eval.split, read)
    for task in tasks:
        if ":" in task.name:
            continue
        named = {"prompt_column": task.prompt_column, "answer_column": task.answer_column}
        reads_prompts = task.name in ("chat", *_EMBEDDED) and task.agent is None
        read = partial(read_prompt, **named) if reads_prompts else None
        if isinstance(task, SetSettings):
            yield _check_dataset(f"eval.sets.{task.label}: dataset", task.dataset, task.split, read)
            continue
        yield _check_dataset("env.dataset", task.dataset, task.split, read)
        measured = ("env.mix: eval_dataset", task.eval_dataset) if env.is_mix else ("eval.dataset", config.eval.dataset)
        yield _check_dataset(*measured, config.eval.split, read)


def _check_dataset(setting: str, name: str | None, split: str, read: Callable[[Any], Any] | None) -> str:
    if name is None or name in _EMBEDDED:
        return ""
    if local_files(name, split) is None:
        return check_repository(name, setting=setting, kind="dataset")
    row = first_row(name, split)
    if row is not None and read is not None:
        read(row)
    return ""
