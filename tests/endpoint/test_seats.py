"""Rollouts of several seats: rows, rewards and advantages of each, of a user's agent and of a game with itself."""

import itertools
import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrl.data.ragged.tensordicts import column_values
from llmrl.endpoint.agents import AgentResult
from llmrl.envs.llm.tasks.text_env import TextArenaEnv, TextEnv
from llmrl.errors import ConfigError, RolloutError
from llmrl.objectives.llm import MCAdvantage
from llmrl.testing import tiny_tokenizer
from llmrl.train.rollouts.agents import AgentRollouts
from llmrl.train.rollouts.step import StepRollouts, select_training_columns
from llmrl.train.settings import GRPOConfig
from llmrl.train.tasks import training_rows
from tests.support.conversations import fake_policy

pytest.importorskip("starlette", reason="the endpoint")
TOKENIZER = tiny_tokenizer()
CLIENTS = Path(os.environ.get("LLMRL_CLIENTS", Path(__file__).parents[2] / "build" / "clients"))
TEXTARENA = CLIENTS / "textarena/bin/python"
DUEL = {"factory": "tests.support.text_games:Duel", "items": 1}
ALONE = SimpleNamespace(
    rank=0, world_size=1, autocast=nullcontext, sum=lambda x: x, gather=lambda x: x, gather_on_first=lambda x: x
)
AGENT = """
import json, urllib.request

def play(base_url, key, row):
    said = {}
    for seat in ("white", "black", "white"):
        body = {"messages": [{"role": "user", "content": f"{seat}, {len(said)}"}]}
        headers = {"authorization": f"Bearer {key}", "x-session-id": seat, "content-type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
        answer = json.load(urllib.request.urlopen(request))
        said[seat] = float(answer["choices"][0]["message"]["content"])
    return {"white": said["white"], "black": 10 * said["black"], "moves": 3}
"""


@pytest.fixture
def play():
    """The rows of a group of three, whose seat "a" or "white" is answered with ``first`` in turn."""
    made = []

    def make(env, first, second="1"):
        config = GRPOConfig(model="tiny", env={"retries": 0, **env}, prompts_per_step=1, group_size=3)
        numbers = itertools.cycle(first)

        def answer(ids):
            return next(numbers) if any(word in TOKENIZER.decode(ids) for word in ("begin", "white")) else second

        rows = [{"prompt": "x"}] if config.env.agent.is_named else training_rows(config.env)
        rollouts = AgentRollouts(config, ALONE, rows, fake_policy(TOKENIZER, answer))
        made.append(rollouts)
        return rollouts.rollout(), rollouts

    yield make
    for rollouts in made:
        rollouts.stop()
        rollouts.close()


def by_seat(data, values):
    """The sorted values of each seat."""
    found = {}
    for seat, value in zip(column_values(data, "env_seat"), values, strict=True):
        found.setdefault(seat, []).append(value)
    return {seat: sorted(own) for seat, own in found.items()}


def rewards(data):
    return data["next", "reward"].flatten().tolist()


def test_both_seats_of_a_game_with_itself_are_rows_whose_rewards_are_compared_by_seat(play):
    data, rollouts = play({"name": "text_env", "options": {**DUEL, "seats": "all"}}, "123")
    assert not rollouts.first_error
    assert data["next", "done"].all()
    assert by_seat(data, rewards(data)) == {"a": [0, 1, 2], "b": [-2, -1, 0]}
    trained = MCAdvantage(3, scale="none").inv(select_training_columns(data))
    # Over both seats the mean is 0, and nothing would be encouraged in the seat that always loses.
    assert by_seat(trained, trained["advantage"].flatten().tolist()) == {"a": [-1, 0, 1], "b": [-1, 0, 1]}
    assert len(set(data["seed"].tolist())) == 6
    sampled = StepRollouts(ALONE, data, trained, TOKENIZER)
    metrics = sampled.metrics(version=0, seconds=1.0)
    assert (metrics["reward/seat.a/mean"], metrics["reward/seat.b/mean"], metrics["reward/turns/mean"]) == (1, -1, 2)
    assert (metrics["group/kept_frac"], metrics["group/zero_var_frac"], metrics["rollout/failed"]) == (1, 0, 0)
    assert {(r.columns["env_seat"], r.reward, r.advantage) for r in sampled.records} == {
        *(("a", own, own - 1) for own in (0, 1, 2)),
        *(("b", own, own + 1) for own in (0, -1, -2)),
    }
    text = data["text"].rows("prompt")
    assert all(
        ("You begin" in own) == (seat == "a") for own, seat in zip(text, column_values(data, "env_seat"), strict=True)
    )


def test_either_seat_can_be_trained_alone(play):
    data, _ = play({"name": "text_env", "options": {**DUEL, "seats": ["b"]}}, "123")
    assert by_seat(data, rewards(data)) == {"b": [-2, -1, 0]}


def test_a_seat_without_a_turn_has_its_reward_without_an_answer(play):
    data, rollouts = play({"name": "text_env", "options": {**DUEL, "seats": "all"}}, ["1", "3", "fold"])
    assert not rollouts.first_error
    assert by_seat(data, rewards(data)) == {"a": [-9, 0, 2], "b": [-2, 0, 9]}
    unsampled = [not bool(mask.any()) for mask in data.get(("masks", "all_assistant_mask"), as_list=True)]
    assert [own for own, reward in zip(unsampled, rewards(data), strict=True) if reward == 9] == [True]
    assert sum(unsampled) == 1
    trained = MCAdvantage(3, scale="none").inv(select_training_columns(data))
    own = by_seat(trained, trained["advantage"].flatten().tolist())["b"]
    assert own == pytest.approx([-13 / 3, -7 / 3, 20 / 3])


def test_a_rollout_that_failed_has_lost_all_seats(play):
    data, rollouts = play({"name": "text_env", "options": {**DUEL, "seats": "all"}}, ["1", "3", "raise"])
    assert "RuntimeError: the board fell" in rollouts.first_error
    assert by_seat(data, [-99 if math.isnan(r) else r for r in rewards(data)]) == {"a": [-99, 0, 2], "b": [-99, -2, 0]}
    data, rollouts = play({"name": "text_env", "options": {**DUEL, "seats": ["c"]}}, "1")
    assert "env.options.seats must be of the players a, b: got c" in rollouts.first_error
    assert data["next", "reward"][data["next", "done"]].isnan().all()


def test_an_agent_of_ones_own_returns_the_rewards_of_its_seats(play, tmp_path, monkeypatch):
    tmp_path.joinpath("two_seats.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    agent = {"run": "two_seats:play", "seats": ["white", "black"], "train": "all"}
    data, rollouts = play({"dataset": "x.jsonl", "agent": agent}, "2")
    assert not rollouts.first_error
    done = data["next", "done"].flatten()
    # White's two questions begin a conversation each: two rows, of which the last has the reward.
    assert by_seat(data, data["next", "done"].flatten().tolist()) == {
        "white": [False] * 3 + [True] * 3,
        "black": [True] * 3,
    }
    assert by_seat(data[done], rewards(data[done])) == {"white": [2] * 3, "black": [10] * 3}
    with pytest.raises(RolloutError, match="a mapping must have 'black': got 'white'"):
        AgentResult.of({"white": 1}, seats=["white", "black"])


def test_a_game_with_itself_is_no_environment_and_its_settings_are_an_agents():
    with pytest.raises(ConfigError, match="a game with itself is several conversations"):
        TextEnv.turns(factory="a:b", seats="all")
    with pytest.raises(ConfigError, match="seats must be all, or a list of players: got 'al'"):
        TextEnv.games(factory="a:b", seats="al")
    with pytest.raises(ConfigError, match=r"the policy plays all: leave out env.options.arguments.opponent"):
        TextArenaEnv.games(env_id="x", seats="all", arguments={"opponent": "a:b"})
    env = {"name": "text_env", "options": {**DUEL, "seats": "all"}}
    assert GRPOConfig(model="tiny", env=env).env.agent.train == "all"
    with pytest.raises(ValueError, match=r"env text_env does this itself: leave out env.max_turns"):
        GRPOConfig(model="tiny", env={**env, "max_turns": 3})


@pytest.mark.slow
@pytest.mark.skipif(not TEXTARENA.exists(), reason="textarena is not installed: scripts/foreign_clients installs it")
def test_a_game_of_textarena_with_itself():
    options = {"env_id": "TicTacToe-v0", "python": str(TEXTARENA), "items": 1, "seats": "all"}
    config = GRPOConfig(model="tiny", env={"name": "textarena", "options": options}, prompts_per_step=1, group_size=2)

    def move(ids):
        text = TOKENIZER.decode(ids)
        return f"[{(0, 1, 2)[text.count('assistant') - 1] + 3 * ('You are Player 1' in text)}]"

    rollouts = AgentRollouts(config, ALONE, training_rows(config.env), fake_policy(TOKENIZER, move))
    try:
        data = rollouts.rollout()
        assert not rollouts.first_error
        assert by_seat(data, rewards(data)) == {"0": [1, 1], "1": [-1, -1]}  # the first has its row of three first
        answers = {
            seat: own for seat, own in zip(column_values(data, "env_seat"), data["text"].rows("response"), strict=True)
        }
        assert [answers["0"].count(f"[{square}]<") for square in (0, 1, 2, 3, 4, 5)] == [1, 1, 1, 0, 0, 0]
        assert [answers["1"].count(f"[{square}]<") for square in (0, 1, 2, 3, 4, 5)] == [0, 0, 0, 1, 1, 0]
    finally:
        rollouts.stop()
        rollouts.close()
