"""The load-balancing loss of a mixture of experts over a whole optimizer step, for any division into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmrl.modules.llm.routers import RouterLoad, Routers
from llmrl.objectives.llm.functional import expert_balance
from llmrl.train.distributed import Session


class ExpertBalance:
    """``coefficient`` times `expert_balance` of all tokens of a step; 0 for a dense model.

    coefficient  None: that of the model's configuration, 0 if it has none

    The loss is a product of two means over the step: how often an expert was chosen, which has no gradient, and the
    probability that the router gave it. So the gradient of one micro-batch needs the choices in all of them. With one
    micro-batch per rank they are known after its forward pass; otherwise extra passes without gradients count them.
    """

    def __init__(self, session: Session, model: nn.Module, coefficient: float | None) -> None:
        self._session = session
        self._routers = Routers.of(model)
        if coefficient is None:
            coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", None) or 0.0
        self.coefficient = coefficient if self._routers.count else 0.0
        self._chosen: Tensor | None = None  # counts of the whole step, [R, E]; None until known
        self._parts: list[RouterLoad] = []

    def watch(self) -> AbstractContextManager[None]:
        """Context for the forward pass of a micro-batch: records its routers."""
        return self._routers.recording() if self._routers.count else nullcontext()

    def begin_step(self, forwards: Sequence[tuple[Callable[[], Any], bool]]) -> None:
        """Counts a step's choices by running its ``forwards`` if necessary; each comes with a flag: it has rows."""
        self._parts, self._chosen, self._tokens = [], None, None
        if not self.coefficient or not self._session.any(len(forwards) > 1):
            return
        loads = []
        for forward, is_filled in forwards:
            with torch.no_grad(), self.watch():
                forward()
            loads.append(self._load(is_filled))
        self._set_totals(loads)

    def term(self, *, is_filled: bool) -> Tensor | float:
        """The loss term of the micro-batch watched last; the terms of all micro-batches and ranks sum to the loss."""
        if not self._routers.count:
            return 0.0
        load = self._load(is_filled)
        self._parts.append(load._replace(probs_RE=load.probs_RE.detach()))  # for the metrics, without its graph
        if not self.coefficient:
            return 0.0
        if self._chosen is None:
            self._set_totals([load])
        return self.coefficient * expert_balance(self._chosen, load.probs_RE, self._tokens)

    def _load(self, is_filled: bool) -> RouterLoad:
        load = self._routers.load()
        # The placeholder row of a rank without rows counts 0 but stays in the graph: other ranks wait for its backward.
        return load if is_filled else RouterLoad(*(0 * value for value in load))

    def _set_totals(self, loads: Sequence[RouterLoad]) -> None:
        self._chosen = self._over_ranks(sum(load.chosen_RE for load in loads))
        self._tokens = self._over_ranks(sum(load.tokens for load in loads))

    def _over_ranks(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        if self._session.world_size > 1:
            dist.all_reduce(value)
        return value

    def metrics(self) -> dict[str, float]:
        """The step's loss without its coefficient, and the busiest expert's load over the mean load of its layer."""
        if not self._parts:
            return {}
        if self._chosen is None:
            self._set_totals(self._parts)
        probs_RE = self._over_ranks(sum(part.probs_RE for part in self._parts))
        busiest_R = self._chosen.amax(-1) / self._chosen.mean(-1)
        loss = expert_balance(self._chosen, probs_RE, self._tokens)
        metrics = {"expert_aux_loss": float(loss), "expert_load_max": float(busiest_R.amax())}
        replayed, differing = (float(self._over_ranks(sum(part[field] for part in self._parts))) for field in (3, 4))
        if replayed:
            metrics["expert_replayed"] = replayed / (float(self._tokens) * self._routers.count)
            metrics["expert_differing"] = differing / replayed
        return metrics
