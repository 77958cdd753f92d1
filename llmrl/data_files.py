"""The files that the name of a dataset means, and the columns of their first row; no torch."""

from __future__ import annotations

import csv
import re
from glob import glob, has_magic
from pathlib import Path

from llmrl.errors import DataError, did_you_mean
from llmrl.strict_json import parse_json

FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv")
SAVED = ("dataset_dict.json", "state.json")  # what the folders of `save_to_disk` hold
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = {  # the words in names of files, as the hub reads them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def local_files(source: str | Path, split: str = "train") -> list[Path] | None:
    """The files of a source on this machine, or its folder if `save_to_disk` wrote it; None for a name on the hub.

    Raises  DataError for a pattern without files, or a folder without files of this split
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return [path] if any((path / name).is_file() for name in SAVED) else _files_of(path, split)
    if has_magic(str(path)) and not path.exists():
        found = sorted(Path(file) for file in glob(str(path), recursive=True) if Path(file).is_file())
        if not found:
            raise DataError(f"load_rows: a pattern must match a file: {source} (from {Path.cwd()}) does not.")
        return found
    return [path] if path.suffix.lower() in FILE_FORMATS or path.exists() else None


def _files_of(folder: Path, split: str) -> list[Path]:
    """The data files of one split in a folder, by their names; all of them if no name says a split."""
    found = _data_files(folder)
    if exact := [file for file in found if file.stem == split]:
        files = exact
    else:
        splits = {file: _split_in(file.relative_to(folder)) for file in found}
        own = next((key for key, words in _SPLITS.items() if split in words), split)
        files = [file for file in found if splits[file] == own]
        if not any(splits.values()):
            files = found
    if not files:
        names = ", ".join(str(file.relative_to(folder)) for file in found[:8]) or "no data file"
        raise DataError(
            f"load_rows: the folder {folder} must have a file for the split {split!r}, such as {split}.jsonl: it has "
            f"{names}.{did_you_mean(split, [file.stem for file in found])}"
        )
    if len(kinds := {file.suffix.lower() for file in files}) > 1:
        raise DataError(
            f"load_rows: the files of a split must have one format: the folder {folder} has {', '.join(sorted(kinds))} "
            f"for {split!r}; name the files, as {folder}/*{files[0].suffix}."
        )
    return files


def _data_files(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in FILE_FORMATS
        and file.name not in _NOT_ROWS
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def has_splits(source: str | Path) -> bool:
    """True for a folder whose files, or whose saved dataset, have splits."""
    path = Path(source).expanduser()
    if (path / "dataset_dict.json").is_file():
        return True
    return path.is_dir() and any(_split_in(file.relative_to(path)) for file in _data_files(path))


def _split_in(path: Path) -> str | None:
    """The split that the name of a file says, or else that of its folder."""
    for part in reversed(path.parts):
        words = set(re.split(r"[^a-z]+", part.lower()))
        for split, names in _SPLITS.items():
            if words & {*names}:
                return split
    return None


def check_exists(file: Path) -> None:
    """Raises DataError, with the nearest name beside it, if there is no such file."""
    if not file.is_file():
        beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise DataError(
            f"load_rows: a dataset file must exist: {file} (from {Path.cwd()}) does not."
            f"{did_you_mean(file.name, beside)}"
        )


def first_columns(file: Path) -> tuple[str, list[str]] | None:
    """The place of the first row of a .jsonl or .csv file, and its columns; None for others, and if it has none."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if file.suffix.lower() == ".csv":
                return f"{file}, row 1", next(csv.reader(lines))
            if file.suffix.lower() == ".jsonl":
                number, line = next((number, line) for number, line in enumerate(lines, 1) if line.strip())
                return f"{file}:{number}", [*parse_json(line).keys()]
    except (OSError, ValueError, AttributeError, StopIteration, csv.Error):
        pass  # said when the file is read
    return None
