"""Loads a reward model (a language model with one output per token), and evaluates it on held-out pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from llmrl.modules.llm.packing import evaluating
from llmrl.objectives.llm import RewardLoss
from llmrl.train.evaluation import eval_metrics
from llmrl.train.lora import add_adapters
from llmrl.train.models import load_files, made_model
from llmrl.train.preference_settings import RewardConfig
from llmrl.train.settings import TinyModelSettings
from llmrl.train.sft_data import AT_ONCE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session
    from llmrl.train.updater import Updater


def load_reward_model(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    session: Session,
    *,
    runs: Path,
    checked: bool = False,
    adapter: Path | None = None,
) -> PreTrainedModel:
    """The layers of ``config.model`` with a scalar output layer, random unless the files have one; float32, on the
    session's device, in evaluation mode; sharded if the session is.

    With ``config.lora`` a ``peft.PeftModel`` around it, as in `load_model`; the output layer is trained in full.

    Raises  DataError if it cannot be loaded
    """
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if isinstance(config.model, TinyModelSettings):
            body = made_model(config, tokenizer)
            body.config.num_labels, body.config.pad_token_id = 1, tokenizer.pad_token_id
            model = AutoModelForSequenceClassification.from_config(body.config)
            model.base_model.load_state_dict(body.base_model.state_dict())
            model = model.to(session.device).eval()
            model = session.shard(model) if session.sharded else model
        else:
            head = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
            model = load_files(config, session, runs=runs, checked=checked, **head)
    return add_adapters(config, model, adapter) if config.lora else model


class PairEvaluator:
    """Measures the share of held-out pairs whose chosen answer gets the larger reward; used as an `Evaluator`."""

    call_rate = None
    failed = 0
    metric = "eval/pairs/mean"

    def __init__(self, updater: Updater, loss: RewardLoss, rows: TensorDict, *, split: str) -> None:
        self.updater, self.loss, self.rows = updater, loss, rows
        self.name, self.score, self.num_rows = f"pairs {split}", math.nan, len(rows)

    def run(self) -> float:
        right = 0.0
        for start in range(0, self.num_rows, AT_ONCE):
            mine, _ = self.updater.deal(self.rows[start : start + AT_ONCE], everywhere=True)
            with evaluating(self.updater.scorer):  # turns off the dropout of adapters
                rewards = self.updater.score(mine, self.loss.pair_rewards)
            own = 0 if mine is None else sum(float(chosen > rejected) for chosen, rejected in rewards)
            right += self.updater.session.sum({"right": own})["right"]
        self.score = right / self.num_rows
        return self.score

    @property
    def metrics(self) -> dict[str, float]:
        std = math.sqrt(self.score * (1 - self.score))  # of scores that are 0 or 1
        return eval_metrics(self.metric, self.score, std, self.num_rows)

    @property
    def summary(self) -> str:
        return f"{self.name} {self.score:.3f}"
