"""Runs text environments in a process of their own, by this Python or another; `text_env` starts this file as a script.

An environment has ``reset(seed=...) -> text, info`` and ``step(text) -> text, reward, terminated, truncated, info``, as
gymnasium's and GEM's do; gymnasium's older forms are read too. In a game for several, info["player"] says whose turn it
is, and info["rewards"] at its end what each has earned.
"""

from __future__ import annotations

import importlib.metadata
import io
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from llmrl.concurrency.worker_process import serve
from llmrl.loading import load_function

_envs: dict[int, Any] = {}
_states: dict[int, Any] = {}  # of the random numbers that each game draws


def main() -> None:
    serve(_handle)


def _handle(request: tuple[str, Any, Any], reply: Callable[[Any], None]) -> None:
    """Replies with an observation, or {"failed": why}."""
    kind, number, given = request
    try:
        with redirect_stdout(io.StringIO()), _random_state(number):
            reply(_KINDS[kind](number, given))
    except Exception as error:
        reply({"failed": f"{type(error).__name__}: {error}"})


def _start(number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    env = _envs[number] = load_function(given["factory"], what="factory")(**given["arguments"])
    seed, others = given["row"].get("seed"), {key: value for key, value in given["row"].items() if key != "seed"}
    random.seed(seed)
    found = env.reset(seed=seed, **({"options": others} if others else {}))
    observation, info = found if isinstance(found, tuple) else (found, {})
    return _observed(observation, None, False, False, info)


def _step(number: int, text: str) -> dict[str, Any]:
    observation, reward, *ends, info = _envs[number].step(text)
    terminated, truncated = ends if len(ends) == 2 else (ends[0], False)
    return _observed(observation, reward, terminated, truncated, info)


def _observed(observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> dict[str, Any]:
    if not isinstance(observation, str):
        raise TypeError(f"an observation must be text: got a {type(observation).__name__}")
    if isinstance(info, Mapping) and isinstance(suffix := info.get("suffix"), str):  # GEM's request for the next action
        observation = f"{observation}\n{suffix}"
    reward = None if reward is None else float(reward)
    seen = {"text": observation, "reward": reward, "terminated": bool(terminated), "truncated": bool(truncated)}
    if isinstance(info, Mapping) and "player" in info:
        seen["player"] = str(info["player"])
    if isinstance(info, Mapping) and "rewards" in info:
        seen["rewards"] = {str(player): float(earned) for player, earned in info["rewards"].items()}
    return seen


def _close(number: int, given: None) -> None:
    _states.pop(number, None)
    if (env := _envs.pop(number, None)) is not None and hasattr(env, "close"):
        with suppress(Exception):  # TextArena's close gives the rewards, of a game that may not be over
            env.close()


def _version(number: int, package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


_KINDS: dict[str, Callable[[int, Any], Any]] = {"start": _start, "step": _step, "close": _close, "version": _version}


@contextmanager
def _random_state(number: int) -> Iterator[None]:
    """Context in which a game draws from its own random numbers: games seed those of the process."""
    if number in _states:
        random.setstate(_states[number])
    yield
    _states[number] = random.getstate()


if __name__ == "__main__":
    sys.modules["llmrl.envs.llm.tasks.text_env_process"] = sys.modules["__main__"]
    main()
