"""The commands that do not train: the options of each, checked before its module is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmrl.run.command_line import JSON, RUN, Parser
from llmrl.run.run_dir import RunDir

__all__ = ["COMMANDS"]


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _show(arguments: list[str]) -> int:
    options = Parser(
        "show RUN [options]",
        RUN,
        (["--rows"], {"type": int, "default": 20, "metavar": "N", "help": "steps in the table (default: 20; 0: all)"}),
        (["--step"], {"type": int, "metavar": "K", "help": "whose samples (default: the last step's)"}),
        (["--samples"], {"type": int, "default": 2, "metavar": "N", "help": "conversations to print (default: 2)"}),
        JSON,
    ).parse(arguments)
    run = RunDir.open(options.run)
    if options.json:
        print(_module("llmrl.run.show").as_json(run))
    else:
        _module("llmrl.run.show").show(run, rows=options.rows, step=options.step, samples=options.samples)
    return 0


def _report(arguments: list[str]) -> int:
    run = RunDir.open(Parser("report RUN", RUN).parse(arguments).run)
    print(f"report    {_module('llmrl.report').write_report(run.path)}")
    return 0


def _watch(arguments: list[str]) -> int:
    port = {"type": int, "default": 0, "metavar": "N", "help": "on this machine (default: a free one)"}
    options = Parser("watch RUN [--port N]", RUN, (["--port"], port)).parse(arguments)
    return _module("llmrl.report.watch").watch(RunDir.open(options.run).path, port=options.port)


def _compare(arguments: list[str]) -> int:
    parser = Parser(
        "compare RUN RUN ... [--html FILE]",
        (["runs"], {"nargs": "+", "metavar": "RUN", "help": "runs' folders, or their names in runs/"}),
        (["--html"], {"type": Path, "metavar": "FILE", "help": "write a page with overlaid curves, too"}),
    )
    options = parser.parse(arguments)
    if len(options.runs) < 2:
        parser.error(f"needs at least two runs: got {options.runs[0]}; llmrl show and llmrl report are for one")
    paths = [RunDir.open(run).path for run in options.runs]
    return _module("llmrl.report.comparison").compare(paths, html=options.html)


def _template(arguments: list[str]) -> int:
    options = Parser(
        "template NAME_OR_PATH [options]",
        (["name"], {"help": "a folder with a tokenizer, a registered template, or a name on the hub"}),
        (["--tools"], {"action": "store_true", "help": "conversations with tools are to work, too"}),
        (["--data"], {"metavar": "FILE", "help": "look at its conversations instead of a made-up one"}),
        JSON,
    ).parse(arguments)
    report = _module("llmrl.run.template_report")
    return report.run(options.name, tools=options.tools, data=options.data, as_json=options.json)


def _doctor(arguments: list[str]) -> int:
    options = Parser("doctor [--json]", JSON).parse(arguments)
    return _module("llmrl.run.doctor").report(as_json=options.json)


# name -> what runs it: the arguments after the name in, the exit code out
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "show": _show,
    "report": _report,
    "watch": _watch,
    "compare": _compare,
    "template": _template,
    "doctor": _doctor,
}
