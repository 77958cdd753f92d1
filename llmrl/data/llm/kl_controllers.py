"""Weights of a KL penalty, constant or adapted to the measured divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmrl.errors import ConfigError


class ConstantKLController:
    """A constant weight.

    Writes  ``coef`` and, with ``model``, its existing attribute ``kl_coef``
    Raises  ConfigError without a weight, or for a model without ``kl_coef``

    >>> controller = ConstantKLController(kl_coef=0.1)
    >>> controller.update([-0.3, -0.2])
    >>> controller.coef
    0.1
    """

    def __init__(self, *, kl_coef: float | None = None, model: Any | None = None):
        if model is not None and not hasattr(model, "kl_coef"):
            raise ConfigError(
                f"{type(self).__name__}: the model must own the weight: {type(model).__name__} has no attribute "
                "'kl_coef'."
            )
        if kl_coef is None and model is None:
            raise ConfigError(f"{type(self).__name__}: give kl_coef, or a model that has it.")
        self.model = model
        self._set(model.kl_coef if kl_coef is None else kl_coef)

    def update(self, values: Tensor | Sequence[float]) -> None:
        """Keeps the weight."""

    def _set(self, coef: float) -> None:
        self.coef = float(coef)
        if self.model is not None:
            self.model.kl_coef = self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._set(state["coef"])


class AdaptiveKLController(ConstantKLController):
    """A weight that grows while the divergence is above ``target`` and shrinks while it is below.

    Reads   in `update`: the KL rewards of a batch, -coef * KL each
    Writes  ``coef`` and, with ``model``, its existing attribute ``kl_coef``
    Raises  ConfigError unless init_kl_coef, target and horizon are above 0
    Source  Ziegler et al. 2019 (arXiv:1909.08593), section 2.2

    With KL the batch's mean and n its size, coef *= 1 + n / horizon * clip(KL / target - 1, -0.2, 0.2).

    >>> controller = AdaptiveKLController(init_kl_coef=0.5, target=2.0, horizon=100)
    >>> controller.update([-2.0] * 10)  # a KL of 4: twice the target, counted as 1.2 times
    >>> controller.coef
    0.51
    """

    def __init__(self, *, init_kl_coef: float, target: float, horizon: int, model: Any | None = None):
        for name, value in (("init_kl_coef", init_kl_coef), ("target", target), ("horizon", horizon)):
            if not value > 0:
                raise ConfigError(f"AdaptiveKLController: {name} must be above 0: got {value}.")
        self.target = target
        self.horizon = horizon
        super().__init__(kl_coef=init_kl_coef, model=model)

    def update(self, values: Tensor | Sequence[float]) -> None:
        """Moves the weight by the KL rewards of a batch; an empty or non-finite one is an error."""
        values = torch.as_tensor(values, dtype=torch.float64)
        if not values.numel() or not bool(values.isfinite().all()):
            raise ConfigError(
                f"AdaptiveKLController.update: needs finite KL rewards: got {values.numel()} values, "
                f"{int((~values.isfinite()).sum())} of them not finite."
            )
        kl = -float(values.mean()) / self.coef  # a KL reward is -coef * KL
        # Clipped, so that one batch with an extreme divergence cannot move the weight far.
        error = min(0.2, max(-0.2, kl / self.target - 1))
        self._set(self.coef * (1 + error * values.numel() / self.horizon))
