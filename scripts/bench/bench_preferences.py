"""Times a training step on pairs of answers, for DPO and for a reward model: llmrl against TRL's trainers.

    python scripts/bench/bench_preferences.py [--pairs 16] [--repeats 10]

A step draws a batch of pairs, scores both answers with gradients, and takes an AdamW step; the reference's log-probs
are computed beforehand. Both sides train copies of one model of a million parameters on the same pairs, in turn, in one
process: llmrl's step runs between two of TRL's. Each figure is the least processor time of the repeats, on one thread.

llmrl    one step of `llmrl.recipes.dpo` and of `llmrl.recipes.reward`, without files and display
TRL      `DPOTrainer` and `RewardTrainer`, with logging, saving, the progress bar and gradient checkpointing off

The memory of a DPO step is measured by bench_loss.py.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
from table import Row, benchmark
from trl_side import LEARNING_RATE, QUIET, train


class Ours:
    """The body of the loops of `llmrl.recipes.dpo` and `llmrl.recipes.reward`."""

    def __init__(self, kind: str, model: Any, tokenizer: Any, rows: int, pairs: int):
        from llmrl.modules.llm.policies import TransformersWrapper
        from llmrl.modules.llm.reward_scorer import RewardScorer
        from llmrl.objectives.llm import DPOLoss, RewardLoss
        from llmrl.train.data.preferences import ReferenceLogProbs, tokenize_pairs
        from llmrl.train.dealing import deal_epochs
        from llmrl.train.distributed import Session
        from llmrl.train.settings.preferences import DPOConfig, RewardConfig
        from llmrl.train.updater import make_updater

        settings = {"model": {}, "data": {"path": "sums", "rows": rows}, "optim": {"lr": LEARNING_RATE, "warmup": 0}}
        config = (DPOConfig if kind == "dpo" else RewardConfig)(**settings, batch_size=pairs)
        self.step = 0
        self.rows = tokenize_pairs(config, tokenizer).as_rows()
        if kind == "dpo":
            policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        else:
            policy = SimpleNamespace(scorer=RewardScorer(model))
        self.updater = make_updater(config, Session(config), policy, steps=1_000_000)
        self.loss = DPOLoss(self.updater.scorer) if kind == "dpo" else RewardLoss(self.updater.scorer)
        self.reference = ReferenceLogProbs() if kind == "dpo" else None
        if self.reference:
            self.reference.compute(self.updater, self.loss, self.rows)
        self.buffer = deal_epochs(len(self.rows), config)

    def __call__(self) -> None:
        self.step += 1
        batch = self.rows[self.buffer.sample()]
        if self.reference:
            batch.set("reference_log_probs", self.reference.values[batch["row"]])
        batch, _ = self.updater.deal(batch, everywhere=True)
        self.updater.step(self.loss, batch, self.step)


def trl_trainer(kind: str, model: Any, tokenizer: Any, rows: list[dict], pairs: int, folder: str) -> Any:
    import trl
    from datasets import Dataset

    data = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
        for row in rows
    ]
    options = {**QUIET, "output_dir": folder, "per_device_train_batch_size": pairs}
    if kind == "dpo":
        settings, trainer = trl.DPOConfig(**options, precompute_ref_log_probs=True), trl.DPOTrainer
    else:
        settings, trainer = trl.RewardConfig(**options), trl.RewardTrainer
    return trainer(model=model, args=settings, train_dataset=Dataset.from_list(data), processing_class=tokenizer)


def measure(kind: str, pairs: int, repeats: int) -> dict[str, float]:
    """The least processor time of a step of each side, in milliseconds."""
    from transformers import AutoModelForSequenceClassification

    from llmrl.envs.llm.tasks.sums import sums_preferences
    from llmrl.testing import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden_size=160, layers=4, heads=5)
    if kind == "reward":
        model.config.num_labels, model.config.pad_token_id = 1, tokenizer.pad_token_id
        model = AutoModelForSequenceClassification.from_config(model.config)
    rows = sums_preferences("train")[: 32 * pairs]
    ours = Ours(kind, copy.deepcopy(model).eval(), tokenizer, len(rows), pairs)
    seconds: dict[str, list[float]] = {"llmrl": [], "TRL": []}

    def between(trl_seconds: float) -> bool:
        seconds["TRL"].append(trl_seconds)
        start = time.process_time()
        ours()
        seconds["llmrl"].append(time.process_time() - start)
        return len(seconds["TRL"]) <= repeats

    with tempfile.TemporaryDirectory() as folder:
        train(trl_trainer(kind, copy.deepcopy(model), tokenizer, rows, pairs, folder), time.process_time, between)
    return {name: 1e3 * min(values[1:]) for name, values in seconds.items()}


def main(pairs: int, repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = []
    if importlib.util.find_spec("trl") is None:
        print("trl: not installed; nothing to compare with")
    else:
        for kind in ("dpo", "reward"):
            best = measure(kind, pairs, repeats)
            print(f"{kind}: " + "  ".join(f"{name} {value:.1f} ms" for name, value in best.items()), flush=True)
            rows.append(Row(f"{kind} step, {pairs} pairs: llmrl / TRL", best["llmrl"] / best["TRL"], 1.0))
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, pairs=(16, "of a step"), repeats=10)
