"""Rewards given by name run in a process of their own: whatever they do, they are killed at their deadline."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmrl.envs.llm.tasks.sums import sums_reward
from llmrl.envs.llm.transforms import RewardFunction, reward_process
from llmrl.errors import ConfigError, DeadlineError, ShapeError, WorkerError
from tests.support.processes import is_running, wait_until

GRADERS = """
import asyncio, ctypes, os, time

tries = []

def keeps_the_lock(completion):
    if completion == "hang":
        ctypes.PyDLL(None).sleep(1000)  # unlike CDLL it does not let other threads run
    return len(completion)

def swallows(completion):
    while completion == "hang":
        try:
            time.sleep(1000)
        except BaseException:
            pass
    return len(completion)

def crashes(completion):
    return ctypes.string_at(0) if completion == "hang" else len(completion)

def graded(completion, answer, ids, note=None):
    return float(ids.sum()) + (completion == answer) + len(note)

def mixed(completion):
    return {"none": None, "raise": completion, "list": [1.0], "huge": 1e308, "digits": 10**400}[completion]

def flaky(completion):
    tries.append(completion)
    return 1 / (len(tries) - 1)

async def waits(completion):
    await asyncio.sleep(0)
    return os.getpid()

def shares(completions, answer):
    return [completions.count(c) / len(completions) for c in completions]

def where(completion):
    return os.getpid()

def exits(completion):
    os._exit(3)
"""


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """Makes a reward of one of the functions above; it is closed at the end."""
    (tmp_path / "graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, **options):
        made.append(RewardFunction(f"graders:{name}", **options))
        return made[-1]

    yield make
    for transform in made:
        transform.close()
    sys.modules.pop("graders", None)


def score(transform, completions, **columns):
    return transform._score(completions, columns)


@pytest.mark.parametrize("name", ["keeps_the_lock", "swallows"])
def test_one_that_cannot_be_interrupted_is_killed_and_costs_its_rows_alone(reward, name):
    """Regression: either stopped the run for ever."""
    transform = reward(name, deadline_s=0.3)
    values = score(transform, ["ok", "hang", "ok"])
    assert values[0] == 2
    assert all(map(math.isnan, values[1:]))
    assert transform.counters == {"rows": 3, "errors": 0, "timeouts": 2, "none": 0, "retries": 0}
    assert "row 2 of 3 was not done 0.3 s" in transform.first_error
    assert score(transform, ["four"]) == [4]


def test_one_that_ends_its_process_costs_the_rows_that_were_left_and_is_named(reward):
    transform = reward("crashes")
    values = score(transform, ["ok", "hang", "ok"])
    assert [math.isnan(value) for value in values] == [False, True, True]
    assert transform.counters["errors"] == 2
    assert transform.first_error.startswith("RewardFunction 'crashes': its process must run until it is closed")
    assert transform.first_error.endswith("it ended by SIGSEGV. Row 2 of 3 was the first without a value.")
    assert score(transform, ["four"]) == [4]


def test_columns_tensors_and_optional_arguments_arrive(reward):
    columns = {"answer": ["a", "b"], "ids": [torch.arange(3), torch.arange(4)], "note": ["", "xx"]}
    assert score(reward("graded"), ["a", "a"], **columns) == [4.0, 8.0]


def test_values_mean_what_they_mean_in_a_thread(reward):
    transform = reward("mixed")
    values = score(transform, ["none", "huge", "digits"])
    assert values[0] is None, "it does not apply"
    assert all(map(math.isnan, values[1:]))
    assert (transform.counters["none"], transform.counters["errors"]) == (1, 2)
    with pytest.raises(ShapeError, match=r"must be one number.*got a list for row 2 of 2: \[1\.0\]"):
        score(transform, ["none", "list"])
    with pytest.raises(ShapeError, match="got a str for row 1 of 1: 'raise'"):
        score(transform, ["raise"])
    flaky = reward("flaky", retries=1)
    assert score(flaky, ["a"]) == [1.0]
    assert flaky.counters["retries"] == 1


def test_coroutines_and_batched_functions_run_there_too(reward):
    assert len(set(score(reward("waits"), ["a"] * 3))) == 1
    columns = {"completions": ["a", "a", "b"], "answer": ["x"] * 3}
    assert reward("shares", batched=True)._score(columns["completions"], columns) == [2 / 3, 2 / 3, 1 / 3]


def test_the_process_is_warm_shared_by_clones_and_ends_with_close(reward):
    transform = reward("where")
    clone = transform.clone()
    (pid,) = set(score(transform, ["a", "b"]) + score(clone, ["c"]))
    assert pid != os.getpid()
    clone.close()
    assert score(transform, ["d"]) == [pid]
    transform.close()
    assert not Path(f"/proc/{int(pid)}").exists()


def test_functions_of_llmrl_and_objects_stay_in_this_process_unless_told_otherwise(reward, tmp_path):
    own = RewardFunction("llmrl.envs.llm.tasks.sums:sums_reward")
    assert own.fn is sums_reward
    assert type(own._runner) is type(RewardFunction(sums_reward)._runner) is type(RewardFunction(len)._runner)
    assert score(reward("where", process=False), ["a"]) == [os.getpid()]
    import graders

    apart = RewardFunction(graders.where, process=True)
    assert score(apart, ["a"]) != [os.getpid()]
    apart.close()
    with pytest.raises(ConfigError, match=r"process=True the reward must be importable by name.*<lambda>"):
        RewardFunction(lambda completion: 1.0, process=True)


def test_what_cannot_be_sent_is_named(reward):
    with pytest.raises(ConfigError, match="'graded': its arguments must be picklable"):
        score(reward("graded"), ["a"], answer=["a"], ids=[lambda: 0], note=[""])


def test_a_process_that_does_not_start_is_an_error(reward, tmp_path):
    transform = reward("where")
    (tmp_path / "graders.py").write_text("import os; os._exit(5)")
    with pytest.raises(WorkerError, match=r"RewardFunction 'where': its process must run .* exit code 5"):
        score(transform, ["a"])


def test_a_caller_waits_for_a_busy_process_no_longer_than_its_deadline(reward):
    pool = reward("where")._runner._pool
    with contextlib.ExitStack() as busy:
        for _ in range(pool._size):
            busy.enter_context(pool.worker())
        message = "RewardFunction 'where': one of its .* processes must be free within 0.1 s: all were busy"
        with pytest.raises(DeadlineError, match=message), pool.worker(wait_s=0.1):
            pass
    with pool.worker(wait_s=0.1) as worker:
        assert worker.stop.alive


def test_the_process_ends_with_its_owner_also_where_it_keeps_the_lock(tmp_path):
    code = "import ctypes, os\ndef grade(completion):\n    print(os.getpid(), flush=True)\n"
    (tmp_path / "stuck.py").write_text(f"{code}    ctypes.PyDLL(None).sleep(1000)\n")
    settings = json.dumps(["stuck:grade", 1, False])
    script = f"""
from pathlib import Path
from llmrl.concurrency.worker_process import WorkerPool
with WorkerPool(Path({reward_process.__file__!r}), [{settings!r}], size=1, who="test").worker() as worker:
    list(worker.ask([[[["a"], {{}}]], 0], 1000))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as owner:
        worker = int(owner.stdout.readline())
        assert is_running(worker)
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(worker))


RUN_REWARD = "deadline.ThreadRunner('reward').run(deadline.Calls([keeps_the_lock]), timeout_s=0.1)"
RUN_TOOL = "ToolRunner([keeps_the_lock], timeout_s=0.1).run([ToolCall('keeps_the_lock', {}, id='0')])"


@pytest.mark.parametrize("run", [RUN_REWARD, RUN_TOOL])
def test_a_function_in_a_thread_that_keeps_the_lock_ends_the_run_with_its_place(run):
    """Regression: it stopped the run for ever, and nothing said where."""
    script = f"""
import ctypes
from llmrl.concurrency import deadline
from llmrl.tools import ToolCall, ToolRunner
deadline.STUCK_S = 0.5

def keeps_the_lock():
    '''Sleeps.'''
    ctypes.PyDLL(None).sleep(1000)

assert [outcome.value for outcome in deadline.ThreadRunner("reward").run(deadline.Calls([list]), timeout_s=60)] == [[]]
{run}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "in keeps_the_lock" in done.stderr


@pytest.mark.slow
def test_a_process_whose_threads_run_is_never_ended_whatever_is_watched():
    """Regression: the thread that stops the timer could end before the timer was started."""
    script = """
import time
from llmrl.concurrency import deadline
deadline.STUCK_S = 4.0
for number in range(100):
    deadline.watch_lock(number, time.monotonic())
    deadline.watch_lock(number, None)
    time.sleep(0.005)
deadline.watch_lock("forgotten", time.monotonic())
time.sleep(7)
deadline.watch_lock("forgotten", None)
while deadline._fires_at:
    time.sleep(0.01)
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
