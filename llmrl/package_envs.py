"""Python environments of packages that cannot be installed beside llmrl: where they are, what is wrong, making one.

Each is a venv in the cache folder (LLMRL_ENVS, or llmrl/envs in XDG_CACHE_HOME); LLMRL_VERIFIERS_PYTHON, or the option
``python`` of an environment, names the Python of one made otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from llmrl.errors import MissingDependencyError, WorkerError, check_choice

_ANSWER_S = 60.0  # for a Python to start, on a busy machine
_IMPORT_S = 300.0
_SHOWN = 2000  # characters of what failed
_DONE = "complete"  # a file that says that everything was installed


@dataclass(frozen=True)
class Package:
    """What an environment must have: a package of a version from ``oldest`` to before ``below``, and its ``module``."""

    name: str
    oldest: tuple[int, ...]
    below: tuple[int, ...]
    module: str
    why: str

    @property
    def requirement(self) -> str:
        return f"{self.name}>={_dotted(self.oldest)},<{_dotted(self.below)}"

    def fits(self, version: str) -> bool:
        """True if the version is in the range; letters behind its numbers do not count."""
        numbers = tuple(map(int, re.findall(r"(?:^|\.)(\d+)", version)[:3]))
        return self.oldest <= numbers < self.below


PACKAGES = {
    "verifiers": Package("verifiers", (0, 4), (0, 5), "verifiers.v1", "it needs openai<3 and mcp==2.0.0"),
    "openenv": Package("openenv", (0, 10), (0, 11), "openenv.core", "it needs an mcp before 2"),
    "gem": Package("gem-llm", (0, 1), (0, 2), "gem", "it needs reasoning-gym==0.1.23"),
    "textarena": Package("textarena", (0, 7), (0, 8), "textarena", "its games bring packages of their own"),
}


def folder_of(name: str) -> Path:
    """The folder of the environment that `install` makes."""
    home = os.environ.get("LLMRL_ENVS") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/llmrl/envs"
    return Path(home).expanduser().absolute() / name


def python_of(name: str, given: str | None = None) -> Path:
    """The Python of the environment: ``given``, that of the variable, or that of the cache folder.

    Raises  MissingDependencyError if there is none, or if its package is missing or has a version that does not fit
    """
    python = _python(name, given)
    if python is None:
        raise MissingDependencyError(
            f"{name}: needs an environment of its own, because {PACKAGES[name].why}: there is none in "
            f"{folder_of(name)}; run: llmrl env install {name}.",
            name=name,
        )
    installed_version(name, python)
    return python


def installed_version(name: str, python: Path) -> str:
    """The version of the package in that environment. Raises MissingDependencyError, with what to do."""
    package, mend = PACKAGES[name], f"{python} -m pip install '{PACKAGES[name].requirement}'"
    if not python.is_file():
        raise MissingDependencyError(f"{name}: its Python must be a file: {python} is none.", name=name)
    code = f"import importlib.metadata as m; print(m.version({package.name!r}))"
    done = _run([str(python), "-P", "-c", code], _ANSWER_S)
    if done.returncode:
        reason = "is not installed" if "PackageNotFoundError" in done.stderr else f"was not found: {_end(done.stderr)}"
        raise MissingDependencyError(f"{name}: needs {package.requirement}: it {reason} in {python}; run: {mend}.")
    if not package.fits(version := done.stdout.strip()):
        raise MissingDependencyError(
            f"{name}: needs {package.requirement}: {python} has {version}; run: {mend}.", name=name
        )
    return version


def check(name: str, given: str | None = None) -> tuple[Path, str]:
    """The environment's Python and the version of its package, which is imported there.

    Raises  MissingDependencyError for what is missing or does not fit, or cannot be imported
    """
    python = python_of(name, given)
    version = installed_version(name, python)
    done = _run([str(python), "-P", "-c", f"import {PACKAGES[name].module}"], _IMPORT_S)
    if done.returncode:
        raise MissingDependencyError(
            f"{name}: {PACKAGES[name].module} {version} cannot be imported by {python}: {_end(done.stderr)}; to make "
            f"the environment again: llmrl env install {name} --again.",
            name=name,
        )
    return python, version


def is_there(name: str) -> bool:
    """True if an environment was made, or is named by the variable; nothing is run."""
    return _python(name, None) is not None


def install(name: str, *, again: bool = False) -> tuple[Path, str]:
    """Makes the environment with pip, if it is not there or ``again``; returns what `check` does.

    Raises  WorkerError, with the end of what pip printed
    """
    check_choice("llmrl env", "NAME", name, PACKAGES)
    folder = folder_of(name)
    if again or not (folder / _DONE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        pip = [str(_in(folder)), "-m", "pip", "install", "--disable-pip-version-check", PACKAGES[name].requirement]
        for command in ([sys.executable, "-m", "venv", str(folder)], pip):
            done = _run(command, None)
            if done.returncode:
                raise WorkerError(f"llmrl env install {name}: {' '.join(command)} failed: {_end(done.stderr)}")
        (folder / _DONE).touch()
    return check(name, str(_in(folder)))


def _python(name: str, given: str | None) -> Path | None:
    named = given or os.environ.get(f"LLMRL_{name.upper()}_PYTHON")
    if named:
        return Path(named).expanduser().absolute()
    return _in(folder_of(name)) if (folder_of(name) / _DONE).is_file() else None


def _in(folder: Path) -> Path:
    return folder / "bin" / "python"


def _run(command: list[str], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    # Of torchrun's and of this environment's variables none concerns that Python.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _end(text: str) -> str:
    return text.strip()[-_SHOWN:] or "it said nothing"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
