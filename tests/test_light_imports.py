"""The packages that imports and commands load, each in a fresh process."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from llmrl import hub
from llmrl.errors import DataError

HEAVY = ["torch", "tensordict", "transformers", "datasets", "accelerate", "pyarrow", "numpy", "vllm", "ray"]
MAIN = "import sys; from llmrl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
EXTRAS = ["vllm", "ray", "gymnasium", "h5py", "mcp", "playwright", "peft", "wandb", "tensorboard", "math_verify"]


def run(code: str, *arguments: str, words: tuple[str, ...] = (), **place) -> tuple[set[str], int]:
    """The large packages that ``code`` had loaded at its end, even if it left by sys.exit, and its exit code."""
    report = f"print(json.dumps([name for name in {HEAVY + EXTRAS} if sys.modules.get(name)]), file=sys.stderr)"
    script = f"import atexit, json, sys\natexit.register(lambda: {report})\n{code}"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **place)
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    return set(json.loads(done.stderr.splitlines()[-1])), done.returncode


@pytest.mark.parametrize(
    "module",
    ["llmrl", "llmrl.commands.cli", "llmrl.run.config", "llmrl.run.metrics", "llmrl.commands.show", "llmrl.tools"],
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
    assert run(MAIN, *arguments) == (set(), code)


GRPO = ("grpo", "model=small", "env.dataset=asked.jsonl", "env.reward=math:isfinite")
LOST = "must be the folder of a model"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sft", "model=smal", "data.path=asked.jsonl"), ("model smal: " + LOST, "Did you mean 'small'?")),
        (("sft", "model=./smal", "data.path=asked.jsonl"), (LOST, "Did you mean 'small'?")),
        (("dpo", "model=~/smal", "data.path=sums"), (LOST,)),
        (("reward", "model=org/smal", "data.path=sums"), (LOST, "HF_HUB_OFFLINE is set")),
        (("chat", "smal"), (LOST, "Did you mean 'small'?")),
        (("template", "qwem"), (LOST, "Registered templates: chatml_format, ")),
        (("launch", *GRPO, "model=smal", "rollout.engine=vllm", "rollout.gpus=1"), (LOST,)),
        (("sft", "model=asked.jsonl", "data.path=sums"), ("it is a file",)),
        (("sft", "model=above", "data.path=sums"), ("must hold config.json", "did you mean above/small?")),
        ((*GRPO, "env.rewards=[{reward_model: {model: smal}}]", "env.reward=null"), ("reward_model.model smal",)),
        ((*GRPO, "env.dataset=ask.jsonl"), ("Did you mean 'asked.jsonl'?",)),
        ((*GRPO, "env.dataset=org/asked"), ("env.dataset org/asked: must be a dataset's file or folder",)),
        ((*GRPO, "env.prompt_column=questoin"), ("'questoin' is missing in asked.jsonl:1", "'question'?")),
        (("dpo", "model=small", "data.path=asked.jsonl"), ("'chosen' is missing in asked.jsonl:1",)),
        (("sft", "model=small", "data.path=odd.csv"), ("odd.csv, row 1 must have a prompt column", "'prompt'?")),
        ((*GRPO, "lora={}"), ("lora: needs the package 'peft'", "llmrl[lora]")),
        ((*GRPO, "log=[wandb]"), ("log=wandb: needs the package 'wandb'",)),
        ((*GRPO, "rollout.engine=vllm"), ("rollout.engine=vllm: needs the package 'vllm'",)),
    ],
)
def test_what_is_not_there_is_said_without_torch_and_leaves_no_run(tmp_path, arguments, words):
    for folder in ("small", "above/small"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
    (tmp_path / "asked.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    (tmp_path / "odd.csv").write_text("promt,completion\n2 + 2?,4\n")
    hide = f"sys.modules |= dict.fromkeys({EXTRAS})\n" if "needs the package" in words[0] else ""
    assert run(f"{hide}{MAIN}", *arguments, words=words, cwd=tmp_path) == (set(), 3)
    assert not (tmp_path / "runs").exists()


def test_the_hub_is_asked_once_and_what_is_in_its_cache_is_used_without_it(tmp_path, monkeypatch):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(200 if "/known/" in self.path else 401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    asked = []
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    assert hub.check_repository("known/model", setting="model") == ""
    with pytest.raises(DataError, match="has no public dataset of this name"):
        hub.check_repository("lost/rows", setting="data.path", kind="dataset")
    assert asked == ["/known/model/resolve/main/config.json", "/datasets/lost/rows/resolve/main/README.md"]
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"does not answer \(Connection refused\)"):
        hub.check_repository("known/model", setting="model")
    (folder := tmp_path / "hub/models--known--model/snapshots/1").mkdir(parents=True)
    (folder / "config.json").touch()
    assert "known/model is read from the hub's cache" in hub.check_repository("known/model", setting="model")
    assert hub.os.environ["HF_HUB_OFFLINE"] == "1"


ON_DEMAND = [  # each in a process that imported nothing else of llmrl
    "import torch; from llmrl.data import Bounded; assert len(torch.stack([Bounded(0, 1), Bounded(0, 2)]).shape)",
    "import llmrl.data; assert llmrl.data.llm.History and llmrl.data.replay_buffers.samplers.RandomSampler",
    "from llmrl.data import *; from llmrl.envs import *; assert ReplayBuffer and GymEnv and CompositeSpec",
    "import pickle, llmrl; assert pickle.loads(pickle.dumps(llmrl.GRPOLoss)) is llmrl.objectives.llm.GRPOLoss",
]


@pytest.mark.parametrize("command", ["sft", "dpo", "reward", "grpo"])
def test_a_recipe_that_is_run_as_a_module_reports_bad_settings_without_torch(command):
    script = f"import runpy; runpy.run_module('llmrl.recipes.{command}', run_name='__main__')"
    assert run(script, "stepz=1") == (set(), 2)


def test_every_module_imports_without_any_extra_and_leaves_the_process_as_it_was():
    """Regression: torch.stack of specs needed a module that nothing had imported."""
    script = f"""
import importlib, json, multiprocessing, os, pkgutil, random, sys, warnings
for extra in {EXTRAS}:
    sys.modules[extra] = None  # importing it raises
import torch, tensordict, transformers, datasets, accelerate, numpy, rich.console  # what these do is theirs
assert "llmrl" not in sys.modules
for code in {ON_DEMAND}:
    if not (child := os.fork()):
        exec(code, {{}})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code

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
    assert {"llmrl.commands.cli", "llmrl.errors"} <= set(names)
