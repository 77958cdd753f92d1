"""On-policy distillation: the student samples, and a teacher says at each of its tokens what it would have written.

`DistillLoss` is `GRPOLoss` with a `TeacherTerm` (teacher.py), and its own loss by reward at a weight that may be 0.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.objectives.llm.algorithm import Algorithm
from llmrl.objectives.llm.grpo import GRPOLoss
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.objectives.llm.teacher import DIVERGENCE, TeacherTerm
from llmrl.objectives.llm.teacher_settings import DistillSettings


class DistillLoss(GRPOLoss):
    """The divergence of the student from a teacher at every trained token, and ``weight_reward`` times GRPO's loss.

    Reads   the columns of `GRPOLoss` and of `TeacherTerm`
    Returns the fields of GRPOLossOutput as a dict, with ``loss_distill`` and ``distill``, the mean divergence

    ``teacher``, ``temperature`` and ``vocabulary`` are those of `TeacherTerm`; ``teacher`` may also be one.
    """

    metrics: ClassVar = {**GRPOLoss.metrics, "distill": DIVERGENCE}

    def __init__(
        self,
        actor_network: nn.Module,
        settings: GRPOSettings | None = None,
        options: DistillSettings | None = None,
        *,
        teacher: nn.Module | TeacherTerm | None = None,
        temperature: float = 1.0,
        vocabulary: int | None = None,
        **keywords: Any,
    ) -> None:
        self.options = options or DistillSettings()
        if not isinstance(teacher, TeacherTerm):
            teacher = TeacherTerm(self.options, teacher, temperature=temperature, vocabulary=vocabulary)
        super().__init__(actor_network, settings, teacher=teacher, **keywords)

    @property
    def trains_log_probs(self) -> bool:
        settings = self.settings
        return bool(self.options.weight_reward or settings.entropy or settings.kl or settings.kl_inference)

    def surrogate(
        self, log_ratio_BT: Tensor, log_prob_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, advantage_BT: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        value_BT, clipped = super().surrogate(log_ratio_BT, log_prob_BT, behaviour_BT, mask_BT, advantage_BT)
        weight = self.options.weight_reward
        return (weight * value_BT if weight else torch.zeros_like(value_BT)), clipped


class Distill(Algorithm):
    """``llmrl distill``: answers of the student, each token trained towards what the teacher would have written.

    Rewards are read only with ``weight_reward``; without it no answer is dropped for its reward.
    """

    settings = DistillSettings
    loss = DistillLoss
    without = ("zero_variance", "min_spread")  # groups of equal rewards have the gradient of the teacher
    compares_groups = False

    def __init__(self, options: DistillSettings, *, group_size: int, advantage: Any, grpo: GRPOSettings):
        super().__init__(
            options,
            group_size=group_size,
            advantage={**advantage, "on_zero_variance": "keep", "min_spread": 0.0},
            grpo=grpo,
        )

    @property
    def teacher_settings(self) -> DistillSettings:
        return self.options

    def describe(self) -> dict[str, str]:
        options, others = self.options, self.grpo.describe()["kl"]
        words = {"kl": options.in_words()}
        if others != "0":
            words["kl"] += f"; and {others}"
        if not options.weight_reward:
            words |= {"advantage": "none: no reward is trained on", "ratio": "none"}
        else:
            words["kl"] += f"; and {options.weight_reward:g} x the loss by reward"
        return words

    def make_loss(self, actor: nn.Module) -> DistillLoss:
        return DistillLoss(actor, self.grpo, self.options, teacher=self.teacher)

    def advantages(self, rows: TensorDictBase) -> TensorDictBase | None:
        if self.options.weight_reward:
            return super().advantages(rows)
        reward = rows.get(("next", "reward"))
        kept = reward.flatten(1).isfinite().all(1)  # a completion that failed is left out
        return rows[kept].set("advantage", torch.zeros_like(reward[kept])) if kept.any() else None
