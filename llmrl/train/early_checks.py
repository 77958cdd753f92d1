"""What a run needs and can be known before torch is imported: packages, the model, the data's files and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmrl.data_files import check_exists, first_columns, local_files
from llmrl.errors import DataError, did_you_mean
from llmrl.hub import check_repository
from llmrl.optional import check_installed
from llmrl.run.recipes import resolve_model
from llmrl.train.settings import GRPOConfig, ModelSource, SFTConfig, SFTData

_EMBEDDED = ("sums", "big_sums", "colours", "sums_mistakes")


def check_packages(config: ModelSource) -> None:
    """Raises MissingDependencyError for a package that a setting needs and that is not installed."""
    needed = {name: ("log", name, name) for name in config.log}
    if config.lora is not None:
        needed["peft"] = ("lora", "peft", "lora")
        if config.lora.quantize:
            needed["bitsandbytes"] = ("lora.quantize", config.lora.quantize, "qlora")
    if config.optim.name == "adamw_8bit":
        needed["torchao"] = ("optim.name", config.optim.name, "optim")
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


def check_run(config: ModelSource, *, runs: Path) -> Iterator[str]:
    """Checks the model, the models of rewards, and the data of a new run; yields remarks for the user.

    Raises  DataError for what is not there, and for a column that a setting names and the first row lacks
    """
    yield check_model(config.model, runs=runs)
    env = getattr(config, "env", None)
    for reward in (env and env.rewards) or ():
        if reward.reward_model and isinstance(name := reward.reward_model.get("model"), str):
            yield check_model(name, runs=Path("runs"), setting="reward_model.model")
    if isinstance(config, SFTConfig):
        data = config.data
        named = [data.prompt_column, data.completion_column] if isinstance(data, SFTData) else None
        # Two whole conversations need no prompt column.
        named = named or [data.chosen_column, data.rejected_column, data.margin_column]
        yield _check_dataset("data.path", data.path, data.split, named)
    if env is not None and ":" not in env.name:
        yield _check_dataset("env.dataset", env.dataset, env.split, [env.prompt_column, env.answer_column])
        yield _check_dataset("eval.dataset", config.eval.dataset, config.eval.split)


def _check_dataset(setting: str, name: str | None, split: str, columns: Iterable[str | None] = ()) -> str:
    if name is None or name in _EMBEDDED:
        return ""
    files = local_files(name, split)
    if files is None:
        return check_repository(name, setting=setting, kind="dataset")
    if files[0].is_dir():
        return ""
    for file in files:
        check_exists(file)
    place, known = first_columns(files[0]) or ("", [])
    for column in columns if place else ():
        if column is not None and column not in known:
            raise DataError(
                f"dataset: the column {column!r} is missing in {place}: its columns are {', '.join(known)}."
                f"{did_you_mean(column, known)}"
            )
    return ""
