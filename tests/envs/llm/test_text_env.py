"""Text environments: any with reset and step, GEM's and TextArena's; what they say, earn, and cost when they fail."""

import json
import math
import os
import random
from pathlib import Path

import pytest

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm.tasks.text_env import GEMEnv, TextArenaEnv, TextEnv
from llmrl.errors import ConfigError, MissingDependencyError
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.train.settings import EnvSettings, GRPOConfig
from llmrl.train.tasks import Task, eval_rows, training_rows

TOLD = "tests.support.text_games:Told"
CLIENTS = Path(os.environ.get("LLMRL_CLIENTS", Path(__file__).parents[3] / "build" / "clients"))


def converse(env, replies):
    """The last turn of each conversation, and the first error."""
    try:
        data = LLMCollector(env, policy=ScriptedPolicy(replies), yield_only_last_steps=True).rollout()
        errors = [leaf.first_error for leaf in env.transform.leaves() if getattr(leaf, "first_error", None)]
        return data, (errors or [""])[0]
    finally:
        env.close()


def told(count=1, max_steps=2, **options):
    return TextEnv(factory=TOLD, items=count, num_envs=count, shuffle=False, max_steps=max_steps, **options)


def rewards(data):
    return data["next", "reward"].flatten().tolist()


def contents(data, row=0):
    return [message["content"] for message in data["history"].prompt.to_chats()[row]]


def test_observations_are_the_users_messages_and_each_seed_has_random_numbers_of_its_own():
    data, error = converse(told(2, 3, items_seed=4), ["1", "2"])
    assert not error
    for row, seed in enumerate((4, 5)):  # the two are played in turn, in one process
        drawn = random.Random(seed)
        first, second, third = (drawn.randint(0, 10**6) for _ in range(3))
        answer = contents(data, row)[1]
        after = [f"{number} <|im_end|>\nNext." for number in (second, third)]
        assert contents(data, row) == [f"Say a number. {first}", answer, after[0], answer, after[1]]


@pytest.mark.parametrize(
    ("kind", "replies", "expected"),
    [
        ("sum", ["1", "2", "bye"], 3),
        ("last", ["1", "2", "bye"], 2),
        ("last", ["4", "nothing", "nothing"], 4),  # it ends by max_steps
        ("sum", ["nothing", "nothing", "nothing"], 0),
        ("sum", ["2", "5"], 7),
    ],
)
def test_the_reward_is_the_sum_or_the_last_of_those_that_are_given(kind, replies, expected):
    data, error = converse(told(max_steps=3, reward=kind), replies)
    assert not error
    assert rewards(data) == [expected]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", "RuntimeError: the world ended"),
        ("late", "text_env: its process must answer before the deadline"),
        ("die", "it ended with exit code 3"),
        ("7", "TypeError: an observation must be text: got a int"),
        ("nan", "a reward must be finite: got nan"),
        ("bye", "the episode ended without a reward"),
    ],
)
def test_a_step_that_fails_gives_no_reward_and_the_others_go_on(action, reason):
    env = told(3, processes=3, step_timeout_s=1.0, start_timeout_s=60.0)
    data, error = converse(env, ["1", action, "2", "1", "2"])
    assert reason in error
    lost = [math.isnan(reward) for reward in rewards(data)]
    assert lost == [False, True, False]
    assert data["next", "terminated"].flatten().tolist()[1] == (action == "bye")


def test_a_process_that_was_lost_is_started_again_for_the_next_episodes():
    env = told(2)
    collector = LLMCollector(env, policy=ScriptedPolicy(["die", "1", "2", "3", "2", "3"]), yield_only_last_steps=True)
    assert all(map(math.isnan, rewards(collector.rollout())))  # both were in it
    assert rewards(collector.rollout()) == [4, 6]
    env.close()


def test_an_episode_that_does_not_start_costs_its_row():
    rows = [{"query": "", "episode": json.dumps({"seed": 0, **more})} for more in ({}, {"level": 9})]
    env = TextEnv(dataset=rows, factory=TOLD, num_envs=2, shuffle=False, max_steps=1)
    data, error = converse(env, ["1"])
    assert "ValueError: no such options: {'level': 9}" in error
    assert rewards(data) == [1, pytest.approx(math.nan, nan_ok=True)]


def test_a_task_has_rows_of_other_seeds_to_measure_and_rewards_of_its_own():
    options = {"factory": TOLD, "items": 3, "eval_items": 2, "prompt": "Play.", "arguments": {"greeting": "Hello."}}
    settings = EnvSettings(name="text_env", options=options, max_turns=2, reward="tests.support.text_games:length")
    rows, held_out = training_rows(settings), eval_rows(settings, GRPOConfig(env=settings, model="tiny").eval)
    seeds = [json.loads(row["episode"])["seed"] for row in (*rows, *held_out)]
    assert seeds == [0, 1, 2, 2**30, 2**30 + 1]
    task = Task(settings, tiny_tokenizer())
    assert task.fit_prompts(rows) == (rows, 0, [])
    data, _ = converse(task.make_env(rows[:1], num_envs=1, shuffle=False), ["1", "bye"])
    assert contents(data)[0].startswith("Play.\n\nHello. ")
    assert rewards(data) == [1 + 3]
    task.close()


def test_what_cannot_be_played_is_told_before_the_run():
    with pytest.raises(ConfigError, match=r"env.options.factory must be as my_games:make: got None"):
        TextEnv.turns()
    with pytest.raises(ConfigError, match=r"gem: env.options.env_id must name an environment: got 'a:b'"):
        GEMEnv.turns(factory="a:b")
    with pytest.raises(ConfigError, match=r"an episode must start: .*has no 'Tald'"):
        TextEnv.about(None, at_once=1, factory="tests.support.text_games:Tald")
    with pytest.raises(
        MissingDependencyError, match=r"gem-llm is not installed for this Python: run llmrl env install gem"
    ):
        GEMEnv.about(None, at_once=1, env_id="game:Wordle-v0-easy")
    assert TextEnv.about(None, at_once=1, factory=TOLD).startswith(f"{TOLD} · 1 process · begins 'Say a number. ")


def of_package(name):
    python = CLIENTS / name / "bin" / "python"
    return pytest.mark.skipif(
        not python.exists(), reason=f"{name} is not installed: scripts/foreign_clients installs it"
    )


@of_package("gem")
@pytest.mark.slow
def test_an_environment_of_gem():
    options = {"env_id": "game:GuessTheNumber-v0-easy", "python": str(CLIENTS / "gem/bin/python"), "items": 4}
    assert GEMEnv.about(None, at_once=4, **options).startswith(
        "gem-llm 0.1.0 · game:GuessTheNumber-v0-easy · 1 process"
    )
    env = GEMEnv(**options, num_envs=4, max_steps=2, shuffle=False)
    secrets = []
    for seed in range(4):
        random.seed(seed)
        secrets.append(random.randint(1, 10))
    data, error = converse(env, lambda chat: rf"\boxed{{{secrets[0]}}}")
    assert not error
    hit = [secret == secrets[0] for secret in secrets]
    assert [reward == 1 for reward in rewards(data)] == hit


@of_package("textarena")
@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["TicTacToe-v0", "GuessTheNumber-v0"])
def test_a_game_of_textarena(env_id):
    python = str(CLIENTS / "textarena/bin/python")
    alone = env_id != "TicTacToe-v0"
    options = {} if alone else {"arguments": {"opponent": "tests.support.text_games:opponent"}}
    env = TextArenaEnv(env_id=env_id, python=python, items=2, num_envs=2, max_steps=9, shuffle=False, **options)
    squares = [8, 7, 6, 5, 4, 3]  # of the second player: the first takes 6 to 8 first, the other three in a row
    data, error = converse(
        env, (lambda chat: f"[{len(chat)}]") if alone else lambda chat: f"[{squares[len(chat) // 2]}]"
    )
    assert not error
    first = contents(data)[0]
    assert "You are Player 0" in first
    assert first not in contents(data)[2]  # what was read is not said again
    if not alone:
        assert rewards(data) == [1.0, -1.0]
        assert "You are Player 1" in contents(data, 1)[0]
