"""The packages that imports and commands load, each in a fresh process."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "tensordict", "transformers", "datasets", "accelerate", "pyarrow", "numpy", "vllm", "ray"]
EXTRAS = ["vllm", "ray", "gymnasium", "h5py", "mcp", "playwright", "peft", "wandb", "tensorboard", "math_verify"]


def run(code: str, *arguments: str) -> tuple[set[str], int]:
    """The large packages that ``code`` had loaded at its end, even if it left by sys.exit, and its exit code."""
    report = f"print(json.dumps([name for name in {HEAVY + EXTRAS} if name in sys.modules]), file=sys.stderr)"
    script = f"import atexit, json, sys\natexit.register(lambda: {report})\n{code}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    return set(json.loads(done.stderr.splitlines()[-1])), done.returncode


@pytest.mark.parametrize(
    "module", ["llmrl", "llmrl.run.cli", "llmrl.run.config", "llmrl.run.metrics", "llmrl.run.show", "llmrl.tools"]
)
def test_the_light_modules_load_nothing_large(module):
    assert run(f"import {module}") == (set(), 0)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["sft", "--help"], 0),
        (["grpo", "--defaults"], 0),
        (["grpo", "sums_grpo", "no.such.setting=1"], 2),
        (["sft", "sums_sft", "stepz=1"], 2),
        (["grpo", "no_such_recipe"], 2),
        (["show", "no_such_run"], 2),
    ],
)
def test_help_and_bad_settings_are_answered_without_torch(arguments, code):
    loaded = run("import sys; from llmrl.run.cli import main; sys.exit(main(sys.argv[1:]))", *arguments)
    assert loaded == (set(), code)


@pytest.mark.parametrize("command", ["sft", "dpo", "reward", "grpo"])
def test_a_recipe_that_is_run_as_a_module_reports_bad_settings_without_torch(command):
    script = f"import runpy; runpy.run_module('llmrl.recipes.{command}', run_name='__main__')"
    assert run(script, "stepz=1") == (set(), 2)


def test_every_module_imports_without_any_extra_and_leaves_the_process_as_it_was():
    script = f"""
import importlib, json, multiprocessing, pkgutil, random, sys, warnings
for extra in {EXTRAS}:
    sys.modules[extra] = None  # importing it raises
import torch, tensordict, transformers, datasets, accelerate, numpy, rich.console  # what these do is theirs

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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after, names = json.loads(done.stdout.splitlines()[-1])
    assert before == after
    assert {"llmrl.run.cli", "llmrl.errors"} <= set(names)
