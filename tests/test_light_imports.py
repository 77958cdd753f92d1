"""What an import costs and touches, each in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ["torch", "tensordict", "transformers", "datasets", "accelerate", "pyarrow", "numpy", "vllm", "ray"]
EXTRAS = ["vllm", "ray", "gymnasium", "h5py", "mcp", "playwright", "peft", "wandb", "tensorboard", "math_verify"]


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Runs ``code`` and returns which of the large packages it had loaded at its end, even if it left by sys.exit."""
    script = (
        "import atexit, json, sys\n"
        f"atexit.register(lambda: print(json.dumps([n for n in {HEAVY + EXTRAS} if n in sys.modules]), file=sys.stderr))\n"
        + code
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("module", ["llmrl", "llmrl.cli", "llmrl.config", "llmrl.metrics", "llmrl.show", "llmrl.tools"])
def test_the_light_modules_load_nothing_large(module):
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["sft", "--help"],
        ["grpo", "sums_grpo", "no.such.setting=1"],
        ["grpo", "no_such_recipe"],
        ["show", "x"],
    ],
    ids=" ".join,
)
def test_help_and_bad_settings_are_answered_without_torch(arguments):
    assert loaded_by("import sys; from llmrl.cli import main; sys.exit(main(sys.argv[1:]))", *arguments) == set()


def test_every_module_imports_without_any_extra_and_leaves_the_process_as_it_was():
    script = f"""
import importlib, json, multiprocessing, pkgutil, random, sys, warnings
for extra in {EXTRAS}:
    sys.modules[extra] = None  # importing it raises
import torch, tensordict, transformers, datasets, accelerate, numpy

def state():
    return [
        repr(warnings.filters), multiprocessing.get_start_method(allow_none=True), str(torch.get_default_dtype()),
        torch.get_num_threads(), str(tensordict.list_to_stack()), hash(random.getstate()),
        int(torch.random.get_rng_state().sum()), str(numpy.random.get_state()[1][:4]), repr(sys.excepthook),
        transformers.utils.logging.get_verbosity(),
    ]

import llmrl
before = state()
names = [found.name for found in pkgutil.walk_packages(llmrl.__path__, "llmrl.")]
for name in ("chat_templates", "tools", "recipes"):
    package = importlib.import_module(f"llmrl.{{name}}")
    names += [found.name for found in pkgutil.walk_packages(package.__path__, f"llmrl.{{name}}.")]
for name in names:
    importlib.import_module(name)
print(json.dumps([before, state(), names]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after, names = json.loads(done.stdout.splitlines()[-1])
    assert before == after
    assert {"llmrl.cli", "llmrl.errors"} <= set(names)
