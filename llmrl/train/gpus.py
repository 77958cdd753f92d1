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
    "A10G": (22.0, 70),
    "L4": (22.0, 121),
    "3090": (23.6, 71),
    "4090": (23.6, 165),
    "5090": (31.4, 210),
    "A6000": (47.4, 155),
    "L40": (44.4, 181),
    "L40S": (44.4, 362),
    "A100-40": (39.4, 312),
    "A100": (79.2, 312),
    "RTX-PRO-6000": (94.9, 503),
    "H20": (95.0, 148),
    "H100-PCIe": (79.2, 756),
    "H100-NVL": (93.1, 835),
    "H100": (79.2, 989),
    "GH200": (94.5, 989),
    "H200": (139.8, 989),
    "B200": (178.4, 2250),
    "MI300X": (191.5, 1307),
}
_PER_NODE = 8
_USABLE = 0.985  # share of the nominal size of a GPU


@dataclass(frozen=True)
class GPU:
    """``count`` GPUs of ``bytes`` each, on ``nodes`` machines; ``flops`` is the peak per second of one, ``host`` the
    bytes of the machine's memory for each; None if unknown.
    """

    name: str
    bytes: float
    count: int = 1
    flops: float | None = None
    bfloat16: bool = True
    host: float | None = None
    nodes: int = 1

    def of(self, count: int) -> GPU:
        """``count`` such GPUs; more than eight are on machines of eight."""
        return replace(self, count=count, nodes=-(-count // _PER_NODE))

    @property
    def place(self) -> str:
        """Their number, in words."""
        return (
            f"{self.count}" if self.nodes == 1 else f"{self.count} ({self.nodes} nodes of {self.count // self.nodes})"
        )

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
    """The GPUs of ``--gpu``: a name of the table or gigabytes, a number of GPUs, and a number of machines with as many
    each. More than eight GPUs without a number of machines are on machines of eight.

    Raises  ConfigError

    >>> gpu = parse_gpu("H100:8")
    >>> gpu.name, gpu.count, round(gpu.bytes / 2**30, 1)
    ('H100', 8, 79.2)
    >>> parse_gpu("48").name
    '48 GB'
    >>> gpu = parse_gpu("H100:4x2")
    >>> gpu.count, gpu.nodes
    (8, 2)
    """
    name, _, number = text.partition(":")
    each, times, nodes = number.partition("x")
    known = {label.lower(): label for label in _GPUS}
    size = name.lower().removesuffix("gb").strip()
    counted = all(part.isdecimal() and int(part) > 0 for part in (each or "1", nodes or "1"))
    counted &= bool(each or not number) and bool(nodes or not times)
    label = known.get(name.lower())
    if counted and (label or (size.isdecimal() and int(size) > 0)):
        gpu = _named(label, 1) if label else GPU(f"{int(size)} GB", int(size) * _USABLE * _GIB)
        count = int(each or 1) * int(nodes or 1)
        return replace(gpu, count=count, nodes=int(nodes)) if nodes else gpu.of(count)
    raise ConfigError(
        f"--gpu {text}: must be a name or gigabytes, a number of GPUs, and a number of machines, such as H100:8, 48:2 "
        f"or H100:8x2; names: {', '.join(_GPUS)}.{did_you_mean(name, _GPUS)}"
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
    words += [word.removesuffix("GB") for word in words]  # A100s have two sizes
    parts = {label: label.split("-") for label in _GPUS if all(part in words for part in label.split("-"))}
    label = max(parts, key=lambda label: len(parts[label]), default=None)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", count))  # set by torchrun
    found = _named(label, count, memory) if label else GPU(name, memory, count, None, bfloat16)
    return replace(found, host=host_memory() / local, nodes=max(1, count // local))
