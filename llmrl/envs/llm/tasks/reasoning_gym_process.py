"""Generates items of reasoning-gym, and scores answers to them, in processes that import this package but not torch.

`reasoning_gym` starts this file as a script to generate; the process of its reward calls `score`.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from typing import Any

from llmrl.concurrency.worker_process import serve
from llmrl.errors import ConfigError, did_you_mean
from llmrl.optional import require

# Events of sys.addaudithook that have an effect outside of a process; opening a file has one if it is for writing.
_EFFECTS = ("os.", "subprocess.", "pty.", "shutil.", "socket.", "ctypes.", "sqlite3.", "fcntl.", "mmap.", "signal.")
_READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_guard = threading.local()
_OURS = {"size": "items", "seed": "items_seed"}  # keys of a config that the environment sets


def score(answer: str | None, /, item: str) -> float:
    """The library's score of an answer to ``item``; 0 if its function raises, as prime_factorization does on text."""
    task, config, entry = json.loads(item)
    data = _dataset(task, config)
    try:
        with redirect_stdout(io.StringIO()), _guarded():  # some functions print
            return float(data.score_answer(answer, ast.literal_eval(entry)))
    except Exception:
        return 0.0


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the items of some tasks depend on the order of a set of words
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    serve(_generate)


def _generate(request: Any, reply: Callable[[Any], None]) -> None:
    """Replies with rows; or with {"refused": what and why}, {"failed": why}. Without a request: with the prompts."""
    if request is None:
        reply(require("reasoning_gym.utils", extra="reasoning", used_by="reasoning_gym").SYSTEM_PROMPTS)
        return
    task, config, seed, count, level = request
    try:
        config = config if level is None else _of_level(task, config, level)
        data = _dataset(task, config, seed, count)
    except ConfigError as error:
        reply({"refused": str(error)})
        return
    random.seed(seed)  # in case that a generator draws from it
    for index in range(count):
        try:
            entry = data[index]
            item = json.dumps([task, config, repr(_plain(entry))])
            data.score_answer(entry["answer"], ast.literal_eval(json.loads(item)[2]))  # whether its score works at all
        except Exception as error:
            reply({"failed": f"item {index} raised {type(error).__name__}: {error}"})
            return
        answer = entry["answer"]
        reply({"question": entry["question"], "answer": None if answer is None else str(answer), "item": item})


def _of_level(task: str, config: str, level: int) -> str:
    """The settings of a level of the library's curriculum, as JSON, changed by those of ``config``."""
    gym = require("reasoning_gym", extra="reasoning", used_by="reasoning_gym")
    _check(gym.factory.DATASETS, task, json.loads(config), "task", "config")
    try:
        curriculum = gym.factory.create_curriculum(task)
    except ValueError as error:
        raise ConfigError(f"levels: {task} has no curriculum: give a list of settings, from easy to hard.") from error
    most = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=0)
    if level >= most:
        raise ConfigError(f"levels: the curriculum of {task} has {most}: got more; give a list of settings.")
    curriculum.set_global_level(level)
    made = dataclasses.asdict(curriculum.generate_configuration())
    made = {key: value for key, value in made.items() if key not in _OURS}
    return json.dumps({**made, **json.loads(config)}, sort_keys=True)


@lru_cache(maxsize=64)
def _dataset(task: str, config: str, seed: int = 0, size: int = 1) -> Any:
    """The library's dataset. Raises ConfigError, which begins with the option, for what cannot be made."""
    gym = require("reasoning_gym", extra="reasoning", used_by="reasoning_gym")
    warnings.simplefilter("ignore")  # of numpy, about answers that are not numbers
    tasks = gym.factory.DATASETS
    settings = json.loads(config)
    _check(tasks, task, settings, "task", "config")
    if task == "composite":
        specs = [{"weight": 1.0, "config": {}, **spec} for spec in settings["datasets"]]
        settings = {**settings, "datasets": [gym.composite.DatasetSpec(**spec) for spec in specs]}
    try:
        return gym.create_dataset(task, size=size, seed=seed, **settings)
    except Exception as error:  # its checks are assertions, and errors of any other type
        reason = str(error) or f"{type(error).__name__} without a message"
        raise ConfigError(f"config: {task} does not take {config}: {reason}.") from error


def _check(tasks: Mapping[str, Any], task: Any, settings: Any, at: str, settings_at: str) -> None:
    if task not in tasks:
        known = f"one of the {len(tasks)} tasks of the library"
        raise ConfigError(f"{at} must be {known}: got {task!r}.{did_you_mean(str(task), tasks)}")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{settings_at} must be a mapping: got {settings!r:.80}.")
    known = [field.name for field in dataclasses.fields(tasks[task][1]) if field.name not in _OURS]
    for key in settings:
        if key in _OURS:
            raise ConfigError(f"{settings_at} must not have {key}: that is env.options.{_OURS[key]}.")
        if key not in known:
            listed = ", ".join(known) or "no keys"
            raise ConfigError(f"{settings_at}: {task} has no key {key!r}: it has {listed}.{did_you_mean(key, known)}")
    if task != "composite":
        return
    specs = settings.get("datasets")
    if not isinstance(specs, list) or not specs:
        form = "[{name: chain_sum, weight: 2}, {name: gcd}]"
        raise ConfigError(f"{settings_at}.datasets must be a list of tasks, as {form}: got {specs!r:.80}.")
    for number, spec in enumerate(specs):
        where = f"{settings_at}.datasets.{number}"
        if not isinstance(spec, Mapping) or not {"name"} <= spec.keys() <= {"name", "weight", "config"}:
            raise ConfigError(f"{where} must have a name, and may have weight and config: got {spec!r:.80}.")
        weight = spec.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"{where}.weight must be a number above 0: got {weight!r}.")
        if spec["name"] == "composite":
            raise ConfigError(f"{where}.name must not be composite again: put its tasks into the one list.")
        _check(tasks, spec["name"], spec.get("config", {}), f"{where}.name", f"{where}.config")


@contextmanager
def _guarded() -> Iterator[None]:
    """Context in which this thread starts no program, connects to nothing and changes no file: several functions of the
    library evaluate an answer as Python. No sandbox: code that looks for this guard can end it.
    """
    _add_guard()
    _guard.on = True
    try:
        yield
    finally:
        _guard.on = False


@lru_cache(maxsize=1)
def _add_guard() -> None:
    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(_guard, "on", False) and (
            (event.startswith(_EFFECTS) and event not in _READS)
            or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES)
        ):
            raise PermissionError(f"an answer must not do this: {event}")

    sys.addaudithook(check)  # for the life of the process


def _plain(value: Any) -> Any:
    """The value with Python's own numbers and texts for numpy's, so that its repr is a literal."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


if __name__ == "__main__":
    main()
