"""What is known of a child process that failed: its last lines, how it ended."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from llmrl.concurrency.process_monitor import LogTail, process_state
from llmrl.modules.llm.engines.vllm.compat import NOISE
from tests.support.processes import wait_until

PATIENCE_S = 60.0
CHILD = """
import os, sys
print("ready", flush=True)
for line in range(40):
    print(f"line {line}", file=sys.stderr, flush=True)
sys.stdin.read(1)
os.abort()
"""


async def logged(work, noise=None):
    """The lines that a log keeps of what ``work`` starts or writes."""
    log = LogTail(asyncio.get_running_loop(), noise)
    with log.inherited():
        process = work()
    if process is not None:
        await asyncio.to_thread(process.communicate, b"x", PATIENCE_S)
    log.drain()
    text = log.lines()
    log.close()
    return text


def test_the_last_lines_of_a_dead_process_are_kept_and_passed_on(capfd):
    def start():
        return subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", CHILD], stdin=subprocess.PIPE)

    before = pipes()
    text = asyncio.run(logged(start))
    assert "Fatal Python error: Aborted" in text
    assert "line 39" in text
    assert "line 5\n" not in text  # only the last lines are kept
    out, err = capfd.readouterr()
    assert out == "ready\n"
    assert "line 0\n" in err
    assert "Aborted" in err
    wait_until(lambda: pipes() <= before)


def pipes() -> set[str]:
    """The pipes that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith("pipe:")}


@pytest.mark.parametrize(
    ("noise", "kept"), [(None, ["before", "Triton", "after"]), (NOISE, ["before", "after"])], ids=["all", "noise"]
)
def test_output_of_this_process_is_passed_on_too_but_for_noise(capfd, noise, kept):
    def write():
        os.write(2, b"before\nTriton is installed, but doesn't include CPU backend. Disabling Triton.\nafter\n")

    text = asyncio.run(logged(write, noise))
    os.write(2, b"afterwards\n")
    assert [line.split()[0] for line in text.splitlines()[1:]] == kept
    assert [line.split()[0] for line in capfd.readouterr().err.splitlines()] == [*kept, "afterwards"]


def test_the_state_of_a_process_is_named():
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=[600.0])
    process.start()
    assert process_state(process) == "runs"
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(process) == "is stopped")
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    assert process_state(process) == "was killed by SIGKILL"
    process = context.Process(target=sys.exit, args=[3])
    process.start()
    process.join(PATIENCE_S)
    assert process_state(process) == "ended with exit code 3"
