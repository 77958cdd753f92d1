"""AdamW, and variants that need less GPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llmrl.optional import require
from llmrl.train.settings import OptimSettings


def import_optimizer(optim: OptimSettings) -> Any:
    """Imports the optimizer's package; None for torch's own. Checkpoints with its state can be read only afterwards.

    Raises  MissingDependencyError for adamw_8bit without torchao
    """
    if optim.name != "adamw_8bit":
        return None
    return require("torchao.optim", extra="optim", used_by="optim.name=adamw_8bit")


def make_optimizer(parameters: Iterable[Tensor], optim: OptimSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the settings. Raises MissingDependencyError like `import_optimizer`."""
    package = import_optimizer(optim)
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    if optim.name == "adamw_8bit":
        return package.AdamW8bit(parameters, **options)
    if optim.name == "adamw_offload":
        return OffloadedAdamW(parameters, **options)
    # fused: one kernel per step, while foreach allocates temporaries of the size of the parameters
    return torch.optim.AdamW(parameters, **options, **({"fused": True} if device.type == "cuda" else {"foreach": True}))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's compiled step reads a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments in host memory, which are moved to the device for one parameter at a time."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    # AdamW updates parameters independently, so one at a time gives the same result. The base class's
                    # `step` reads self.param_groups.
                    state = self.state[parameter]
                    _move(state, parameter.device)
                    self.param_groups = [group | {"params": [parameter]}]
                    super().step()
                    _move(state, torch.device("cpu"))
        finally:
            self.param_groups = groups


def _move(state: dict[str, Any], device: torch.device) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        if name in state:
            state[name] = state[name].to(device)
