"""An environment and a call format of the user's own, named in a recipe: what they must be able to do, and mistakes."""

import sys

import pytest

from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.train.settings import EnvSettings, EvalSettings
from llmrl.train.tasks import Task, eval_rows, training_rows

MINE = """
from llmrl.envs.llm import DatasetChatEnv, TaskEnv
from llmrl.envs.llm.tool_calls import CallFormat, PatternFormat
from llmrl.envs.llm.transforms import RewardFunction

ROWS = [{"word": "one"}, {"word": "three"}, {"word": "eleven"}]

def size(completion):
    return len(completion)

class Spelling(TaskEnv):
    SYSTEM_PROMPT = "Spell."

    @classmethod
    def rows(cls, dataset=None, *, name=None, split=None):
        return ROWS[:1] if split == "test" else ROWS

    @classmethod
    def prompt_row(cls, row, number=None):
        return {"query": f"Spell {row['word']}.", "answer": " ".join(row["word"])}

    @classmethod
    def scorer(cls, tokenizer=None):
        return RewardFunction(lambda completion, answer: completion == answer, name="spelt")

class Short(Spelling):
    def __init__(self, *, most=9, **options):
        super().__init__(**options)

    @classmethod
    def rows(cls, dataset=None, *, name=None, split=None, most=9):
        return [row for row in ROWS if len(row["word"]) <= most]

class Unscored(TaskEnv):
    DATASET = "x"

class OwnReward(DatasetChatEnv):
    def __init__(self, *, factor=1, **options):
        super().__init__(**options)
        self.append_transform(RewardFunction(lambda completion: factor * len(completion)))

def made(level, **options):
    env = DatasetChatEnv(**options)
    return env.append_transform(RewardFunction(lambda completion: level))

def without_reward(**options):
    return DatasetChatEnv(**options)

def something_else(**options):
    return 5

def too_few(dataset, num_envs, shuffle):
    return None

class NoEnv:
    pass

shouted = PatternFormat(r"CALL (\\w+) (\\{.*\\})")
class NeedsArguments(CallFormat):
    name = "x"
    def __init__(self, a):
        pass
    def render(self, name, arguments):
        return ""
    def _read(self, text, opening, schemas):
        return [], 0
number = 5
"""


@pytest.fixture
def own(place):
    place.module("mine", MINE)
    yield place
    sys.modules.pop("mine", None)


def answered(env, replies, rows=None):
    made = Task(env, tiny_tokenizer()).make_env(rows or training_rows(env), num_envs=len(replies), shuffle=False)
    return made.step(ScriptedPolicy(replies)(made.reset()))


def test_a_task_of_ones_own_has_its_rows_its_prompt_and_its_reward(own):
    env = EnvSettings(name="mine:Spelling")
    td = answered(env, ["o n e", "three"])
    assert td["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert td["history"].prompt.to_chats()[1] == [
        {"role": "system", "content": "Spell."},
        {"role": "user", "content": "Spell three."},
    ]
    assert len(eval_rows(env, EvalSettings())) == 1
    assert Task(env, tiny_tokenizer()).fit_prompts(training_rows(env))[1] == 0


def test_options_that_its_rows_have_parameters_for_reach_them(own):
    assert training_rows(EnvSettings(name="mine:Short", options={"most": 3})) == [{"word": "one"}]
    assert len(eval_rows(EnvSettings(name="mine:Short", options={"most": 5}), EvalSettings())) == 2


def test_its_reward_gives_way_to_one_that_is_named(own):
    assert answered(EnvSettings(name="mine:Spelling", reward="mine:size"), ["four"])["next", "reward"].item() == 4.0


@pytest.mark.parametrize(
    ("name", "options", "reward"),
    [("OwnReward", {}, 4.0), ("OwnReward", {"factor": 3}, 12.0), ("made", {"level": 7}, 7.0)],
)
def test_an_environment_made_by_a_class_or_a_function_has_its_reward_inside_and_options(own, name, options, reward):
    env = EnvSettings(name=f"mine:{name}", dataset="prompts.jsonl", options=options)
    assert answered(env, ["four"])["next", "reward"].item() == reward


def test_tools_of_the_settings_act_in_it(own):
    env = EnvSettings(name="mine:Spelling", tools=["calculator"], tool_format="mine:shouted", max_turns=2)
    td = answered(env, ['CALL calculator {"expression": "6 * 7"}'])
    assert td["next", "history"].prompt.to_chats()[0][-1]["content"] == "42"


def test_a_file_has_no_problems_that_are_held_out(own):
    assert eval_rows(EnvSettings(name="mine:OwnReward", dataset="prompts.jsonl"), EvalSettings()) is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mine:Speling", {}, ["bad.yaml:2  env.name", "'mine' has no 'Speling'", "Did you mean 'Spelling'?"]),
        ("mien:Spelling", {}, ["no module 'mien'"]),
        ("mine:NoEnv", {}, ["'mine:NoEnv' must be a subclass of TaskEnv or DatasetChatEnv"]),
        ("mine:number", {}, ["it is of type int"]),
        ("mine:Unscored", {}, ["Unscored must have a SCORER or define scorer"]),
        ("mine:OwnReward", {}, ["OwnReward has no rows", "env.dataset"]),
        ("mine:too_few", {"dataset": "prompts.jsonl"}, ["too_few must take"]),
        ("mine:made", {"dataset": "prompts.jsonl"}, ["a required argument: 'level'", "env.opt"]),
        ("mine:Spelling", {"options": {"sede": 1}}, ["Spelling has no parameter 'sede'. Did you mean 'seed'?"]),
        ("mine:Spelling", {"options": {"seed": 1}}, ["env.options must not have seed"]),
        ("sums", {"options": {"seed": 1}}, ["env.options", "sums takes none"]),
        ("mine:Spelling", {"prompt_column": "word"}, ["env.prompt_column is for data of your own"]),
        ("spelling", {}, ["'spelling' is not an environment: must be one of sums"]),
        ("mine:Spelling", {"tool_format": "mine:number"}, ["env.tool_format  'mine:number' must be a CallFormat"]),
        ("mine:Spelling", {"tool_format": "mine:NeedsArguments"}, ["must be made without arguments"]),
        ("mine:something_else", {"dataset": "prompts.jsonl"}, ["must return a DatasetChatEnv: got int"]),
        ("mine:without_reward", {"dataset": "prompts.jsonl"}, ["without_reward gives no reward"]),
    ],
)
def test_a_dry_run_says_what_cannot_be_run(own, name, options, words):
    recipe = own.recipe("bad", {"model": "tiny", "env": {"name": name, **options}})
    own.run("grpo", recipe, "--dry-run", code=2, words=words)


def test_all_names_are_told_at_once_each_at_its_place(own):
    (own.path / "bad.yaml").write_text(
        "model: tiny\n"
        "env:\n"
        "  name: mine:Spelling\n"
        "  max_turns: 2\n"
        "  user: mine:nobody\n"
        "  tools:\n"
        "    - calculator\n"
        "    - {search_documents: {foldr: docs}}\n"
        "    - mine:number\n"
        "  rewards:\n"
        "    - mine:size\n"
        "    - {fn: mine:sise, weight: 2}\n"
    )
    words = ["Did you mean 'folder'?", "Did you mean 'size'?"]
    result = own.run("grpo", "bad.yaml", "--dry-run", "--runs", "none", code=2, words=words)
    lines = [line.split("  ") for line in result.err.replace("config error", " " * 12).splitlines()]
    places = [[part.strip() for part in line if part.strip()][:2] for line in lines if "bad.yaml" in " ".join(line)]
    assert places == [
        ["bad.yaml:5", "env.user"],
        ["bad.yaml:8", "env.tools.1"],
        ["bad.yaml:9", "env.tools.2"],
        ["bad.yaml:12", "env.rewards.1.fn"],
    ], result.err


def test_a_module_is_not_run_while_the_section_has_another_fault(own):
    own.module("counted", "raise RuntimeError('run')\n")
    name = own.recipe("bad", {"model": "tiny", "env": {"name": "sums", "reward": "counted:x", "max_turns": 0}})
    assert "RuntimeError" not in own.run("grpo", name, code=2).err
    words = ["importing 'counted' failed: RuntimeError: run, at", "counted.py:1."]
    own.run("grpo", name, "env.max_turns=1", code=2, words=words)


@pytest.mark.slow
def test_its_evaluation_goes_by_its_name_without_the_module(own):
    model = {"hidden_size": 16, "layers": 1, "heads": 2}
    recipe = own.recipe("one", {"model": model, "env": {"name": "mine:Spelling"}})
    small = ("steps=1", "prompts_per_step=2", "group_size=2", "sampling.max_tokens=2", "eval.max_tokens=2")
    own.run("grpo", recipe, "--name", "one", *small)
    assert "eval/Spelling/mean" in own.steps("one")[0]
