"""AdamW, variants that need less GPU memory, and Muon for matrices."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from llmrl.optional import require
from llmrl.train.settings.machine import OptimSettings
from llmrl.weight_update.buffers import pin

_LARGE = 10**7  # numbers


def import_optimizer(optim: OptimSettings) -> Any:
    """Imports the optimizer's package; None for torch's own. Checkpoints with its state can be read only afterwards.

    Raises  MissingDependencyError for adamw_8bit without torchao
    """
    if optim.name != "adamw_8bit":
        return None
    return require("torchao.optim", extra="optim", used_by="optim.name=adamw_8bit")


def make_optimizer(
    parameters: Iterable[Tensor],
    optim: OptimSettings,
    device: torch.device,
    *,
    matrices: Iterable[Tensor] = (),
    offloads: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of the settings; ``matrices`` are those of ``parameters`` that Muon trains, if it is chosen.
    ``offloads``: parameters on a GPU during passes are in host memory, where they are updated.

    Raises  MissingDependencyError like `import_optimizer`
    """
    package = import_optimizer(optim)
    parameters = list(parameters)
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    if optim.name == "adamw_8bit":
        return package.AdamW8bit(parameters, **options)
    if optim.name == "muon":
        return MuonWithAdamW(parameters, matrices, optim, _one_pass(parameters, device))
    if optim.name == "adamw_offload":
        return OffloadedAdamW(parameters, **options)
    if offloads:
        return HostAdamW(parameters, **options)
    return torch.optim.AdamW(parameters, **options, **_one_pass(parameters, device))


def _one_pass(parameters: Iterable[Tensor], device: torch.device) -> dict[str, bool]:
    """Fused: one pass over weights, gradients and moments, where foreach makes temporaries of the parameters' size.

    On a CPU only where these count: the last digits differ, and with them the curve of a tiny model's seed.
    """
    large = sum(parameter.numel() for parameter in parameters) >= _LARGE
    return {"fused": True} if device.type == "cuda" or (device.type == "cpu" and large) else {"foreach": True}


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
        self, parameters: Iterable[Tensor], matrices: Iterable[Tensor], optim: OptimSettings, one_pass: dict[str, bool]
    ) -> None:
        matrices = list(matrices)
        chosen = set(map(id, matrices))
        given: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
        self._muon = torch.optim.Muon(matrices, **given)
        others = [parameter for parameter in parameters if id(parameter) not in chosen]
        self._adamw = torch.optim.AdamW(others, **given, betas=optim.betas, **one_pass)
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


class HostAdamW(torch.optim.AdamW):
    """AdamW for parameters in host memory: one fused pass, on all cores of this process."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:  # a checkpoint may have brought others
            group |= {"fused": True, "foreach": False}
        with _all_cores():
            super().step()


@contextmanager
def _all_cores() -> Iterator[None]:
    """Context with this rank's share of the machine's cores, if it has one thread only: torchrun sets OMP_NUM_THREADS=1
    for several ranks, which then compute on a GPU and leave the cores idle.
    """
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if before == 1:
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


_CHUNK, _SLOTS = 2**25, 3  # numbers of a moment that are on the device at once; chunks on their way in, in use, out
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments in host memory, of which a few chunks at a time are on the device.

    The update of a chunk runs while the next one is copied to the device and the one before is copied back.
    """

    _moments: Tensor | None = None  # float32[2, numbers of all parameters on this rank], pinned if there is a GPU

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self._hold()
        pipeline, begin = None, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                place, begin = begin, begin + _local(parameter).numel()
                if parameter.grad is None:
                    continue
                pipeline = pipeline or _Pipeline(self._moments, parameter.device)
                values, gradient = _local(parameter), _local(parameter.grad).reshape(-1)
                flat, state = values.reshape(-1), self.state[parameter]
                for first in range(0, flat.numel(), _CHUNK):
                    part = slice(first, min(first + _CHUNK, flat.numel()))
                    moments = pipeline.fetch(place + part.start, place + part.stop)
                    _update(group, flat[part], gradient[part], moments, float(state["step"]))
                    pipeline.give_back()
                if not values.is_contiguous():  # `flat` is a copy
                    values.copy_(flat.view_as(values))
                state["step"] += 1
        if pipeline is not None:
            pipeline.finish()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; its moments do not pass through the device, which may lack the room for them."""
        given = state_dict["state"]
        others = {key: {n: value for n, value in each.items() if n not in _MOMENTS} for key, each in given.items()}
        super().load_state_dict(state_dict | {"state": others})
        self._hold()
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(keys, parameters, strict=True):
            for name in _MOMENTS:  # those that are given may be those that are here, if a checkpoint was read in place
                held = _local(self.state[parameter][name])
                held.copy_(_local(given[key][name])) if name in given.get(key, ()) else held.zero_()

    def _hold(self) -> None:
        """Makes the moments: views of one tensor, which is pinned as a whole, because torch would round each up to a
        power of two.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self._moments is None:
            assert all(parameter.dtype == torch.float32 for parameter in parameters), "trained weights are float32"
            self._moments = torch.zeros(2, sum(_local(parameter).numel() for parameter in parameters))
            on_gpu = parameters and parameters[0].is_cuda and torch.cuda.is_available()
            if on_gpu and not pin(self, self._moments):
                size = f"{self._moments.nbytes / 2**30:.1f} GiB"
                warnings.warn(
                    f"optim.name=adamw_offload: {size} of host memory cannot be pinned: copies are slow", stacklevel=4
                )
        begin = 0
        for parameter in parameters:
            state, local = self.state[parameter], _local(parameter)
            state["step"] = state.get("step", torch.zeros(())).cpu()  # read in each step, so never from a GPU
            for row, name in enumerate(_MOMENTS):
                if name not in state:
                    view = self._moments[row, begin : begin + local.numel()].view(local.shape)
                    state[name] = _as_parts_of(parameter, view)
            begin += local.numel()


class _Pipeline:
    """Copies chunks of ``moments`` to ``device`` and back, each direction in a stream of its own."""

    def __init__(self, moments: Tensor, device: torch.device):
        self._moments, self._count = moments, 0
        width = min(_CHUNK, moments.shape[1])
        self._slots = [torch.empty(2, width, device=device) for _ in range(_SLOTS)]
        self._streams = None
        if device.type == "cuda" and torch.cuda.is_available():
            self._main, self._in, self._out = torch.cuda.current_stream(device), *_streams(device)
            self._streams = self._in, self._out
            self._left = [torch.cuda.Event() for _ in self._slots]  # a slot's content is in host memory again
            self._in.wait_stream(self._main)  # the slots' memory may still be in use there

    def fetch(self, begin: int, end: int) -> Tensor:
        """Numbers ``begin`` to ``end`` of both moments, on the device, for the current stream."""
        slot = self._count % _SLOTS
        self._place, self._here = slice(begin, end), self._slots[slot][:, : end - begin]
        if self._streams and self._count >= _SLOTS:
            self._in.wait_event(self._left[slot])
        with torch.cuda.stream(self._in) if self._streams else nullcontext():
            self._copy(self._moments[:, self._place], self._here)
        if self._streams:
            self._main.wait_stream(self._in)
        return self._here

    def give_back(self) -> None:
        """Copies what `fetch` returned back, after the work that the current stream has so far."""
        if self._streams:
            self._out.wait_stream(self._main)
        with torch.cuda.stream(self._out) if self._streams else nullcontext():
            self._copy(self._here, self._moments[:, self._place])
        if self._streams:
            self._left[self._count % _SLOTS].record(self._out)
        self._count += 1

    def finish(self) -> None:
        """Waits until all moments are in host memory: a checkpoint may read them, and the slots are freed."""
        if self._streams:
            self._out.synchronize()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        for row in range(2):  # each is contiguous, so that the copy is one transfer
            target[row].copy_(source[row], non_blocking=True)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _update(group: dict[str, Any], weights: Tensor, gradient: Tensor, moments: Tensor, steps: float) -> None:
    """AdamW's fused update of flat ``weights``, which have had ``steps`` updates."""
    options = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    step = torch.full((), steps, device=weights.device)
    state = [moments[0]], [moments[1]], [], [step]
    adamw([weights], [gradient], *state, fused=True, amsgrad=False, maximize=False, **options)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, by reference."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_parts_of(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor in host memory, sharded as ``parameter`` is, of which ``local`` is this rank's part."""
    if not isinstance(parameter, DTensor):
        return local
    whole = torch.empty_like(parameter, device="cpu")  # `DTensor.from_local` would move the part to the mesh's device
    whole.to_local().set_(local)
    return whole
