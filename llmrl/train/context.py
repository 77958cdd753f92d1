"""The run as its algorithm sees it: other models, optimizers, and a place in the checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.padding import pad_rows
from llmrl.envs.llm.transforms import RetrieveLogProb
from llmrl.envs.llm.transforms.log_probs import adapter_off
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.objectives.llm.algorithm import Algorithm, LogProbWriter
from llmrl.objectives.llm.batch import TOKENS
from llmrl.train.adapter_files import start_adapter
from llmrl.train.critic import Critic
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model
from llmrl.train.models.lora import ReferenceAtStart
from llmrl.train.run import Run
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.settings.machine import OptimSettings
from llmrl.train.updater import Updater

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunContext:
    """The `llmrl.objectives.llm.algorithm.Context` of a run."""

    config: GRPOConfig
    session: Session
    run: Run
    tokenizer: PreTrainedTokenizerBase
    actor: TransformersWrapper
    updater: Updater

    def load_model(self, name: Any) -> PreTrainedModel:
        source = self.config.model_copy(update={"model": name, "lora": None})
        return load_model(source, self.tokenizer, self.session, runs=self.run.runs)

    def make_updater(self, scorer: TokenScorer, optim: OptimSettings) -> Updater:
        settings = self.config.model_copy(update={"optim": optim})
        return Updater(self.session, scorer, settings, steps=self.config.steps)

    def load_critic(self, name: Any, optim: OptimSettings) -> Critic:
        source = self.run.origin if name is None else name
        return Critic(source, optim, self.config, self.tokenizer, self.session, self.run.runs)

    def without_adapters(self) -> AbstractContextManager[None]:
        return adapter_off(self.actor.model)

    def make_reference(self) -> LogProbWriter:
        """Scores with the actor without its adapters, or with those that it started from; or with a frozen copy of the
        model that the run started from (not of the checkpoint).
        """
        name = "ref_log_probs"
        if (start := start_adapter(self.run.origin)) is not None:
            around = ReferenceAtStart(self.actor.model, start).active
            return self._writer(RetrieveLogProb(self.actor), name, around)
        if self.config.lora is not None:
            return self._writer(RetrieveLogProb(self.actor, reference="adapter_off"), name)
        return self.make_writer(self.load_model(self.run.origin), name)

    def make_writer(self, model: PreTrainedModel, name: str) -> LogProbWriter:
        frozen = self.actor.get_new_version(model=model)
        return self._writer(RetrieveLogProb(frozen, log_probs_full_key=(name, "full")), name)

    def _writer(
        self, scorer: RetrieveLogProb, name: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> LogProbWriter:
        """Writes what ``scorer`` does, in the micro-batches of an update and inside the block ``around()``.

        A forward pass of a sharded model is a collective: all ranks need equally many.
        """
        scorer.model.engine.max_batch_tokens = self.config.tokens_per_microbatch  # it must not split them again

        def score(part: TensorDictBase) -> Tensor:
            return pad_rows(scorer(part).get(("next", name)).rows("full"))

        def write(batch: TensorDictBase | None) -> None:
            with self.session.autocast(), around():
                scores = self.updater.score(None, batch, score)
            if batch is not None:
                pairs = zip(scores, batch.get(TOKENS, as_list=True), strict=True)
                rows = [row[: len(ids)].clone() for row, ids in pairs]
                batch.get("next").set(name, LogProbs.from_rows({"full": rows}))

        return write


class AlgorithmState:
    """The part of a checkpoint that is the algorithm's: its own state, and the groups that wait on each rank."""

    def __init__(self, session: Session, algorithm: Algorithm):
        self._session, self._algorithm = session, algorithm

    def state_dict(self) -> dict[str, Any]:
        has_groups = self._algorithm.compares_groups or "groups" in vars(self._algorithm)
        groups = self._session.gather([self._algorithm.groups.state_dict()]) if has_groups else []
        return {"groups": groups, "own": self._algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["groups"]:  # the number of ranks may differ now
            self._algorithm.groups.load_state_dict(state["groups"][self._session.rank % len(state["groups"])])
        self._algorithm.load_state_dict(state["own"])
