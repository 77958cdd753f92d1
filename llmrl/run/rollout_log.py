"""The rollouts of a run, one Parquet file per step in ``<run>/rollouts``: the rows that ``llmrl show`` prints."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llmrl.errors import DataError
from llmrl.run.run_dir import writing

__all__ = ["Rollout", "RolloutLog", "read_rollouts"]

_COLUMNS = {
    "step": "int64",
    "group": "int64",
    "prompt": "string",
    "completion": "string",
    "reward": "float64",
    "advantage": "float64",
    "stop_reason": "string",
    "version": "int64",
    "tokens": "int64",
}


@dataclass(frozen=True)
class Rollout:
    """One conversation as it was sampled. A reward of None (NaN is stored as None) failed: it is not a zero."""

    prompt: str
    completion: str
    reward: float | None
    advantage: float | None
    stop_reason: str  # of the last turn: eos, stop_string, length, tool, abort
    version: int  # of the weights that sampled it
    tokens: int  # sampled
    group: int = 0
    step: int = 0  # filled in by the log


class RolloutLog:
    """Writes a step's conversations to ``<run>/rollouts/stepNNNNNN.parquet``, whole or not at all.

    ``resume_step``  files of later steps are removed, they will come again
    ``enabled``      False on every rank but the first: nothing is written
    """

    def __init__(self, run_dir: Path | str, *, enabled: bool = True, resume_step: int | None = None):
        self.folder = Path(run_dir) / "rollouts"
        self.enabled = enabled
        if enabled and resume_step is not None:
            for step, path in _files(self.folder).items():
                if step > resume_step:
                    with writing(path):
                        path.unlink()

    def write(self, step: int, rollouts: Iterable[Rollout]) -> Path | None:
        """Returns the file, or None where the log is disabled.

        Raises  RunFolderError if it cannot be written
        """
        if not self.enabled:
            return None
        import pyarrow  # a third of a second that `llmrl --help` need not pay
        from pyarrow import parquet

        rows = [asdict(rollout) | {"step": step} for rollout in rollouts]
        schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in _COLUMNS.items()])
        columns = {name: [_plain(row[name]) for row in rows] for name in _COLUMNS}
        path = self.folder / f"step{step:06d}.parquet"
        draft = path.with_suffix(".tmp")
        with writing(path):
            self.folder.mkdir(exist_ok=True)
            parquet.write_table(pyarrow.table(columns, schema=schema), draft)
            os.replace(draft, path)
        return path


def read_rollouts(run_dir: Path | str, step: int | None = None) -> list[Rollout]:
    """The conversations of one step; without ``step``, of the last one that was written.

    Raises  DataError that lists the steps there are, or names a file that is not one of rollouts
    """
    files = _files(Path(run_dir) / "rollouts")
    if not files or (step is not None and step not in files):
        there = f"steps {min(files)} to {max(files)} ({len(files)} files)" if files else "none"
        raise DataError(f"{Path(run_dir) / 'rollouts'}: must hold the step asked for: got {step}, there: {there}.")
    from pyarrow import ArrowException, parquet

    path = files[max(files) if step is None else step]
    names = [field.name for field in fields(Rollout)]
    try:
        rows = parquet.read_table(path).to_pylist()
        return [Rollout(**{name: row[name] for name in names}) for row in rows]
    except (ArrowException, OSError, KeyError) as error:
        raise DataError(f"{path}: must be a Parquet file of rollouts: {error}.") from error


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _files(folder: Path) -> dict[int, Path]:
    found = {re.fullmatch(r"step(\d+)\.parquet", path.name): path for path in sorted(folder.glob("step*.parquet"))}
    return {int(match[1]): path for match, path in found.items() if match}
