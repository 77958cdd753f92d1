"""Downloads the packages for a machine with Python 3.12, torch 2.11 (CUDA 13) and transformers, but no network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["bundle"]

MOST = 64 * 2**20  # bytes of the folder
WHOLE = (
    "pydantic>=2.10",
    "pytest>=8.3",
    "hypothesis>=6.100",
    "rich>=13.7",
    "importlib-metadata",
)  # with what they need
ALONE = (
    "tensordict>=0.14.3,<0.15",
    "accelerate>=1.10",
    "peft>=0.21",
    "pyarrow>=18",
    "orjson>=3.10",
    "cloudpickle",
    "pyvers",
)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def bundle(folder: Path) -> int:
    """Fills ``folder`` with wheels; 1 if pip fails, the folder has other files, or it gets larger than 64 MiB."""
    if folder.exists() and any(folder.iterdir()):
        print(f"--bundle {folder}: must be empty or new, so that it has one version of each package", file=sys.stderr)
        return 1
    target = ["--dest", str(folder), "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    target += [part for platform in PLATFORMS for part in ("--platform", platform)]
    for packages, options in ((WHOLE, []), (ALONE, ["--no-deps"])):
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *target, *packages]
        if code := subprocess.run(command).returncode:
            return code
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    total = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:7.2f} MiB  {wheel.name}")
    print(f"{total / 2**20:7.2f} MiB  in all; on the machine, in this checkout:")
    print(f"  python3 -m pip install --no-index --no-deps {folder}/*.whl && scripts/gpu_check")
    if total > MOST:
        print(f"--bundle: at most {MOST / 2**20:.0f} MiB can be carried: leave out a package", file=sys.stderr)
    return int(total > MOST)
