"""One row of a dataset while it is read: its columns, and which of them were used; see `llmrl.data.llm.rows`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmrl.data.llm.message_forms import FLAGS, is_trained
from llmrl.data.llm.row_images import IMAGE_COLUMNS, with_images
from llmrl.data.llm.row_messages import Message, check_calls, declared_tools, is_message, read_messages, says
from llmrl.errors import DataError, did_you_mean

Row = Mapping[str, Any]

CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", "question", "query", "problem", "instruction", "input")
REFERENCE_COLUMNS = ("answer", "reference", "solution", "ground_truth", "target", "response", "output")
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions")
_LABELS = ("label", "kto_tag")  # of KTO's rows: whether the answer is good
_UNREAD = {
    "input": "join it to the prompt, or name it with prompt_column",
    "history": "write it into the messages",
    "videos": "only text and images are read",
    "audios": "only text and images are read",
    "video": "only text and images are read",
    "audio": "only text and images are read",
}
_NOT_SAID = ("role", "content", "name", "id", "tools", *FLAGS)
_JSON = {"true": True, "false": False, "True": True, "False": False, "0": 0, "1": 1}  # flags in files of text


def place_of(row: Row, number: int | None = None) -> str:
    """The name of a row in messages: its file and line if `load_rows` read it, else its number."""
    return getattr(row, "place", None) or ("the row" if number is None else f"row {number}")


def has_value(value: Any) -> bool:
    """False for None, an empty text and an empty list."""
    return value is not None and not (isinstance(value, (str, list, tuple, Mapping)) and len(value) == 0)


class Reading:
    """A row that is being read, and which of its columns were used. Its methods raise DataError naming the row."""

    def __init__(self, row: Row, number: int | None) -> None:
        self.row, self.where = row, place_of(row, number)
        self.used: set[str] = set()
        self.prompt_columns: set[str] = set()
        self.is_list = False  # the prompt is a list of messages

    def take(self, column: str) -> Any:
        value = self.row.get(column)
        if value is None:
            what, hint = ("is empty", "") if column in self.row else ("is missing", did_you_mean(column, self.row))
            raise DataError(
                f"dataset: the column {column!r} {what} in {self.where}: its columns are {', '.join(self.row)}."
                f"{hint}{self._advice()}"
            )
        self.used.add(column)
        return value

    def pick(self, names: Iterable[str], what: str, others: Iterable[str] = ()) -> str:
        """The first of these columns that has a value."""
        for column in names:
            if self.row.get(column) is not None:
                return column
        expected = [*others, *names]
        advice = self._advice()
        hint = "" if advice else next((h for column in self.row if (h := did_you_mean(column, expected))), "")
        raise DataError(
            f"dataset: {self.where} must have a {what} column, one of {', '.join(expected)}: its columns are "
            f"{', '.join(self.row)}.{hint}{advice} {what}_column=NAME names another column."
        )

    def _advice(self) -> str:
        if all(has_value(self.row.get(name)) for name in ("chosen", "rejected")):
            return " Pairs are trained by llmrl dpo or llmrl reward."
        if any(isinstance(self.row.get(name), bool) for name in _LABELS):
            return " Rows of an answer with a label are trained by llmrl dpo with dpo.kind=kto."
        if has_value(self.row.get("text")):
            return " Raw text is not read: llmrl trains conversations."
        return ""

    def messages(self, column: str, role: str) -> list[Message]:
        return read_messages(self.take(column), column, role, self.where)

    def chat(self, prompt_column: str | None) -> list[Message] | None:
        """The messages of a column that holds a whole conversation; None if there is none."""
        if prompt_column is None:
            column = next((name for name in CHAT_COLUMNS if self.row.get(name) is not None), None)
        else:
            value = self.row.get(prompt_column)
            last = value[-1] if isinstance(value, (list, tuple)) and value else None
            ends = is_message(last) and last.get("role", last.get("from")) in ("assistant", "gpt", "function_call")
            column = prompt_column if ends else None
        if column is None:
            return None
        value = self.take(column)
        if not isinstance(value, (list, tuple)):
            raise DataError(f"dataset: {column!r} must be a list of messages: {self.where} has {value!r:.60}.")
        self.is_list = True
        self.prompt_columns.add(column)
        return read_messages(value, column, "user", self.where)

    def prompt(self, column: str) -> list[Message]:
        """The messages of the history and of a prompt column."""
        messages = self.messages(column, "user")
        self.prompt_columns.add(column)
        self.is_list = not isinstance(self.row[column], (str, int, float))
        if column == "instruction" and has_value(added := self.row.get("input")):
            self.used.add("input")
            if not isinstance(added, str) or self.is_list:
                raise DataError(f"dataset: 'instruction' and 'input' must be text: {self.where} has {added!r:.60}.")
            messages = [{"role": "user", "content": "\n".join(filter(None, [self.row[column], added]))}]
        return self._history() + messages

    def _history(self) -> list[Message]:
        history = self.row.get("history")
        if not has_value(history):
            return []
        self.used.add("history")
        turns: list[Message] = []
        for turn in history if isinstance(history, (list, tuple)) else [history]:
            if is_message(turn):
                turns += read_messages(turn, "history", "user", self.where)
            elif isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(said, str) for said in turn):
                turns += [
                    {"role": role, "content": said} for role, said in zip(("user", "assistant"), turn, strict=True)
                ]
            else:
                raise DataError(
                    f"dataset: 'history' must be pairs of a question and an answer, or messages: {self.where} has "
                    f"{turn!r:.60}."
                )
        return turns

    def finish(
        self, messages: list[Message], system_prompt: str | None, refuse: Iterable[str] = tuple(_UNREAD)
    ) -> list[Message]:
        """The messages with the system message, the images and the tools of the row.

        Raises  DataError for a column in ``refuse`` that has a value and was not used
        """
        system = system_prompt
        for column in SYSTEM_COLUMNS:
            value = self.row.get(column)
            if not has_value(value) or column in self.used & self.prompt_columns:
                continue
            if not isinstance(value, str):
                raise DataError(f"dataset: {column!r} must be text: {self.where} has {value!r:.60}.")
            if messages[0]["role"] == "system" and messages[0]["content"] != value:
                raise DataError(
                    f"dataset: a conversation must have one system message: {self.where} has one in its messages and "
                    f"another in {column!r}."
                )
            self.used.add(column)
            if messages[0]["role"] != "system":
                messages = [{"role": "system", "content": value}, *messages]
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        for column in refuse:
            if has_value(self.row.get(column)) and column not in self.used:
                raise DataError(
                    f"dataset: the column {column!r} would be left out of the conversation in {self.where}: "
                    f"{_UNREAD[column]}; or rename it."
                )
        messages = with_images(messages, self.row, self.where)
        self.used |= {column for column in IMAGE_COLUMNS if self.row.get(column)}
        for column in TOOL_COLUMNS:
            if tools := declared_tools(self.row.get(column), self.where):
                self.used.add(column)
                if column == "functions":  # as OpenAI's format had it before "tools"
                    tools = [{"type": "function", "function": function} for function in tools]
                messages = [{**messages[0], "tools": tools}, *messages[1:]]
        return messages

    def flag(self) -> bool:
        """False if a flag of the row leaves it out of the loss."""
        flags = {name: self.row[name] for name in FLAGS if has_value(self.row.get(name))}
        flags = {name: _JSON.get(value, value) if isinstance(value, str) else value for name, value in flags.items()}
        self.used |= flags.keys()
        try:
            trained = is_trained(flags)
        except ValueError as error:
            raise DataError(
                f"dataset: a row is trained or left out: {self.where}: {error}; rename the column if it "
                "means something else."
            ) from error
        return trained

    def refuse_bad_answer(self) -> None:
        """Raises DataError for a row whose label says that its answer is not to be imitated."""
        for name in _LABELS:
            value = self.row.get(name)
            value = _JSON.get(value.lower(), value) if isinstance(value, str) else value
            if isinstance(value, (bool, int)) and value in (0, 1) and name not in self.used:
                self.used.add(name)
                if not value:
                    raise DataError(
                        f"dataset: an answer to train on must be a good one: {self.where} has {name} = "
                        f"{self.row[name]!r}, as KTO's rows have; keep the rows with a true one, train with llmrl dpo "
                        "and dpo.kind=kto, or rename the column if it means something else."
                    )

    def label(self, column: str | None) -> bool:
        """Whether the answer is desirable. Raises DataError for a label that is missing, or neither true nor false"""
        column = column or next((name for name in _LABELS if self.row.get(name) is not None), _LABELS[0])
        value = self.take(column)
        value = _JSON.get(value.lower(), value) if isinstance(value, str) else value
        if not (isinstance(value, (bool, int)) and value in (0, 1)):
            raise DataError(f"dataset: {column!r} must be true or false: {self.where} has {value!r:.40}.")
        return bool(value)

    def trained_turns(self, messages: list[Message]) -> bool:
        """True if a turn of the assistant is trained. Raises DataError for a trained one without content, or with a
        call whose arguments are not a JSON object.
        """
        trained = False
        for number, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                continue
            try:
                if counts := is_trained(message):
                    check_calls(message)
            except ValueError as error:
                raise DataError(f"dataset: {self.where}, message {number}: {error}.") from error
            said = any(has_value(value) for key, value in message.items() if key not in _NOT_SAID)
            content = message["content"]
            if counts and not said and not (content.strip() if isinstance(content, str) else says(content)):
                raise DataError(
                    f"dataset: an answer to train on must not be empty: the model would learn to stop at once: "
                    f"{self.where}, message {number}, is; leave it out, or set its weight to 0."
                )
            trained |= counts
        return trained

    def unused(self) -> tuple[str, ...]:
        return tuple(name for name, value in self.row.items() if name not in self.used and has_value(value))
