"""Greedy evaluation: how often is the most likely answer right, on problems that are not trained on?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmrl.collectors.llm import LLMCollector
from llmrl.recipes.settings import EnvSettings
from llmrl.recipes.state import named_weights
from llmrl.recipes.tasks import make_env

if TYPE_CHECKING:
    from llmrl.modules.llm.policies.base import LLMWrapperBase
    from llmrl.recipes.session import Session

__all__ = ["Evaluation"]


class Evaluation:
    """Asks ``policy`` every row once, without sampling, the rows dealt out over the ranks.

    `run` returns the mean of "success" where the environment writes it, else of the reward. Answers whose scoring
    failed are left out of the mean and counted in ``failed``. The policy has the weights of ``source`` by then, where
    one is given: a model whose own parameters are sharded cannot generate.
    """

    def __init__(
        self,
        session: Session,
        policy: LLMWrapperBase,
        env: EnvSettings,
        rows: Sequence[Mapping[str, Any]],
        *,
        split: str,
        batch_size: int,
        max_tokens: int,
        source: nn.Module | None = None,
    ):
        self.session = session
        self.name = f"{env.name} {split}"
        self.metric = f"eval/{env.name}/mean" if split == "test" else f"eval/{env.name}-{split}/mean"
        self.num_rows = len(rows)
        self.failed = 0
        self._source = source
        self._policy = policy.get_new_version(
            generate_kwargs={"max_new_tokens": max_tokens, "temperature": 0.0},
            prefer_tokens=True,  # nothing is trained, so that a template may rewrite the past
        )
        mine = list(rows[session.rank :: session.world_size])
        self._envs = [
            make_env(
                env, mine[start : start + batch_size], shuffle=False, num_envs=len(mine[start : start + batch_size])
            )
            for start in range(0, len(mine), batch_size)
        ]

    def run(self) -> float:
        if self._source is not None:
            engine = self._policy.engine
            engine.update_weights(named_weights(self._source), version=engine.version)
        scores: list[float] = []
        for env in self._envs:
            env.reset_dataloader()
            collector = LLMCollector(env, policy=self._policy, yield_only_last_steps=True)
            with self.session.autocast():
                after = collector.rollout().get("next")
            score = after.get("success", None)
            score = after.get("reward") if score is None else score
            score = score[after.get("done").flatten()]  # a conversation may be several records; the last one has it
            scores += score.to(torch.float64).reshape(len(score), -1).sum(-1).tolist()
        scores = self.session.gather(scores)
        valid = [score for score in scores if not math.isnan(score)]
        self.failed = len(scores) - len(valid)
        return sum(valid) / len(valid) if valid else math.nan
