"""Loads a dataset: a local file, several files, a folder, what ``datasets`` saved, or a name on the hub."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrl.data.llm.placed_rows import ArrowRows, PlacedRow, arrow_row
from llmrl.data.llm.row_images import resolve_images
from llmrl.data_files import FILE_FORMATS, check_exists, local_files
from llmrl.errors import DataError, did_you_mean
from llmrl.strict_json import JSONError, parse_json
from llmrl.text_files import why_not_text

Row = Mapping[str, Any]


def load_rows(source: Any, *, split: str = "train", name: str | None = None) -> Sequence[Row]:
    """The rows of a dataset: a sequence of dicts, which know their place for messages.

    Reads    ``source``: a ``.jsonl``, ``.json`` (a list of objects, or lines of them), ``.parquet`` or ``.csv`` file; a
             pattern such as ``data/*.jsonl``; a folder of such files, with the word of a split in their names
             (``train-00000-of-00002.parquet``) or of one split; a folder that ``datasets.save_to_disk`` wrote; a
             ``datasets.Dataset``; or a name on the Hugging Face hub. ``split`` applies to folders and the hub, the
             configuration ``name`` to the hub
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
        rows = [row for file in files for row in _load_file(file)]
    if len(rows) == 0:
        raise DataError(f"load_rows: a dataset must have at least one row: {source} has none.")
    return rows


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


def _load_file(path: Path) -> list[PlacedRow]:
    check_exists(path)
    suffix = path.suffix.lower()
    try:
        if suffix != ".parquet" and (reason := why_not_text(path)):
            raise DataError(f"load_rows: {reason}")
        rows = _rows_of(path, suffix)
        for row in rows:
            resolve_images(row, path.parent)
        return rows
    except UnicodeDecodeError as error:
        raise DataError(f"load_rows: {why_not_text(path, by_line=True) or f'{path}: {error}'}") from error
    except OSError as error:
        raise DataError(f"load_rows: {path} cannot be read: {error.strerror or error}.") from error


def _rows_of(path: Path, suffix: str) -> list[PlacedRow]:
    if suffix == ".jsonl":
        return _json_lines(path)
    if suffix == ".json":
        text = path.read_text(encoding="utf-8-sig")
        first = text.lstrip().partition("\n")[0].rstrip()
        if first.startswith("{") and first.endswith("}"):
            return _json_lines(path)  # one object per line, as in a .jsonl file
        rows = _parse(text, str(path), kind=list)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise DataError(f"load_rows: every row must be an object: row {number} of {path} is {row!r:.60}.")
        return [PlacedRow.at(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]
    if suffix == ".parquet":
        from pyarrow import parquet  # lazy: importing it takes longer than reading a JSONL file

        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(
                f"load_rows: {path} cannot be read as Parquet: {error}; rename a file of another format "
                f"({', '.join(FILE_FORMATS)})."
            ) from error
        return [arrow_row(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    if suffix == ".csv":
        return _csv_rows(path)
    raise DataError(f"load_rows: a dataset file must end in one of {', '.join(FILE_FORMATS)}: got {path}.")


def _json_lines(path: Path) -> list[PlacedRow]:
    with path.open(encoding="utf-8-sig") as lines:
        return [
            PlacedRow.at(f"{path}:{number}", _parse(line, f"{path}, line {number}"))
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]


def _csv_rows(path: Path) -> list[PlacedRow]:
    limit = csv.field_size_limit(sys.maxsize)  # global; its default is shorter than some conversations
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader, rows = csv.DictReader(lines, strict=True), []  # strict: an open quote at the end is an error
            for row in reader:
                rows.append(PlacedRow.at(f"{path}, row {len(rows) + 1}", row))
                if None in row:
                    raise DataError(
                        f"load_rows: a row must have as many fields as the header: row {len(rows)} of {path}, which "
                        f"ends in line {reader.line_num}, has {len(row[None])} more; put a field with commas in quotes."
                    )
            return rows
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
