"""The critic of PPO: a second model, with one output per token, that is trained and saved beside the policy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.transformers import vocabulary_size
from llmrl.modules.llm.rendering import text_tokenizer
from llmrl.modules.llm.reward_scorer import RewardScorer
from llmrl.modules.llm.vision import vision_tower
from llmrl.train.models.loading import check_model, fill_weight, load_tokenizer, meta_model
from llmrl.train.models.reward import load_reward_model
from llmrl.train.optimizers import import_optimizer
from llmrl.train.updater import make_updater

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.train.distributed import Session
    from llmrl.train.settings.algorithms import PPOConfig
    from llmrl.train.settings.grpo import GRPOConfig
    from llmrl.train.settings.machine import OptimSettings


class Critic:
    """The model of ``name``, loaded as the policy is, with a scalar output that is random unless the files have one.

    ``updater``   its optimizer, sharded as the policy's; ``updater.scorer`` is the module
    ``name``      a model as in ``config.model``
    """

    def __init__(
        self,
        name: Any,
        optim: OptimSettings,
        config: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        session: Session,
        runs: Path,
    ):
        config = config.model_copy(update={"model": name, "optim": optim})
        scorer = RewardScorer(load_reward_model(config, text_tokenizer(tokenizer), session, runs=runs))
        self._weights = {name: value for name, value in scorer.named_parameters() if value.requires_grad}
        self.updater = make_updater(config, session, SimpleNamespace(scorer=scorer), steps=config.steps)

    def state_dict(self) -> dict[str, Any]:
        """The trained weights and the optimizer's state; sharded tensors stay sharded."""
        weights = {name: value.detach() for name, value in self._weights.items()}
        return {"weights": weights, "optimizer": self.updater.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads ``state``, sharded or whole on every rank."""
        for name, value in self._weights.items():
            fill_weight(value, state["weights"][name])
        self.updater.load_state_dict(state["optimizer"])


def check_critic(config: PPOConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, runs: Path) -> None:
    """Raises ConfigError if the critic could not be trained beside ``policy``, which may be on the meta device."""
    import_optimizer(config.ppo.critic_optim)
    check_model(config.model_copy(update={"optim": config.ppo.critic_optim}), policy)
    if vision_tower(policy) is not None:
        raise ConfigError(
            f"ppo.critic: a critic reads text alone: got {type(policy).__name__}, which reads images; use llmrl grpo."
        )
    if (name := config.ppo.critic) is None:
        return
    own = load_tokenizer(config.model_copy(update={"model": name}), runs=runs)
    expected, got = (text_tokenizer(each).get_vocab() for each in (tokenizer, own))
    if differing := sorted(expected.items() ^ got.items(), key=lambda pair: (pair[1], pair[0])):
        token, number = differing[0]
        raise ConfigError(
            f"ppo.critic: must have the policy's tokenizer: got {name}, of {len(got)} tokens, expected the "
            f"{len(expected)} of {config.model}; only one of them has {token!r} = {number}. Leave ppo.critic out, or "
            "name a model that was trained from the policy's own."
        )
    size = vocabulary_size(meta_model(config.model_copy(update={"model": name}), own, runs=runs))
    if size is not None and size < len(expected):
        raise ConfigError(f"ppo.critic: must have an embedding of {len(expected)} tokens: got {size} in {name}.")
