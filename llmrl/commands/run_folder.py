"""The folder of a run that a training command starts or goes on with: one for all ranks, recorded, locked.

Loads no torch, but to agree on a folder with other ranks.
"""

from __future__ import annotations

import argparse
import operator
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import llmrl
from llmrl.errors import ConfigError, DataError, DeadlineError, MissingDependencyError, RunFolderError, TemplateError
from llmrl.run.checkpoint import latest_checkpoint
from llmrl.run.config import Loaded, dump_config, load_config, settings
from llmrl.run.files import open_file
from llmrl.run.masking import masked_arguments, masked_text
from llmrl.run.model_names import resolve_model
from llmrl.run.run_dir import RunDir

OF_ENVIRONMENT = (DataError, MissingDependencyError, RunFolderError, TemplateError)


@contextmanager
def error_file(run: RunDir) -> Iterator[None]:
    """Appends the traceback of an error that ends the training to the run's error.txt; tells what Ctrl-C left."""
    try:
        yield
    except (ConfigError, *OF_ENVIRONMENT):  # their messages say it all
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        with suppress(OSError), open_file(run.path / "error.txt", "a+b") as file:
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            file.write(f"{when}, rank {rank_here()}\n{masked_text(text)}\n".encode())
            error.written_to = run.path / "error.txt"  # type: ignore[attr-defined]
        raise
    except KeyboardInterrupt:
        last = latest_checkpoint(run.path)
        saved = "nothing was saved" if last is None else f"{last} was saved before; llmrl resume {run.path} goes on"
        raise KeyboardInterrupt(f"; {saved}") from None


def forget_steps(run: RunDir) -> None:
    """Removes the logs of steps that no checkpoint has: they are run again."""
    if rank_here() == 0:
        run.metrics.unlink(missing_ok=True)
        shutil.rmtree(run.rollouts, ignore_errors=True)


def new_run(options: argparse.Namespace, recipe: str, loaded: Loaded, record: Callable[[RunDir], None]) -> RunDir:
    if num_restarts() and (begun := _begun_by(_launch(), Path(options.runs))) is not None:
        return begun
    if options.overwrite:
        _remove(RunDir(Path(options.runs) / options.name), getattr(loaded.config, "model", None))
    run = RunDir.create(recipe, dump_config(loaded.config, loaded.origins), root=options.runs, name=options.name)
    try:
        record(run)
    except RunFolderError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def _remove(run: RunDir, model: Any) -> None:
    """Removes a run that is to be replaced, if there is one, but not the ``model`` that the new one starts from."""
    if not run.path.is_dir():
        return
    if isinstance(model, str):
        source = Path(resolve_model(model, runs=run.path.parent)).resolve()
        if run.path.resolve() in (source, *source.parents):
            raise ConfigError(f"--overwrite  {run.path} has the model to start from, {model}; choose another name")
    print(f"note          {run.remove()}", file=sys.stderr)


def run_of_name(
    options: argparse.Namespace, command: str, loaded: Loaded, record: Callable[[RunDir], None]
) -> RunDir | None:
    """The run to resume, which may have been killed before it wrote its first file; None if there is none.

    Raises  ConfigError if another command made it, or its fixed settings differ
    """
    run = RunDir(Path(options.runs) / options.name)
    if not run.path.is_dir():
        return None
    if not run.info.exists():
        record(run)
    if (other := run.read_info().get("command")) != command:
        raise ConfigError(f"--name  {run.path} is a run of {other}: choose another name for one of {command}")
    check_fixed(run, loaded.config)
    return run


def record_run(run: RunDir, command: str, recipe: str, loaded: Loaded, arguments: Sequence[str]) -> None:
    info = {
        "command": command,
        "recipe": recipe,
        "arguments": masked_arguments(arguments),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "llmrl": llmrl.__version__,
        "python": sys.version.split()[0],
        "origins": loaded.origins,
        "defaults": {s.name: s.default for s in settings(type(loaded.config)) if s.name in loaded.origins},
        "launch": _launch(),
    }
    run.write_config(dump_config(loaded.config, loaded.origins))
    run.write_info(info)


def _begun_by(launch: str, root: Path) -> RunDir | None:
    """The run that this launch created before its launcher restarted the ranks."""
    # Newest first: the run is among the most recent ones.
    for run in sorted(map(RunDir, root.glob("*")), key=lambda run: run.path.stat().st_mtime, reverse=True):
        with suppress(ConfigError):
            if run.read_info().get("launch") == launch:
                return run
    return None


def _launch() -> str:
    """A name for one start by torchrun, the same after each of its restarts."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{socket.gethostname()}:{os.getppid()}"


def num_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def lock_of(run: RunDir) -> AbstractContextManager[None]:
    """The run's lock; rank 0 holds it for all ranks."""
    return run.lock() if rank_here() == 0 else nullcontext()


def check_fixed(run: RunDir, config: Any) -> None:
    """Raises ConfigError that names each changed setting that a resumed run must keep."""
    before = load_config(type(config), run.read_config(), written=True).config
    faults = []
    for name in getattr(config, "FIXED", ()):
        was, is_now = (operator.attrgetter(name)(values) for values in (before, config))
        was, is_now = (value.model_dump() if hasattr(value, "model_dump") else value for value in (was, is_now))
        if was != is_now:
            faults.append(f"{name}  cannot change in a resumed run: was {was!r}, got {is_now!r}")
    if faults:
        raise ConfigError("\n".join([*faults, f"leave it out, or start a new run with model={run.path}"]))


def on_all_ranks(create: Callable[[], RunDir]) -> RunDir:
    """One run folder for all processes: rank 0 makes it and tells the others through the launcher's store."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return create()
    from datetime import timedelta

    from torch.distributed import rendezvous  # the settings are valid: torch is needed anyway

    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=120)))
    # One key per restart: the store outlives the ranks and still holds the answer of the previous start.
    key = f"llmrl/run/{num_restarts()}"
    if rank == 0:
        try:
            run = create()
        except (ConfigError, RunFolderError):
            # Tells the other ranks, which would otherwise wait until the deadline.
            store.set(key, "")
            raise
        store.set(key, str(run.path.absolute()))
        return run
    try:
        path = store.get(key).decode()
    except RuntimeError as error:
        raise DeadlineError(
            f"llmrl: rank 0 must name the run's folder within 120 s: got nothing; rank 0 has stopped or hangs: {error}"
        ) from error
    if not path:
        raise ConfigError("rank 0 could not make the run folder")
    return RunDir(Path(path))


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))
