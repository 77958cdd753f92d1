"""The options of one ``llmrl`` command: what its users typed, with near names for what is not one of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from llmrl.errors import ConfigError, closest

__all__ = ["JSON", "RUN", "Option", "Parser", "option"]

Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An option of a command, as argparse's ``add_argument`` takes it."""
    return names, settings


RUN = option("run", help="a run's folder, or its name in runs/")
JSON = option("--json", dest="as_json", action="store_true", help="print one JSON object")


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, that lets options stand between settings and suggests near names."""

    def __init__(self, usage: str, *options: Option):
        super().__init__(prog=f"llmrl {usage.partition(' ')[0]}", usage=f"llmrl {usage}", allow_abbrev=False)
        for names, settings in options:
            self.add_argument(*names, **settings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            name, equals, _ = unknown[0].partition("=")
            takes_value = [text for text, action in self._option_string_actions.items() if action.nargs != 0]
            match = closest(name, takes_value if equals else self._option_string_actions)
            hint = f"\ndid you mean  {match}?" if match else ""
            if equals and not match:
                hint = f"\ndid you mean  {unknown[0].lstrip('-')}   (settings have no dashes)?"
            raise ConfigError(f"{self.prog} {unknown[0]}  is not an option{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}  {message}")
