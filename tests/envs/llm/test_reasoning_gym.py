"""Tasks of reasoning-gym: items that are the same in every process, and the library's own scores of the answers."""

import ast
import importlib
import json
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

from llmrl.concurrency.worker_process import WorkerPool
from llmrl.envs.llm import ReasoningGymEnv
from llmrl.envs.llm.tasks import reasoning_gym, reasoning_gym_process
from llmrl.errors import ConfigError, DataError, MissingDependencyError
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.train.settings import EnvSettings, EvalSettings
from llmrl.train.tasks import Task, eval_rows, training_rows

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, and of what it imports

SUMS = {"task": "chain_sum", "items": 40, "eval_items": 40}
SUMS["config"] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# Their generators take more than 10 ms per item.
SLOW = {
    "knight_swap": 1,
    "futoshiki": 3,
    "sokoban": 3,
    "zebra_puzzles": 3,
    "puzzle24": 3,
    "intermediate_integration": 3,
}
SLOW |= dict.fromkeys(("sudoku", "quantum_lock", "countdown", "rubiks_cube", "polynomial_equations"), 5)
SLOW |= dict.fromkeys(("game_of_life", "advanced_geometry"), 5)
NO_SOLUTION = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
MIX = {"datasets": [{"name": "gcd", "weight": 3}, {"name": "word_ladder", "config": {"min_word_length": 3}}]}
ROW = {"question": "1 + 1?", "answer": "2", "item": '["chain_sum", "{}", "{}"]'}


def rewards(env, replies):
    td = env.step(ScriptedPolicy(replies)(env.reset()))
    return td["next", "reward"].flatten().tolist()


def generated(*requests):
    """The rows of several requests, by one process."""
    pool = WorkerPool(Path(reasoning_gym_process.__file__), [], size=1, who="test", quiet=True)
    with closing(pool), pool.worker() as worker:
        return [list(worker.ask([*request, None], 60)) for request in requests]


@pytest.mark.slow
def test_every_task_gives_its_own_solution_1_and_any_other_answer_what_the_library_gives():
    names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    assert len(names) >= 106
    requests = [[n, json.dumps(MIX if n == "composite" else {}), 1, SLOW.get(n, 20)] for n in names]
    by_name = dict(zip(names, generated(*requests), strict=True))
    assert {n: len(rows) for n, rows in by_name.items()} == {n: SLOW.get(n, 20) for n in names}
    rows = [row for made in by_name.values() for row in made]
    env = EnvSettings(name="reasoning_gym", options={"task": "composite"}, reward_deadline_s=60)
    with closing(Task(env, tiny_tokenizer())) as task:
        made = task.make_env(rows, num_envs=len(rows), shuffle=False)
        solved = rewards(made, [f"so <answer>\n{row['answer']} </answer>" for row in rows])
        few = [row for made in by_name.values() for row in made[:2] for _ in range(3)]
        made = task.make_env(few, num_envs=len(few), shuffle=False)
        given = rewards(made, ["<answer>garbage</answer>", "<answer></answer>", "garbage"] * (len(few) // 3))
    assert {row["item"].split('"')[1] for row in rows if row["answer"] is None} == NO_SOLUTION
    for row, value in zip(rows, solved, strict=True):
        assert value == 1.0 or row["answer"] is None, row
    for row, answer, value in zip(few, ["garbage", "", None] * (len(few) // 3), given, strict=True):
        name, config, entry = json.loads(row["item"])
        try:
            score = reasoning_gym_process._dataset(name, config).score_answer(answer, ast.literal_eval(entry))
        except ValueError:  # of prime_factorization
            score = 0.0
        assert value == pytest.approx(score), (name, answer)


@pytest.mark.slow
def test_items_are_the_same_in_every_process(monkeypatch):
    names = (
        "isomorphic_strings",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
        "codeio",
    )
    requests = [[name, "{}", 5, 10] for name in names] + [["composite", json.dumps(MIX), 5, 10]]
    first = generated(*requests)
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # these depend on the order of sets of text
    assert generated(*reversed(requests)) == first[::-1]


@pytest.mark.slow
def test_a_recipe_asks_its_questions_scores_answer_blocks_and_holds_items_out():
    env = EnvSettings(name="reasoning_gym", options=SUMS)
    rows, held_out = training_rows(env), eval_rows(env, EvalSettings())
    assert len(rows) == 40
    assert 0 < len(held_out) < 40
    assert not {row["question"] for row in rows} & {row["question"] for row in held_out}
    answer = rows[0]["answer"]
    replies = {f"<answer> {answer} </answer>": 1.0, f"<answer>about {answer}.</answer>": None, answer: 0.0}
    replies |= {f"<think><answer>{answer}</answer></think>": 0.0, f"<answer>no</answer><answer>{answer}</answer>": 1.0}
    with closing(Task(env, tiny_tokenizer())) as task:
        words = task.about(EvalSettings(), at_once=1)
        assert f"reasoning-gym {metadata.version('reasoning-gym')} · chain_sum, 40 items of seed 0" in words
        assert f"{40 - len(held_out)} of 40 held-out items are trained on too: left out" in words
        made = task.make_env(rows[:1] * len(replies), num_envs=len(replies), shuffle=False)
        system, user = made.reset()["history"].prompt.to_chats()[0]
        assert "<answer>" in system["content"]
        assert user["content"] == rows[0]["question"]
        for value, expected in zip(rewards(made, list(replies)), replies.values(), strict=True):
            assert 0 < value < 1 if expected is None else value == expected  # partial credit stays


def test_rows_of_a_file_are_scored_without_generating(tmp_path, monkeypatch):
    rows = [ROW, {**ROW, "answer": None}]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(reasoning_gym, "_generated", None)
    env = EnvSettings(name="reasoning_gym", dataset=str(path))
    assert [dict(row) for row in training_rows(env)] == rows


def test_a_prompt_of_the_library_is_chosen_by_name():
    env = ReasoningGymEnv(dataset=[ROW], prompt="direct", compute_reward=False)
    assert env.reset()["history"].prompt.to_chats()[0][0]["content"].startswith("Answer the question directly.")
    for options, words in [({"prompt": "drect"}, "Did you mean 'direct'"), ({"system_prompt": "Hi."}, "got both")]:
        with pytest.raises(ConfigError, match=words):
            ReasoningGymEnv(dataset=[ROW], **{"prompt": "direct", **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": None}, "options.task must name a task"),
        ({"items": 0}, "options.items must be a whole number from 1"),
        ({"items_seed": "a"}, "options.items_seed must be"),
        ({"deadline_s": 0}, "options.deadline_s must be"),
        ({"config": [1]}, "options.config must be a mapping"),
        ({"split": "tset"}, "Did you mean 'test'"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        ReasoningGymEnv.rows(**{**SUMS, **options})


@pytest.mark.parametrize(
    ("task", "config", "words"),
    [
        (
            "chain_sun",
            {},
            "^task must be one of the .* tasks of the library: got 'chain_sun'. Did you mean 'chain_sum'",
        ),
        ("chain_sum", {"min_term": 3}, "^config: chain_sum has no key 'min_term'.*Did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "^config: chain_sum does not take .*max_terms must be"),
        ("chain_sum", {"min_terms": "many"}, "^config: chain_sum does not take "),
        ("chain_sum", {"seed": 3}, "^config must not have seed: that is env.options.items_seed"),
        ("composite", {}, "^config.datasets must be a list of tasks"),
        ("composite", {"datasets": [{"name": "gcd", "weight": 0}]}, "^config.datasets.0.weight must be .*: got 0"),
        ("composite", {"datasets": [{"name": "gcd"}, {"name": "lcm", "weight": -1}]}, "datasets.1.weight .* got -1"),
        ("composite", {"datasets": [{"name": "gcdd"}]}, r"^config.datasets.0.name must .*Did you mean 'gcd'"),
        (
            "composite",
            {"datasets": [{"name": "gcd", "config": {"min": 1}}]},
            "^config.datasets.0.config: gcd has no key",
        ),
        ("composite", {"datasets": [{"name": "gcd", "wieght": 1}]}, "^config.datasets.0 must have a name, and may"),
        ("composite", {"datasets": [{"name": "composite"}]}, "^config.datasets.0.name must not be composite"),
        ("composite", {"datasets": [{"name": "gcd"}, {"name": "gcd"}]}, "^config: composite does not take .*Duplicate"),
    ],
)
def test_what_the_library_does_not_take_is_named(task, config, words):
    with pytest.raises(ConfigError, match=words):
        reasoning_gym_process._dataset(task, json.dumps(config))


@pytest.mark.parametrize(
    "task", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "simple_integration"]
)
def test_an_answer_that_is_python_changes_nothing(task, tmp_path):
    rows = []
    reasoning_gym_process._generate([task, "{}", 1, 1, None], rows.append)
    touched = tmp_path / "touched"
    for code in ("__import__('os').system('touch {}')", "open('{}', 'w')", "__import__('os').mkdir('{}')"):
        assert reasoning_gym_process.score(code.format(touched), rows[0]["item"]) < 0.1
        assert not touched.exists()
    assert reasoning_gym_process.score(rows[0]["answer"], rows[0]["item"]) == 1.0
    touched.write_text("allowed again")


@pytest.mark.slow
def test_a_refusal_and_a_deadline_end_generation():
    with pytest.raises(ConfigError, match=r"task must be one of the .* tasks"):
        ReasoningGymEnv.rows(task="chain_sun")
    with pytest.raises(DataError, match=r"2000 items within .* s: got .*items lower"):
        ReasoningGymEnv.rows(task="knight_swap", items=2000, deadline_s=0.5)


def test_held_out_items_that_are_all_trained_on_are_an_error_unless_none_are_asked_for(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "_generated", lambda *_: (ROW,))
    env = EnvSettings(name="reasoning_gym", options={"task": "gcd"})
    with pytest.raises(DataError, match="all 1 items of test are among"):
        eval_rows(env, EvalSettings())
    assert eval_rows(env.model_copy(update={"options": {"task": "gcd", "eval_items": 0}}), EvalSettings()) is None


def test_an_old_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.9")
    with pytest.raises(MissingDependencyError, match=r"0\.1\.25 or newer: got 0\.1\.9; run: pip install -U 'llmrl\["):
        ReasoningGymEnv.rows(**SUMS)


@pytest.mark.slow
def test_items_are_divided_among_levels_of_the_librarys_curriculum_or_of_ones_own():
    rows = ReasoningGymEnv.rows(task="chain_sum", items=41, levels=3)
    assert [sum(row["level"] == level for row in rows) for level in range(3)] == [14, 14, 13]
    for row in rows:  # terms and digits of the curriculum: 2 and 1 at first, then up to one more
        terms = row["question"].rpartition(": ")[2].rpartition(" = ")[0].replace("-", "+").split(" + ")
        assert len(terms) <= 2 + row["level"]
        assert all(len(term.strip("+ ")) <= 1 + row["level"] for term in terms)
    own = {"levels": [{"max_terms": 2}, {"max_terms": 4, "min_terms": 4}], "config": {"min_terms": 2, "max_digits": 1}}
    rows = ReasoningGymEnv.rows(task="chain_sum", items=10, eval_items=10, split="test", **own)
    assert {row["level"]: json.loads(json.loads(row["item"])[1])["max_terms"] for row in rows} == {0: 2, 1: 4}
    env = ReasoningGymEnv(task="chain_sum", items=2, num_envs=2, shuffle=False, **own)
    solved = [f"<answer>{row['answer']}</answer>" for row in ReasoningGymEnv.rows(task="chain_sum", items=2, **own)]
    assert rewards(env, solved) == [1.0, 1.0]
    with pytest.raises(ConfigError, match="at most 2 levels, as many as there are items: got 3"):
        ReasoningGymEnv.rows(task="chain_sum", items=2, levels=3)
    with pytest.raises(ConfigError, match=r"env.options.levels: the curriculum of chain_sum has 11: got more"):
        ReasoningGymEnv.rows(task="chain_sum", items=20, levels=12)
    with pytest.raises(ConfigError, match=r"env.options.levels: composite has no curriculum: give a list"):
        ReasoningGymEnv.rows(task="composite", config=MIX, items=20, levels=2)
