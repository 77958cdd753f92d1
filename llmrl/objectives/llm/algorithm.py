"""An algorithm as an object: how rewards become advantages, and rows of tokens a gradient.

The loop of ``llmrl grpo`` (recipes/grpo.py) calls an `Algorithm` in this order: `build` once, then in each step
`advantages`, `prepare` and `train`. Each does GRPO by default; an algorithm of your own overrides what differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar, Protocol

from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from llmrl.envs.transforms.base import Transform
from llmrl.objectives.base import LossModule
from llmrl.objectives.llm.advantage import MCAdvantage
from llmrl.objectives.llm.batch import trained_tokens
from llmrl.objectives.llm.groups import group_advantage
from llmrl.objectives.llm.grpo import GRPOLoss
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.objectives.llm.teacher import Demonstrations, TeacherTerm
from llmrl.objectives.llm.teacher_models import make_term
from llmrl.objectives.llm.teacher_settings import DivergenceSettings
from llmrl.objectives.metric import Metric
from llmrl.settings import Settings

LogProbWriter = Callable[[TensorDictBase | None], None]


class Context(Protocol):
    """What a run has when it calls `Algorithm.build`; ``llmrl.train.context.RunContext`` is it.

    config     settings of the recipe
    session    this process among the others: ``rank``, ``device``, ``any``, ``gather``, ``sum``
    run        the run: ``origin`` names the model that it started from, ``resume`` says if it goes on
    tokenizer  of the model
    actor      the policy that is trained; it has ``token_scores``
    updater    its optimizer: ``train(loss, batches, step)``, ``score(loss, batch, function)``, ``add_proximal``
    """

    config: Any
    session: Any
    run: Any
    tokenizer: Any
    actor: Any
    updater: Any

    def load_model(self, name: str) -> nn.Module:
        """Another model, loaded as the policy is: the same sharding and dtype; without new adapters."""

    def make_updater(self, scorer: nn.Module, optim: Any) -> Any:
        """An `Updater` for another model that is trained, with optimizer settings of its own."""

    def load_critic(self, name: str | None, optim: Any) -> Any:
        """A model with one output per token that is trained beside the policy; None: the model that the run started
        from. Its ``updater`` is as the policy's; `state_dict` of the algorithm keeps its ``state_dict``.
        """

    def without_adapters(self) -> AbstractContextManager[None]:
        """A block in which the actor's model has no adapters."""

    def make_reference(self) -> LogProbWriter:
        """Writes the log-probs of the model that the run started from, ("next", "ref_log_probs", "full")."""

    def make_writer(self, model: nn.Module, name: str) -> LogProbWriter:
        """Writes the log-probs of another model, ("next", ``name``, "full"); called on every rank, None: no rows."""


class Algorithm:
    """GRPO and its relatives, by the settings of a recipe; and the base of your own, which overrides what differs.

    A recipe names a subclass by ``algorithm: my_file:MyAlgorithm``, or with settings of its own by
    ``algorithm: {"my_file:MyAlgorithm": {strength: 2}}``. docs/extending.md has one, and shows a recipe file that has
    another algorithm as its default.

    settings         class of these settings; ``options`` are their values
    loss             class of the loss; it declares its metrics, and which log-probs of other models it reads
    metrics          what `train` returns beside the loss's metrics, by name
    without          settings of the recipe that it does without, such as "grpo.scale": the plan names those given
    reads            columns of the data that the algorithm or its loss reads; a row keeps them until the loss
    compares_groups  False: there may be one completion per prompt (``group_size: 1``)
    advantage        keyword arguments of `MCAdvantage`, by ``algo`` and the ``grpo`` section of the recipe
    grpo             complete settings of `GRPOLoss`, likewise

    After `build`: ``context``; ``policy_loss``, the loss that trains the policy; ``reference``, or None; ``teacher``,
    the term of ``grpo.teacher``, or None.
    """

    settings: ClassVar[type[Settings]] = Settings
    loss: ClassVar[type[LossModule]] = GRPOLoss
    without: ClassVar[Sequence[str]] = ()
    metrics: ClassVar[Mapping[str, Metric]] = {}
    reads: Sequence[NestedKey] = ()
    compares_groups: ClassVar[bool] = True
    context: Context | None = None
    teacher: TeacherTerm | None = None
    demonstrations: Demonstrations | None = None  # what the teacher reads in place of the student's prompts

    def __init__(self, options: Any, *, group_size: int, advantage: Mapping[str, Any], grpo: GRPOSettings):
        self.options, self.group_size, self.advantage, self.grpo = options, group_size, advantage, grpo
        self.reads = (*self.reads, *(advantage.get("reward_weights") or ()))
        if (teacher := self.teacher_settings) is not None and teacher.demonstration is not None:
            self.reads = (*self.reads, teacher.demonstration)

    # --- what the plan needs, before weights are loaded ---

    def describe(self) -> dict[str, str]:
        """What the plan says in place of "advantage", "ratio", "aggregation" and "kl", by these names."""
        return {}

    # --- the calls of the loop, in order ---

    def build(self, context: Context) -> None:
        """Makes the loss and what it needs, once, after the policy and its updater exist; a teacher or a critic too."""
        self.context = context
        if (own := self.teacher_settings) is not None:
            self.teacher = make_term(own, context)
        self.policy_loss = self.make_loss(context.actor)
        if self.teacher is not None:
            self.policy_loss.use_teacher(self.teacher)
        self.reference = context.make_reference() if self.policy_loss.reads_reference else None

    def advantages(self, rows: TensorDictBase) -> TensorDictBase | None:
        """The rows to train, with "advantage": those of groups whose rewards say something; None if there are none.

        Called once for the rollouts of a step, and once more for each round that is drawn in place of dropped groups;
        each rank has its own rows.
        """
        kept = self.groups.inv(rows)
        return kept if kept is None or self.grpo.aggregation != "seq-mean" else _by_conversation(kept)

    def prepare(self, batches: Sequence[TensorDictBase | None]) -> dict[str, float]:
        """Writes what the loss compares with, before the step's first update changes the weights.

        Here the log-probs of the reference, of the proximal policy if the engine's are not exact enough, and of a
        teacher whose logits are not read; and with ``grpo.top_entropy_quantile`` which tokens have the highest entropy.

        batches  those of the step's updates, this rank's rows of each; None: it has no rows
        Returns  metrics, such as "time/logp"
        """
        loss, updater = self.policy_loss, self.context.updater
        asks = self.teacher is not None and self.teacher.is_asked
        if self.reference is None and not (loss.reads_proximal or loss.reads_entropy or asks):
            return {}
        clock = time.perf_counter()
        for batch in batches:
            if self.reference is not None:
                self.reference(batch)
            if asks:
                self.teacher.write(loss, batch, self.context)
            if loss.reads_proximal:
                updater.add_proximal(loss, batch)
            if loss.reads_entropy:
                updater.add_top_entropy(loss, batch, self.grpo.top_entropy_quantile)
        return {"time/logp": time.perf_counter() - clock}

    def train(self, batches: Sequence[TensorDictBase | None], step: int) -> dict[str, float]:
        """One update on each batch: micro-batches, loss, clipping, optimizer. Returns the step's metrics by name."""
        return self.context.updater.train(self.policy_loss, batches, step)

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep of it, such as a critic's weights and optimizer; sharded tensors stay sharded."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""

    # --- the parts of GRPO ---

    @property
    def teacher_settings(self) -> DivergenceSettings | None:
        """The teacher whose divergence from the policy is a term of the loss; None: there is none."""
        return self.grpo.teacher

    def group_advantages(self, rewards_NG: Tensor) -> Tensor:
        """The advantages of N groups of G completions, from their rewards; NaN where a completion failed."""
        return group_advantage(rewards_NG, scale=self.advantage["scale"])

    def make_advantage(self) -> Transform:
        """The transform that `advantages` calls: groups, then `group_advantages` of each.

        Its ``inv`` reads "group_id" and ("next", "reward"), NaN where a completion failed, writes "advantage", float32
        in the shape of the reward, and returns the rows to train, None if there are none.
        """
        own = {} if type(self).group_advantages is Algorithm.group_advantages else {"scale": self.group_advantages}
        gather = None if self.context is None else self.context.session.gather
        return MCAdvantage(self.group_size, **{**self.advantage, **own}, gather=gather)

    @cached_property
    def groups(self) -> Transform:
        """What `make_advantage` returned; groups that wait for completions are in checkpoints, of each rank."""
        return self.make_advantage()

    def make_loss(self, actor: nn.Module) -> LossModule:
        """The loss of a policy that has ``token_scores``."""
        return self.loss(actor, self.grpo)


def _by_conversation(rows: TensorDictBase) -> TensorDictBase:
    """Rows whose advantage is times the row's share of its conversation's trained tokens, for means over rows: a
    conversation of several rows then weighs as much as one of a single row, and each of its tokens the same.
    """
    ends = rows.get(("next", "done")).flatten(1).any(1).tolist()
    if all(ends):
        return rows
    lengths = trained_tokens(rows, ("masks", "all_assistant_mask"), "Algorithm.advantages")[0].sum(1).tolist()
    shares, first = [], 0
    for place, is_end in enumerate(ends):
        if is_end:
            own = lengths[first : place + 1]
            shares += [length / max(1, sum(own)) for length in own]
            first = place + 1
    for row, share in zip(singles := list(rows.unbind(0)), shares, strict=True):
        row.set("advantage", row.get("advantage") * share)
    return LazyStackedTensorDict.lazy_stack(singles)
