"""A reward model: a language model's layers with one number for each token, its loading, and its score on pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from llmrl.modules.llm.packing import Packing
from llmrl.objectives.llm import RewardLoss
from llmrl.run.checkpoint import CHECKSUMS, check_files
from llmrl.train.dealing import deal_batch
from llmrl.train.models import loading_options, resolve_model
from llmrl.train.preference_settings import RewardConfig
from llmrl.train.settings import TinyModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session
    from llmrl.train.updater import Updater

__all__ = ["PairEvaluator", "RewardScorer", "load_reward_model"]

_AT_ONCE = 1024  # pairs


def load_reward_model(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, session: Session, *, runs: Path, checked: bool = False
) -> PreTrainedModel:
    """The layers of ``config.model`` with an output of one number, random unless the files have one; float32, on the
    session's device, in evaluation mode. It is read whole, also where the session then shards it.

    Raises  DataError if it cannot be loaded
    """
    from transformers import AutoModelForSequenceClassification

    options = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if isinstance(config.model, TinyModelSettings):
            from llmrl.testing import tiny_model

            body = tiny_model(tokenizer, seed=config.seed, **config.model.model_dump())
            body.config.num_labels, body.config.pad_token_id = 1, tokenizer.pad_token_id
            model = AutoModelForSequenceClassification.from_config(body.config)
            model.base_model.load_state_dict(body.base_model.state_dict())
        else:
            source = resolve_model(config.model, runs=runs)
            if not checked and (Path(source) / CHECKSUMS).exists():
                check_files(Path(source))
            options |= loading_options(config)
            model = AutoModelForSequenceClassification.from_pretrained(source, **options)
    model = model.eval().to(session.device)
    return session.shard(model) if session.sharded else model


class RewardScorer(nn.Module):
    """The rewards after each token, float32[B, T], of ids int64[B, T] and an attention mask bool[B, T], padded on the
    right. ``model`` has one label; DDP and FSDP2 wrap this module.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def use_packing(self, packing: Packing) -> None:
        """Rewards are computed on padded rows."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        given = (input_ids, attention_mask)
        call_whole = getattr(self.model, "call_whole", None)  # of a sharded model
        return _token_rewards(self.model, *given) if call_whole is None else call_whole(_token_rewards, *given)


def _token_rewards(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    given = {"input_ids": input_ids, "attention_mask": attention_mask.long(), "use_cache": False}
    hidden_BTH = model.base_model(**given).last_hidden_state
    return model.score(hidden_BTH)[..., 0].float()


class PairEvaluator:
    """The share of held-out pairs whose chosen answer gets the larger reward; used as an `Evaluator`."""

    call_rate = None
    metric = "eval/pairs/mean"

    def __init__(
        self, session: Session, updater: Updater, loss: RewardLoss, rows: TensorDict, *, split: str, share: float
    ) -> None:
        self.session, self.updater, self.loss, self.rows, self.share = session, updater, loss, rows, share
        self.name, self.score = f"pairs {split}", math.nan

    def run(self) -> float:
        right = 0.0
        for start in range(0, len(self.rows), _AT_ONCE):
            mine, _ = deal_batch(self.session, self.rows[start : start + _AT_ONCE], self.share, everywhere=True)
            rewards = self.updater.score(mine, self.loss.pair_rewards)
            own = 0 if mine is None else sum(float(chosen > rejected) for chosen, rejected in rewards)
            right += self.session.sum({"right": own})["right"]
        self.score = right / len(self.rows)
        return self.score

    @property
    def metrics(self) -> dict[str, float]:
        return {self.metric: self.score}

    @property
    def summary(self) -> str:
        return f"{self.name} {self.score:.3f}"
