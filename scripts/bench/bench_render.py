"""Times rendering against the tokenizer's own method, and a turn's extension early and late in a conversation.

    python scripts/bench/bench_render.py [--batch 256] [--repeats 7]

Each figure is the best of the repeats; the ratios are what to compare between machines. The yardstick is one batched
call of ``tokenizer.apply_chat_template`` on the same conversations, ids only: no masks, no spans, no escapes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch

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


def best(function: Callable[[], object], repeats: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256, help="conversations per batch")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    tokenizer = tiny_tokenizer()
    unmarked = tokenizer.chat_template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    chats = conversations(arguments.batch, turns=6, words=40)
    yardstick = best(lambda: tokenizer.apply_chat_template(chats, tokenize=True), arguments.repeats)
    print(f"apply_chat_template, {arguments.batch} x 6 turns: {yardstick:.1f} ms")
    for name, template in (("with generation blocks", None), ("without", unmarked)):
        renderer = Renderer(tokenizer, chat_template=template)
        renderer.render(chats)
        elapsed = best(lambda renderer=renderer: renderer.render(chats), arguments.repeats)
        print(f"render + tokenise + mask, template {name}: {elapsed:.1f} ms, ratio {elapsed / yardstick:.2f}")

    renderer = Renderer(tokenizer)
    first = None
    for turns in (2, 40):
        chats = [[*chat, {"role": "user", "content": "And now?"}] for chat in conversations(64, turns, words=40)]
        streams = [torch.tensor(renderer.end_of_turn_ids)] * 64
        renderer.extend(streams, chats, [1] * 64)
        elapsed = best(
            lambda chats=chats, streams=streams: renderer.extend(streams, chats, [1] * 64), arguments.repeats
        )
        first = first or elapsed
        print(f"extend, 64 conversations of {turns} messages: {elapsed:.2f} ms, ratio {elapsed / first:.2f}")

    chats = conversations(64, turns=3, words=40)

    def rows() -> None:
        for chat in chats:
            history = History.from_messages(chat)
            history.append(History(role="assistant", content="ok"))
            history.to_chats()

    print(f"History, 64 x (create + append + to_chats): {best(rows, arguments.repeats):.2f} ms")


if __name__ == "__main__":
    main()
