"""Times `History` against the same work on plain lists of dicts, and text against bare regular expressions.

    python scripts/bench/bench_history.py [--repeats 15] [--json FILE]

Each figure is the fastest of the repeats of two functions that run in turn; only ratios are comparable between
machines. The baselines: a copy of every message (``from_chats``), a list comprehension over every message (reading),
one ``findall`` per text (``from_text``). Rendering is in ``bench_render.py``.
"""

from __future__ import annotations

import re
from functools import partial

from inputs import chats_of_words
from table import Row, benchmark
from timing import best

from llmrl.data.llm import History
from llmrl.data.llm.templates import template_names

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
SIZES = ((64, 3), (512, 10))


def ratio(ours: object, yardstick: object, repeats: int) -> float:
    elapsed, reference = best(ours, yardstick, repeats=repeats)
    return elapsed / reference


def lists_of_dicts(repeats: int) -> list[Row]:
    rows = []
    for num, turns in SIZES:
        chats = chats_of_words(num, turns)
        history = History.from_chats(chats)
        built = ratio(
            lambda chats=chats: History.from_chats(chats),
            lambda chats=chats: [[dict(message) for message in chat] for chat in chats],
            repeats,
        )
        read = ratio(
            lambda history=history: history.content,
            lambda chats=chats: [[message["content"] for message in chat] for chat in chats],
            repeats,
        )
        rows += [
            Row(f"from_chats, {num} x {turns}, against a copy of the dicts", built, 10),
            Row(f"content of {num} x {turns}, against a list comprehension", read, 10),
        ]
    return rows


def appends(repeats: int) -> list[Row]:
    """Times appends to conversations that grow from 1 to 50 turns; the fastest append of each turn counts."""
    answer = History(role=["assistant"] * 64, content=["It is 42."] * 64)
    fastest = [float("inf")] * 50
    for _ in range(repeats):
        history = History.from_chats(chats_of_words(64, 1, words=4))
        for turn in range(50):
            [elapsed] = best(lambda history=history: history.append(answer), repeats=1)
            fastest[turn] = min(fastest[turn], elapsed)
    first, last = sorted(fastest[:5])[2], sorted(fastest[45:])[2]
    return [
        Row("append, 64 conversations, slowest turn of 50", max(fastest), 0.3, "ms"),
        Row("append, turn 50 against turn 1", last / first, 1.5),
    ]


def parsing(repeats: int) -> list[Row]:
    """Times `from_text`. The baseline always parses ChatML: all formats contain the same conversations."""
    rows, slowest = [], ("", 0.0)
    for num, turns in SIZES:
        chats = chats_of_words(num, turns + turns % 2)
        texts = written("chatml_format", chats)
        for name in template_names():
            parsed = ratio(
                partial(History.from_text, written(name, chats), chat_template_name=name),
                lambda texts=texts: [TURN.findall(text) for text in texts],
                repeats if name == "chatml_format" else max(3, repeats // 3),
            )
            if name == "chatml_format":
                rows.append(Row(f"from_text, {num} x {turns}, ChatML, against one regular expression", parsed, 5))
            slowest = max(slowest, (name, parsed), key=lambda pair: pair[1])
    return [*rows, Row(f"from_text, the slowest format ({slowest[0]}), against the same", slowest[1], 5)]


def written(name: str, chats: list[list[dict[str, str]]]) -> list[str]:
    history = History.from_chats(chats)
    return history.apply_chat_template(chat_template_name=name, add_generation_prompt=False)


def main(repeats: int) -> list[Row]:
    return [row for part in (lists_of_dicts, appends, parsing) for row in part(repeats)]


if __name__ == "__main__":
    benchmark(main, __doc__, repeats=15)
