"""The command ``llmrl``: reads the command line, checks the settings, then calls a recipe.

Everything up to a valid configuration runs without torch, so that help and config errors are printed at once. The
training commands are the recipes; the others are in `llmrl.commands.parser`.

Exit codes: 0 done, 2 bad configuration, 3 the environment or the data lacks something, 4 training aborted,
130 interrupted (after a checkpoint).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import llmrl
from llmrl.commands.parser import COMMANDS, RUN, Parser, option
from llmrl.commands.recipes import RECIPES, load_run
from llmrl.commands.run_folder import (
    OF_ENVIRONMENT,
    check_fixed,
    error_file,
    forget_steps,
    lock_of,
    new_run,
    num_restarts,
    on_all_ranks,
    rank_here,
    record_run,
    run_of_name,
)
from llmrl.concurrency.parent_watchdog import follow_launcher
from llmrl.errors import (
    ConfigError,
    LLMRLError,
    closest,
)
from llmrl.loading import load_object, user_place, user_traceback
from llmrl.run.checkpoint import latest_checkpoint
from llmrl.run.config import Loaded, dump_config, dump_defaults, find_recipe, load_config, recipe_names
from llmrl.run.masking import masked_text
from llmrl.run.printable import printable
from llmrl.run.run_dir import RunDir

DONE, BAD_CONFIG, ENVIRONMENT, ABORTED, INTERRUPTED = 0, 2, 3, 4, 130
RANK_0_SPEAKS_WITHIN_S = 10.0
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # set by users to choose how OpenMP threads wait


HELP = """\
usage: llmrl COMMAND ...

{training}
  resume  RUN [section.key=value ...]      continue from a run's last complete checkpoint
  launch  grpo|ppo|...|resume ...          that, with vLLM servers on the rollout.gpus last GPUs; --slurm: as a job
  eval    RUN [section.key=value ...]      evaluate a run's checkpoint
  chat    RUN|MODEL                        talk to a model, with the run's tools
  serve   RUN|MODEL                        a model behind an OpenAI-compatible server
  export  RUN DIR                          a checkpoint as a model folder, with a card; --push to the hub
  show    RUN                              a run's steps, before and after, samples; reads files only
  runs                                     the runs in runs/: state, step, best measure, age
  report  RUN                              writes its report.html again
  watch   RUN [--port N]                   serves the report on this machine while the run trains
  compare RUN RUN ...                      runs side by side, in the terminal and (--html FILE) as a page
  template NAME_OR_PATH                    what a chat template does to training, on a conversation
  new     reward|tool|env|recipe NAME      files to start from, with a test that passes
  env     install|check verifiers          a Python environment of a package that cannot be beside llmrl
  doctor                                   devices, versions, and what works here

RECIPE is a YAML file or a packaged recipe: {recipes}
RUN is a folder, or the name of one in runs/. Each command has its own --help.
exit codes: 0 done, 1 template or doctor found a problem, 2 bad configuration, 3 environment or data,
            4 training aborted, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. ``argv`` None: the arguments of this process."""
    follow_launcher()
    if not any(name in os.environ for name in WAITING):
        # Must be set before torch is loaded. Spinning threads slow each other down many times over where runs share
        # cores; threads that sleep at once are slow to wake. So they spin briefly, and less on a busy machine.
        is_busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000" if is_busy else "10000"}
    code = _run(list(sys.argv[1:] if argv is None else argv))
    distributed = sys.modules.get("torch.distributed")
    in_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if code != DONE and in_group:  # exit without destructors: they would wait for the other ranks, which wait for
        sys.stdout.flush()  # this one; the launcher ends those once this rank has exited
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(arguments: list[str]) -> int:
    started = time.perf_counter()
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        report = _config_report(error, arguments, time.perf_counter() - started)
        _let_rank_0_speak()
        print(report, file=sys.stderr)
        _tell_launcher(str(error))
        return BAD_CONFIG
    except LLMRLError as error:
        _let_rank_0_speak()
        _report(error)
        return ENVIRONMENT if isinstance(error, OF_ENVIRONMENT) else ABORTED
    except KeyboardInterrupt as interrupt:
        if rank_here() == 0:
            print(f"interrupted{interrupt}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `llmrl show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if user_place(error) is None:  # of llmrl: the interpreter prints the whole traceback
            _tell_launcher(f"{type(error).__name__}: {error}")
            raise
        _let_rank_0_speak()
        error.add_note(user_traceback(error).rstrip())
        _report(error)
        return ABORTED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        training = (f"  {name:8}RECIPE [section.key=value ...]   {recipe.about}" for name, recipe in RECIPES.items())
        print(HELP.format(training="\n".join(training), recipes=", ".join(recipe_names()) or "none"))
        return DONE if arguments else BAD_CONFIG
    if arguments[0] == "--version":
        print(f"llmrl {llmrl.__version__}")
        return DONE
    command, *rest = arguments
    others = {"resume": _resume, "launch": _launch_all, **COMMANDS}
    if command in RECIPES:
        return _train(command, rest)
    if command in others:
        return others[command](rest)
    known = [*RECIPES, *others]
    match = closest(command, known)
    hint = f"did you mean  llmrl {match}?" if match else f"known here    {', '.join(known)}"
    raise ConfigError(f"llmrl {command}  is not a command\n{hint}")


# --- commands --------------------------------------------------------------------------------------------------------


def _train(command: str, arguments: list[str]) -> int:
    options, path, loaded = _read_training(command, arguments)
    recipe = RECIPES[command]
    if options.defaults:
        print(dump_defaults(recipe.settings()), end="")
        return DONE
    if options.gpu and not options.dry_run:
        raise ConfigError(f"llmrl {command}  --gpu plans for GPUs of another machine: it needs --dry-run")
    goes_on = options.resume and options.name and latest_checkpoint(Path(options.runs) / options.name) is not None
    _check_early(loaded.config, Path(options.runs), packages=not options.dry_run, data=not goes_on)
    if options.dry_run:
        from llmrl.run.console import make_console, print_plan  # rich is not needed to report errors

        console = make_console()
        console.print(dump_config(loaded.config, loaded.origins, mask=True), end="", markup=False, soft_wrap=True)
        elsewhere = {}
        if options.gpu:
            elsewhere["gpu"] = load_object("llmrl.train.gpus:parse_gpu", what="plan")(options.gpu)
        plan = recipe.loop().plan(loaded.config, runs=Path(options.runs), **elsewhere)
        print_plan(console, f"{command} (dry run)", plan)
        return DONE
    _check_launched(command, loaded.config)
    name = path.stem if path else command
    if options.resume and options.name is None:
        raise ConfigError(f"llmrl {command}  --resume continues the run named by --name: give one")
    if options.overwrite and (options.name is None or options.resume):
        raise ConfigError(f"llmrl {command}  --overwrite replaces the run named by --name: give one, without --resume")
    record = partial(record_run, command=command, recipe=name, loaded=loaded, arguments=arguments)
    run = on_all_ranks(
        lambda: (
            (options.resume and run_of_name(options, command, loaded, record)) or new_run(options, name, loaded, record)
        )
    )
    with lock_of(run), error_file(run):
        goes_on = options.resume or num_restarts() > 0
        resume = goes_on and latest_checkpoint(run.path) is not None
        if goes_on and not resume:
            forget_steps(run)
        changes = {"on_start": lambda: record(run)} if options.resume else {}
        return recipe.loop().run(loaded.config, run_dir=run.path, resume=resume, **changes)


def _read_training(command: str, arguments: list[str]) -> tuple[argparse.Namespace, Path | None, Loaded | None]:
    """The options of a training command, its recipe and its settings; the last two are None with ``--defaults``."""
    parser = Parser(
        f"{command} [RECIPE] [section.key=value ...] [options]",
        option("items", nargs="*", metavar="RECIPE | section.key=value", help="a YAML file or packaged recipe"),
        option("--name", help="the run's folder under --runs; without it, the recipe's name and four digits"),
        option("--resume", action="store_true", help="continue the run of that name, if it exists"),
        option("--overwrite", action="store_true", help="replace the run of that name: it is removed"),
        option("--runs", default="runs", metavar="DIR", help="where runs are kept (default: runs)"),
        option("--dry-run", action="store_true", help="print the settings and the plan; write nothing"),
        option(
            "--gpu",
            metavar="NAME:COUNT",
            help="with --dry-run, plan for these GPUs: H100:8, H100:8x2 (two nodes), 48:2 (48 GB)",
        ),
        option("--defaults", action="store_true", help="print every setting, its default and its meaning"),
    )
    options = parser.parse(arguments)
    if options.defaults:
        return options, None, None
    recipes = [item for item in options.items if "=" not in item]
    overrides = [item for item in options.items if "=" in item]
    if len(recipes) > 1:
        raise ConfigError(f"llmrl {command}  takes one recipe, and settings as section.key=value: got {recipes}")
    if not options.items:
        parser.error(f"needs a recipe or settings; packaged recipes: {', '.join(recipe_names())}")
    path = find_recipe(recipes[0]) if recipes else None
    return options, path, load_config(RECIPES[command].settings(), path, overrides)


def _launch_all(arguments: list[str]) -> int:
    own = Parser(
        "launch grpo|ppo|... RECIPE rollout.gpus=N [section.key=value ...] [options], or launch resume RUN [...]",
        option("command", choices=[*RECIPES, "resume"], metavar="COMMAND"),
        option("--trainers", type=int, metavar="N", help="ranks that train (default: a GPU each; on a CPU 1)"),
        option("--port", type=int, default=8100, help="of the first server, the others follow (default: 8100)"),
        option("--wait", type=float, default=1800, metavar="S", help="for servers to answer (default: 1800)"),
        option("--dry-run", action="store_true", help="print the plan and the commands; start nothing"),
        option("--slurm", action="store_true", help="as a job of Slurm on several nodes, which is submitted"),
        option("--print", dest="print_only", action="store_true", help="with --slurm: print the job's script instead"),
        option("--gpu", metavar="NAME:COUNTxNODES", help="with --slurm: the nodes' GPUs, such as H100:8x2"),
        option("--nodes", type=int, metavar="N", help="with --slurm: nodes without GPUs"),
        option("--time", metavar="T", help="with --slurm: the job's limit (default: 24:00:00)"),
        option("--sbatch", action="append", default=[], metavar="NAME=VALUE", help="with --slurm: as partition=long"),
    )
    options, rest = own.parse_known_args(arguments)
    job = {name: getattr(options, name) for name in ("print_only", "gpu", "nodes", "sbatch", "time")}
    if not options.slurm and any(job.values()):
        own.error("--print, --gpu, --nodes, --time and --sbatch describe a job of Slurm: add --slurm")
    if options.trainers is not None and options.trainers < 1:
        own.error(f"--trainers must be at least 1: got {options.trainers}")
    command = options.command
    if command != "resume":
        given, _, loaded = _read_training(command, rest)
        if loaded is None:
            own.error(f"--defaults is an option of llmrl {command}")
        if options.slurm and given.overwrite:
            own.error("--overwrite would remove what a job that is queued again continues from: leave it out")
        runs = Path(given.runs)
    else:
        run = RunDir.open(next((word for word in rest if "=" not in word), ""))
        changes = ["rollout.servers=[]", *(word for word in rest if "=" in word)]  # the earlier start's are gone
        _, info, loaded = load_run(run, changes)
        command, runs = info["command"], run.path.parent
    if not hasattr(loaded.config, "rollout") and not options.slurm:
        own.error(f"needs a command that samples, such as grpo: {command} trains on rows")
    _check_early(loaded.config, runs, packages=not options.dry_run, data=options.command != "resume")
    start = importlib.import_module("llmrl.commands.launch").launch
    if options.slurm:
        start = partial(importlib.import_module("llmrl.commands.slurm").submit, **job)
    return start(
        RECIPES[command].module,
        loaded.config,
        [options.command, *rest],
        runs=runs,
        wait_s=options.wait,
        port=options.port,
        trainers=options.trainers,
        dry_run=options.dry_run,
    )


def _check_early(config: Any, runs: Path, *, packages: bool = True, data: bool = True) -> None:
    """Raises the errors of `llmrl.train.planning.early_checks`; ``data``: also the model and the data of a new run."""
    from llmrl.train.planning import early_checks  # imported here: the commands that only read need no settings

    if isinstance(config, early_checks.ModelSource):
        for remark in early_checks.check_run(config, runs=runs) if data else ():
            if remark and rank_here() == 0:
                print(f"note          {remark}", file=sys.stderr)
        if packages:
            early_checks.check_packages(config)


def _check_launched(command: str, config: Any) -> None:
    """Raises ConfigError if engines are to run on separate GPUs but no servers were started."""
    rollout = getattr(config, "rollout", None)
    if rollout is not None and rollout.gpus and not rollout.servers:
        raise ConfigError(
            f"rollout.gpus {rollout.gpus}  needs llmrl launch, which starts the engines\n"
            f"did you mean  llmrl launch {command} ...?"
        )


def _resume(arguments: list[str]) -> int:
    changes = option("overrides", nargs="*", metavar="section.key=value", help="settings to change, e.g. steps=400")
    options = Parser("resume RUN [section.key=value ...]", RUN, changes).parse(arguments)
    run = RunDir.open(options.run)
    with lock_of(run), error_file(run):
        recipe, info, loaded = load_run(run, options.overrides)
        check_fixed(run, loaded.config)
        _check_launched("resume", loaded.config)
        _check_early(loaded.config, run.path.parent, data=False)
        resume = latest_checkpoint(run.path) is not None
        if not resume:
            forget_steps(run)

        def write_settings() -> None:
            changed = {name: "resume" for name, place in loaded.origins.items() if place == "command line"}
            origins = {**info.get("origins", {}), **changed}
            run.write_config(dump_config(loaded.config, origins))
            run.write_info(info | {"origins": origins})

        on_start = write_settings if options.overrides else None
        return recipe.loop().run(loaded.config, run_dir=run.path, resume=resume, on_start=on_start)


# --- errors --------------------------------------------------------------------------------------------------------


def _let_rank_0_speak() -> None:
    """Delays the other ranks: rank 0 prints the same error, and then the launcher ends them. If one of them exited
    first, the launcher would end rank 0 before it has printed.
    """
    if rank_here() != 0:
        time.sleep(RANK_0_SPEAKS_WITHIN_S)


def _report(error: Exception) -> None:
    """Prints the error's notes, which are tracebacks of the user's code, then its message."""
    rank = f"[rank {rank_here()}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    for note in getattr(error, "__notes__", ()):
        print(printable(masked_text(note)), file=sys.stderr)
    text = str(error) if isinstance(error, LLMRLError) else f"{user_place(error)}: {type(error).__name__}: {error}"
    if file := getattr(error, "written_to", None):
        text = f"{text.rstrip('.')}; all frames: {file}"
    text = printable(masked_text(text))
    print(f"{rank}error         {text}", file=sys.stderr)
    _tell_launcher(text)


def _tell_launcher(text: str) -> None:
    """Gives torchrun the message of this rank, which it prints at its end."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        lines = "\n".join(textwrap.wrap(text, 100))
        message = {"message": lines, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def _config_report(error: ConfigError, arguments: Sequence[str], seconds: float) -> str:
    hints = ("did you mean  ", "it means      ", "known here    ", "packaged      ")
    first, *rest = printable(masked_text(str(error))).splitlines()
    lines = [f"config error  {first}", *(line if line.startswith(hints) else f"{'':14}{line}" for line in rest)]
    if "torch" not in sys.modules:
        last = f"nothing was loaded ({seconds:.2f} s)."
        if arguments and arguments[0] in RECIPES:
            last += f"  llmrl {arguments[0]} --defaults  lists every setting."
        lines.append(f"{'':14}{last}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
