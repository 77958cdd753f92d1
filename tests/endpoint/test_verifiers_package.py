"""The real package verifiers plays tasksets of scripts/clients/tasksets: its own branches are llmrl's rows.

`llmrl env install verifiers` or `scripts/foreign_clients verifiers` makes what these tests need.
"""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from llmrl.endpoint import RecordingEndpoint
from llmrl.endpoint.agents import Seat
from llmrl.endpoint.verifiers import VerifiersAgent, verifiers_rows
from llmrl.errors import ConfigError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.package_envs import is_there
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_there("verifiers"), reason="no environment with verifiers: llmrl env install verifiers"),
]
TASKSETS = Path(__file__).parent.parent.parent / "scripts/clients/tasksets"
TOKENIZER = tiny_tokenizer()
LOOP = {"harness": {"id": "chat_loop"}}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"name": "alpha"}}\n</tool_call>'
SEATS = {"writer": LOOP, "twin": LOOP, "critic": LOOP}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(TASKSETS)


def tiny_engine():
    ids = {"eos_token_ids": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
    return TransformersEngine(tiny_model(TOKENIZER), tokenizer=TOKENIZER, seed=0, **ids)


def play(options, engine, *, tasks=2, max_tokens=600):
    """Plays the first tasks; for each: what the program answers, and the rows of the sessions that are trained."""
    agent, played = VerifiersAgent(options, TOKENIZER), []
    params = SamplingParams(max_new_tokens=40)
    try:
        with RecordingEndpoint(engine, TOKENIZER, params=params, train="all", max_tokens=max_tokens) as endpoint:
            for row in verifiers_rows(options, split="train")[:tasks]:
                key = endpoint.begin(row, by_session=True)
                asked = {"task": json.loads(row["task"]), "key": key, "base_url": endpoint.base_url, "model": "llmrl"}
                answer = agent._servers[0].ask({**asked, "traces": True}, time.monotonic() + 200, lambda: False)
                seats = {session: Seat(name, reward) for session, name, reward in answer.get("seats", ())}
                played.append((answer, endpoint.finish(key, 1.0, seats)))
    finally:
        agent.close()
    return played


def branches(answer, seats=None):
    trained = [session for session, _, _ in answer["seats"]]
    return [b for trace in answer["traces"] if trace["id"] in trained for b in trace["branches"]]


def rewards(answer):
    return {name: reward for _, name, reward in answer["seats"]}


def assert_same(branches, rows):
    """Each branch is a row: ids, mask and log-probs."""
    full, masks = rows.get(("tokens", "full"), as_list=True), rows.get(("masks", "all_assistant_mask"), as_list=True)
    log_probs = rows.get(("log_probs", "full"), as_list=True)
    ours = {
        tuple(ids.tolist()): (mask, values * mask) for ids, mask, values in zip(full, masks, log_probs, strict=True)
    }
    assert len(branches) == len(ours) == len(rows)
    for branch in branches:
        mask, values = ours[tuple(branch["token_ids"])]
        assert branch["sampled_mask"] == mask.tolist()
        torch.testing.assert_close(torch.tensor(branch["logprobs"]), values)


def test_branches_of_the_client_for_training_are_the_rows():
    played = play({"taskset": "reverse_text", "config": {"agent": LOOP}, "renderer": "default"}, tiny_engine())
    for answer, rows in played:
        assert_same(branches(answer), rows)
        [reward], metrics = rewards(answer).values(), answer["metrics"]
        assert reward == pytest.approx(metrics["likeness"] + 0.5 * metrics["exact"])
        assert (metrics["turns"], metrics["timeout"]) == (1, 0)


@pytest.mark.parametrize("renderer", [None, {"name": "default", "tool_parser": "qwen3"}], ids=["llmrl", "renderers"])
def test_a_conversation_with_a_tool_is_one_row(renderer):
    options = {"taskset": "echo_tool", "config": {"agent": LOOP}, "renderer": renderer}
    tool = "secrets_look_up"
    [(answer, rows)] = play(options, FakeEngine([CALL % tool, "It is 4."], tokenizer=TOKENIZER))
    assert "error" not in answer, answer
    assert rewards(answer) == {"agent": 1.0}
    assert len(rows) == 1
    if renderer:
        assert_same(branches(answer), rows)


def test_seats_are_rows_of_their_own_and_those_that_are_not_trainable_none():
    options = {"taskset": "duet", "config": SEATS, "renderer": "default"}
    for answer, rows in play(options, tiny_engine()):
        assert_same(branches(answer), rows)
        assert rewards(answer) == {"twin": 1.0, "writer": 2.0}
        earned = dict(zip(rows["env_seat"], rows["next", "reward"].flatten().tolist(), strict=True))
        assert earned == {"twin": 1.0, "writer": 2.0}
        assert rows["next", "done"].all()
    [(answer, rows)] = play({**options, "renderer": None, "seats": ["writer"]}, tiny_engine(), tasks=1)
    assert rewards(answer) == {"writer": 2.0}
    assert len(rows) == 1


def test_trouble_is_a_failure_with_a_reason_but_a_stage_out_of_time_is_scored():
    options = {"taskset": "troubles", "config": {"agent": LOOP}}
    rows = {json.loads(row["task"])["name"]: row for row in verifiers_rows(options, split="train")}
    expected = {
        "raises": "no such page",
        "unscored": "must give a reward",
        "long": "ProviderError",
        "killed": "its program ended",
        "stopped": "",  # after the program was started again
        "slow": None,
    }
    agent = VerifiersAgent(options, TOKENIZER)
    try:
        with RecordingEndpoint(FakeEngine(["yes"] * 9, tokenizer=TOKENIZER), TOKENIZER, max_tokens=600) as endpoint:
            for name, words in expected.items():
                key, limit_s = endpoint.begin(by_session=True), 5 if words is None else 200
                got = agent.call(endpoint.base_url, key, rows[name], timeout_s=limit_s, stopped=lambda: False)
                assert got.done is (words is not None), name
                if words:
                    assert words in got.error, name
                elif words == "":
                    assert (got.value.reward, got.value.metrics["timeout"]) == (1.0, 1.0)
    finally:
        agent.close()


@pytest.mark.parametrize(
    ("taskset", "words"),
    [("revers_text", "Did you mean 'reverse_text'"), ("old_style", "before 0.4 (vf.Environment, load_environment)")],
)
def test_a_taskset_that_cannot_be_loaded_is_explained(taskset, words):
    with pytest.raises(ConfigError) as refused:
        verifiers_rows({"taskset": taskset}, split="train")
    assert words in str(refused.value)


def test_many_rollouts_at_the_same_time_do_not_mix():
    options = {"taskset": "reverse_text", "config": {"agent": LOOP}}
    row = verifiers_rows(options, split="train")[0]
    agent, outcomes = VerifiersAgent(options, TOKENIZER), {}
    engine = FakeEngine(lambda prompt: "ok", tokenizer=TOKENIZER)
    try:
        with RecordingEndpoint(engine, TOKENIZER, train="all") as endpoint:

            def one(number):
                key = endpoint.begin(row, by_session=True)
                got = agent.call(endpoint.base_url, key, row, timeout_s=300, stopped=lambda: False)
                outcomes[number] = (got, len(endpoint.finish(key, 1.0)))

            threads = [threading.Thread(target=one, args=[number]) for number in range(256)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert endpoint.counters["calls"] == 256
    finally:
        agent.close()
    assert len(outcomes) == 256
    assert all(rows == 1 and got.value is not None for got, rows in outcomes.values())


def test_the_program_ends_with_its_owner():
    import subprocess
    import sys

    script = (
        "import os; from llmrl.endpoint.verifiers import VerifiersAgent; from llmrl.testing import tiny_tokenizer; "
        "agent = VerifiersAgent({'taskset': 'reverse_text'}, tiny_tokenizer()); "
        "print(agent._servers[0]._process.pid, flush=True); os._exit(9)"
    )
    path = os.pathsep.join(str(entry) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    pid, end = int(done.stdout), time.monotonic() + 60
    while time.monotonic() < end and Path(f"/proc/{pid}/stat").exists():
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.2)
    assert not Path(f"/proc/{pid}").exists()
