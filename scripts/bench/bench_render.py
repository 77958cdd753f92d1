"""Times rendering, tokenising and masking against the tokenizer's own method.

    python scripts/bench/bench_render.py [--batch 256] [--repeats 7]

Each figure is the best of the repeats; only ratios are comparable between machines. The baseline is one batched call of
``tokenizer.apply_chat_template`` on the same conversations, ids only: no masks, no spans, no escapes. A second one is
the tokenizer alone, on text that is already rendered.
"""

from __future__ import annotations

from inputs import chats_of_words
from table import Row, benchmark
from timing import best

from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer


def main(batch: int, repeats: int) -> list[Row]:
    rows = []
    tokenizer = tiny_tokenizer()
    unmarked = tokenizer.chat_template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    chats = chats_of_words(batch, turns=6)
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    for name, template, target in (("with generation blocks", None, 1.3), ("without them", unmarked, 1.5)):
        renderer = Renderer(tokenizer, chat_template=template)
        renderer.render(chats)
        elapsed, yardstick, bare = best(
            lambda renderer=renderer: renderer.render(chats),
            lambda: tokenizer.apply_chat_template(chats, tokenize=True),
            lambda: tokenizer(texts, add_special_tokens=False),
            repeats=repeats,
        )
        print(f"{batch} x 6 turns: Renderer {elapsed:.1f} ms, apply_chat_template {yardstick:.1f} ms")
        what = f"render + tokenise + mask, {batch} x 6 turns, {name}: llmrl / "
        rows += [Row(f"{what}one call", elapsed / yardstick, target), Row(f"{what}rendered text", elapsed / bare)]
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, batch=(256, "conversations per batch"), repeats=15)
