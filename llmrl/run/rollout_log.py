"""The rollouts of a run, one Parquet file per step in ``<run>/rollouts``; ``llmrl show`` and the report read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from llmrl.errors import DataError
from llmrl.notebook_html import conversation_html, message_html, token_html
from llmrl.run.files import open_file, replacing, writing

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

__all__ = [
    "ModelCallRecord",
    "Rollout",
    "RolloutLog",
    "Rollouts",
    "TokenRecord",
    "ToolCallRecord",
    "read_rollouts",
    "read_tokens",
    "rollout_files",
]

_TOKEN = "token_"  # prefix of the token columns
_SHOWN, _SHOWN_TOKENS = 20, 2000  # in a notebook: rollouts, and tokens of each


@dataclass(frozen=True)
class TokenRecord:
    """The tokens of a conversation; each list has one entry per token, None where there is no value.

    If a conversation was split into several training records, these are the tokens of the last one.
    """

    ids: Sequence[int]
    texts: Sequence[str]  # each token decoded alone; bytes of an incomplete character as <0xE2>
    roles: Sequence[str]  # of the message; "system+user" if the prompt's messages were rendered together
    turns: Sequence[int]  # of the policy, from 0; environment messages belong to the turn that follows them
    control: Sequence[bool]  # a special token of the tokenizer
    trained: Sequence[bool]
    engine_logp: Sequence[float | None]  # None: not sampled
    trainer_logp: Sequence[float | None] = ()  # in its update, or recomputed before the first; empty if for no token
    advantage: Sequence[float | None] = ()
    ratio: Sequence[float | None] = ()  # as used in the surrogate
    entropy: Sequence[float | None] = ()  # if the loss computes it


@dataclass(frozen=True)
class ToolCallRecord:
    """A tool call and its result."""

    turn: int  # of the policy, from 0
    name: str
    arguments: str  # JSON; the model's own text if it could not be parsed
    result: str  # the message to the model
    outcome: str  # ok, error, timeout, malformed, unknown, not_run
    seconds: float | None = None


@dataclass(frozen=True)
class ModelCallRecord:
    """A call of the model by an agent."""

    parent: int  # the place of the call whose ids it continues; -1: it begins a path
    row: int  # of the rollout's rows, from 0, the one that trains its answer; -1: none
    why: str  # it is in no row; "" if it is in one
    question: str  # the last message of the request, and the answer; the beginning of long ones
    answer: str
    prompt_tokens: int
    tokens: int  # sampled
    stop_reason: str

    def in_words(self, place: int) -> str:
        """One line about the call at this place.

        >>> ModelCallRecord(0, -1, "of another conversation", "2+2?", "4", 9, 2, "eos").in_words(1)
        'call 2 after 1 · 2 tokens · no row: of another conversation'
        """
        after = f" after {self.parent + 1}" if self.parent >= 0 else ""
        return f"call {place + 1}{after} · {self.tokens} tokens · " + (
            f"row {self.row + 1}" if self.row >= 0 else f"no row: {self.why}"
        )


@dataclass(frozen=True)
class Rollout:
    """One sampled conversation. A reward of None means that scoring failed; NaN is stored as None."""

    prompt: str
    completion: str
    reward: float | None
    advantage: float | None
    stop_reason: str  # of the last turn: eos, stop_string, length, tool, abort
    version: int  # of the weights that sampled it
    tokens: int  # sampled
    group: int = 0
    step: int = 0  # filled in by the log
    prompt_id: str = ""  # equal for equal first prompts, at any step
    rewards: dict[str, float | None] = field(default_factory=dict)  # of each reward function
    columns: dict[str, Any] = field(default_factory=dict)  # of its row of the data, such as "answer"; values as in JSON
    tool_calls: Sequence[ToolCallRecord] = ()
    model_calls: Sequence[ModelCallRecord] = ()  # of an agent, in the order of its requests
    token_record: TokenRecord | None = None  # only of some conversations of a step; absent in files of older versions

    @property
    def untrained(self) -> str:
        """Why none of its rows was trained, in words; "" if they were."""
        if self.reward is None:
            return "not trained: it failed"
        return "not trained: its group gave no advantage" if self.advantage is None else ""

    def _repr_html_(self) -> str:
        """The conversation for a notebook; trained tokens are blue, other sampled ones orange."""
        reward, advantage = ("none" if n is None else f"{n:.4g}" for n in (self.reward, self.advantage))
        facts = f"step {self.step} · reward {reward} · advantage {advantage} · {self.tokens} tokens"
        messages = [message_html("prompt", self.prompt), message_html("answer", self.completion)]
        if self.token_record is not None:
            messages = _record_html(self.token_record)
        calls = [
            message_html(f"{call.name}, turn {call.turn + 1}, {call.outcome}", f"{call.arguments}\n{call.result}")
            for call in self.tool_calls
        ]
        return conversation_html(f"{facts} · {self.stop_reason}", [*messages, *calls])


# Arrow types of the columns, from the annotations of the records. A token column holds a list with one entry per token,
# or null for a conversation without tokens.
_TYPES = {"int": "int64", "str": "string", "float | None": "float64"}
_COLUMNS = {part.name: _TYPES[part.type] for part in fields(Rollout) if part.type in _TYPES}
_COLUMNS |= {"columns": "string"}  # a JSON object
_COLUMNS |= {"rewards": {"name": "string", "value": "float64"}}
_COLUMNS |= {"tool_calls": {part.name: _TYPES[part.type] for part in fields(ToolCallRecord)}}
_COLUMNS |= {"model_calls": {part.name: _TYPES[part.type] for part in fields(ModelCallRecord)}}
_OF_TOKENS = {"int": "int64", "str": "string", "bool": "bool_", "float | None": "float32"}
_TOKEN_COLUMNS = {part.name: _OF_TOKENS[part.type[len("Sequence[") : -1]] for part in fields(TokenRecord)}


class Rollouts(list[Rollout]):
    """A list of rollouts; a notebook shows the first twenty as conversations, of a part of the list too."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Rollouts: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Rollout | Rollouts:
        found = super().__getitem__(index)
        return Rollouts(found) if isinstance(found, list) else found

    def _repr_html_(self) -> str:
        shown = "".join(rollout._repr_html_() for rollout in self[:_SHOWN])
        return shown + (f"<p>{len(self) - _SHOWN} more rollouts</p>" if len(self) > _SHOWN else "")


class RolloutLog:
    """Writes a step's conversations to ``<run>/rollouts/stepNNNNNN.parquet``, atomically.

    ``resume_step``  files of later steps are removed; those steps are run again
    ``enabled``      False on every rank but the first: nothing is written
    """

    def __init__(self, run_dir: Path | str, *, enabled: bool = True, resume_step: int | None = None):
        self.folder = Path(run_dir) / "rollouts"
        self.enabled = enabled
        if enabled and resume_step is not None:
            for step, path in rollout_files(run_dir).items():
                if step > resume_step:
                    with writing(path):
                        path.unlink()

    def write(self, step: int, rollouts: Iterable[Rollout]) -> Path | None:
        """Writes the file of a step and returns its path, or None if the log is disabled.

        Raises  RunFolderError if it cannot be written
        """
        if not self.enabled:
            return None
        import pyarrow  # takes a third of a second, which would slow down `llmrl --help`
        from pyarrow import parquet

        rows = list(rollouts)
        columns = {name: [_plain(getattr(row, name)) for row in rows] for name in _COLUMNS}
        columns["step"] = [step] * len(rows)
        columns["columns"] = [json.dumps(row.columns) for row in rows]
        columns["rewards"] = [[{"name": n, "value": _plain(v)} for n, v in row.rewards.items()] for row in rows]
        for kind in ("tool_calls", "model_calls"):
            columns[kind] = [
                [{name: _plain(getattr(call, name)) for name in _COLUMNS[kind]} for call in getattr(row, kind)]
                for row in rows
            ]
        for name in _TOKEN_COLUMNS:
            columns[_TOKEN + name] = [
                record if record is None else [_plain(value) for value in getattr(record, name)]
                for record in (row.token_record for row in rows)
            ]
        kinds = _COLUMNS | {_TOKEN + name: [kind] for name, kind in _TOKEN_COLUMNS.items()}
        schema = pyarrow.schema([(name, _arrow_type(kind)) for name, kind in kinds.items()])
        path = self.folder / _file_name(step)
        with writing(path):
            self.folder.mkdir(exist_ok=True)
        with replacing(path) as file:  # readers look for step*.parquet, so they never see an incomplete file
            parquet.write_table(pyarrow.table(columns, schema=schema), file)
        return path


def read_rollouts(run_dir: Path | str, step: int | None = None, *, tokens: bool = True) -> Rollouts:
    """The conversations of one step (default: the last one written), with their tokens if ``tokens``.

    Raises  DataError that lists the existing steps, or names a file that does not hold rollouts
    """
    files = rollout_files(run_dir)
    if not files or (step is not None and step not in files):
        there = f"steps {min(files)} to {max(files)} ({len(files)} files)" if files else "none"
        raise DataError(f"{Path(run_dir) / 'rollouts'}: must hold the requested step: got {step}, there: {there}.")
    path = files[max(files) if step is None else step]
    with _opened(path) as file:
        names = [name for name in file.schema_arrow.names if name in _COLUMNS or (tokens and name.startswith(_TOKEN))]
        return Rollouts(_rollout(row) for row in _typed(file, names).to_pylist())


def read_tokens(run_dir: Path | str, step: int) -> dict[int, TokenRecord]:
    """The tokens of one step's conversations by row number in its file; rows without tokens are left out.

    Raises  DataError if the file does not hold rollouts
    """
    with _opened(Path(run_dir) / "rollouts" / _file_name(step)) as file:
        names = [name for name in file.schema_arrow.names if name.startswith(_TOKEN)]
        if not names:
            return {}
        rows = _typed(file, names)
        # Filtered in Arrow, before the conversion to Python objects: most rows of a step have no tokens.
        kept = rows[f"{_TOKEN}ids"].is_valid()
        places = [place for place, has_tokens in enumerate(kept.to_pylist()) if has_tokens]
        records = (_token_record(row) for row in rows.filter(kept).to_pylist())
        return {place: record for place, record in zip(places, records, strict=True) if record is not None}


@contextmanager
def _opened(path: Path) -> Iterator[ParquetFile]:
    """Opens the file of a step; `parquet.read_table` would also load pandas."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with open_file(path) as opened, ParquetFile(opened) as file:
            yield file
    except (ArrowException, OSError, TypeError, ValueError, LookupError, RecursionError) as error:
        raise DataError(f"{path}: must be a Parquet file of rollouts: {error}.") from error


def rollout_files(run_dir: Path | str) -> dict[int, Path]:
    """The files of a run's rollouts by their step, ascending."""
    paths = sorted((Path(run_dir) / "rollouts").glob("step*.parquet"))
    found = {re.fullmatch(r"step(\d+)\.parquet", path.name): path for path in paths}
    return dict(sorted((int(match[1]), path) for match, path in found.items() if match))


def _typed(file: ParquetFile, names: Sequence[str]) -> Table:
    """The columns by ``names``, in the types of the log. Raises ArrowException for a column that has another."""
    table = file.read(names)
    kinds = _COLUMNS | {_TOKEN + name: [kind] for name, kind in _TOKEN_COLUMNS.items()}
    for place, name in enumerate(names):
        if name in kinds and not isinstance(kinds[name], dict):
            table = table.set_column(place, name, table[name].cast(_arrow_type(kinds[name])))
    return table


def _rollout(row: dict[str, Any]) -> Rollout:
    """A rollout from a row of a file; columns that older versions did not write may be missing."""
    row["token_record"] = _token_record({name: row.pop(name) for name in list(row) if name.startswith(_TOKEN)})
    if "columns" in row:
        row["columns"] = dict(json.loads(row["columns"]))
    if "rewards" in row:
        row["rewards"] = {str(entry["name"]): entry["value"] for entry in row["rewards"]}
        row["tool_calls"] = tuple(_without_nulls(ToolCallRecord(**call)) for call in row["tool_calls"])
    if "model_calls" in row:
        row["model_calls"] = tuple(_without_nulls(ModelCallRecord(**call)) for call in row["model_calls"])
    return _without_nulls(Rollout(**row))


def _token_record(values: dict[str, Any]) -> TokenRecord | None:
    if values.get(f"{_TOKEN}ids") is None:
        return None
    record = TokenRecord(**{part.name: values[_TOKEN + part.name] for part in fields(TokenRecord)})
    for part in fields(record):
        column = getattr(record, part.name)
        if len(column) != len(record.ids) and not (len(column) == 0 and part.default == ()):
            raise ValueError(f"{part.name} must have a value per token: got {len(column)} for {len(record.ids)}")
        if "None" not in part.type and None in column:
            raise TypeError(f"{part.name} must not have nulls")
    return record


def _without_nulls(record: Any) -> Any:
    """The record. Raises TypeError for a null in a field that must have a value."""
    for part in fields(record):
        if "None" not in part.type and getattr(record, part.name) is None:
            raise TypeError(f"{part.name} must not be null")
    return record


def _record_html(record: TokenRecord) -> list[str]:
    """The messages of a conversation, token by token; the middle of a long conversation is left out."""
    length = len(record.ids)
    places = [place for place in range(length) if min(place, length - 1 - place) < _SHOWN_TOKENS // 2]
    messages = []
    for (role, turn), of_message in groupby(places, key=lambda place: (record.roles[place], record.turns[place])):
        tokens = [_token_html(record, place) for place in of_message]
        messages.append(message_html(role, tokens=tokens, note=f"· turn {turn + 1}"))
    left_out = length - len(places)
    return [*messages, message_html(f"{left_out} tokens of the middle are left out")] if left_out else messages


def _token_html(record: TokenRecord, place: int) -> str:
    numbers = [("id", record.ids[place])]
    for name in ("engine_logp", "trainer_logp", "advantage", "ratio", "entropy"):
        values = getattr(record, name)
        if values and values[place] is not None:
            numbers.append((name, f"{values[place]:.4g}"))
    return token_html(
        record.texts[place],
        numbers,
        trained=record.trained[place],
        sampled=record.engine_logp[place] is not None,
        control=record.control[place],
    )


def _file_name(step: int) -> str:
    return f"step{step:06d}.parquet"


def _plain(value: Any) -> Any:
    """The value in a form that the file can store: NaN as None, a lone surrogate as its escape sequence."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return None if isinstance(value, float) and math.isnan(value) else value


def _arrow_type(kind: Any) -> Any:
    import pyarrow

    if isinstance(kind, str):
        return getattr(pyarrow, kind)()
    if isinstance(kind, list):
        return pyarrow.list_(_arrow_type(kind[0]))
    return pyarrow.list_(pyarrow.struct([(name, _arrow_type(inner)) for name, inner in kind.items()]))
