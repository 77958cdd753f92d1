"""The engine that samples during a run: the trainer's own weights, or a vLLM engine with a copy of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmrl.errors import WeightSyncError
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper, vLLMWrapper
from llmrl.train.distributed import Session
from llmrl.train.plan import has_own_process, samples_exactly
from llmrl.train.settings import GRPOConfig
from llmrl.weight_update import SyncProbe, publish

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["RolloutEngine"]

_NUM_PROBES, _PROBE_TOKENS = 4, 64
_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # engine and trainer round differently, by their precision


class RolloutEngine:
    """The policy that samples, and the way of new weights to its engine.

    ``policy``  for the collector; without vLLM it shares the trainer's module
    ``exact``   its log-probs are the trainer's to float32 rounding
    ``probes``  the sequences that engine and trainer are compared on; none before the first rollouts, or without vLLM
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
        self.exact = samples_exactly(config, session)
        wrapping = {
            "tokenizer": tokenizer,
            "generate_kwargs": options,
            "prefer_tokens": True if config.env.on_rewrite == "new_record" else "always",
        }
        self.policy: LLMWrapperBase
        if self.is_vllm:
            engine_options: dict[str, Any] = {}
            if session.low_precision:
                engine_options["dtype"] = "bfloat16"
            if settings.kv_cache_gb is not None:
                engine_options["kv_cache_memory_bytes"] = int(settings.kv_cache_gb * 2**30)
            overlaps = bool(settings.max_staleness) and session.device.type == "cpu"
            with _half_the_threads() if overlaps else nullcontext():
                engine = VLLMEngine(
                    model.name_or_path or model,  # the files that it was loaded from, where there are any
                    tokenizer=tokenizer,
                    own_process=has_own_process(config, session),
                    seed=config.seed,
                    **engine_options,
                )
            self.policy = vLLMWrapper(engine, **wrapping)
        else:
            self.policy = TransformersWrapper(model, **wrapping)
        dtype = torch.bfloat16 if session.low_precision else torch.float32
        self._bound = settings.probe_bound or _BOUND[dtype]
        self._temperature = config.sampling.temperature
        self._probe: SyncProbe | None = None

    def set_probe_sequences(self, sequences: Sequence[Tensor]) -> None:
        """Compares engine and trainer on the first of ``sequences`` from now on. Only the first call counts."""
        if self.is_vllm and self._probe is None:
            chosen = [ids[:_PROBE_TOKENS] for ids in sequences if len(ids) > 1][:_NUM_PROBES]
            self._probe = SyncProbe(chosen, bound=self._bound) if chosen else None

    @property
    def probes(self) -> list[Tensor]:
        return [] if self._probe is None else self._probe.sequences

    def push(self, scorer: TokenScorer) -> dict[str, float]:
        """New weights to the engine, and the proof: "mismatch/probe", the mean |log-prob difference| on the probes.

        Raises  WeightSyncError if they do not arrive, or the difference is above ``rollout.probe_bound``
        """
        engine = self.policy.engine
        version = publish(self.model if self.is_vllm else None, engine)
        if self._probe is None:
            return {}
        theirs, mine = partial(engine.score, temperature=self._temperature), partial(self._score, scorer)
        try:
            return {"mismatch/probe": self._probe(theirs, mine, version=version)}
        except WeightSyncError as error:
            raise WeightSyncError(f"{error} The bound is rollout.probe_bound.") from None

    def _score(self, scorer: TokenScorer, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The trainer's log-prob of each token after those before it; all ranks do it in step."""
        scores = []
        for ids in sequences:
            ids_1T = ids[None].to(self.session.device)
            everywhere = torch.ones_like(ids_1T, dtype=torch.bool)
            scores.append(scorer(ids_1T, everywhere, everywhere, temperature=self._temperature).log_probs[0])
        # FSDP2 keeps the outermost parameters whole for a backward pass, which does not follow here; a checkpoint
        # that is written now needs them as the optimizer knows them.
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return scores

    def close(self) -> None:
        """Ends an engine of its own."""
        if self.is_vllm:
            self.policy.engine.close()


@contextmanager
def _half_the_threads() -> Iterator[None]:
    """Processes started inside compute with half of this one's threads.

    Where both compute at the same time on one CPU, two that take every core cost both a third of their speed. The
    trainer keeps all: the engine waits for it, and it is alone on the CPU once the rollouts are there.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // 2))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
