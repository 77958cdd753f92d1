"""The commands that do not train: the options of each, checked before its module is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmrl.errors import ConfigError
from llmrl.loading import load_object
from llmrl.run.command_line import JSON, RUN, Parser
from llmrl.run.recipes import checkpoint_of, load_run
from llmrl.run.run_dir import RunDir

__all__ = ["COMMANDS"]

DTYPES = ("bfloat16", "float16", "float32")
CHECKPOINT = (["--checkpoint"], {"metavar": "stepN", "help": "which checkpoint (default: the last)"})


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _eval(arguments: list[str]) -> int:
    options = Parser(
        "eval RUN [section.key=value ...] [options]",
        RUN,
        (["overrides"], {"nargs": "*", "metavar": "section.key=value", "help": "settings to change"}),
        CHECKPOINT,
        (
            ["--samples"],
            {"type": int, "default": 1, "metavar": "K", "help": "answers to a problem (default: 1, greedy)"},
        ),
        (["--temperature"], {"type": float, "metavar": "T", "help": "of several samples (default: the run's, else 1)"}),
        (
            ["--data"],
            {
                "action": "append",
                "default": [],
                "metavar": "NAME[:SPLIT]",
                "help": "a file or hub name to measure on; again for more",
            },
        ),
        JSON,
    ).parse(arguments)
    run = RunDir.open(options.run)
    _, info, loaded = load_run(run, options.overrides)
    return _module("llmrl.run.evaluate").run(
        run.path,
        command=info["command"],
        config=loaded.config,
        checkpoint=checkpoint_of(run, options.checkpoint),
        data=options.data,
        samples=options.samples,
        temperature=options.temperature,
        as_json=options.json,
    )


def _export(arguments: list[str]) -> int:
    options = Parser(
        "export RUN DIR [options]",
        RUN,
        (["folder"], {"metavar": "DIR", "help": "a folder that does not exist"}),
        CHECKPOINT,
        (
            ["--dtype"],
            {
                "choices": ["bfloat16", "float16", "float32"],
                "default": "bfloat16",
                "help": "of the weights (default: bfloat16)",
            },
        ),
        (["--merge"], {"action": "store_true", "help": "of a run with adapters: the model with them added in"}),
        (["--push"], {"metavar": "REPO", "help": "upload the folder to this repository of the hub, too"}),
        (["--public"], {"action": "store_true", "help": "everybody can see the repository that --push makes"}),
    ).parse(arguments)
    run = RunDir.open(options.run)
    _, _, loaded = load_run(run)
    return _module("llmrl.run.export").export(
        run,
        Path(options.folder),
        config=loaded.config,
        checkpoint=checkpoint_of(run, options.checkpoint),
        dtype=options.dtype,
        merge=options.merge,
        push=options.push,
        public=options.public,
    )


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


def _runs(arguments: list[str]) -> int:
    where = (["--runs"], {"default": "runs", "metavar": "DIR", "help": "where runs are kept (default: runs)"})
    options = Parser("runs [options]", where, JSON).parse(arguments)
    return _module("llmrl.run.runs").list_runs(Path(options.runs), as_json=options.json)


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


def _chat(arguments: list[str]) -> int:
    options = Parser(
        "chat RUN|MODEL [options]",
        (["model"], {"metavar": "RUN|MODEL", "help": "a run's folder or name; or a model's folder or name on the hub"}),
        CHECKPOINT,
        (
            ["--tools"],
            {"action": "append", "default": [], "metavar": "NAME", "help": "not those of the run; repeatable"},
        ),
        (["--system"], {"metavar": "TEXT", "help": "the system prompt, instead of the run's"}),
        (
            ["--temperature"],
            {"type": float, "metavar": "T", "help": "0: greedy (default: the run's, else 1)"},
        ),
        (["--max-tokens"], {"type": int, "metavar": "N", "help": "of an answer (default: the run's, else 1024)"}),
        (["--seed"], {"type": int, "metavar": "N", "help": "of sampling"}),
    ).parse(arguments)
    config, runs = _model_source(options.model, options.checkpoint)
    return _module("llmrl.run.chat").chat(
        config,
        runs=runs,
        tools=options.tools,
        system=options.system,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )


def _model_source(name: str, checkpoint: str | None) -> tuple[Any, Path]:
    """The settings of a run with its checkpoint as the model, or of a model alone; and where runs are."""
    try:
        run = RunDir.open(name)
    except ConfigError as error:
        if "did you mean" in str(error) or checkpoint:
            raise
        return load_object("llmrl.train.settings:ModelSource", what="settings")(model=name), Path("runs")
    _, info, loaded = load_run(run)
    if info["command"] == "reward":
        raise ConfigError(f"llmrl chat  {run.path} is a reward model, which gives numbers: it does not answer")
    source = {"model": str(checkpoint_of(run, checkpoint)), "lora": None}  # with adapters merged in
    return loaded.config.model_copy(update=source), run.path.parent


def _new(arguments: list[str]) -> int:
    options = Parser(
        "new KIND NAME [options]",
        (["kind"], {"choices": ["reward", "tool", "env", "recipe"], "help": "reward, tool, env or recipe"}),
        (["name"], {"help": "of the module that is written, in lower case"}),
        (["--folder"], {"default": ".", "metavar": "DIR", "help": "where the files are written (default: here)"}),
    ).parse(arguments)
    return _module("llmrl.run.new").new(options.kind, options.name, folder=Path(options.folder))


def _doctor(arguments: list[str]) -> int:
    options = Parser("doctor [--json]", JSON).parse(arguments)
    return _module("llmrl.run.doctor").report(as_json=options.json)


# name -> what runs it: the arguments after the name in, the exit code out
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "eval": _eval,
    "chat": _chat,
    "export": _export,
    "show": _show,
    "runs": _runs,
    "report": _report,
    "watch": _watch,
    "compare": _compare,
    "template": _template,
    "new": _new,
    "doctor": _doctor,
}
