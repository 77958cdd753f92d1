"""What an algorithm gets from its run: other models, optimizers, and a place in the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase

from llmrl.envs.llm.transforms import RetrieveLogProb
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.objectives.llm.algorithm import Algorithm, LogProbWriter
from llmrl.train.adapter_files import start_adapter
from llmrl.train.critic import Critic
from llmrl.train.distributed import Session
from llmrl.train.lora import ReferenceAtStart
from llmrl.train.models import load_model
from llmrl.train.run import Run
from llmrl.train.settings import GRPOConfig, OptimSettings
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

    def make_reference(self) -> LogProbWriter:
        """Scores with the actor without its adapters, or with those that it started from; or with a frozen copy of the
        model that the run started from (not of the checkpoint).
        """
        if (start := start_adapter(self.run.origin)) is not None:
            return self._on_every_rank(ReferenceAtStart(RetrieveLogProb(self.actor), self.actor.model, start))
        if self.config.lora is not None:
            return self._on_every_rank(RetrieveLogProb(self.actor, reference="adapter_off"))
        return self.make_writer(self.load_model(self.run.origin), "ref_log_probs")

    def make_writer(self, model: PreTrainedModel, name: str) -> LogProbWriter:
        frozen = self.actor.get_new_version(model=model)
        return self._on_every_rank(RetrieveLogProb(frozen, log_probs_full_key=(name, "full")))

    def _on_every_rank(self, scorer: Any) -> LogProbWriter:
        def write(batch: TensorDictBase | None) -> None:
            if batch is None:  # a forward pass of a sharded model is a collective: this rank takes part in it
                if not self.session.sharded:
                    return
                batch = TensorDict(placeholders(self.session.device), batch_size=[1])
            with self.session.autocast(), self.session.split_sequences():
                scorer(batch)

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
