"""Reads a dataset (a local file or a name on the hub) into rows, and rows into conversations or prompts.

`to_messages` turns a row into the conversation that SFT trains on, `to_prompt` into the prompt and reference answer
that an environment starts from. The columns decide, row by row:

| columns of the row | as a conversation | as a prompt |
|---|---|---|
| ``messages`` | the messages | the messages before the last assistant turn; that turn is the reference |
| ``prompt``, ``completion`` | both; each a string or a list of messages | the prompt |
| a prompt column, a reference column | user asks, assistant answers | the prompt and the reference |

A prompt column is ``prompt``, ``question``, ``query``, ``problem`` or ``instruction``; a reference column is
``answer``, ``reference``, ``solution``, ``ground_truth`` or ``target``; GSM8K's ``question`` and ``answer`` are one
such pair. Other names are given as arguments. A column ``tools`` (a list of schemas, or JSON text) is declared to the
model: it becomes "tools" of the first message, where rendering reads it. A column ``image``, or ``images`` with a
list, is shown to the model: a path (relative to the file of the rows), or an image as the ``datasets`` library and
Parquet have it. The images replace the placeholders in the messages ({"type": "image"} parts), or else precede the
first text of the user. Rows are counted from 1 in every message.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrl.data.llm.images import load_image
from llmrl.errors import DataError, did_you_mean
from llmrl.strict_json import JSONError, parse_json
from llmrl.text_files import why_not_text

Message = dict[str, Any]
Row = Mapping[str, Any]

PROMPT_COLUMNS = ("prompt", "question", "query", "problem", "instruction")
REFERENCE_COLUMNS = ("answer", "reference", "solution", "ground_truth", "target")
IMAGE_COLUMNS = ("image", "images")
FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv")


def load_rows(source: str | Path, *, split: str = "train", name: str | None = None) -> Sequence[Row]:
    """The rows of a dataset: a sequence of dicts.

    Reads    ``source``: a ``.jsonl``, ``.json`` (a list of objects), ``.parquet`` or ``.csv`` file, or a name on the
             Hugging Face hub (``split`` and the configuration ``name`` apply only to the hub)
    Returns  a list of dicts, or a ``datasets.Dataset``
    Raises   DataError for a missing file, one that is not UTF-8 (a byte order mark is allowed), an unreadable row, or
             no rows at all
    """
    path = Path(source).expanduser()
    if path.suffix.lower() in FILE_FORMATS or path.exists():
        rows = _load_file(path)
    else:
        rows = _load_hub(str(source), split=split, name=name)
    if len(rows) == 0:
        raise DataError(f"load_rows: a dataset must have at least one row: {source} has none.")
    return rows


def to_messages(
    row: Row,
    *,
    number: int | None = None,
    prompt_column: str | None = None,
    completion_column: str | None = None,
    system_prompt: str | None = None,
) -> list[Message]:
    """The conversation of a row, for SFT. The table at the top of this file says which columns are read.

    Writes   ``system_prompt`` as the first message, if given and the row has none of its own
    Raises   DataError naming the row (``number``) for a missing column, a malformed message or no assistant turn

    >>> to_messages({"question": "2 + 2?", "answer": "4"})
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    where = _where(number)
    if prompt_column is None and completion_column is None and row.get("messages") is not None:
        messages = _checked(row["messages"], "messages", where)
    else:
        prompt_column = prompt_column or _pick(row, PROMPT_COLUMNS, "prompt", where, or_messages=True)
        completion_column = completion_column or _pick(row, ("completion", *REFERENCE_COLUMNS), "completion", where)
        prompt = _as_messages(row, prompt_column, "user", where)
        messages = prompt + _as_messages(row, completion_column, "assistant", where)
    messages = _with_images(messages, row, where)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"to_messages: a conversation to train on must have an assistant turn: {where} has only {roles}."
        )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tools := declared_tools(row.get("tools"), where):
        messages[0] = {**messages[0], "tools": tools}
    return messages


def to_prompt(
    row: Row, *, number: int | None = None, prompt_column: str | None = None, answer_column: str | None = None
) -> dict[str, Any]:
    """The start of an environment's conversation.

    Returns  a new dict: "query" is a string, or a list of messages if the row has one; "answer", if there is a
             reference, is a string; the other columns are kept under their names, for reward functions
    Raises   DataError naming the row (``number``) for a missing column, or a prompt without any message

    >>> to_prompt({"problem": "2 + 2?", "solution": 4, "level": "easy"})
    {'level': 'easy', 'query': '2 + 2?', 'answer': '4'}
    """
    where = _where(number)
    reference: Any = None  # a reference column has priority over the last turn of "messages"
    if prompt_column is None and row.get("messages") is not None:
        query, used = _checked(row["messages"], "messages", where), {"messages"}
        if query[-1]["role"] == "assistant":
            query, reference = query[:-1], query[-1]["content"]
        if not query:
            raise DataError(f"to_prompt: a prompt must have at least one message: {where} has only an assistant turn.")
    else:
        prompt_column = prompt_column or _pick(row, PROMPT_COLUMNS, "prompt", where, or_messages=True)
        # Columns that are used here are removed; the others stay for reward functions.
        query, used = _require(row, prompt_column, where), {prompt_column}
        query = query if isinstance(query, str) else _checked(query, prompt_column, where)
    if answer_column is not None:
        reference = _require(row, answer_column, where)
    else:
        answer_column = next((c for c in REFERENCE_COLUMNS if row.get(c) is not None and c not in used), None)
        reference = row[answer_column] if answer_column else reference
    if answer_column:
        used.add(answer_column)
    if any(row.get(column) for column in IMAGE_COLUMNS):
        query = _with_images([{"role": "user", "content": query}] if isinstance(query, str) else query, row, where)
        used |= set(IMAGE_COLUMNS)
    prompt = {column: value for column, value in row.items() if column not in used}
    prompt["query"] = query
    if reference is not None:
        prompt["answer"] = reference if isinstance(reference, str) else str(reference)
    return prompt


def to_pair(
    row: Row,
    *,
    number: int | None = None,
    prompt_column: str | None = None,
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    system_prompt: str | None = None,
) -> tuple[list[Message], list[Message]]:
    """The chosen and the rejected conversation of a row: the same messages, then two answers.

    Reads    the prompt, text or messages, and two answers, text or messages; or two whole conversations
    Raises   DataError naming the row (``number``) for a missing column, an empty answer, equal answers, or two
             conversations that differ before their answers

    >>> to_pair({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})[1]
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '5'}]
    """
    where = _where(number)
    pair = []
    for column in (chosen_column, rejected_column):
        messages = _as_messages(row, column, "assistant", where)
        if messages[0]["role"] == "assistant":
            prompt_column = prompt_column or _pick(row, PROMPT_COLUMNS, "prompt", where)
            messages = _as_messages(row, prompt_column, "user", where) + messages
        answer = messages[-1]
        if answer["role"] != "assistant" or not (answer["content"] or answer.get("tool_calls")):
            raise DataError(
                f"dataset: {column!r} must end with an answer of the assistant: {where} has {answer!r:.80}."
            )
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        pair.append(_with_images(messages, row, where))
    chosen, rejected = pair
    if chosen[:-1] != rejected[:-1]:
        raise DataError(f"dataset: the conversations of a pair must be the same up to the last answer: not in {where}.")
    if chosen == rejected:
        raise DataError(f"dataset: the answers of a pair must differ: in {where} both are {chosen[-1]!r:.80}.")
    return chosen, rejected


def _load_file(path: Path) -> list[Row]:
    if not path.is_file():
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"load_rows: a dataset file must exist: {path} (from {Path.cwd()}) does not."
            f"{did_you_mean(path.name, beside)}"
        )
    suffix = path.suffix.lower()
    try:
        if suffix != ".parquet" and (reason := why_not_text(path)):
            raise DataError(f"load_rows: {reason}")
        rows = _rows_of(path, suffix)
        for row in rows:
            _resolve_images(row, path.parent)
        return rows
    except UnicodeDecodeError as error:
        raise DataError(f"load_rows: {why_not_text(path, by_line=True) or f'{path}: {error}'}") from error
    except OSError as error:
        raise DataError(f"load_rows: {path} cannot be read: {error.strerror or error}.") from error


def _rows_of(path: Path, suffix: str) -> list[Row]:
    if suffix == ".jsonl":
        with path.open(encoding="utf-8-sig") as lines:
            return [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if suffix == ".json":
        rows = _parse(path.read_text(encoding="utf-8-sig"), str(path), kind=list)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise DataError(f"load_rows: every row must be an object: row {number} of {path} is {row!r:.60}.")
        return rows
    if suffix == ".parquet":
        from pyarrow import parquet  # lazy: importing it takes longer than reading a JSONL file

        try:
            return parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(
                f"load_rows: {path} cannot be read as Parquet: {error}; rename a file of another format "
                f"({', '.join(FILE_FORMATS)})."
            ) from error
    if suffix == ".csv":
        return _csv_rows(path)
    raise DataError(f"load_rows: a dataset file must end in one of {', '.join(FILE_FORMATS)}: got {path}.")


def _csv_rows(path: Path) -> list[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # global; its default is shorter than some conversations
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader, rows = csv.DictReader(lines, strict=True), []  # strict: an open quote at the end is an error
            for row in reader:
                rows.append(row)
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


def _where(number: int | None) -> str:
    return "the row" if number is None else f"row {number}"


def _require(row: Row, column: str, where: str) -> Any:
    value = row.get(column)
    if value is None:
        what, hint = ("is empty", "") if column in row else ("is missing", did_you_mean(column, row))
        raise DataError(f"dataset: the column {column!r} {what} in {where}: its columns are {', '.join(row)}.{hint}")
    return value


def _pick(row: Row, names: Iterable[str], what: str, where: str, *, or_messages: bool = False) -> str:
    for column in names:
        if row.get(column) is not None:
            return column
    expected = [*(["messages"] if or_messages else []), *names]
    hint = next((h for column in row if (h := did_you_mean(column, expected))), "")
    raise DataError(
        f"dataset: {where} must have a {what} column, one of {', '.join(expected)}: its columns are {', '.join(row)}."
        f"{hint} Otherwise name the column."
    )


def _resolve_images(row: dict[str, Any], folder: Path) -> None:
    def resolved(image: Any) -> Any:
        is_path = isinstance(image, str) and not image.startswith(("data:", "http://", "https://"))
        return str(folder / Path(image).expanduser()) if is_path else image

    for column in IMAGE_COLUMNS:
        if value := row.get(column):
            row[column] = [resolved(image) for image in value] if isinstance(value, list) else resolved(value)


def _with_images(messages: list[Message], row: Row, where: str) -> list[Message]:
    """The messages with the images of the row. Raises DataError naming row and column of one that cannot be read."""
    images = []
    for column in IMAGE_COLUMNS:
        value = row.get(column)
        for image in (value if isinstance(value, (list, tuple)) else [value]) if value else ():
            try:
                load_image(image, only_check=True)
            except DataError as error:
                raise DataError(f"dataset: column {column!r} of {where}: {error}") from error
            images.append({"type": "image", "image": image})
    if not images:
        return messages
    # Copies, because images are inserted in place and the row belongs to the caller.
    messages = [
        {**message, "content": list(message["content"])} if isinstance(message["content"], (list, tuple)) else message
        for message in messages
    ]
    places = [
        (message["content"], place)
        for message in messages
        if isinstance(message["content"], list)
        for place, part in enumerate(message["content"])
        if isinstance(part, Mapping) and part.get("type") == "image" and len(part) == 1
    ]
    if places and len(places) != len(images):
        raise DataError(
            f"dataset: {where} must have as many images as its messages have places for: got {len(images)} images for "
            f"{len(places)} parts {{'type': 'image'}}."
        )
    for (content, place), image in zip(places, images, strict=False):
        content[place] = image
    if not places:
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        said = messages[first]["content"]
        text = [{"type": "text", "text": said}] if isinstance(said, str) else said
        messages[first] = {**messages[first], "content": [*images, *text]}
    return messages


def _as_messages(row: Row, column: str, role: str, where: str) -> list[Message]:
    value = _require(row, column, where)
    if isinstance(value, (list, tuple)):
        return _checked(value, column, where)
    return [{"role": role, "content": value if isinstance(value, str) else str(value)}]


def _checked(messages: Any, column: str, where: str) -> list[Message]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(f"dataset: {column!r} must be a list of messages: {where} has {messages!r:.60}.")
    checked: list[Message] = []
    for position, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"dataset: a message must have 'role' and 'content': message {position} of {column!r} in {where} is "
                f"{message!r:.80}."
            )
        # Parquet gives every message the union of all fields; those that this one never had are None.
        kept = {key: value for key, value in message.items() if value is not None}
        # An empty list is left out: templates test whether there are calls, not how many.
        if kept.get("tool_calls"):
            kept["tool_calls"] = _without_nulls(kept["tool_calls"])
        else:
            kept.pop("tool_calls", None)
        if "content" not in kept:
            if "tool_calls" not in kept:
                raise DataError(
                    f"dataset: a message must have 'content': message {position} ({kept['role']}) of {column!r} in "
                    f"{where} has none."
                )
            kept["content"] = ""
        checked.append(kept)
    return checked


def declared_tools(tools: Any, where: str) -> list[Any]:
    """The schemas in the column ``tools`` of a row: a list, or JSON text. Raises DataError naming the row otherwise."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except JSONError as error:
            raise DataError(f"dataset: 'tools' must be a list of schemas or JSON text: {where}: {error}.") from error
    if tools and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError(f"dataset: 'tools' must be a list of schemas or JSON text: {where} has {tools!r:.80}.")
    return _without_nulls(list(tools or ()))


def _without_nulls(value: Any) -> Any:
    """Drops None values: Parquet gives the objects of a column the union of their fields, also in call arguments."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value
