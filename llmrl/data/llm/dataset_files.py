"""Loads a dataset: a local file, several files, a folder, what ``datasets`` saved, or a name on the hub."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from llmrl.data.llm.placed_rows import ArrowRows, PlacedRow, arrow_row
from llmrl.data.llm.row_images import resolve_images
from llmrl.errors import DataError, did_you_mean
from llmrl.strict_json import JSONError, parse_json
from llmrl.text_files import why_not_text

Row = Mapping[str, Any]

FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv")
_SAVED = ("dataset_dict.json", "state.json")  # what the folders of `save_to_disk` hold
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = {  # the words in names of files, as the hub reads them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def load_rows(source: Any, *, split: str = "train", name: str | None = None) -> Sequence[Row]:
    """The rows of a dataset: a sequence of dicts, which know their place for messages.

    Reads    ``source``: a ``.jsonl`` or ``.json`` file (lines of objects, or a list of them), a ``.parquet`` or
             ``.csv`` file; a pattern such as ``data/*.jsonl``; a folder of such files, with the word of a split in
             their names (``train-00000-of-00002.parquet``) or of one split; a folder that ``datasets.save_to_disk``
             wrote; a ``datasets.Dataset``; or a name on the Hugging Face hub. ``split`` applies to folders and the hub,
             the configuration ``name`` to the hub
    Returns  a list, or a sequence that reads rows as they are asked for
    Raises   DataError for a missing file or split, a file that is not UTF-8 (a byte order mark is allowed), an
             unreadable row, or no rows at all
    """
    rows: Sequence[Row]
    if hasattr(source, "column_names"):  # a datasets.Dataset
        rows = ArrowRows(source, "the dataset")
    elif (files := local_files(source, split)) is None:
        rows = ArrowRows(_load_hub(str(source), split=split, name=name), str(source))
    elif files[0].is_dir():
        rows = ArrowRows(_load_saved(files[0], split), str(files[0]))
    else:
        rows = [row for file in files for row in _read_file(file)]
    if len(rows) == 0:
        raise DataError(f"load_rows: a dataset must have at least one row: {source} has none.")
    return rows


def first_row(source: str, split: str = "train") -> Row | None:
    """The first row of local files, if they are .jsonl or .csv: others take long to open. None if there is none.

    Raises  DataError for a missing file, too, and for an unreadable row
    """
    files = local_files(source, split) or []
    for file in files:
        if not file.is_dir():
            _check_exists(file)
    if not files or files[0].suffix.lower() not in (".jsonl", ".csv"):
        return None
    with closing(_read_file(files[0])) as rows:
        return next(rows, None)


def local_files(source: str | Path, split: str = "train") -> list[Path] | None:
    """The files of a source on this machine, or its folder if `save_to_disk` wrote it; None for a name on the hub.

    Raises  DataError for a pattern without files, or a folder without files of this split
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return [path] if any((path / name).is_file() for name in _SAVED) else _files_of(path, split)
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


def _load_saved(path: Path, split: str) -> Any:
    import datasets  # a second of imports

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"load_rows: {path} must be what datasets' save_to_disk wrote: {error}") from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise DataError(
            f"load_rows: {path} must have the split {split!r}: it has {', '.join(saved)}.{did_you_mean(split, saved)}"
        )
    return saved[split]


def _check_exists(path: Path) -> None:
    if not path.is_file():
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"load_rows: a dataset file must exist: {path} (from {Path.cwd()}) does not."
            f"{did_you_mean(path.name, beside)}"
        )


def _read_file(path: Path) -> Iterator[PlacedRow]:
    _check_exists(path)
    suffix = path.suffix.lower()
    try:
        if suffix != ".parquet" and (reason := why_not_text(path)):
            raise DataError(f"load_rows: {reason}")
        for row in _rows_of(path, suffix):
            resolve_images(row, path.parent)
            yield row
    except UnicodeDecodeError as error:
        raise DataError(f"load_rows: {why_not_text(path, by_line=True) or f'{path}: {error}'}") from error
    except OSError as error:
        raise DataError(f"load_rows: {path} cannot be read: {error.strerror or error}.") from error


def _rows_of(path: Path, suffix: str) -> Iterator[PlacedRow]:
    if suffix in (".jsonl", ".json"):  # which of the two it is, its first line says
        with path.open(encoding="utf-8-sig") as lines:
            first = next((line.strip() for line in lines if line.strip()), "")
        is_list = first == "[" or first.startswith("[{")
        if not is_list and (suffix == ".jsonl" or (first.startswith("{") and first.endswith("}"))):
            yield from _json_lines(path)
            return
        for number, row in enumerate(_parse(path.read_text(encoding="utf-8-sig"), str(path), kind=list), 1):
            if not isinstance(row, dict):
                raise DataError(f"load_rows: every row must be an object: row {number} of {path} is {row!r:.60}.")
            yield PlacedRow.at(f"{path}, row {number}", row)
    elif suffix == ".parquet":
        from pyarrow import parquet  # lazy: importing it takes longer than reading a JSONL file

        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(
                f"load_rows: {path} cannot be read as Parquet: {error}; rename a file of another format "
                f"({', '.join(FILE_FORMATS)})."
            ) from error
        yield from (arrow_row(row, f"{path}, row {number}") for number, row in enumerate(rows, 1))
    elif suffix == ".csv":
        yield from _csv_rows(path)
    else:
        raise DataError(f"load_rows: a dataset file must end in one of {', '.join(FILE_FORMATS)}: got {path}.")


def _json_lines(path: Path) -> Iterator[PlacedRow]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield PlacedRow.at(f"{path}:{number}", _parse(line, f"{path}, line {number}"))


def _csv_rows(path: Path) -> Iterator[PlacedRow]:
    limit = csv.field_size_limit(sys.maxsize)  # global; its default is shorter than some conversations
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)  # strict: an open quote at the end is an error
            for number, row in enumerate(reader, 1):
                if None in row:
                    raise DataError(
                        f"load_rows: a row must have as many fields as the header: row {number} of {path}, which "
                        f"ends in line {reader.line_num}, has {len(row[None])} more; put a field with commas in quotes."
                    )
                yield PlacedRow.at(f"{path}, row {number}", row)
    except csv.Error as error:
        raise DataError(f"load_rows: {path}, line {reader.reader.line_num} must be CSV: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _parse(text: str, where: str, kind: type = dict) -> Any:
    try:
        value = parse_json(text)
    except JSONError as error:
        raise DataError(f"load_rows: {where} must be JSON: {error}.") from error
    if not isinstance(value, kind):
        expected = "an object, {...}" if kind is dict else "a list of objects, [{...}, ...]"
        raise DataError(f"load_rows: {where} must hold {expected}: got {type(value).__name__}.")
    return value


def _load_hub(source: str, *, split: str, name: str | None) -> Sequence[Row]:
    import datasets  # a second of imports that a local file does not need

    try:
        return datasets.load_dataset(source, name, split=split)
    except (OSError, ValueError) as error:  # the hub: no such dataset, split or configuration, or no network
        raise DataError(
            f"load_rows: {source!r} must be a file ending in {', '.join(FILE_FORMATS)} or a dataset on the hub with "
            f"the split {split!r}: there is no such file, and the hub reports {type(error).__name__}: {error}"
            f"{did_you_mean(source, _known_names())}"
        ) from error


def _known_names() -> list[str]:
    """Datasets of the hub that were loaded before, and those named in the documentation."""
    from datasets import config

    cached = [path.name.replace("___", "/") for path in Path(config.HF_DATASETS_CACHE).glob("*___*")]
    named = ["openai/gsm8k", "CarperAI/openai_summarize_comparisons", "CarperAI/openai_summarize_tldr"]
    return named + cached
