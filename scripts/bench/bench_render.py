"""Times rendering against the tokenizer's own method, and a turn's extension early and late in a conversation.

    python scripts/bench/bench_render.py [--batch 256] [--repeats 7]

Each figure is the best of the repeats; the ratios are what to compare between machines. The yardstick is one batched
call of ``tokenizer.apply_chat_template`` on the same conversations, ids only: no masks, no spans, no escapes.
"""

from __future__ import annotations

import argparse
import random

import torch
from table import Row, add_json_option, print_table, write_rows
from timing import best

from llmrl.data.llm import History
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "12", "34", "+", "=", "then", "é", "done")


def conversations(num: int, turns: int, words: int, seed: int = 0) -> list[list[dict[str, str]]]:
    generator = random.Random(seed)
    return [
        [
            {"role": ("user", "assistant")[turn % 2], "content": " ".join(generator.choices(WORDS, k=words))}
            for turn in range(turns)
        ]
        for _ in range(num)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256, help="conversations per batch")
    parser.add_argument("--repeats", type=int, default=7)
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    tokenizer = tiny_tokenizer()
    unmarked = tokenizer.chat_template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    chats = conversations(arguments.batch, turns=6, words=40)
    for name, template in (("with generation blocks", None), ("without them", unmarked)):
        renderer = Renderer(tokenizer, chat_template=template)
        renderer.render(chats)
        elapsed, yardstick = best(
            lambda renderer=renderer: renderer.render(chats),
            lambda: tokenizer.apply_chat_template(chats, tokenize=True),
            repeats=arguments.repeats,
        )
        print(f"{arguments.batch} x 6 turns: Renderer {elapsed:.1f} ms, apply_chat_template {yardstick:.1f} ms")
        what = f"render + tokenise + mask, {arguments.batch} x 6 turns, {name}: llmrl / one call"
        rows.append(Row(what, elapsed / yardstick, 1.5))

    renderer = Renderer(tokenizer)
    for turns in (2, 40):
        chats = [[*chat, {"role": "user", "content": "And now?"}] for chat in conversations(64, turns, words=40)]
        streams = [torch.tensor(renderer.end_of_turn_ids)] * 64
        renderer.extend(streams, chats, [1] * 64)
        (elapsed,) = best(
            lambda chats=chats, streams=streams: renderer.extend(streams, chats, [1] * 64), repeats=arguments.repeats
        )
        print(f"extend, 64 conversations of {turns} messages: {elapsed:.2f} ms")

    chats = conversations(64, turns=3, words=40)

    def histories() -> None:
        for chat in chats:
            history = History.from_messages(chat)
            history.append(History(role="assistant", content="ok"))
            history.to_chats()

    print(f"History, 64 x (create + append + to_chats): {best(histories, repeats=arguments.repeats)[0]:.2f} ms")
    print_table(rows)
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
