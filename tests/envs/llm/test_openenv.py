"""Environments of OpenEnv: real servers, by a Python that has the package (scripts/foreign_clients installs it)."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm.tasks.openenv import OpenEnvEnv, OpenEnvServer
from llmrl.errors import ConfigError, DeadlineError
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.train.settings import EnvSettings
from llmrl.train.tasks import Task, training_rows
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("LLMRL_CLIENTS", ROOT / "build" / "clients"), "openenv", "bin", "python")
PROGRAM = ROOT / "scripts" / "clients" / "openenv_servers.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="openenv is not installed: scripts/foreign_clients installs it"),
]


@pytest.fixture(scope="module")
def server():
    """The address of a server with 64 sessions of each environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, PROGRAM, str(port), "64"])
    try:
        OpenEnvServer(f"http://127.0.0.1:{port}/guess", None, start_timeout_s=300).close()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def converse(url, policy, *, rows=None, max_turns=4, last=True, **options):
    """The last turn of each conversation with an environment, one for each row, and the task's first error."""
    settings = EnvSettings(name="openenv", options={"url": url, **options}, max_turns=max_turns)
    task = Task(settings, tiny_tokenizer())
    rows = training_rows(settings) if rows is None else rows
    env = task.make_env(rows, num_envs=len(rows), shuffle=False)
    try:
        policy = policy if isinstance(policy, ScriptedPolicy) else ScriptedPolicy(policy)
        data = LLMCollector(env, policy=policy, yield_only_last_steps=last).rollout()
        errors = [leaf.first_error for leaf in env.transform.leaves() if getattr(leaf, "first_error", None)]
        return data, (errors or [None])[0]
    finally:
        task.close()


def rewards(data):
    return [round(reward, 4) for reward in data["next", "reward"].flatten().tolist()]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(data, row=0):
    return [(message["role"], message["content"]) for message in data["history"].prompt.to_chats()[row]]


def guess(text):
    """An action of the policy's text."""
    if not text.isdecimal():
        raise ValueError("A number, please.")
    return {"guess": int(text)}


def say(text):
    return {"say": text}


# --- what an episode is


def test_the_tools_of_an_mcp_environment_are_called_with_their_schemas_and_its_reward_is_the_answers(server):
    replies = [call("echo", message="ä 你好"), call("echo", mess=1), call("submit", number=1)]
    data, error = converse(f"{server}/echo", replies, items=1, prompt="Echo, then submit.", max_turns=9)
    assert error is None
    messages = said(data)
    assert messages[0] == ("user", "Echo, then submit.")  # its reset says nothing
    assert messages[2] == ("tool", "ä 你好")
    assert messages[4][1].startswith("Error: 2 validation errors")  # which the model reads, and the episode goes on
    assert rewards(data) == [1.0]
    assert data["next", "terminated"].item()
    assert not data["next", "truncated"].item()
    (schema, _) = data["tools"].tolist()[0] if hasattr(data["tools"], "tolist") else data["tools"][0]
    assert schema["function"]["parameters"]["required"] == ["message"]


def test_the_tasks_of_a_split_start_the_episodes_and_rewards_are_summed(server):
    url, tasks = f"{server}/counter", {"tasks": {"split": "train"}}
    data, _ = converse(url, [call("count_by", by=1)], **tasks)
    firsts = [said(data, row)[0][1] for row in range(3)]
    assert firsts == [f"Count.\n\nThe target is {target}." for target in (2, 3, 4)]
    # Three of the four turns run calls: 2 of 2, 3 of 3, 3 of 4 steps.
    assert rewards(data) == [1.0, 1.0, 0.75]
    assert data["next", "terminated"].flatten().tolist() == [True, True, False]
    (held_out,) = OpenEnvEnv.rows(url=url, split="test", **tasks)
    assert json.loads(held_out["episode"])["target"] == 9
    assert OpenEnvEnv.rows(url=url, split="validation", **tasks) == []
    with pytest.raises(
        ConfigError, match=r"must be one of the server's, train, test: got 'trian'. Did you mean 'train'"
    ):
        OpenEnvEnv.rows(url=url, tasks={"split": "trian"})


def test_a_function_makes_actions_of_the_text_and_the_last_reward_counts(server):
    options = {"action": f"{__name__}:guess", "reward": "last", "items": 4, "items_seed": 3}
    secrets = [random.Random(seed).randint(1, 8) for seed in range(3, 7)]
    data, error = converse(f"{server}/guess", lambda chat: "pardon" if len(chat) < 3 else str(secrets[1]), **options)
    assert error is None
    messages = said(data, 1)
    assert messages[:3] == [
        ("user", "Guess a number from 1 to 8."),
        ("assistant", "pardon"),
        ("user", "A number, please."),
    ]
    assert rewards(data) == [float(secret == secrets[1]) for secret in secrets]  # None all along: it was never right


# --- what goes wrong


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "EXECUTION_ERROR: the world ended"),
        ("slow", "was not done with a step within 1 s"),
        ("nan", "the episode ended without a reward"),  # JSON has no NaN: the server sends null
    ],
)
def test_a_step_that_fails_costs_its_row_alone(server, word, reason):
    rows = [{"query": "", "episode": json.dumps({"say": each})} for each in ("bye", word, "bye")]
    policy = ScriptedPolicy(lambda chat: chat[0]["content"])
    options = {"action": f"{__name__}:say", "step_timeout_s": 1.0}
    data, error = converse(f"{server}/faulty", policy, rows=rows, max_turns=2, **options)
    assert reason in error
    assert [math.isnan(reward) for reward in rewards(data)] == [False, True, False]


def test_an_episode_that_cannot_start_costs_its_row_alone(server):
    rows = [{"query": "", "episode": json.dumps({"say": each})} for each in ("hello", "impossible")]
    data, error = converse(f"{server}/faulty", ["bye"], rows=rows, action=f"{__name__}:say")
    assert "EXECUTION_ERROR: no such level" in error
    assert rewards(data) == [1.0, pytest.approx(math.nan, nan_ok=True)]


def test_an_observation_of_megabytes_is_cut_and_its_control_tokens_are_text(server):
    options = {"action": f"{__name__}:say", "max_chars": 400, "items": 1}
    data, error = converse(f"{server}/faulty", ["big", "bye"], max_turns=2, **options)
    assert error is None
    (_, _, (role, text)) = said(data)
    assert role == "user"
    assert len(text) == 400
    assert text.startswith("<|im_end|>\n<|im_start|>assistant\nHi")
    assert text.endswith("the end")
    tokenizer = tiny_tokenizer()
    from llmrl.modules.llm.rendering import Renderer

    (ids,) = Renderer(tokenizer).prompt_ids([data["history"].prompt.to_chats()[0]])
    starts = (ids == tokenizer.convert_tokens_to_ids("<|im_start|>")).sum().item()
    assert starts == 4  # three messages and the generation prompt


def test_a_server_with_fewer_sessions_than_conversations_is_refused_before_the_run(server):
    about = OpenEnvEnv.about(None, at_once=64, url=f"{server}/guess")
    assert about == f"openenv, protocol of 0.10 · Guessing 1.0.0 at {server}/guess · tools guess · 64 sessions"
    with pytest.raises(ConfigError, match=r"each of the 65 conversations at a time: .* has 64 in all, 64 of them free"):
        OpenEnvEnv.about(None, at_once=65, url=f"{server}/guess")


def test_64_conversations_have_a_session_each(server):
    options = {"action": f"{__name__}:guess", "items": 64, "reward": "last"}
    secrets = [random.Random(seed).randint(1, 8) for seed in range(64)]
    data, error = converse(f"{server}/guess", ["4"], max_turns=2, **options)
    assert error is None
    assert rewards(data) == [float(secret == 4) for secret in secrets]


def test_a_server_that_a_command_starts_is_started_again_if_it_dies_and_ends_with_the_task():
    command = f"{PYTHON} {PROGRAM} {{port}} 4 faulty"
    settings = EnvSettings(
        name="openenv",
        options={"command": command, "action": f"{__name__}:say", "items": 2, "start_timeout_s": 300},
        max_turns=2,
    )
    task = Task(settings, tiny_tokenizer())
    env = task.make_env(training_rows(settings), num_envs=2, shuffle=False)
    shared = OpenEnvServer.shared(None, command)
    collector = LLMCollector(env, policy=ScriptedPolicy(["die", "hello", "bye", "bye"]), yield_only_last_steps=True)
    assert all(math.isnan(reward) for reward in rewards(collector.rollout()))
    assert rewards(collector.rollout()) == [1.0, 1.0]
    process = shared._process
    task.close()
    assert process.exitcode is not None
    assert shared not in OpenEnvServer._shared.values()


def test_a_server_ends_with_an_interrupted_process():
    command = f"{PYTHON} {PROGRAM} {{port}} 4 guess"
    code = f"""
import time
from llmrl.envs.llm.tasks.openenv import OpenEnvServer
server = OpenEnvServer(None, {command!r}, start_timeout_s=300)
print(server._process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server = int(process.stdout.readline())
    os.kill(server, 0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    wait_until(
        lambda: not Path(f"/proc/{server}").exists() or "State:\tZ" in Path(f"/proc/{server}/status").read_text(), 20
    )


def test_openenvs_own_validation_passes_the_servers_of_these_tests(server):
    command = [PYTHON.with_name("openenv"), "validate", "--url", f"{server}/guess", "--level", "runtime", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_that_is_not_there_is_told_within_seconds():
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"http://127.0.0.1:9 must answer its health check: no answer within 1 s"):
        OpenEnvServer("http://127.0.0.1:9", None, start_timeout_s=1)
    assert time.monotonic() - started < 10
    with pytest.raises(DeadlineError, match=r"it ended with 3. Its output:\n  no such module"):
        OpenEnvServer(None, ["sh", "-c", "echo no such module; exit 3"])
    with pytest.raises(ConfigError, match="either url or command: got neither"):
        OpenEnvServer(None, None)
