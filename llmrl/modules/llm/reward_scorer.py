"""Per-token rewards from a sequence-classification model with one label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from llmrl.modules.llm.packing import accepted, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmrl.modules.llm.packing import Packing


class RewardScorer(nn.Module):
    """Returns the reward after each token, float32[B, T], for ids int64[B, T] and an attention mask bool[B, T], padded
    on the right. ``model`` has one label; DDP and FSDP2 wrap this module.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def use_packing(self, packing: Packing) -> None:
        """Does nothing: rewards are computed on padded rows."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        given = (input_ids, attention_mask)
        call_whole = getattr(self.model, "call_whole", None)  # a sharded model has it
        return _token_rewards(self.model, *given) if call_whole is None else call_whole(_token_rewards, *given)


def _token_rewards(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    model = unwrapped(model)
    given = accepted(model.base_model, {"input_ids": input_ids, "attention_mask": attention_mask.long()})
    hidden_BTH = model.base_model(**given).last_hidden_state
    return model.score(hidden_BTH)[..., 0].float()
