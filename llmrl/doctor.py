"""``llmrl doctor``: what this machine has, one line each, and what of llmrl works on it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llmrl.console import make_console

__all__ = ["Check", "checks", "report"]

_BASE = ("tensordict", "transformers", "datasets", "accelerate", "pydantic", "pyarrow")
_EXTRAS = {
    "vllm": ("vllm", "sampling with vLLM"),
    "ray": ("ray", "clusters"),
    "peft": ("lora", "LoRA"),
    "gymnasium": ("gym", "Gym environments"),
    "mcp": ("mcp", "MCP tools"),
    "playwright": ("browser", "the browser tool"),
    "math_verify": ("math", "symbolic answer checks"),
    "wandb": ("wandb", "mirroring to Weights & Biases"),
    "tensorboard": ("tensorboard", "mirroring to TensorBoard"),
}


@dataclass(frozen=True)
class Check:
    """One line: ``ok`` True works, False does not, None is optional and absent."""

    name: str
    ok: bool | None
    detail: str


def checks() -> list[Check]:
    """Looks at everything; imports torch, and no other large package."""
    found = [Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    found += _devices()
    found += [_package(name) for name in _BASE]
    for module, (extra, purpose) in _EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        detail = (
            f"{_version(module)}: {purpose}" if there else f"not installed: pip install 'llmrl[{extra}]' for {purpose}"
        )
        found.append(Check(module, True if there else None, detail))
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    found.append(Check("disk", free > 1, f"{free:.1f} GiB free in {Path.cwd()}"))
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    found.append(Check("hub", True, "offline: only local models and files" if offline else "used for names, not paths"))
    return [*found, _verdict(found)]


def report(*, as_json: bool = False, console: Console | None = None) -> int:
    """Prints the lines; returns 0 if something can be trained here, else 1."""
    found = checks()
    if as_json:
        print(json.dumps([asdict(check) for check in found]))
    else:
        console = console or make_console()
        for check in found:
            sign, style = {True: ("ok", "green"), False: ("NO", "bold red"), None: ("--", "dim")}[check.ok]
            console.print(Text.assemble((f"{sign:<4}", style), f"{check.name:<14}", check.detail), soft_wrap=True)
    return 0 if found[-1].ok else 1


def _devices() -> list[Check]:
    try:
        import torch
    except Exception as error:  # a broken binary raises anything from ImportError to OSError
        return [Check("torch", False, f"cannot be imported: {type(error).__name__}: {error}")]
    found = [Check("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")]
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    for name in names:
        detail = f"{os.cpu_count()} cores"
        try:
            if name.startswith("cuda"):
                properties = torch.cuda.get_device_properties(name)
                detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            weight = torch.ones(8, 8, device=name, requires_grad=True)
            (weight @ weight).sum().backward()
            works = weight.grad is not None and bool((weight.grad == 16).all())
            found.append(Check(name, works, detail if works else f"{detail}: a matrix product gave a wrong gradient"))
        except Exception as error:  # a driver fault: say it and look at the next device
            found.append(Check(name, False, f"{detail}: {type(error).__name__}: {error}"))
    distributed = torch.distributed
    backends = []
    if distributed.is_available():
        backends = [kind for kind in ("gloo", "nccl") if getattr(distributed, f"is_{kind}_available")()]
    found.append(Check("torchrun", bool(backends), f"backends: {', '.join(backends) or 'none'}"))
    return found


def _package(name: str) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, False, "not installed, though llmrl depends on it: pip install llmrl")
    return Check(name, True, _version(name))


def _version(module: str) -> str:
    for name in (module, module.replace("_", "-"), f"{module}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "version unknown"


def _verdict(found: list[Check]) -> Check:
    by_name = {check.name: check.ok for check in found}
    missing = [name for name in ("torch", *_BASE) if not by_name.get(name)]
    devices = [check.name for check in found if check.ok and check.name.partition(":")[0] in ("cpu", "cuda", "mps")]
    if missing or not devices:
        return Check("training", False, f"nothing works without {', '.join(missing) or 'a device'}")
    engines = "transformers" + (" or vllm" if by_name.get("vllm") else "")
    return Check("training", True, f"sft and grpo on {devices[-1]}; completions by {engines}")
