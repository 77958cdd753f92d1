"""Coroutines of users: one event loop for rewards, users and tools, whatever object runs them; and threads that end."""

import asyncio
import threading
import time

import pytest

from llmrl.concurrency.daemon_threads import DaemonThreads
from llmrl.concurrency.deadline import AsyncRunner, Calls
from llmrl.envs.llm.transforms import RewardFunction, UserTurn
from llmrl.errors import LLMRLError
from llmrl.tools.function import FunctionTool


def outcomes_of(runner, coroutine, timeout_s=10.0):
    return [(outcome.done, outcome.error) for outcome in runner.run(Calls([coroutine] * 2), timeout_s=timeout_s)]


def test_rewards_users_tools_and_their_clones_share_a_semaphore():
    limit = asyncio.Semaphore(1)

    async def judged(completion: str = "", answer: str = "") -> str:
        """Judges."""
        async with limit:
            await asyncio.sleep(0.005)
        return "1"

    reward, user, tool = RewardFunction(judged), UserTurn(judged), FunctionTool(judged)
    runners = [part._runner for part in (reward, reward.clone(), user, user.clone())]
    for runner in (*runners, AsyncRunner("other", concurrency=2)):
        assert outcomes_of(runner, judged) == [(True, None)] * 2
    answers = []
    call = lambda: answers.append(tool.call({}, conversation=0, deadline=time.monotonic() + 10))  # noqa: E731
    threads = [threading.Thread(target=call) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert answers == ["1", "1"]

    async def late():
        time.sleep(0.3)  # blocks the loop, which is kept because it answers afterwards
        await asyncio.sleep(30)

    assert outcomes_of(runners[0], late, timeout_s=0.1) == [(False, None)] * 2
    assert outcomes_of(runners[2], judged) == [(True, None)] * 2


def test_closing_one_runner_cancels_its_coroutines_and_no_others():
    started, ended, cancelled = threading.Semaphore(0), [], threading.Event()

    async def waits():
        started.release()
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def run(runner):
        try:
            ended.append(outcomes_of(runner, waits))
        except LLMRLError:
            ended.append("closed")

    runners = [AsyncRunner(name, concurrency=1) for name in ("first", "second")]
    threads = [threading.Thread(target=run, args=[runner]) for runner in runners]
    for thread in threads:
        thread.start()
        started.acquire()
    runners[0].close()
    assert cancelled.wait(10)
    [thread.join() for thread in threads]
    assert ended == ["closed", [(True, None)] * 2]


def test_a_runner_that_is_closed_while_a_coroutine_is_handed_over_cancels_it(monkeypatch):
    runner, hand_over = AsyncRunner("closed", concurrency=1), asyncio.run_coroutine_threadsafe

    def closed_meanwhile(coroutine, loop):
        future = hand_over(coroutine, loop)
        runner.close()
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", closed_meanwhile)
    with pytest.raises(LLMRLError, match="closed"):
        outcomes_of(runner, lambda: asyncio.sleep(5))


def test_closing_daemon_threads_waits_for_calls_that_end_and_not_for_those_that_hang():
    threads, begun, release = DaemonThreads("ends-or-hangs"), threading.Barrier(3), threading.Event()
    threads.start(lambda: (begun.wait(10), time.sleep(0.1)))
    threads.start(lambda: (begun.wait(10), release.wait(60)))
    begun.wait(10)
    threads.close(0.5)
    alive = [thread for thread in threading.enumerate() if thread.name == "ends-or-hangs"]
    assert len(alive) == 1, "the one that hangs"
    release.set()
    alive[0].join(10)
    assert not alive[0].is_alive()
