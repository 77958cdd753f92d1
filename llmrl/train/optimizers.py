"""AdamW, variants that need less GPU memory, and Muon for matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from llmrl.optional import require
from llmrl.train.settings.machine import OptimSettings


def import_optimizer(optim: OptimSettings) -> Any:
    """Imports the optimizer's package; None for torch's own. Checkpoints with its state can be read only afterwards.

    Raises  MissingDependencyError for adamw_8bit without torchao
    """
    if optim.name != "adamw_8bit":
        return None
    return require("torchao.optim", extra="optim", used_by="optim.name=adamw_8bit")


def make_optimizer(
    parameters: Iterable[Tensor], optim: OptimSettings, device: torch.device, *, matrices: Iterable[Tensor] = ()
) -> torch.optim.Optimizer:
    """The optimizer of the settings; ``matrices`` are those of ``parameters`` that Muon trains, if it is chosen.

    Raises  MissingDependencyError like `import_optimizer`
    """
    package = import_optimizer(optim)
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    if optim.name == "adamw_8bit":
        return package.AdamW8bit(parameters, **options)
    if optim.name == "muon":
        return MuonWithAdamW(parameters, matrices, optim, fused=device.type == "cuda")
    if optim.name == "adamw_offload":
        return OffloadedAdamW(parameters, **options)
    # fused: one kernel per step, while foreach allocates temporaries of the size of the parameters
    return torch.optim.AdamW(parameters, **options, **({"fused": True} if device.type == "cuda" else {"foreach": True}))


def set_options(optimizer: torch.optim.Optimizer, optim: OptimSettings) -> None:
    """Sets what settings may change when a run goes on; the rate is set in each step."""
    for group in optimizer.param_groups:
        group["weight_decay"] = optim.weight_decay
        group |= _muon_options(optim) if "momentum" in group else {"betas": optim.betas}


def _muon_options(optim: OptimSettings) -> dict[str, Any]:
    muon = optim.muon
    share = 1.0 if muon.lr is None else muon.lr / optim.lr
    return {"momentum": muon.momentum, "adjust_lr_fn": muon.adjust_lr_fn, "share_of_lr": share}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        rate_of_group = rate * group.get("share_of_lr", 1.0)
        if isinstance(group["lr"], Tensor):  # torchao's compiled step reads a tensor
            group["lr"].fill_(rate_of_group)
        else:
            group["lr"] = rate_of_group


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for ``matrices``, AdamW for the other ``parameters``; one optimizer, with the state of both.

    A sharded matrix is gathered for its update, one at a time: Muon orthogonalises whole matrices, so the result is
    that of a single process. Its momentum stays sharded.
    """

    def __init__(
        self, parameters: Iterable[Tensor], matrices: Iterable[Tensor], optim: OptimSettings, *, fused: bool
    ) -> None:
        matrices = list(matrices)
        chosen = set(map(id, matrices))
        given: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
        self._muon = torch.optim.Muon(matrices, **given)
        others = [parameter for parameter in parameters if id(parameter) not in chosen]
        self._adamw = torch.optim.AdamW(others, **given, betas=optim.betas, fused=fused, foreach=not fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        set_options(self, optim)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        # Loading a state replaces the groups and the state of this object: its parts must have the current ones.
        self._adamw.state, self._adamw.param_groups = self.state, [g for g in self.param_groups if "betas" in g]
        self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in group else ():
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    self._step_sharded(parameter, group)
                else:
                    self._step_whole(parameter, group, self.state)

    def _step_whole(self, parameter: Tensor, group: dict[str, Any], state: Any) -> None:
        self._muon.state, self._muon.param_groups = state, [group | {"params": [parameter]}]
        self._muon.step()

    def _step_sharded(self, parameter: DTensor, group: dict[str, Any]) -> None:
        whole = nn.Parameter(parameter.full_tensor())
        whole.grad = parameter.grad.full_tensor()
        state, kept = defaultdict(dict), self.state[parameter]
        if kept:
            state[whole]["momentum_buffer"] = kept["momentum_buffer"].full_tensor()
        self._step_whole(whole, group, state)
        parameter.copy_(_as_sharded(whole, parameter))
        kept["momentum_buffer"] = _as_sharded(state[whole]["momentum_buffer"], parameter)


def _as_sharded(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole."""
    everywhere = [Replicate()] * like.device_mesh.ndim
    found = DTensor.from_local(whole.detach(), like.device_mesh, everywhere, run_check=False)
    return found.redistribute(placements=like.placements)


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
