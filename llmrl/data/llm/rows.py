"""Reads a row of a dataset: as a conversation to train on, as the prompt of an environment, or as a pair of answers.

One reading serves all three. The columns decide, row by row:

| columns | as a conversation | as a prompt |
|---|---|---|
| ``messages``, ``conversations`` | the messages | those before the last assistant turn, which is the reference |
| a prompt and an answer column | user asks, assistant answers | prompt, reference |

A prompt column is ``prompt``, ``question``, ``query``, ``problem``, ``instruction`` or ``input``; an answer column is
``completion`` (for a prompt, last), ``answer``, ``reference``, ``solution``, ``ground_truth``, ``target``, ``response``
or ``output``. Other names are given as arguments. A pair has ``chosen`` and ``rejected``: two answers to a prompt, or
two conversations. Values are read by `llmrl.data.llm.row_messages`. All three also read:

| column | use |
|---|---|
| ``input`` beside ``instruction`` (Alpaca) | joined with it by a line break |
| ``history``, pairs of texts or messages | the turns before the prompt |
| ``system``, ``system_prompt`` | the system message |
| ``tools``, ``functions``, a list of schemas or JSON text | "tools" of the first message, where rendering reads them |
| ``image``, ``images`` | images, see `llmrl.data.llm.row_images` |
| ``weight``, ``train`` and the like, 0 or 1 (not in prompts) | 0: the row is not trained |

Other columns stay in prompts, for rewards; for the others they are listed as unused. A row is named in errors by its
file and line, or else by its number, counted from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrl.data.llm.message_forms import FLAGS, is_trained
from llmrl.data.llm.row_images import IMAGE_COLUMNS
from llmrl.data.llm.row_messages import Message, says
from llmrl.data.llm.row_reading import (
    CHAT_COLUMNS,
    PROMPT_COLUMNS,
    REFERENCE_COLUMNS,
    TOOL_COLUMNS,
    Reading,
    has_value,
)
from llmrl.errors import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ReadRow:
    """The conversations of a row: one, or the chosen and the rejected one."""

    chats: tuple[list[Message], ...]
    unused: tuple[str, ...]  # columns with a value that no conversation has
    is_trained: bool  # False: a flag of the row, or of all its answers, leaves it out of the loss


def to_messages(
    row: Row,
    *,
    number: int | None = None,
    prompt_column: str | None = None,
    completion_column: str | None = None,
    system_prompt: str | None = None,
) -> list[Message]:
    """The conversation of a row, for SFT. The tables at the top of this file say which columns are read.

    Writes   ``system_prompt`` as the first message, if given and the row has none of its own
    Raises   DataError naming the row for a missing column, a malformed message, no assistant turn, an empty one, or a
             column that belongs to the conversation but is not read

    >>> to_messages({"question": "2 + 2?", "answer": "4"})
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    return read_conversation(
        row,
        number=number,
        prompt_column=prompt_column,
        completion_column=completion_column,
        system_prompt=system_prompt,
    ).chats[0]


def read_conversation(
    row: Row,
    *,
    number: int | None = None,
    prompt_column: str | None = None,
    completion_column: str | None = None,
    system_prompt: str | None = None,
) -> ReadRow:
    """`to_messages`, with the columns that it leaves out, and whether the row is trained."""
    return _read_conversation(Reading(row, number), prompt_column, completion_column, system_prompt)


def read_answers(
    row: Row,
    *,
    number: int | None = None,
    prompt_column: str | None = None,
    completion_column: str | None = None,
    label_column: str | None = None,
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    system_prompt: str | None = None,
) -> tuple[ReadRow, tuple[bool, ...]]:
    """The conversations of a row whose last answers are desirable (True) or not, as KTO trains them: both of a pair, or
    one with its label.

    Reads    a pair like `to_pair`; or the conversation like `to_messages` and its label, true or false: ``label``,
             ``kto_tag`` or ``label_column``
    Raises   DataError like these, for a label that is missing or neither, or a conversation that does not end with an
             answer

    >>> read_answers({"prompt": "2 + 2?", "completion": "5", "label": False})[1]
    (False,)
    """
    if all(has_value(row.get(column)) for column in (chosen_column, rejected_column)):
        columns = {"prompt_column": prompt_column, "chosen_column": chosen_column, "rejected_column": rejected_column}
        return read_pair(row, number=number, **columns, system_prompt=system_prompt), (True, False)
    reading = Reading(row, number)
    label = reading.label(label_column)
    read = _read_conversation(reading, prompt_column, completion_column, system_prompt)
    if read.chats[0][-1]["role"] != "assistant":
        raise DataError(f"dataset: a conversation with a label must end with an answer: {reading.where} does not.")
    return read, (label,)


def _read_conversation(
    reading: Reading, prompt_column: str | None, completion_column: str | None, system_prompt: str | None
) -> ReadRow:
    messages = reading.chat(prompt_column) if completion_column is None else None
    if messages is None:
        prompt_column = prompt_column or reading.pick(PROMPT_COLUMNS, "prompt", CHAT_COLUMNS)
        messages = reading.prompt(prompt_column)
        answers = [column for column in ("completion", *REFERENCE_COLUMNS) if column != prompt_column]
        completion_column = completion_column or reading.pick(answers, "completion")
        messages += reading.messages(completion_column, "assistant")
    messages = reading.finish(messages, system_prompt)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"dataset: a conversation to train on must have an assistant turn: {reading.where} has only {roles}."
        )
    reading.refuse_bad_answer()
    trained = reading.flag() and reading.trained_turns(messages)
    return ReadRow((messages,), reading.unused(), trained)


def to_prompt(
    row: Row, *, number: int | None = None, prompt_column: str | None = None, answer_column: str | None = None
) -> dict[str, Any]:
    """The start of an environment's conversation.

    Returns  a new dict: "query" is a string, or a list of messages if the row has one, a system message, a history or
             images; "answer", if there is a reference, is it (numbers as text); all other columns, and those of the
             prompt and the reference, under their names, for reward functions
    Raises   DataError naming the row for a missing column, a prompt without any message, or a second column ``query``

    >>> to_prompt({"problem": "2 + 2?", "solution": 4, "level": "easy"})
    {'problem': '2 + 2?', 'solution': 4, 'level': 'easy', 'query': '2 + 2?', 'answer': '4'}
    """
    return read_prompt(row, number=number, prompt_column=prompt_column, answer_column=answer_column)[0]


def read_prompt(
    row: Row, *, number: int | None = None, prompt_column: str | None = None, answer_column: str | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`to_prompt`, and the columns that are neither in the prompt nor the reference."""
    reading = Reading(row, number)
    reference: Any = None  # a reference column has priority over the last turn of the messages
    messages = reading.chat(prompt_column)
    if messages is not None:
        if messages[-1]["role"] == "assistant":
            messages, reference = messages[:-1], messages[-1]["content"]
        if not messages:
            raise DataError(f"to_prompt: a prompt must have a message: {reading.where} has only an assistant turn.")
    else:
        messages = reading.prompt(prompt_column or reading.pick(PROMPT_COLUMNS, "prompt", CHAT_COLUMNS))
    [column] = reading.prompt_columns
    if has_value(row.get("query")) and row["query"] != row[column]:
        remedy = "rename 'query', which is the name of the prompt in an environment"
        if prompt_column is None and column not in CHAT_COLUMNS:
            remedy = "name 'query' as prompt_column, or rename it"
        raise DataError(
            f"to_prompt: {reading.where} must have one prompt: its columns {column!r} and 'query' both are; {remedy}."
        )
    messages = reading.finish(messages, None, refuse=("history",))
    if answer_column is not None:
        reference = reading.take(answer_column)
    else:
        known = [name for name in (*REFERENCE_COLUMNS, "completion") if name not in reading.prompt_columns]
        answer_column = next((name for name in known if row.get(name) is not None), None)
        reference = reading.take(answer_column) if answer_column else reference
    # The environment has entries of its own called "history" and "query".
    hidden = {*CHAT_COLUMNS, "completion", "functions"} & reading.used | {*IMAGE_COLUMNS, "history", "query"}
    hidden |= {name for name in reading.prompt_columns if not isinstance(row[name], str)}
    prompt = {column: value for column, value in row.items() if column not in hidden}
    messages = [{key: value for key, value in message.items() if key not in FLAGS} for message in messages]
    if reading.used & {*TOOL_COLUMNS}:  # the environment declares those of the column
        prompt["tools"] = messages[0].pop("tools")
    as_text = not reading.is_list and len(messages) == 1 and isinstance(messages[0]["content"], str)
    prompt["query"] = messages[0]["content"] if as_text else messages
    if reference is not None:
        is_number = isinstance(reference, (int, float)) and not isinstance(reference, bool)
        prompt["answer"] = str(reference) if is_number else reference
    return prompt, reading.unused()


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
    Raises   DataError naming the row for a missing column, an empty answer, equal answers, two conversations that
             differ before their answers, or a column that belongs to the prompt but is not read

    >>> to_pair({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})[1]
    [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '5'}]
    """
    columns = {"prompt_column": prompt_column, "chosen_column": chosen_column, "rejected_column": rejected_column}
    chosen, rejected = read_pair(row, number=number, **columns, system_prompt=system_prompt).chats
    return chosen, rejected


def read_pair(
    row: Row,
    *,
    number: int | None = None,
    prompt_column: str | None = None,
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    system_prompt: str | None = None,
) -> ReadRow:
    """`to_pair`, with the columns that it leaves out, and whether the row is trained."""
    reading = Reading(row, number)
    pair = []
    for column in (chosen_column, rejected_column):
        messages = reading.messages(column, "assistant")
        if messages[0]["role"] == "assistant":
            known = (*PROMPT_COLUMNS, *CHAT_COLUMNS)
            messages = reading.prompt(prompt_column or reading.pick(known, "prompt")) + messages
        else:  # whole conversations: a prompt column repeats what they hold
            held = [message["content"] for message in messages]
            reading.used |= {name for name in (prompt_column, *PROMPT_COLUMNS) if name and row.get(name) in held}
        answer = messages[-1]
        if answer["role"] != "assistant" or not (says(answer["content"]) or answer.get("tool_calls")):
            raise DataError(
                f"dataset: {column!r} must end with an answer of the assistant: {reading.where} has {answer!r:.80}."
            )
        if not is_trained(answer):
            raise DataError(f"dataset: the answers of a pair are trained: {reading.where} has a flag against it.")
        pair.append(reading.finish(messages, system_prompt))
    chosen, rejected = pair
    if chosen[:-1] != rejected[:-1]:
        raise DataError(
            f"dataset: the conversations of a pair must be the same up to the last answer: not in {reading.where}."
        )
    if chosen == rejected:
        raise DataError(f"dataset: the answers of a pair must differ: in {reading.where} both are {chosen[-1]!r:.80}.")
    trained = reading.flag()
    return ReadRow((chosen, rejected), reading.unused(), trained)
