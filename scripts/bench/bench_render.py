"""Times rendering against the tokenizer's own method, and a turn's extension early and late in a conversation.

    python scripts/bench/bench_render.py [--batch 256] [--repeats 7]

Each figure is the best of the repeats; the ratios are what to compare between machines. The yardstick is one batched
call of ``tokenizer.apply_chat_template`` on the same conversations, ids only: no masks, no spans, no escapes.
"""

from __future__ import annotations

import torch
from inputs import chats_of_words
from table import Row, benchmark
from timing import best

from llmrl.data.llm import History
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer


def main(batch: int, repeats: int) -> list[Row]:
    rows = []
    tokenizer = tiny_tokenizer()
    unmarked = tokenizer.chat_template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    chats = chats_of_words(batch, turns=6)
    for name, template in (("with generation blocks", None), ("without them", unmarked)):
        renderer = Renderer(tokenizer, chat_template=template)
        renderer.render(chats)
        elapsed, yardstick = best(
            lambda renderer=renderer: renderer.render(chats),
            lambda: tokenizer.apply_chat_template(chats, tokenize=True),
            repeats=repeats,
        )
        print(f"{batch} x 6 turns: Renderer {elapsed:.1f} ms, apply_chat_template {yardstick:.1f} ms")
        what = f"render + tokenise + mask, {batch} x 6 turns, {name}: llmrl / one call"
        rows.append(Row(what, elapsed / yardstick, 1.5))

    renderer = Renderer(tokenizer)
    for turns in (2, 40):
        chats = [[*chat, {"role": "user", "content": "And now?"}] for chat in chats_of_words(64, turns)]
        streams = [torch.tensor(renderer.end_of_turn_ids)] * 64
        renderer.extend(streams, chats, [1] * 64)
        (elapsed,) = best(
            lambda chats=chats, streams=streams: renderer.extend(streams, chats, [1] * 64), repeats=repeats
        )
        print(f"extend, 64 conversations of {turns} messages: {elapsed:.2f} ms")

    chats = chats_of_words(64, turns=3)

    def histories() -> None:
        for chat in chats:
            history = History.from_messages(chat)
            history.append(History(role="assistant", content="ok"))
            history.to_chats()

    print(f"History, 64 x (create + append + to_chats): {best(histories, repeats=repeats)[0]:.2f} ms")
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, batch=(256, "conversations per batch"), repeats=7)
