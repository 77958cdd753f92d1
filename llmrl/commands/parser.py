"""Option parsing with suggestions for misspelt names; the commands that do not train.

Options are checked before the command's module is imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from llmrl.commands.recipes import load_run, reading_checkpoint
from llmrl.errors import ConfigError, DataError, closest, did_you_mean
from llmrl.loading import load_object
from llmrl.run.config import load_config
from llmrl.run.run_dir import RunDir

Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An option of a command: the arguments of argparse's ``add_argument``."""
    return names, settings


RUN = option("run", help="a run's folder, or its name in runs/")
JSON = option("--json", dest="as_json", action="store_true", help="print one JSON object")
RUN_OR_MODEL = option(
    "model", metavar="RUN|MODEL", help="a run's folder or name; or a model's folder or name on the hub"
)
OVERRIDES = option("overrides", nargs="*", metavar="section.key=value", help="settings to change")
CHECKPOINT = option("--checkpoint", metavar="stepN", help="which checkpoint (default: the last)")


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations; allows options between settings and suggests similar names."""

    def __init__(self, usage: str, *options: Option):
        super().__init__(prog=f"llmrl {usage.partition(' ')[0]}", usage=f"llmrl {usage}", allow_abbrev=False)
        for names, settings in options:
            self.add_argument(*names, **settings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            name, equals, value = unknown[0].partition("=")
            takes_value = [text for text, action in self._option_string_actions.items() if action.nargs != 0]
            options = takes_value if equals else list(self._option_string_actions)
            match = closest(name.lstrip("-"), [text.lstrip("-") for text in options])  # all have the two dashes
            hint = f"\ndid you mean  --{match}?" if match else ""
            if not match and any("section.key=value" in str(action.metavar) for action in self._actions):
                value = value or next(iter(arguments[list(arguments).index(unknown[0]) + 1 :]), "VALUE")
                hint = f"\ndid you mean  {name.lstrip('-')}={value}   (settings have no dashes)?"
            raise ConfigError(f"{self.prog} {unknown[0]}  is not an option{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}  {message}")


def _as_given(held: ExitStack, **given: Any) -> dict[str, Any]:
    return given


class _Command:
    """A command: ``usage``, ``options``, and the ``function`` "module:name" that gets them as keyword arguments.

    ``prepare``  turns the options into the function's arguments, before the function's module is imported; what it
                 enters in its first argument is held until the function has returned
    """

    def __init__(
        self, usage: str, function: str, *options: Any, prepare: Callable[..., dict[str, Any]] = _as_given
    ) -> None:
        self.usage, self.function, self.options, self.prepare = usage, function, options, prepare

    def __call__(self, arguments: list[str]) -> int:
        """Runs it and returns the exit code."""
        with ExitStack() as held:
            given = self.prepare(held, **vars(Parser(self.usage, *self.options).parse(arguments)))
            module, _, name = self.function.partition(":")
            return getattr(importlib.import_module(module), name)(**given)


def _with_run(held: ExitStack, run: str, **given: Any) -> dict[str, Any]:
    return {"run": RunDir.open(run), **given}


def _with_checkpoint(
    held: ExitStack, run: str, checkpoint: str | None, overrides: Sequence[str] = (), **given: Any
) -> dict[str, Any]:
    folder = RunDir.open(run)
    if data := given.get("data"):
        overrides = ["eval.sets=null", f"eval.dataset={json.dumps(data[0])}", *overrides]  # what eval.* are for
    read = ("eval.max_tokens", "eval.batch_size") if given.get("suite") else ()  # also of a run that measures nothing
    _, _, loaded = load_run(folder, overrides, read=read)
    found = held.enter_context(reading_checkpoint(folder, checkpoint))
    return {"run": folder, "config": loaded.config, "checkpoint": found, **given}


def _with_model(
    held: ExitStack, model: str, checkpoint: str | None, overrides: Sequence[str] = (), **given: Any
) -> dict[str, Any]:
    """The settings of a run with its checkpoint as the model, or those of a model alone; and the folder of runs."""
    try:
        run = RunDir.open(model)
    except ConfigError as error:
        if "did you mean" in str(error) or checkpoint:
            raise
        alone = _model_alone(model, overrides).model_copy(update={"lora": None})
        load_object("llmrl.train.planning.early_checks:check_base", what="check")(alone, runs=Path("runs"))
        return {"config": alone, "runs": Path("runs"), **given}
    _, info, loaded = load_run(run, overrides)
    if info["command"] == "reward":
        raise ConfigError(f"{run.path} is a reward model, which outputs scores and cannot answer")
    changes = {
        "model": str(held.enter_context(reading_checkpoint(run, checkpoint))),
        "lora": None,
    }  # with adapters merged in
    return {"config": loaded.config.model_copy(update=changes), "runs": run.path.parent, **given}


def _model_alone(model: str, overrides: Sequence[str]) -> Any:
    """The settings of a model alone. Raises DataError for one that is neither here nor on the hub."""
    settings = load_object("llmrl.train.settings:ModelSource", what="settings")
    config = load_config(settings, None, [*overrides, f"model={json.dumps(model)}"]).config
    check_model = load_object("llmrl.train.planning.early_checks:check_model", what="check")
    if remark := check_model(config.model, runs=Path("runs")):
        print(f"note          {remark}", file=sys.stderr)
    return config


def _with_template(held: ExitStack, name: str, overrides: Sequence[str], **given: Any) -> dict[str, Any]:
    """The tokenizer's name, and the settings of its template."""
    allowed = ("chat_template", "template_variables")
    if other := [text for text in overrides if text.partition("=")[0].partition(".")[0] not in allowed]:
        raise ConfigError(f"llmrl template  takes the settings {' and '.join(allowed)}: got {other[0]}")
    registered = load_object("llmrl.data.llm.templates:template_names", what="templates")()
    try:
        config = _model_alone("tiny" if name in registered else name, overrides)
    except DataError as error:
        known = f"Registered templates: {', '.join(registered)}.{did_you_mean(name, registered)}"
        raise DataError(f"{error} {known}") from None
    return {"name": name, **{setting: getattr(config, setting) for setting in allowed}, **given}


def _with_paths(held: ExitStack, runs: list[str], **given: Any) -> dict[str, Any]:
    if len(runs) < 2:
        raise ConfigError(
            f"llmrl compare  needs at least two runs: got {runs[0]}; llmrl show and llmrl report are for one"
        )
    return {"paths": [RunDir.open(run).path for run in runs], **given}


def _report(arguments: list[str]) -> int:
    run = RunDir.open(Parser("report RUN", RUN).parse(arguments).run)
    print(f"report    {importlib.import_module('llmrl.report').write_report(run.path)}")
    return 0


# command name -> function from the arguments after the name to the exit code
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "eval": _Command(
        "eval RUN [section.key=value ...] [options]",
        "llmrl.commands.evaluate:evaluate",
        RUN,
        OVERRIDES,
        CHECKPOINT,
        option("--samples", type=int, default=1, metavar="K", help="answers to a problem (default: 1, greedy)"),
        option("--temperature", type=float, metavar="T", help="of several samples (default: the run's, else 1)"),
        option(
            "--data",
            action="append",
            default=[],
            metavar="NAME[:SPLIT]",
            help="a file or hub name to evaluate on; repeatable",
        ),
        option(
            "--suite",
            action="append",
            default=[],
            metavar="SUITE:TASK",
            help="lm_eval:TASK or inspect:FILE, with their own options behind it; repeatable",
        ),
        JSON,
        prepare=_with_checkpoint,
    ),
    "chat": _Command(
        "chat RUN|MODEL [section.key=value ...] [options]",
        "llmrl.commands.chat:chat",
        RUN_OR_MODEL,
        OVERRIDES,
        CHECKPOINT,
        option("--tools", action="append", default=[], metavar="NAME", help="instead of the run's tools; repeatable"),
        option("--system", metavar="TEXT", help="the system prompt, instead of the run's"),
        option("--temperature", type=float, metavar="T", help="0: greedy (default: the run's, else 1)"),
        option("--max-tokens", type=int, metavar="N", help="of an answer (default: the run's, else 1024)"),
        option("--seed", type=int, metavar="N", help="of sampling"),
        prepare=_with_model,
    ),
    "serve": _Command(
        "serve RUN|MODEL [section.key=value ...] [options]",
        "llmrl.commands.serve:serve",
        RUN_OR_MODEL,
        OVERRIDES,
        CHECKPOINT,
        option("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: this machine only)"),
        option("--port", type=int, default=8000, metavar="N", help="0: a free one (default: 8000)"),
        option("--api-key", metavar="KEY", help="that clients must send (default: any)"),
        option("--max-tokens", type=int, metavar="N", help="the most of an answer (default: the run's, else 1024)"),
        prepare=_with_model,
    ),
    "export": _Command(
        "export RUN DIR [options]",
        "llmrl.commands.export:export",
        RUN,
        option("folder", type=Path, metavar="DIR", help="a folder that does not exist"),
        CHECKPOINT,
        option(
            "--dtype",
            choices=["bfloat16", "float16", "float32"],
            default="bfloat16",
            help="of the weights (default: bfloat16)",
        ),
        option("--merge", action="store_true", help="for a run with adapters: export the merged model"),
        option("--push", metavar="REPO", help="upload the folder to this repository of the hub, too"),
        option("--public", action="store_true", help="make the repository of --push public"),
        prepare=_with_checkpoint,
    ),
    "show": _Command(
        "show RUN [options]",
        "llmrl.commands.show:show",
        RUN,
        option("--rows", type=int, default=20, metavar="N", help="steps in the table (default: 20; 0: all)"),
        option("--step", type=int, metavar="K", help="show samples of this step (default: the last)"),
        option("--samples", type=int, default=2, metavar="N", help="conversations to print (default: 2)"),
        JSON,
        prepare=_with_run,
    ),
    "runs": _Command(
        "runs [options]",
        "llmrl.commands.runs:list_runs",
        option(
            "--runs",
            dest="root",
            type=Path,
            default=Path("runs"),
            metavar="DIR",
            help="where runs are kept (default: runs)",
        ),
        option("--all", dest="every", action="store_true", help="also runs that ended before their first step"),
        JSON,
    ),
    "report": _report,
    "watch": _Command(
        "watch RUN [--port N]",
        "llmrl.report.watch:watch",
        RUN,
        option("--port", type=int, default=0, metavar="N", help="on this machine (default: a free one)"),
        prepare=_with_run,
    ),
    "compare": _Command(
        "compare RUN RUN ... [--html FILE]",
        "llmrl.report.comparison:compare",
        option("runs", nargs="+", metavar="RUN", help="runs' folders, or their names in runs/"),
        option("--html", type=Path, metavar="FILE", help="also write a page with overlaid curves"),
        prepare=_with_paths,
    ),
    "template": _Command(
        "template NAME_OR_PATH [chat_template=...] [template_variables={...}] [options]",
        "llmrl.commands.template_report:run",
        option("name", help="a folder with a tokenizer, a registered template, or a name on the hub"),
        option("overrides", nargs="*", metavar="chat_template=...", help="instead of the tokenizer's own"),
        option("--tools", action="store_true", help="conversations with tools must work, too"),
        option("--data", metavar="FILE", help="check its conversations instead of a built-in one"),
        JSON,
        prepare=_with_template,
    ),
    "new": _Command(
        "new KIND NAME [options]",
        "llmrl.commands.new:new",
        option("kind", choices=["reward", "tool", "env", "recipe"], help="reward, tool, env or recipe"),
        option("name", help="of the module that is written, in lower case"),
        option(
            "--folder", type=Path, default=Path(), metavar="DIR", help="where the files are written (default: here)"
        ),
    ),
    "env": _Command(
        "env install|check NAME [options]",
        "llmrl.commands.env:env",
        option("action", choices=["install", "check"], help="make the environment, or say what is wrong with it"),
        option("name", metavar="NAME", help="verifiers"),
        option("--python", metavar="PATH", help="for check: the Python of another environment"),
        option("--again", action="store_true", help="for install: even if it is there"),
    ),
    "doctor": _Command("doctor [--json]", "llmrl.commands.doctor:report", JSON),
}
