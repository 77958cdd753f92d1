"""An algorithm as an object: how rewards become advantages, and rows of tokens a loss. ``llmrl grpo`` runs one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from llmrl.envs.transforms.base import Transform
from llmrl.objectives.base import LossModule
from llmrl.objectives.llm.advantage import MCAdvantage
from llmrl.objectives.llm.groups import group_advantage
from llmrl.objectives.llm.grpo import GRPOLoss
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.settings import Settings


class Algorithm:
    """GRPO and its relatives, by the settings of a recipe; and the base of your own, which overrides what differs.

    A recipe names a subclass by ``algorithm: my_file:MyAlgorithm``, or with settings of its own by
    ``algorithm: {"my_file:MyAlgorithm": {strength: 2}}``. docs/extending.md has one.

    settings    class of these settings; ``options`` are their values
    loss        class of the loss; it declares its metrics, and which log-probs of other models it reads
    advantage   keyword arguments of `MCAdvantage`, by ``algo`` and the ``grpo`` section of the recipe
    grpo        complete settings of `GRPOLoss`, likewise
    """

    settings: ClassVar[type[Settings]] = Settings
    loss: ClassVar[type[LossModule]] = GRPOLoss

    def __init__(self, options: Any, *, group_size: int, advantage: Mapping[str, Any], grpo: GRPOSettings):
        self.options, self.group_size, self.advantage, self.grpo = options, group_size, advantage, grpo

    def advantages(self, rewards_NG: Tensor) -> Tensor:
        """The advantages of N groups of G completions, from their rewards; NaN where a completion failed."""
        return group_advantage(rewards_NG, scale=self.advantage["scale"])

    def make_advantage(self) -> Transform:
        """The transform of rows on their way into the buffer: groups, then `advantages` of each.

        Its ``inv`` reads "group_id" and ("next", "reward"), NaN where a completion failed, writes "advantage", float32
        in the shape of the reward, and returns the rows to train, None if there are none.
        """
        own = {} if type(self).advantages is Algorithm.advantages else {"scale": self.advantages}
        return MCAdvantage(self.group_size, **{**self.advantage, **own})

    def make_loss(self, actor: nn.Module) -> LossModule:
        """The loss of a policy that has ``token_scores``."""
        return self.loss(actor, self.grpo)

    def describe(self) -> dict[str, str]:
        """What the plan says in place of "advantage", "ratio", "aggregation" and "kl", by these names."""
        return {}
