"""Environments of verifiers: options, the other Python, sessions of an endpoint, a program that ends, hangs or fails.

The package itself is in tests/endpoint/test_verifiers_package.py; here a stand-in speaks for its program.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest

from llmrl import package_envs
from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint import verifiers as adapter
from llmrl.endpoint.agents import Seat
from llmrl.endpoint.verifiers import VerifiersAgent, VerifiersOptions, verifiers_rows
from llmrl.errors import ConfigError, DataError, MissingDependencyError, RolloutError
from llmrl.testing import FakeEngine, tiny_tokenizer
from llmrl.train.rollouts.agents import AgentRollouts
from llmrl.train.settings import GRPOConfig
from tests.support.conversations import fake_policy
from tests.support.processes import wait_until

pytest.importorskip("starlette", reason="the endpoint")
TOKENIZER = tiny_tokenizer()
STAND_IN = """
import http.server, json, os, sys, time, urllib.request

mode, asked = sys.argv[-2], {}
if "-c" in sys.argv:
    print(os.environ.get("HAVE", "0.4.0"))
    sys.exit()
asked = json.load(open(sys.argv[-1]))
name = asked["env"]["taskset"]["id"]
if mode == "tasks":
    if name == "wrong":
        sys.exit(print("some warning\\nno such taskset", file=sys.stderr) or 3)
    for number in range(*asked["select"].get("range", [0, 4])):
        print(json.dumps({"idx": number, "prompt": f"say {number % 8}"}))
    sys.exit()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = body["key"] + ".0"
        if name == "dies" and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        if name == "always dies":
            os.kill(os.getpid(), 9)
        if name == "hangs":
            time.sleep(60)
        asking = {"model": "m", "messages": [{"role": "user", "content": body["task"]["prompt"]}]}
        headers = {"x-session-id": session, "content-type": "application/json", "authorization": "Bearer EMPTY"}
        request = urllib.request.Request(body["base_url"] + "/chat/completions", json.dumps(asking).encode(), headers)
        urllib.request.urlopen(request).read()
        if name == "fails" or name == "one" and body["task"]["idx"] == 1:
            return self.answer({"error": "TaskError: no such page"})
        reward = None if name == "unscored" else float("nan") if name == "nan" else 0.5
        self.answer({"seats": [[session, "agent", reward]], "metrics": {"exact": 1.0}})

    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        pass

http.server.ThreadingHTTPServer.request_queue_size = 128
http.server.ThreadingHTTPServer(("127.0.0.1", asked["port"]), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def python(tmp_path, monkeypatch):
    """A stand-in for the Python that has verifiers."""
    script, path = tmp_path / "stand_in.py", tmp_path / "python"
    script.write_text(STAND_IN)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("LLMRL_VERIFIERS_PYTHON", str(path))
    monkeypatch.chdir(tmp_path)
    adapter._tasks.cache_clear()
    return path


@pytest.fixture
def rollouts_of():
    made = []

    def make(taskset, retries=0, group_size=3, processes=1, **agent):
        env = {
            "name": "verifiers",
            "options": {"taskset": taskset, "processes": processes},
            "retries": retries,
            "agent": agent,
        }
        config = GRPOConfig(model="tiny", env=env, prompts_per_step=4, group_size=group_size)
        session = SimpleNamespace(rank=0, world_size=1, autocast=nullcontext, sum=lambda counts: counts)
        rows = verifiers_rows(config.env.options, split="train")
        made.append(AgentRollouts(config, session, rows, fake_policy(TOKENIZER, ["a"])))
        return made[-1]

    yield make
    for rollouts in made:
        rollouts.stop()
        rollouts.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "env.options.taskset: Field required"),
        ({"taskset": "a", "tasket": "b"}, "Did you mean 'taskset'?"),
        ({"taskset": {"split": "train"}}, "taskset must name one"),
        ({"taskset": "a", "config": {"taskset": {}}}, "config must not have taskset: it is the option taskset"),
        ({"taskset": "a", "config": {"id": "user_sim"}}, "it is the option env"),
        ({"taskset": "a", "renderer": "auto"}, "renderer must name one"),
        ({"taskset": "a", "renderer": {"tool_parser": "qwen3"}}, "renderer must name one"),
        ({"taskset": "a", "eval": {"limit": 3}}, "eval must have select and taskset"),
        ({"taskset": "a", "eval": {"taskset": {"id": "b"}}}, "eval must have select and taskset"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match="verifiers: ") as refused:
        VerifiersOptions.read(options)
    assert words in str(refused.value)
    with pytest.raises(ValueError, match=r"env\.options|options"):
        GRPOConfig(model="tiny", env={"name": "verifiers", "options": options})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"agent": "my_agents:run"}, "env verifiers plays its tasks itself: leave out env.agent.run"),
        ({"agent": "node agent.js"}, "leave out env.agent.command"),
        ({"dataset": "rows.jsonl"}, "env verifiers does this itself: leave out env.dataset"),
        ({"tools": ["calculator"], "max_turns": 2}, "leave out env.tools, env.max_turns"),
    ],
)
def test_settings_that_verifiers_replaces_are_refused(env, words):
    with pytest.raises(ValueError, match=words):
        GRPOConfig(model="tiny", env={"name": "verifiers", "options": {"taskset": "a"}, **env})


def test_its_settings_are_those_of_an_agent_that_trains_all_branches():
    env = GRPOConfig(model="tiny", env={"name": "verifiers", "options": {"taskset": {"id": "a/b-c"}}}).env
    assert (env.label, env.agent.train, env.agent.deadline_s, env.several_records) == (
        "verifiers.a-b-c",
        "all",
        600,
        True,
    )
    again = GRPOConfig(model="tiny", env=env.model_dump() | {"agent": env.agent.model_dump() | {"deadline_s": 9}}).env
    assert (again.agent.train, again.agent.deadline_s) == ("all", 9)


def test_measured_tasks_are_never_trained_ones():
    options = {"taskset": "a", "select": {"range": [0, 6]}, "eval": {"select": {"range": [4, 8]}}}
    assert len(verifiers_rows(options, split="train")) == 6
    assert [json.loads(row["task"])["idx"] for row in verifiers_rows(options, split="test")] == [6, 7]
    with pytest.raises(DataError, match=r"all 2 of env\.options\.eval are"):
        verifiers_rows(
            {**options, "eval": {"select": {"range": [8, 10]}}}, split="test"
        )  # they say the same as 0 and 1
    assert verifiers_rows({"taskset": "a"}, split="test") == []
    with pytest.raises(DataError, match="a must have tasks"):
        verifiers_rows({"taskset": "a", "select": {"range": [0, 0]}}, split="train")
    with pytest.raises(ConfigError, match=r"verifiers: no such taskset\.$"):
        verifiers_rows({"taskset": "wrong"}, split="train")


def test_the_other_python_must_be_there_and_have_the_package(python, monkeypatch, tmp_path):
    assert package_envs.python_of("verifiers") == python
    monkeypatch.setenv("HAVE", "0.3.11")
    with pytest.raises(
        MissingDependencyError, match=r"needs verifiers>=0\.4,<0\.5: .* has 0\.3\.11; run: .* -m pip install"
    ):
        package_envs.python_of("verifiers")
    with pytest.raises(MissingDependencyError, match="its Python must be a file"):
        package_envs.python_of("verifiers", "/nowhere/python")
    with pytest.raises(MissingDependencyError, match="it is not installed in"):
        package_envs.python_of("verifiers", sys.executable)
    monkeypatch.delenv("LLMRL_VERIFIERS_PYTHON")
    monkeypatch.setenv("LLMRL_ENVS", str(tmp_path / "none"))
    with pytest.raises(
        MissingDependencyError, match=r"there is none in .*none/verifiers; run: llmrl env install verifiers"
    ):
        package_envs.python_of("verifiers")
    assert not package_envs.is_there("verifiers")


@pytest.mark.parametrize(
    ("version", "fits"), [("0.4.0", True), ("0.4.12.dev3", True), ("0.4rc1", True), ("0.5.0", False), ("0.3.9", False)]
)
def test_versions_are_compared_as_numbers(version, fits):
    assert package_envs.PACKAGES["verifiers"].fits(version) is fits


def test_llmrl_env_and_doctor_say_what_is_wrong(run_llmrl, monkeypatch, python):
    said = run_llmrl("env", "check", "verifiers")
    assert "verifiers 0.4.0" in said.out
    assert str(python) in said.out.replace("\n", "")
    assert "Did you mean 'verifiers'?" in run_llmrl("env", "check", "verifirs", code=2).err
    monkeypatch.setenv("HAVE", "0.3.11")
    assert "has 0.3.11" in run_llmrl("env", "check", "verifiers", code=3).err
    found = {check["name"]: check for check in json.loads(run_llmrl("doctor", "--json").out)}
    assert found["verifiers"]["ok"] is False
    assert "has 0.3.11" in found["verifiers"]["detail"]


def ask(endpoint, session, text, key="EMPTY", **more):
    headers = {"x-session-id": session, "authorization": f"Bearer {key}"}
    body = {"model": "m", "messages": [{"role": "user", "content": text}]} | more
    return httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)


def test_seats_are_told_apart_by_the_session_which_may_also_name_the_rollout():
    with RecordingEndpoint(FakeEngine(["a", "b", "c"], tokenizer=TOKENIZER), TOKENIZER, train="all") as endpoint:
        key, other = endpoint.begin(by_session=True), endpoint.begin()
        for seat in ("0", "1"):
            assert ask(endpoint, f"{key}.{seat}", "hi").status_code == 200
        assert ask(endpoint, f"{key}.0", "hi", key=other).status_code == 200, "the API key counts, not the session"
        assert ask(endpoint, "sk-stranger.0", "hi").status_code == 401
        assert [call.asked.session for call in endpoint.rollout(key).calls] == [f"{key}.0", f"{key}.1"]
        assert [call.asked.session for call in endpoint.rollout(other).calls] == [""]
        rows = endpoint.finish(key, 1.0, {f"{key}.1": Seat("white", 0.5)})
        assert (list(rows["env_seat"]), rewards(rows)) == (["white"], [0.5])
        assert [TOKENIZER.decode(ids, skip_special_tokens=True)[-1] for ids in rows["tokens"].full] == ["b"]
        endpoint.begin()


def test_generate_takes_what_the_client_of_verifiers_sends_for_a_continued_prompt():
    with RecordingEndpoint(FakeEngine(["a"], tokenizer=TOKENIZER), TOKENIZER) as endpoint:
        key = endpoint.begin()
        sampling = {"stop_token_ids": [TOKENIZER.eos_token_id], "logprobs": 1, "skip_special_tokens": False}
        body = {
            "model": "llmrl",
            "token_ids": [5, 6, 7],
            "sampling_params": {**sampling, "routed_experts_prompt_start": 0},
        }
        headers = {"x-session-id": f"{key}.0", "authorization": "Bearer EMPTY"}
        answer = httpx.post(f"{endpoint.url}/inference/v1/generate", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text


def rewards(data):
    return data["next", "reward"].flatten()[data["next", "done"].flatten()].tolist()


@pytest.mark.parametrize(
    ("taskset", "retries", "reward", "error"),
    [
        ("echo", 0, 0.5, ""),
        ("dies", 1, 0.5, "its program ended"),
        ("unscored", 0, None, "the task must give a reward"),
        ("nan", 0, None, "a finite number as reward: got nan"),
    ],
)
def test_a_rollout_has_its_reward_or_is_a_failure_with_a_reason(
    rollouts_of, monkeypatch, taskset, retries, reward, error
):
    monkeypatch.setattr(adapter, "IN_A_ROW", 100)
    rollouts = rollouts_of(taskset, retries)
    got = rewards(rollouts.rollout())
    assert len(got) == 12
    assert all(math.isnan(each) if reward is None else each == reward for each in got)
    assert error in rollouts.first_error
    assert taskset == "echo" or rollouts.first_error


def test_a_late_rollout_is_given_up_on_both_sides(rollouts_of):
    rollouts = rollouts_of("hangs", deadline_s=1, group_size=2)
    began = time.monotonic()
    assert all(map(math.isnan, rewards(rollouts.rollout())))
    assert time.monotonic() - began < 20
    assert "not done within env.agent.deadline_s = 1 s" in rollouts.first_error


def test_many_failures_in_a_row_end_the_run_unless_they_are_of_few_tasks(rollouts_of):
    with pytest.raises(
        RolloutError, match="rollouts of 4 tasks failed one after the other: verifiers: TaskError: no such"
    ):
        rollouts_of("fails").rollout()
    got = rewards(rollouts_of("one", group_size=12).rollout())
    assert sum(map(math.isnan, got)) == 12


def test_a_program_that_always_ends_is_started_a_few_times_only(rollouts_of):
    with pytest.raises(RolloutError, match=f"its program ended {adapter.STARTS} times"):
        rollouts_of("always dies", retries=9).rollout()


def test_several_programs_divide_the_rollouts(rollouts_of):
    rollouts = rollouts_of("echo", processes=3)
    assert rewards(rollouts.rollout()) == [0.5] * 12
    assert not rollouts.first_error
    servers = rollouts._runs._agent._servers
    assert len({server._process.pid for server in servers}) == 3
    rollouts.close()
    wait_until(lambda: all(server._process.exitcode is not None for server in servers), 20)


def test_agents_of_the_same_options_share_a_program_which_ends_with_the_last(python):
    first, second = (VerifiersAgent({"taskset": "a"}, TOKENIZER) for _ in range(2))
    pid = first._servers[0]._process.pid
    assert second._servers[0]._process.pid == pid
    first.close()
    first.close()
    os.kill(pid, 0)
    second.close()
    wait_until(lambda: second._servers[0]._process.exitcode is not None, 20)
    assert second._servers[0]._process.exitcode == -signal.SIGTERM


def test_a_rollout_that_is_stopped_does_not_wait(python):
    agent, stopped = VerifiersAgent({"taskset": "hangs"}, TOKENIZER), threading.Event()
    try:
        threading.Timer(0.2, stopped.set).start()
        row = {"task": '{"idx": 0, "prompt": "x"}'}
        outcome = agent.call("http://127.0.0.1:1/v1", "k", row, timeout_s=60, stopped=stopped.is_set)
        assert not outcome.done
    finally:
        agent.close()
