"""Tools and short cuts that tests of tool conversations share."""

from __future__ import annotations

from tensordict import TensorDict

from llmrl.data.ragged.tensordicts import column
from llmrl.tools import Tool


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Diary(Tool):
    """Remembers what each conversation wrote, and which conversations ended."""

    name = "diary"
    description = "Writes a line and shows all lines so far."
    parameters = {"type": "object", "properties": {"line": {"type": "string"}}, "required": ["line"]}  # noqa: RUF012

    def __init__(self):
        self.lines: dict[int, list[str]] = {}
        self.ended: list[int] = []

    def call(self, arguments, *, conversation, deadline):
        lines = self.lines.setdefault(conversation[1], [])
        lines.append(arguments["line"])
        return ", ".join(lines)

    def end(self, conversation):
        self.ended.append(conversation[1])
        self.lines.pop(conversation[1], None)


def queries(*texts):
    return TensorDict(query=column(texts), batch_size=[len(texts)])


def told(td, row=0):
    """The messages that the environment added."""
    chat = td["next", "history"].prompt.to_chats()[row]
    last = max(number for number, message in enumerate(chat) if message["role"] == "assistant")
    return chat[last + 1 :]
