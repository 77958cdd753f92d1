"""`env.agent`: the rollouts of a user's own agent, what counts as a failure, and runs that are trained by them."""

import json
import math
import shutil
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from llmrl.collectors.llm.rollout import ConversationsStopped
from llmrl.data.ragged.tensordicts import column_values
from llmrl.endpoint.agents import Agent
from llmrl.modules.llm.policies.containers import Masks, Tokens
from llmrl.objectives.llm import Algorithm
from llmrl.objectives.llm.settings import GRPOSettings
from llmrl.package_envs import is_there
from llmrl.report.run_files import read_run
from llmrl.report.warnings import findings
from llmrl.run.metrics import read_metrics
from llmrl.testing import tiny_tokenizer
from llmrl.train.rollouts.agents import AgentRollouts
from llmrl.train.settings import GRPOConfig
from tests.recipes.conftest import OWN_ENGINE, WAITED
from tests.support.conversations import fake_policy
from tests.support.processes import is_running, wait_until
from tests.support.ranks import ROOT
from tests.support.saved_models import save_tiny

pytest.importorskip("openai", reason="the client of the agents")
TOKENIZER = tiny_tokenizer()
AGENTS = """
import collections, itertools, subprocess, sys, threading
import openai

SHARED = openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=0)
tried = collections.defaultdict(itertools.count)
late, meeting = threading.Event(), threading.Barrier(4)

def ask(base_url, api_key, *said):
    client, messages = SHARED.with_options(base_url=base_url, api_key=api_key), []
    for text in said:
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
    return answer

def share(base_url, api_key, row):
    answer = ask(base_url, api_key, row["prompt"], "again")
    ask(base_url, api_key, "A title, please.")  # not the task: left out of training
    return {"reward": sum(letter in "aeiou" for letter in answer) / 10, "letters": len(answer)}

def together(base_url, api_key, row):
    if row["answer"] == "lost":
        raise KeyError("no such page")
    if row["answer"] == "held out":
        meeting.wait(60)  # for the three others
    return share(base_url, api_key, row)

async def later(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": row["prompt"]}])
    return True

def fails_first(base_url, api_key, row):
    ask(base_url, api_key, row["prompt"])
    return 1 / min(1, next(tried[row["prompt"]]) // 3)  # each of three rollouts fails once

def fails(base_url, api_key, row):
    ask(base_url, api_key, row["prompt"])
    raise KeyError("no such page")

def silent(base_url, api_key, row):
    return 1.0

def not_a_number(base_url, api_key, row):
    ask(base_url, api_key, row["prompt"])
    return {"reward": float("nan")}

def never(base_url, api_key, row):
    ask(base_url, api_key, row["prompt"])
    late.wait(60)
    try:
        ask(base_url, api_key, row["prompt"])
    except openai.AuthenticationError:
        late.refused = True

def leaves_a_process(base_url, api_key, row):
    print(ask(base_url, api_key, row["prompt"]))
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("left", "a") as file:
        file.write(f"{left.pid} ")
    return 2

def two(base_url, api_key):
    pass
"""


@pytest.fixture
def agents(place):
    place.module("my_agents", AGENTS)
    place.module("no_model", "import sys; print('not json'); sys.exit('broken' if len(sys.argv) > 1 else 0)")
    import my_agents

    return my_agents


@pytest.fixture
def rollouts_of():
    made = []

    def make(agent, answers=("a",), **changes):
        env = {"dataset": "prompts.jsonl", "agent": agent, **changes}
        config = GRPOConfig(model="tiny", env=env, prompts_per_step=2, group_size=3)
        session = SimpleNamespace(rank=0, world_size=1, autocast=nullcontext, sum=lambda counts: counts)
        prompts = [{"prompt": f"say {number}"} for number in range(4)]
        made.append(AgentRollouts(config, session, prompts, fake_policy(TOKENIZER, answers)))
        return made[-1]

    yield make
    for rollouts in made:
        rollouts.stop()
        rollouts.close()


@pytest.mark.parametrize(
    ("agent", "reward", "rows", "error"),
    [
        ("my_agents:later", 1.0, 1, ""),
        ({"run": "my_agents:share", "train": "all"}, 0.1, 2, ""),
        ({"run": "my_agents:leaves_a_process", "process": True}, 2.0, 1, ""),
        ("my_agents:fails_first", 1.0, 1, "ZeroDivisionError"),
        ("my_agents:fails", None, 1, "no such page"),
        ("my_agents:silent", None, 1, "it made no call"),
        ("my_agents:not_a_number", None, 1, "a finite number as reward: got nan"),
        ({"run": "my_agents:never", "deadline_s": 1}, None, 1, "not done within env.agent.deadline_s = 1 s"),
        ("python -m no_model", None, 1, "must be a number or a JSON object: got 'not json'"),
        ("python -m no_model x", None, 1, "ended with 1: broken"),
    ],
    ids=["coroutine", "sub-agent", "process", "retried", "raises", "no call", "nan", "late", "prints", "exits"],
)
def test_a_rollout_has_its_reward_or_is_a_failure_with_a_reason(agents, rollouts_of, agent, reward, rows, error):
    rollouts = rollouts_of(agent)
    data = rollouts.rollout()
    done = data["next", "done"].flatten()
    assert data.batch_size == (6 * rows,)
    assert done.sum() == 6
    assert data["group_id"][done].tolist() == [0, 0, 0, 1, 1, 1]
    assert len(set(data["seed"][done].tolist())) == 6
    rewards = data["next", "reward"].flatten()[done]
    if reward is None:
        assert rewards.isnan().all(), "never a reward of zero"
        assert error in str(rollouts.failure)
    else:
        assert torch.allclose(rewards, torch.tensor(reward))
    assert error in rollouts.first_error
    assert len({column_values(data, "prompt")[row] for row in done.nonzero().flatten().tolist()}) == 2


def test_a_program_gets_no_text_of_what_json_cannot_hold():
    agent = Agent(command=["true"])
    outcome = agent.call("http://x", "key", {"picture": b"x"}, timeout_s=5, stopped=lambda: False)
    assert "cannot hold the column 'picture'" in outcome.error


def test_an_agent_that_is_late_is_refused_and_what_a_program_leaves_behind_is_ended(agents, rollouts_of, place):
    rollouts_of({"run": "my_agents:never", "deadline_s": 1}).rollout()
    agents.late.set()
    wait_until(lambda: getattr(agents.late, "refused", False), 60)
    rollouts_of({"run": "my_agents:leaves_a_process", "process": True}).rollout()
    pids = [int(pid) for pid in (place.path / "left").read_text().split()]
    assert len(pids) == 6
    wait_until(lambda: not any(map(is_running, pids)), 60)


def test_groups_are_begun_apart_and_can_be_stopped(agents, rollouts_of):
    asked, release = threading.Event(), threading.Event()

    def slow(prompt):
        asked.set()
        assert release.wait(60)
        return "a"

    rollouts = rollouts_of("my_agents:later", slow)
    before = rollouts.state_dict()
    first, second = rollouts.begin(3), rollouts.begin(3)
    stopped, ended = threading.Event(), []

    def run():
        with pytest.raises(ConversationsStopped):
            first(stopped)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    assert asked.wait(60)
    stopped.set()
    thread.join(60)
    assert ended
    release.set()
    rows = second(threading.Event())
    assert rows["group_id"].tolist() == [1, 1, 1]
    rollouts.load_state_dict(before)
    assert rollouts.begin(3)(threading.Event())["group_id"].tolist() == [0, 0, 0]
    metrics = rollouts.metrics(SimpleNamespace(sum=lambda counts: counts))
    assert metrics["agent/rows_mean"] == 1
    assert metrics["agent/untrained_frac"] == 0


def test_a_run_is_trained_by_an_agent_and_resumed_exactly(agents, place):
    env = {"dataset": "prompts.jsonl", "agent": "my_agents:share", "reward": None}
    words = ["agent", "my_agents:share · all at a time", "sub-agents and edited histories are not"]
    place.train("grpo", "run", env=env, steps=4, checkpoint={"every": 2, "keep": 9}, words=words)
    steps = place.steps("run")
    assert [step["agent/calls_mean"] for step in steps] == [3.0] * 4
    assert [step["agent/rows_mean"] for step in steps] == [1.0] * 4
    assert all(math.isclose(step["agent/untrained_frac"], 1 / 3) for step in steps)
    assert all(step["rollout/turns_mean"] == 2 and step["rollout/failed"] == 0 for step in steps)
    assert all(step["reward/letters/mean"] > 0 and step["policy/grad_norm"] > 0 for step in steps)
    assert [step["mismatch/logp_abs_max"] < 1e-4 for step in steps] == [True] * 4
    for rollout in place.rollouts("run", 4):
        calls = [(call.parent, call.row, call.question) for call in rollout.model_calls]
        assert calls == [(-1, 0, rollout.columns["prompt"]), (0, 0, "again"), (-1, -1, "A title, please.")]
        assert sum(call.tokens for call in rollout.model_calls if call.row >= 0) == rollout.tokens
    lines = ["3 calls in 1 row", "call 2 after 1 · 8 tokens · row 1 · again ->"]
    place.run(
        "show", "run", words=[*lines, "call 3 · 8 tokens · no row: of another conversation, which train main leaves"]
    )
    place.cut_back("run", "cut", to=2)
    place.run("resume", "cut")
    place.run("eval", "run", code=2, words=["run has no held-out problems; give eval.dataset=..."])
    place.same("run", "cut", step=4, tolerance=1e-5)  # rounding depends on which calls are computed together
    for step in range(1, 5):
        was, now = (
            [(r.prompt, r.completion, r.reward, r.rewards) for r in place.rollouts(n, step)] for n in ("run", "cut")
        )
        assert was == now


def test_held_out_rows_are_measured_at_the_same_time_and_nothing_of_them_is_trained(agents, place):
    env = {"dataset": "prompts.jsonl", "agent": {"run": "my_agents:together", "train": "all"}, "reward": None}
    place.rows("held.jsonl", [{"prompt": f"Tell {n}", "answer": "lost" if n == 1 else "held out"} for n in range(5)])
    place.rows("reserved.jsonl", [{"prompt": "Tell 1", "seed": 1}])
    named = ["eval.dataset: a column of the data must not have the name of another entry of the batch: got 'seed'"]
    place.plan("grpo", env=env, eval={"dataset": "reserved.jsonl"}, code=3, words=named)
    place.train("grpo", "plain", env=env, steps=2)
    held_out = {"dataset": "held.jsonl", "every": 1, "max_tokens": 8}
    words = [
        "5 problems measured every 1",
        "prompts test: 1 of 5 failed and are not in the mean: KeyError: 'no such page'",
    ]
    place.train("grpo", "run", env=env, steps=2, eval=held_out, words=words)
    before, *steps = read_metrics(place.path / "runs" / "run")
    measured = [{name: row[name] for name in row if name.startswith("eval/")} for row in (before, *steps)]
    assert [row.get("eval/prompts/count") for row in measured] == [4, 4, 4]
    assert [row.get("eval/prompts/failed") for row in measured] == [1, 1, 1]
    plain = place.steps("plain")
    for row, own in zip(plain, place.steps("run"), strict=True):
        assert {name: own[name] for name in row} == pytest.approx(row, abs=1e-5)
    last = measured[-1]["eval/prompts/mean"]
    found = json.loads(place.run("eval", "run", "--json").out)
    assert (found["mean"], found["failed"], found["rows"]) == (pytest.approx(last, abs=1e-5), 1, 5)
    assert found["interval"][0] <= last <= found["interval"][1]
    assert "no such page" in found["failure"]
    sets = {"lost": {"dataset": "held.jsonl"}, "sums": {"name": "sums"}}  # the agent's, and one without an agent
    place.train("grpo", "sets", env=env, steps=1, eval={"sets": sets, "rows": 5, "max_tokens": 8})
    assert [place.steps("sets")[-1][f"eval/{name}/count"] for name in sets] == [4, 5]
    (lost,) = [
        warning.text for warning in findings(read_run(place.path / "runs" / "run")) if "not in its mean" in warning.text
    ]
    assert lost.startswith("In 3 evaluations of prompts 3 answers failed.")


@pytest.mark.slow
def test_two_ranks_divide_the_rollouts_of_an_agent_and_the_rows_it_is_measured_on(agents, place):
    place.rows("held.jsonl", [{"prompt": f"Tell {n}", "answer": "lost" if n == 1 else ""} for n in range(5)])
    env = {"dataset": "prompts.jsonl", "agent": {"run": "my_agents:together", "train": "all"}, "reward": None}
    held_out = {"dataset": "held.jsonl", "every": 2, "max_tokens": 8}
    save_tiny("model")  # of one kind: what ranks do with tied and untied embeddings has tests of its own
    place.train_as_one_and_as_ranks("grpo", model="model", env=env, eval=held_out, steps=3, step=3)
    assert place.steps("two")[-1]["eval/prompts/failed"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_rollouts_of_an_agent_are_sampled_ahead_and_the_run_can_be_resumed(agents, place, staleness):
    place.module("own_engine", OWN_ENGINE)
    save_tiny("model")
    env = {"dataset": "prompts.jsonl", "agent": "my_agents:share", "reward": None}
    rollout = {"engine": "own_engine:make", "max_staleness": staleness}
    options = {
        "model": "model",
        "rollout": rollout,
        "eval": {"dataset": "prompts.jsonl", "rows": 2, "every": 2, "max_tokens": 4},
    }
    place.train("grpo", "run", env=env, steps=5, checkpoint={"every": 2, "keep": 9}, **options)
    place.cut_back("run", "cut", to=2)
    place.run("resume", "cut")
    for steps in (place.steps("run"), place.steps("cut")):
        ages = [step["async/staleness_max"] for step in steps]
        assert ages[0] == 0 < max(ages) <= staleness
        assert all(step.get("agent/rows_mean", 1) == 1 and step["rollout/failed"] == 0 for step in steps)
        assert all(step["policy/grad_norm"] > 0 and step.get("mismatch/probe", 0) < 1e-6 for step in steps)
    if staleness == 1:  # otherwise the versions of a group depend on when it was begun
        assert ages == [0, 1, 1, 1, 1]
        place.same("run", "cut", step=5, tolerance=1e-5, without=WAITED)


@pytest.mark.parametrize("command", ["ppo", "distill"])
def test_other_algorithms_train_by_an_agent_too(agents, place, command):
    env = {"dataset": "prompts.jsonl", "agent": "my_agents:share", "reward": None}
    own = {}
    if command == "distill":
        save_tiny(place.path / "teacher", hidden_size=64, heads=2)
        own = {"distill": {"teacher": "teacher"}, "group_size": 1}
    place.train(command, "run", env=env, steps=2, **own)
    assert place.steps("run")[-1]["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        ("grpo", {"env": {"reward": "vowels:share"}}, ["env.agent does this itself: leave out env.reward"]),
        ("grpo", {"env": {"tools": ["calculator"], "max_turns": 3}}, ["env.tools, env.max_turns"]),
        ("grpo", {"env": {"dataset": None}}, ["env chat needs dataset"]),
        ("grpo", {"env": {"agent": "my_agents:two"}}, ["env.agent", "must take base_url, api_key and row"]),
        (
            "grpo",
            {"env": {"agent": {"run": "my_agents:silent", "command": ["x"]}}},
            ["either run or command: got both"],
        ),
        ("grpo", {"env": {"agent": {"command": ["x"], "process": True}}}, ["process is for run"]),
        ("grpo", {"overlong_buffer": 2}, ["overlong_buffer is for one answer per prompt"]),
        ("rejection", {}, ["env.agent is not for rejection"]),
        ("sft", {}, ["env.agent is for recipes that sample"]),
    ],
)
def test_what_an_agent_does_itself_is_not_set_beside_it(agents, place, command, changes, words):
    env = {"dataset": "prompts.jsonl", "agent": "my_agents:silent", "reward": None, **changes.pop("env", {})}
    place.plan(command, code=2, env=env, words=words, **changes)


def test_an_agent_needs_an_extra_that_is_named_before_weights_load(agents, place, monkeypatch):
    monkeypatch.setattr("llmrl.optional.find_spec", lambda name: None)
    env = {"dataset": "prompts.jsonl", "agent": "my_agents:silent", "reward": None}
    place.plan("grpo", code=3, env=env, words=["env.agent: needs the package 'starlette'", "llmrl[serve]"])


def test_a_rollout_of_several_rows_weighs_as_much_as_one_row_in_a_mean_over_rows():
    masks = [torch.tensor([False, True]), torch.tensor([False, True, True, True]), torch.tensor([False, True])] * 2
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0]).view(6, 1, 1)
    done = torch.tensor([False, True, True] * 2).view(6, 1)
    rows = TensorDict(
        {
            "tokens": Tokens.from_rows({"full": [torch.zeros(len(mask), dtype=torch.int64) for mask in masks]}),
            "masks": Masks.from_rows({"all_assistant_mask": masks}),
            "group_id": torch.zeros(6, dtype=torch.int64),
            "next": TensorDict({"reward": rewards, "done": done}, batch_size=[6]),
        },
        batch_size=[6],
    )
    by_rows = {"scale": "none", "trajectory_return": "sum", "policy_version_key": None}
    for aggregation, expected in (("token", [0.5, 0.5, -0.5] * 2), ("seq-mean", [0.125, 0.375, -0.5] * 2)):
        settings = GRPOSettings(aggregation=aggregation).complete()
        algorithm = Algorithm(None, group_size=4, advantage=by_rows, grpo=settings)
        weighted = [float(row.get("advantage")) for row in algorithm.advantages(rows.clone()).unbind(0)]
        signs = [1, 1, 1, -1, -1, -1]
        assert weighted == pytest.approx([sign * value for sign, value in zip(signs, expected, strict=True)])


GAME = """
class Vowels:
    def reset(self, *, seed=None, options=None):
        self.said = {}
        return f"Word {seed}, a.", {"player": "a"}

    def step(self, action):
        self.said["ab"[len(self.said)]] = sum(letter in "aeiou" for letter in action)
        if len(self.said) == 1:
            return "Yours, b.", None, False, False, {"player": "b"}
        more = self.said["a"] - self.said["b"]
        return "Over.", None, True, False, {"rewards": {"a": more, "b": -more}}
"""


@pytest.mark.slow
def test_a_game_with_itself_is_trained_by_seat_and_resumed_exactly(place):
    place.module("word_game", GAME)
    options = {"factory": "word_game:Vowels", "items": 8, "eval_items": 2, "seats": "all"}
    env = {"name": "text_env", "options": options, "dataset": None, "reward": None}
    changes = {"env": env, "steps": 4, "checkpoint": {"every": 2, "keep": 9}}
    place.train("grpo", "run", words=["word_game:Vowels · 1 process · begins 'Word "], **changes)
    for step in place.steps("run"):
        assert step["agent/calls_mean"] == step["agent/rows_mean"] == step["reward/turns/mean"] == 2
        assert step["reward/seat.a/mean"] == -step["reward/seat.b/mean"]
        assert (step["reward/mean"], step["rollout/failed"]) == (0, 0)
        assert step["mismatch/logp_abs_max"] < 1e-4
    for record in place.rollouts("run", 4):
        same = [
            r
            for r in place.rollouts("run", 4)
            if (r.group, r.columns["env_seat"]) == (record.group, record.columns["env_seat"])
        ]
        if record.advantage is not None:
            assert (record.advantage > 0) == (record.reward > sum(r.reward for r in same) / len(same))
    place.cut_back("run", "cut", to=2)
    place.run("resume", "cut")
    place.same("run", "cut", step=4, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not is_there("verifiers"), reason="no environment with verifiers: llmrl env install verifiers")
def test_tasks_of_verifiers_are_trained_on_two_ranks_and_resumed_exactly(place):
    for name in ("reverse_text.py", "chat_loop.py"):
        shutil.copy(ROOT / "scripts/clients/tasksets" / name, place.path / name)
    save_tiny("model")
    options = {"taskset": "reverse_text", "config": {"agent": {"harness": {"id": "chat_loop"}}}}
    env = {"name": "verifiers", "options": options, "dataset": None, "reward": None}
    changes = {"model": "model", "env": env, "steps": 4, "checkpoint": {"every": 2, "keep": 9}}
    place.train_as_one_and_as_ranks("grpo", step=4, **changes)
    assert all(step["agent/rows_mean"] == 1 and step["rollout/failed"] == 0 for step in place.steps("two"))
    place.cut_back("one", "cut", to=2)
    place.run("resume", "cut")
    place.same("one", "cut", step=4, tolerance=1e-5)
