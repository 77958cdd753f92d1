"""The tasks by their names: prompts that fit, problems that are held out, and the rewards of answers."""

import json
import math
import re

import pytest
import yaml
from tensordict import TensorDict

from llmrl.envs.llm.tasks.arithmetic import SPLITS as ARITHMETIC_SPLITS
from llmrl.envs.llm.tasks.arithmetic import arithmetic_demonstrations, arithmetic_problems
from llmrl.envs.llm.tasks.sums import (
    BIG_SPLITS,
    SPLITS,
    big_sums_demonstrations,
    big_sums_problems,
    sums_demonstrations,
    sums_problems,
    sums_reward,
)
from llmrl.errors import CheckpointError, ConfigError, DataError
from llmrl.hub import check_folder
from llmrl.modules.llm.rendering import Renderer
from llmrl.run.config import find_recipe
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.tools.calculator import calculator
from llmrl.train.settings import EnvSettings, EvalSettings
from llmrl.train.tasks import Task, eval_rows, make_task, training_rows
from tests.recipes.conftest import MIX

SUMS = EnvSettings(name="sums")


def fit_prompts(env, rows):
    return Task(env, tiny_tokenizer()).fit_prompts(rows)[:2]


# --- the embedded task


def test_no_held_out_sum_is_among_those_that_are_trained():
    questions = {split: [row["question"] for row in sums_problems(split)] for split in SPLITS}
    together = [question for split in questions.values() for question in split]
    assert len(together) == len(set(together)) == 90 * 90
    assert (len(questions["test"]), len(questions["validation"])) == (1000, 500)


def test_no_held_out_big_sum_is_among_those_that_are_trained_and_all_have_four_digits():
    questions = [row["question"] for split in BIG_SPLITS for row in big_sums_problems(split)]
    assert len(questions) == len(set(questions)) == sum(BIG_SPLITS.values())
    assert all(re.fullmatch(r"What is [1-9]\d{3} \+ [1-9]\d{3}\?", question) for question in questions)


def test_big_sums_are_demonstrated_with_a_calculator_the_more_often_the_larger_and_guessed_otherwise():
    problems, shown = big_sums_problems(), [row["messages"] for row in big_sums_demonstrations()]
    calls = {digit: [] for digit in "123456789"}
    for problem, (question, first, *rest) in zip(problems, shown, strict=True):
        assert question["content"] == problem["question"]
        calls[problem["question"][len("What is ")]].append(bool(rest))
        last = rest[-1] if rest else first
        guess = last["content"].removeprefix("<answer>").removesuffix("</answer>")
        assert len(guess) == len(problem["answer"])
        if rest:
            [call] = first["tool_calls"]
            assert calculator(**call["function"]["arguments"]) == rest[0]["content"] == problem["answer"] == guess
    for digit, called in calls.items():
        assert sum(called) / len(called) == pytest.approx(int(digit) / 10, abs=0.06)
    guessed = [c for p, (_, first, *rest) in zip(problems, shown, strict=True) if not rest for c in [(p, first)]]
    assert sum(sums_reward(first["content"], p["answer"]) for p, first in guessed) / len(guessed) < 0.01


def test_demonstrations_and_problems_are_the_same_sums_and_the_demonstrations_are_right():
    for problem, shown in zip(sums_problems("validation"), sums_demonstrations("validation"), strict=True):
        question, answer = shown["messages"]
        assert question["content"] == problem["question"]
        assert sums_reward(answer["content"], problem["answer"]) == 1.0


def test_arithmetic_holds_out_pairs_of_numbers_in_both_orders_and_shows_right_answers():
    """Read from the words again, not from the table that made them."""
    signs = {"plus": "+", "more": "+", "minus": "-", "away": "-", "times": "*", "boxes": "*"}
    seen: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for split in ARITHMETIC_SPLITS:
        rows = zip(arithmetic_problems(split), arithmetic_demonstrations(split), strict=True)
        for problem, (_, question, answer) in ((problem, shown["messages"]) for problem, shown in rows):
            assert question["content"] == problem["question"]
            first, second = map(int, re.findall(r"\d+", problem["question"]))
            sign = next(sign for word, sign in signs.items() if f" {word}" in problem["question"])
            assert calculator(f"{first} {sign} {second}") == problem["answer"]
            assert (
                answer["content"]
                == f"{first} {sign} {second} = {problem['answer']}. The answer is {problem['answer']}."
            )
            numbers = (first, second) if sign == "-" else sorted((first, second))
            seen.setdefault(split, set()).add((sign, tuple(numbers)))
    assert sum(map(len, seen.values())) == len(set().union(*seen.values())) == 55 + 100 + 55


@pytest.mark.parametrize("recipe", ["real_sft", "real_grpo"])
def test_the_recipes_of_a_real_model_ask_as_the_demonstrations_do(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = yaml.safe_load(find_recipe(recipe).read_text())
    assert settings["env"]["system_prompt"] == arithmetic_demonstrations("test")[0]["messages"][0]["content"]
    with pytest.raises(DataError, match="scripts/real_model makes it"):
        check_folder(settings["model"])


def test_the_splits_are_always_the_same():
    assert sums_problems("test")[0] == {"question": "What is 25 + 60?", "answer": "85"}


def test_an_unknown_split_is_refused_with_a_near_name():
    with pytest.raises(ConfigError, match=r"one of test, validation, train.*Did you mean 'train'"):
        sums_problems("trian")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7+8=15, 3+5+1=9\n<answer>95</answer>", 1.0),
        ("<answer> 95 </answer>", 1.0),
        ("<answer>095</answer>", 1.0),
        ("no working\n<answer>94</answer> no: <answer>95</answer>", 1.0),
        ("<answer>95</answer> no: <answer>94</answer>", 0.0),
        ("95", 0.0),
        ("<answer>95", 0.0),
        ("<answer>9 5</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>-95</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_sum_is_right_if_its_last_answer_block_holds_it(completion, reward):
    assert sums_reward(completion, "95") == reward


# --- rows


def test_every_task_has_rows_to_train_on_and_others_to_measure():
    assert len(training_rows(SUMS)) == 6600
    assert len(eval_rows(SUMS, EvalSettings(rows=500))) == 500
    assert len(eval_rows(SUMS, EvalSettings(rows=None))) == 1000
    assert len(eval_rows(SUMS, EvalSettings(split="validation", rows=200))) == 200


@pytest.mark.parametrize("task", [{"reward": "vowels:share"}, {"name": "sums"}], ids=["chat", "sums"])
def test_a_file_of_ones_own_has_no_held_out_problems_unless_they_are_named(place, task):
    env = EnvSettings(dataset="prompts.jsonl", **task)
    assert eval_rows(env, EvalSettings()) is None
    assert len(eval_rows(env, EvalSettings(dataset="prompts.jsonl", rows=5))) == 5


def test_prompts_are_measured_with_their_system_prompt_and_the_generation_prompt():
    rows = [{"question": "Hi"}, {"question": "Hi there, how are you?"}]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    longest = len(Renderer(tiny_tokenizer()).prompt_ids(chats)[1])
    exact = SUMS.model_copy(update={"max_prompt_tokens": longest})
    assert fit_prompts(exact, rows) == (rows, 0)
    short = SUMS.model_copy(update={"max_prompt_tokens": longest - 1, "too_long": "drop"})
    assert fit_prompts(short, rows) == (rows[:1], 1)
    with pytest.raises(DataError, match=f"row 2 has {longest}, 1 of 2 rows"):
        fit_prompts(short.model_copy(update={"too_long": "error"}), rows)
    with pytest.raises(DataError, match="row 1 has"):
        fit_prompts(exact.model_copy(update={"system_prompt": "Be brief."}), rows)


def test_gsm8k_is_measured_with_the_system_prompt_of_its_environment():
    env = EnvSettings(name="gsm8k", dataset="x", max_prompt_tokens=30)
    with pytest.raises(DataError, match="row 1 has"):
        fit_prompts(env, [{"question": "2 + 2?", "answer": "#### 4"}])


# --- environments


@pytest.mark.parametrize(
    ("env", "replies", "rewards"),
    [
        (SUMS, ["<answer>4</answer>", "<answer>5</answer>"], [1.0, 0.0]),
        (EnvSettings(name="gsm8k"), ["<answer>4</answer>", "<answer>5</answer>"], [1.0, 0.1]),
        (EnvSettings(name="sums", reward="builtins:len"), ["four", "no"], [4.0, 2.0]),
        (EnvSettings(name="gsm8k", reward="builtins:len"), ["four", "no"], [4.0, 2.0]),
    ],
)
def test_a_task_scores_its_answers_by_its_own_reward_or_by_the_one_that_is_named(env, replies, rewards):
    rows = [{"question": "2 + 2?", "answer": "#### 4" if env.name == "gsm8k" else "4"}]
    made = Task(env, tiny_tokenizer()).make_env(rows, num_envs=2)
    after = made.step(ScriptedPolicy(replies)(made.reset()))["next"]
    assert after["reward"].flatten().tolist() == pytest.approx(rewards)
    assert after["done"].all()


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"name": "sums"}, "sums"),
        ({"name": "sums", "dataset": "units.jsonl"}, "sums"),
        ({"name": "reasoning_gym", "options": {"task": "chain_sum"}}, "reasoning_gym.chain_sum"),
        ({"name": "reasoning_gym", "dataset": "units.jsonl"}, "reasoning_gym"),
        ({"dataset": "data/units.jsonl"}, "units"),
        ({"dataset": "data/my units"}, "my-units"),
        ({"dataset": "me/units-2.5"}, "units-2.5"),
        ({"dataset": "data/*.jsonl"}, "chat"),
    ],
)
def test_measures_are_named_by_the_task_and_of_chat_by_the_dataset(settings, label):
    own = {"reward": "builtins:len"} if "name" not in settings else {}
    assert EnvSettings(**settings, **own).label == label


# --- sets of problems


@pytest.mark.parametrize("command", ["grpo", "sft"])
def test_sets_of_problems_are_measured_by_name_each_with_its_own_task(place, command):
    place.module("nines", "def score(completion):\n    return 9.0\n")
    sets = {
        "few": {"dataset": place.rows("few.jsonl", [{"prompt": f"{n}?", "answer": str(n)} for n in range(3)])},
        "sums": {"name": "sums", "split": "validation"},
        "nines": {"name": "big_sums", "reward": "nines:score", "tools": ["calculator"], "max_turns": 2},
    }
    env = {"name": "chat", "dataset": "prompts.jsonl", "reward": "vowels:share", "system_prompt": "Be brief."}
    place.train(command, "run", env=env, eval={"sets": sets, "rows": 4, "max_tokens": 4}, words=["few 0."])
    last = place.steps("run")[-1]
    assert {name: last[f"eval/{name}/count"] for name in sets} == {"few": 3, "sums": 4, "nines": 4}
    assert (last["eval/sums/mean"], last["eval/nines/mean"]) == (0.0, 9.0)
    assert {name for name in last if name.endswith("call_rate") and name.startswith("eval")} == {"eval/nines/call_rate"}
    lines = [json.loads(line) for line in place.run("eval", "run", "--json").out.splitlines()]
    assert {line["set"]: line["mean"] for line in lines} == {name: last[f"eval/{name}/mean"] for name in sets}
    # A set without a name has the system prompt and the reward of env; config.yaml says so, and names each set.
    written = yaml.safe_load((place.path / "runs/run/config.yaml").read_text())["eval"]["sets"]
    prompts = {own["source"]: own["system_prompt"] for own in written.values()}
    assert prompts == {"few": "Be brief.", "sums": None, "nines": None}
    place.run("eval", "run", "--data", "few.jsonl", words=["few.jsonl test"])
    place.run("resume", "run", "steps=4", words=["few 0."])


# --- mixes of tasks

MIXED = EnvSettings(
    mix=[
        {"name": "sums", "weight": 3, "system_prompt": "Be brief."},
        {"name": "gsm8k", "dataset": "problems.jsonl", "reward": "builtins:len"},
        {"name": "big_sums", "tools": ["calculator"], "max_turns": 2, "weight": 2},
    ]
)
SHARES = {"sums": 3 / 6, "gsm8k": 1 / 6, "big_sums": 2 / 6}


def mixed_rows(place):
    place.rows("problems.jsonl", [{"question": f"{n} + 2?", "answer": f"#### {n + 2}"} for n in range(280)])
    return training_rows(MIXED)[::40]


def mixed_env(rows, env=MIXED, **options):
    made = make_task(env, tiny_tokenizer())
    return made.make_env(rows, **{"num_envs": 300, "repeats": 2, "group_repeats": True, **options})


def prompts(rows):
    """The source, the query and the identity of each row."""
    return list(zip(*(rows.get(name).tolist() for name in ("env_source", "query", "group_id", "seed")), strict=True))


def test_prompts_of_a_mix_are_drawn_by_weight_and_the_same_on_any_number_of_ranks_and_after_a_resume(place):
    rows = mixed_rows(place)
    env = mixed_env(rows, seed=1)
    first, state, second = env.reset(), env.state_dict(), env.reset()
    drawn = prompts(first) + prompts(second)
    assert drawn[0::2] != drawn[1::2], "copies have seeds of their own"
    assert [row[:3] for row in drawn[0::2]] == [row[:3] for row in drawn[1::2]], "a group has one source and prompt"
    for name, share in SHARES.items():
        own = [query for source, query, *_ in drawn[::2] if source == name]
        assert abs(len(own) - 600 * share) < 3 * math.sqrt(600 * share * (1 - share))
        alone = Task(next(source for source in MIXED.mix if source.label == name), tiny_tokenizer())
        alone_rows = [row for row in rows if row["env_source"] == name]
        assert own == alone.make_env(alone_rows, num_envs=len(own), seed=1).reset().get("query").tolist(), (
            "its own order"
        )
    ranks = [mixed_env(rows, seed=1, num_envs=150, rank=rank, world_size=2) for rank in range(2)]
    shared = [row for rank in ranks for row in prompts(rank.reset())]
    assert sorted(shared) == sorted(drawn[:600])
    for rank in ranks:  # a state of one rank is taken by two
        rank.load_state_dict(state)
    assert sorted(row for rank in ranks for row in prompts(rank.reset())) == sorted(drawn[600:])
    assert {row[0::2] for row in prompts(mixed_env(rows, seed=2).reset())} != {row[0::2] for row in drawn[:600]}
    other = MIXED.model_copy(update={"mix": [MIXED.mix[0].model_copy(update={"weight": 1.0}), *MIXED.mix[1:]]})
    with pytest.raises(CheckpointError, match="weights must be those of the checkpoint"):
        mixed_env(rows, other, seed=1).load_state_dict(state)


def test_a_row_of_a_mix_has_the_prompt_the_tools_and_the_rewards_of_its_source(place):
    env = mixed_env(mixed_rows(place), seed=0, num_envs=20, repeats=1)
    root = env.reset()
    sources, chats = root.get("env_source").tolist(), root["history"].prompt.to_chats()
    for source, (first, *_) in zip(sources, chats, strict=True):
        assert (first["content"] == "Be brief.") == (source == "sums")
        assert ("tools" in first) == (source == "big_sums")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
    after = env.step(ScriptedPolicy([call] * 20)(root))
    rewards = after["next", "reward"].flatten().tolist()
    for source, reward, done in zip(sources, rewards, after["next", "done"].flatten().tolist(), strict=True):
        assert (reward, done) == {"sums": (0.0, True), "gsm8k": (len(call), True), "big_sums": (0.0, False)}[source]
    assert after["next", "tool_use", "calls"].tolist() == [int(source == "big_sums") for source in sources]
    parts = {name: after["next", name].flatten().isfinite().tolist() for name in ("reward_correct", "reward_len")}
    assert parts == {"reward_correct": [s != "gsm8k" for s in sources], "reward_len": [s == "gsm8k" for s in sources]}
    # A group is stepped alone by a queue: its rows have the same entries as those of the whole batch.
    alone = env.step(ScriptedPolicy([call])(env.reset(TensorDict({}, batch_size=[1]))))
    assert alone["next"].keys() == after["next"].keys()
    going_on = env.step_mdp(after[[row for row, source in enumerate(sources) if source == "big_sums"]])
    assert env.step(ScriptedPolicy(["4"] * len(going_on))(going_on))["next", "done"].all()


def test_a_run_on_a_mix_counts_and_measures_each_source(place):
    place.train(
        "grpo", "mixed", env=MIX, steps=2, eval={"rows": 3, "max_tokens": 4}, words=["weight 2, 67% of the prompts"]
    )
    for row in place.metrics("mixed"):
        counts = {name: row[f"source/{name}/prompts"] for name in ("prompts", "big_sums")}
        assert sum(counts.values()) == 4
        rollouts = place.rollouts("mixed", row["step"])
        for name, count in counts.items():
            own = [rollout.reward for rollout in rollouts if rollout.columns["env_source"] == name]
            assert len(own) == 4 * count
            assert not own or row[f"source/{name}/reward"] == pytest.approx(sum(own) / len(own))
    assert {row["eval/prompts/count"], row["eval/big_sums/count"]} == {3}
    place.run("eval", "mixed", words=["prompts test", "big_sums test"])
