"""What samples during a run: the trainer's own weights, or a vLLM engine with a copy of them.

Which engine a policy has, whether new weights must be sent to it, and the proof that they arrived: the round
(`grpo_round`) only says when.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmrl.errors import WeightSyncError
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper, vLLMWrapper
from llmrl.recipes.grpo_config import GRPOConfig
from llmrl.recipes.session import Session
from llmrl.recipes.state import named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.collectors.llm import LLMCollector

__all__ = ["Sampler"]

_NUM_PROBES, _PROBE_TOKENS = 4, 64
_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # engine and trainer round differently, by their precision


class Sampler:
    """The policy that samples, and its weights.

    ``policy``  what the collector asks; it shares the trainer's module where there is one process and no sharding
    ``exact``   its log-probs are the trainer's to float32 rounding
    """

    def __init__(
        self,
        config: GRPOConfig,
        session: Session,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
    ):
        self.session, self.model = session, model
        settings = config.rollout
        self.is_vllm = settings.engine == "vllm"
        self.exact = not self.is_vllm and not session.low_precision
        wrapping = {
            "tokenizer": tokenizer,
            "generate_kwargs": options,
            "prefer_tokens": True if config.env.on_rewrite == "new_record" else "always",
        }
        self.policy: LLMWrapperBase
        if self.is_vllm:
            apart = settings.own_process
            if apart is None:  # in this process, the engine opens the default process group and answers call by call
                apart = bool(settings.max_staleness or settings.concurrency) or session.world_size > 1
            engine = VLLMEngine(
                model, tokenizer=tokenizer, own_process=apart, seed=config.seed, **_engine_options(config, session)
            )
            self.policy = vLLMWrapper(engine, **wrapping)
        else:
            self.policy = TransformersWrapper(copy.deepcopy(model) if session.sharded else model, **wrapping)
        dtype = torch.bfloat16 if session.low_precision else torch.float32
        self._bound = settings.probe_bound or _BOUND[dtype]
        self._temperature = config.sampling.temperature
        self._probes: list[Tensor] = []

    def adopt_probes(self, sequences: Sequence[Tensor]) -> None:
        """The first sequences that were sampled are what engine and trainer are compared on from then on."""
        if self.is_vllm and not self._probes:
            self._probes = [ids[:_PROBE_TOKENS].clone() for ids in sequences[:_NUM_PROBES] if len(ids) > 1]

    def push(self, collector: LLMCollector, scorer: TokenScorer) -> dict[str, float]:
        """New weights to the engine, and the proof: "mismatch/probe", the mean |log-prob difference| on the probes.

        Raises  WeightSyncError if they do not arrive, or the difference is above the bound
        """
        if not self.is_vllm:
            collector.update_policy_weights_(named_weights(self.model) if self.session.sharded else None)
            return {}
        collector.update_policy_weights_(named_weights(self.model))
        return self._prove(scorer)

    @torch.no_grad()
    def _prove(self, scorer: TokenScorer) -> dict[str, float]:
        if not self._probes:
            return {}
        engine = self.policy.engine
        theirs = engine.score(self._probes, temperature=self._temperature)
        difference, count = 0.0, 0
        for ids, scores in zip(self._probes, theirs, strict=True):
            ids_1T = ids[None].to(self.session.device)
            everywhere = torch.ones_like(ids_1T, dtype=torch.bool)
            mine = scorer(ids_1T, everywhere, everywhere, temperature=self._temperature).log_probs[0].cpu()
            difference += float((mine - scores.cpu())[1:].abs().sum())
            count += len(ids) - 1
        mean = difference / count
        if not mean <= self._bound:
            raise WeightSyncError(
                f"grpo: after an update the engine must have the trainer's weights: log-probs of {count} tokens differ "
                f"by {mean:.3g} on average, more than rollout.probe_bound = {self._bound:g}."
            )
        return {"mismatch/probe": mean}

    def close(self) -> None:
        """Ends an engine of its own."""
        if self.is_vllm:
            self.policy.engine.close()


def _engine_options(config: GRPOConfig, session: Session) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if session.low_precision:
        options["dtype"] = "bfloat16"
    if config.rollout.kv_cache_gb is not None:
        options["kv_cache_memory_bytes"] = int(config.rollout.kv_cache_gb * 2**30)
    return options
