"""The policy of a collector: where it runs, when it is copied, and how a step is handed to it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModule
from torch import nn

from llmrl.collectors.base import CollectorOptions
from llmrl.envs.base import EnvBase
from llmrl.errors import ConfigError

__all__ = ["acting", "placed", "same_device"]

Policy = Callable[[TensorDictBase], TensorDictBase]


def placed(policy: Any, device: torch.device | str | None, who: str) -> Any:
    """The policy itself if all its tensors are on ``device`` already, or it has none; else a copy on the device.

    The tensors are copied once, straight to the device; ones that are shared stay shared.
    Raises  ConfigError for a policy that cannot be copied
    """
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(same_device(tensor.device, device) for tensor in tensors):
        return policy
    moved: dict[int, Any] = {}
    for tensor in tensors:
        value = tensor.detach().to(device, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        moved[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    try:
        return copy.deepcopy(policy, moved)
    except Exception as error:  # whatever the policy's own parts raise
        raise ConfigError(
            f"{who}: a policy whose tensors are not on policy_device={device} is copied there, and this "
            f"{type(policy).__name__} cannot be copied ({type(error).__name__}: {error}); put it there yourself, or "
            "give policy_factory, a function that builds it."
        ) from error


def acting(policy: Any, env: EnvBase, options: CollectorOptions) -> Policy:
    """The policy as a function of a step: compiled if asked for, and with steps moved to its device and back.

    A module without keys whose ``forward`` names observations reads those and writes the env's actions.
    """
    act: Any = policy
    if isinstance(policy, nn.Module) and not hasattr(policy, "in_keys"):
        names = list(inspect.signature(policy.forward).parameters)
        if names and all(name in env.observation_spec for name in names):
            act = TensorDictModule(policy, in_keys=names, out_keys=list(env.action_keys))
    if options.compile_policy:
        act = torch.compile(act, **_arguments(options.compile_policy))
    if options.cudagraph_policy:
        act = CudaGraphModule(act, **_arguments(options.cudagraph_policy))
    device = options.policy_device or options.device
    home = env.device or torch.device("cpu")
    if device is None or same_device(home, device):
        return act
    return lambda td: act(td.to(device)).to(home)


def same_device(one: torch.device | str, other: torch.device | str) -> bool:
    """True if both name one device; "cuda" is the current one."""
    one, other = torch.device(one), torch.device(other)
    if one.type == other.type == "cuda" and None in (one.index, other.index):
        current = torch.cuda.current_device()
        return (current if one.index is None else one.index) == (current if other.index is None else other.index)
    return one == other


def _arguments(given: Any) -> dict[str, Any]:
    return {} if given is True else dict(given)
