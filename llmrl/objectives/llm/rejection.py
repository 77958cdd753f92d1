"""Rejection sampling: the best of several answers to each prompt are learned as examples, again and again."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import nn

from llmrl.data.llm import TopKRewardSelector
from llmrl.objectives.llm.algorithm import Algorithm
from llmrl.objectives.llm.settings import GRPOSettings, RejectionSettings
from llmrl.objectives.llm.sft import SFTLoss


class RejectionSampling(Algorithm):
    """Keeps the answers to a prompt that `TopKRewardSelector` chooses, and trains `SFTLoss` on them.

    Source  Dong et al. 2023, RAFT (arXiv:2304.06767); Anthony et al. 2017, expert iteration (arXiv:1705.08439)
    """

    settings = RejectionSettings
    loss: ClassVar = SFTLoss
    without: ClassVar = [f"grpo.{name}" for name in GRPOSettings.model_fields if name != "teacher"]

    def make_advantage(self) -> TopKRewardSelector:
        return TopKRewardSelector(self.group_size, self.options.keep, prompt_key="group_id", verbose=False)

    def advantages(self, rows: TensorDictBase) -> TensorDictBase | None:
        """The chosen rows, each with an advantage of 1: all count the same."""
        chosen = self.groups.inv(rows)
        return None if chosen is None else chosen.set("advantage", torch.ones_like(chosen.get(("next", "reward"))))

    def make_loss(self, actor: nn.Module) -> SFTLoss:
        return SFTLoss(actor)

    def describe(self) -> dict[str, str]:
        kept = f"the best {self.options.keep} of {self.group_size} answers, those above the median of their prompt"
        loss = {"ratio": "none: -log p of the answers that are kept", "aggregation": "mean over the tokens of the step"}
        return {"advantage": kept, **loss, "kl": "none"}
