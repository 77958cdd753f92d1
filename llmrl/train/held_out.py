"""Held-out rows of a recipe on files: read like the trained rows, compared with them, and measured by the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.errors import DataError
from llmrl.objectives.llm import DPOLoss, KTOLoss, RewardLoss, SFTLoss
from llmrl.train.environments import is_file
from llmrl.train.evaluation import eval_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.train.data.sft import TokenizedRows
    from llmrl.train.settings.sft import SFTConfig
    from llmrl.train.updater import Updater


def with_held_out(
    tokenize: Callable[[Any, PreTrainedTokenizerBase], TokenizedRows],
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenizedRows:
    """The rows of ``tokenize(config, tokenizer)``, with those of ``eval.dataset`` as ``held_out``. With an env
    ``eval.dataset`` has its problems, and only ``eval.loss`` asks for held-out rows.
    """
    rows = tokenize(config, tokenizer)
    if config.eval.loss if config.env is not None else config.eval.dataset is not None:
        rows.held_out = tokenize_held_out(tokenize, config, tokenizer)
    return rows


def tokenize_held_out(
    tokenize: Callable[[Any, PreTrainedTokenizerBase], TokenizedRows],
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenizedRows:
    """The rows of ``eval.dataset`` (None, or with an env: of ``data.path``) in the split ``eval.split``, with the
    columns and limits of the trained ones.

    Raises  what ``tokenize`` raises for rows that cannot be trained on; DataError for a split of a single file
    """
    settings = config.eval
    path = config.data.path if config.env is not None else settings.dataset or config.data.path
    if config.env is not None and is_file(path) and not Path(path).expanduser().is_dir():
        raise DataError(
            f"eval.loss measures the split {settings.split} of data.path: got a file, which has no splits: {path}; "
            "name a folder or a hub dataset, or leave out env and give eval.dataset."
        )
    given = {"path": path, "split": settings.split, "rows": settings.rows}
    rows = tokenize(config.model_copy(update={"data": config.data.model_copy(update=given)}), tokenizer)
    rows.described = rows.source if is_file(rows.source) else f"{rows.source} {settings.split}"
    return rows


def count_shared(trained: TokenizedRows, held_out: TokenizedRows) -> int:
    """The number of held-out rows whose token ids are those of a trained row."""
    own = [ids.numpy().tobytes() for ids in held_out.own_ids]
    names = set(own)
    shared = {name for ids in trained.own_ids if (name := ids.numpy().tobytes()) in names}
    return sum(name in shared for name in own)


class HeldOutEvaluator:
    """Measures ``loss`` on held-out ``rows`` as on one large step: a mean over all their trained tokens (SFT) or over
    all pairs, with the share of pairs (of KTO: answers) ranked right and their margin. Used as an `Evaluator`.
    """

    call_rate = None
    failed, warning = 0, ""

    def __init__(
        self, updater: Updater, loss: SFTLoss | DPOLoss | KTOLoss | RewardLoss, rows: TokenizedRows, *, split: str
    ):
        self.rows = rows.as_rows()
        self.num_rows, self.unit = len(rows), rows.unit
        self.metrics: dict[str, float] = {}  # of the last run
        self._updater, self._loss = updater, loss
        self._ranks = not isinstance(loss, SFTLoss)
        self.name = f"{rows.unit} {split}" if self._ranks else "held-out loss"
        self.metric = f"eval/{rows.unit}/mean" if self._ranks else "eval/loss"

    def run(self) -> float:
        found = self._updater.measure(self._loss, self.rows)
        self.metrics = {"eval/loss": found["loss"]}
        if self._ranks:
            right = round(found["pairs_right"] * self.num_rows) / self.num_rows  # shares that are summed are rounded
            std = math.sqrt(right * (1 - right))  # of scores that are 0 or 1
            self.metrics |= {"eval/margin": found["margin"]} if "margin" in found else {}  # answers of one kind: none
            self.metrics |= eval_metrics(self.metric, right, std, self.num_rows)
        else:
            # Above 709 the exponential is more than a float holds.
            self.metrics["eval/perplexity"] = math.exp(found["loss"]) if found["loss"] < 709 else math.inf
        return self.score

    @property
    def score(self) -> float:
        return self.metrics.get(self.metric, math.nan)

    @property
    def measures(self) -> dict[str, str]:
        """The metrics of a run's summary, and their labels in it."""
        if self._ranks:
            return {self.metric: self.name, "eval/loss": "held-out loss", "eval/margin": "margin"}
        return {self.metric: self.name, "eval/perplexity": "perplexity"}

    @property
    def summary(self) -> str:
        """The result of the last run, in words."""
        shown = {label: self.metrics[metric] for metric, label in self.measures.items() if metric in self.metrics}
        return ", ".join(f"{label} {value:.3f}" for label, value in shown.items())


def held_out_evaluator(
    config: SFTConfig, updater: Updater, loss: SFTLoss | DPOLoss | KTOLoss | RewardLoss, trained: TokenizedRows
) -> HeldOutEvaluator | None:
    """The evaluator of the held-out rows of ``trained``; None if there are none."""
    if trained.held_out is None:
        return None
    return HeldOutEvaluator(updater, loss, trained.held_out, split=config.eval.split)
