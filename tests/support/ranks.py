"""Ranks of a run, forked from one process that has imported what they need, so that each starts at once.

``torchrun`` starts an interpreter for each rank, which imports torch and Transformers for longer than a tiny run takes.
What the launcher itself does is tested with it (`Workplace.process`).
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from uuid import uuid4

from tests.support.commands import Result

ROOT = Path(__file__).parents[2]  # where tests.support is found
IMPORTED = [f"llmrl.recipes.{name}" for name in ("dpo", "grpo", "ppo", "reward", "sft")]
IMPORTED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "qwen2")]
GRACE_S = 30.0  # for the other ranks to end when one has failed, as torchrun gives them


def run_ranks(module: str, arguments: Sequence[str], *, ranks: int, folder: Path, timeout_s: float) -> Result:
    """``python -m module`` in several ``ranks`` of one run, in ``folder``; where one fails, the others are ended."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has it too: it outlives a rank
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"TORCHELASTIC_RUN_ID": uuid4().hex, "TORCHELASTIC_RESTART_COUNT": 0}
    shared |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with tempfile.TemporaryDirectory() as written:
        task = {"module": module, "arguments": list(arguments), "ranks": ranks, "timeout_s": timeout_s}
        task |= {"folder": str(folder), "written": written}
        task["environment"] = {**os.environ, **{name: str(value) for name, value in shared.items()}}
        server = _server()
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        out, err = (Path(written, name).read_text() for name in ("out", "err"))
    assert answer.strip() not in ("", "late"), f"still running after {timeout_s} s; it wrote:\n{out}\n{err}"
    return Result(int(answer), out, err)


@cache
def _server() -> subprocess.Popen[str]:
    """The process that ranks are forked from; it ends with this one, which closes its input."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tests.support.ranks"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)


def _become_rank(task: dict, rank: int) -> None:
    os.environ.clear()
    os.environ.update(task["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(task["folder"])
    for stream, name in ((0, os.devnull), (1, f"{task['written']}/out"), (2, f"{task['written']}/err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    sys.path.insert(0, task["folder"])
    sys.argv = [task["module"], *task["arguments"]]


def _wait(ranks: list[int], timeout_s: float) -> int | str:
    """The exit code of the first rank that failed, else 0; "late" where they had to be killed."""
    code, deadline = 0, time.monotonic() + timeout_s
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.remove(pid)
            if (ended := os.waitstatus_to_exitcode(status)) and not code:
                code, deadline = ended, min(deadline, time.monotonic() + GRACE_S)
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > deadline:
            code = code or "late"
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return code


def _serve() -> dict:
    """Answers each task with the exit code of its ranks, to the end of input. Returns in a rank, with its task."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        task, ranks = json.loads(line), []
        for file in ("out", "err"):
            Path(task["written"], file).touch()
        for rank in range(task["ranks"]):
            if not (pid := os.fork()):
                _become_rank(task, rank)
                return task
            ranks.append(pid)
        print(_wait(ranks, task["timeout_s"]), flush=True)
    os._exit(0)  # nothing to clean up, and libraries would report what they leave


if __name__ == "__main__":
    task = _serve()
    runpy.run_module(task["module"], run_name="__main__", alter_sys=True)
