"""Loads a reward model: a language model with one output per token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmrl.train.models.loading import load_files, made_model
from llmrl.train.models.lora import add_adapters
from llmrl.train.settings.model import TinyModelSettings
from llmrl.train.settings.preferences import RewardConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session


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
