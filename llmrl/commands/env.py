"""``llmrl env install|check NAME``: the Python environment of a package that cannot be installed beside llmrl."""

from __future__ import annotations

from llmrl.errors import check_choice
from llmrl.package_envs import PACKAGES, check, install
from llmrl.run.console import make_console, print_summary


def env(action: str, name: str, *, python: str | None, again: bool) -> int:
    """Makes or checks the environment, prints where it is, and returns 0.

    Raises  ConfigError for a name that is not in the table; MissingDependencyError for what is missing or does not
            fit, with the command that mends it; WorkerError if pip fails
    """
    check_choice(f"llmrl env {action}", "NAME", name, PACKAGES)
    if action == "install":
        print(f"installing {PACKAGES[name].requirement}, which takes minutes")
        found, version = install(name, again=again)
    else:
        found, version = check(name, python)
    print_summary(make_console(), [f"{name} {version}"], files=str(found))
    return 0
