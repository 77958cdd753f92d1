"""Times building memory-mapped rows from a file of pairs, against the tokenizer alone; and opening them again.

    python scripts/bench/bench_tokenising.py [--pairs 100000] [--repeats 1]

The baseline is the tokenizer's own batched call, a few thousand texts at a time: ids as lists, nothing read, checked,
padded or written. Processor time, on one thread.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from table import Row, benchmark

from llmrl.data import PairwiseDataset
from llmrl.testing import tiny_tokenizer

AT_ONCE = 8192  # texts
POST = "I went to the shop for some tea, walked home in the rain and thought about it for a while. "


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start


def main(pairs: int, repeats: int) -> list[Row]:
    data = [
        {"prompt": POST * (1 + i % 3) + f"What is {i} + {i}?", "chosen": f"It is {2 * i}. {POST}", "rejected": f"{i}?"}
        for i in range(pairs)
    ]
    tokenizer, plain = tiny_tokenizer(), tiny_tokenizer()
    plain.chat_template = None
    texts = [f"{row['prompt']}\n{row[side]}" for row in data for side in ("chosen", "rejected")]
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in data
        for side in ("chosen", "rejected")
    ]

    def in_parts(call: Callable[[list], object], rows: list) -> None:
        for start in range(0, len(rows), AT_ONCE):
            call(rows[start : start + AT_ONCE])

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        file.write_text("\n".join(map(json.dumps, data)))
        for what, own, yardstick in (
            ("as text", plain, lambda: in_parts(plain, texts)),
            ("by a chat template", tokenizer, lambda: in_parts(tokenizer.apply_chat_template, chats)),
        ):
            ours, theirs = [], []
            for repeat in range(repeats):
                arguments = {"max_length": 288, "tokenizer": own, "root_dir": Path(folder) / f"{what}{repeat}"}
                theirs.append(seconds(yardstick, time.process_time))
                build = lambda: PairwiseDataset.from_dataset("train", file, **arguments)  # noqa: B023, E731
                ours.append(seconds(build, time.process_time))
                opened = seconds(build, time.perf_counter)
            print(f"{pairs:,} pairs {what}: {min(ours):.1f} s, the tokenizer alone {min(theirs):.1f} s")
            rows.append(Row(f"{pairs:,} pairs {what}, file to mapped rows", min(ours) / min(theirs), 1.2))
            rows.append(Row(f"{pairs:,} pairs {what}, opened again", opened, 0.5, "s"))
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, pairs=100_000, repeats=1)
