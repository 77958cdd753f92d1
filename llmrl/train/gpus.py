"""GPUs that a run is planned for: those of this machine, or of ``--gpu``."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llmrl.errors import ConfigError, did_you_mean

_GIB = 2**30
_GPUS = {  # GiB that a program can allocate, and dense bfloat16 TFLOP/s; 0: no bfloat16
    "T4": (14.6, 0),
    "V100": (31.7, 0),
    "A10": (22.0, 125),
    "L4": (22.0, 121),
    "3090": (23.6, 71),
    "4090": (23.6, 165),
    "5090": (31.4, 210),
    "A6000": (47.4, 155),
    "L40": (44.4, 181),
    "L40S": (44.4, 362),
    "A100-40": (39.4, 312),
    "A100": (79.2, 312),
    "H100": (79.2, 989),
    "H200": (139.8, 989),
    "B200": (178.4, 2250),
    "MI300X": (191.5, 1307),
}
_USABLE = 0.985  # share of the nominal size of a GPU


@dataclass(frozen=True)
class GPU:
    """``count`` GPUs of ``bytes`` each; ``flops`` is the peak per second of one, None if unknown; ``host`` the bytes of
    the machine's memory for each, None if unknown.
    """

    name: str
    bytes: float
    count: int = 1
    flops: float | None = None
    bfloat16: bool = True
    host: float | None = None

    @property
    def host_bytes(self) -> float:
        """Host memory for each GPU; if unknown, three times that of the GPU, as machines for training have it."""
        return self.host or 3 * self.bytes


def host_memory() -> float:
    """Bytes of this machine's memory, or of what its container may use."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max": no limit
        memory = min(memory, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def parse_gpu(text: str) -> GPU:
    """The GPUs of ``--gpu``: a name of the table or gigabytes, and optionally a number of GPUs.

    Raises  ConfigError

    >>> gpu = parse_gpu("H100:8")
    >>> gpu.name, gpu.count, round(gpu.bytes / 2**30, 1)
    ('H100', 8, 79.2)
    >>> parse_gpu("48").name
    '48 GB'
    """
    name, _, number = text.partition(":")
    known = {label.lower(): label for label in _GPUS}
    size = name.lower().removesuffix("gb").strip()
    counted = not number or (number.isdecimal() and int(number) > 0)
    if counted and name.lower() in known:
        return _named(known[name.lower()], int(number or 1))
    if counted and size.isdecimal() and int(size) > 0:
        return GPU(f"{int(size)} GB", int(size) * _USABLE * _GIB, int(number or 1))
    raise ConfigError(
        f"--gpu {text}: must be a name or gigabytes, and a number of GPUs, such as H100:8 or 48:2; names: "
        f"{', '.join(_GPUS)}.{did_you_mean(name, _GPUS)}"
    )


def _named(label: str, count: int, memory: float | None = None) -> GPU:
    size, teraflops = _GPUS[label]
    return GPU(label, memory or size * _GIB, count, teraflops * 1e12 or None, teraflops > 0)


def find_gpu(device: torch.device, count: int = 1) -> GPU | None:
    """``count`` GPUs like ``device``; None for a CPU."""
    if device.type != "cuda":
        return None
    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    words = name.replace("-", " ").split()
    labels = [label for label in _GPUS if label.partition("-")[0] in words]
    label = min(labels, key=lambda label: abs(_GPUS[label][0] * _GIB - memory), default=None)  # A100s have two sizes
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    host = host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", count))
    found = _named(label, count, memory) if label else GPU(name, memory, count, None, bfloat16)
    return replace(found, host=host)
