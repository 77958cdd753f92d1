"""Recipes with tools, a user and several rewards: what is shown, run, counted and trained, and what is refused."""

import json

import pytest
import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm.tasks.countdown import countdown_problems
from llmrl.envs.transforms import Transform
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from llmrl.tools import load_tool
from llmrl.train.data.sft import tokenize_chats
from llmrl.train.settings import EnvSettings, SFTConfig
from llmrl.train.tasks import Task

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
BIG = EnvSettings(name="big_sums", tools=["calculator"], max_turns=3)
ROW = {"question": "What is 4821 + 3977?", "answer": "8798"}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def converse(env, rows, replies, **settings):
    """The last turn of each conversation of ``rows``, in a task by ``env``'s settings."""
    made = Task(env.model_copy(update=settings), tiny_tokenizer()).make_env(rows, num_envs=len(rows), shuffle=False)
    return LLMCollector(made, policy=ScriptedPolicy(replies), yield_only_last_steps=True).rollout()


# --- settings

ACTING = "name: big_sums\n  max_turns: 2\n  tools: "
SUMS = "name: sums\n  "
KINDS = "exactly one of fn, judge, reward_model, code: got"


@pytest.mark.parametrize(
    ("env", "messages"),
    [
        (ACTING + "[calculater]", ["bad.yaml:7  env.tools.0  'calculater' is not a tool", "mean 'calculator'?"]),
        (ACTING + "[{pythn: {}}]", ["mean 'python'?"]),
        (ACTING + "[{python: {}, mcp: {}}]", ["one tool's name with its options"]),
        ("name: big_sums\n  tools: [calculator]", ["bad.yaml:4  env  env.tools needs max_turns of at least 2"]),
        (SUMS + "user: my_pkg:reply", ["env.user needs max_turns of at least 2"]),
        (SUMS + "max_turns: 2\n  user: reply", ["bad.yaml:7  env.user  must be 'package.module:name': got 'reply'"]),
        ("name: big_sums\n  tool_format: hermess", ["mean 'hermes'?"]),
        (SUMS + "rewards: []", ["bad.yaml:6  env.rewards"]),
        (SUMS + "rewards: [{weight: 2}]", [f"{KINDS} none"]),
        (SUMS + "rewards: [{fn: a:b, code: {}}]", [f"{KINDS} fn and code"]),
        (SUMS + "rewards: [{fn: a:b, weigth: 2}]", ["bad.yaml:6  env.rewards.0.weigth  is not a setting"]),
        (SUMS + "reward: a:b\n  rewards: [c:d]", ["env has reward and rewards"]),
        ("name: math\n  prompt_column: task", ["env.prompt_column is for data of your own"]),
        ("name: gsm8", ["bad.yaml:5  env.name  'gsm8' is not an environment", "mean 'gsm8k'?"]),
    ],
)
def test_settings_that_cannot_be_run_are_told_with_their_line(place, env, messages):
    (place.path / "bad.yaml").write_text(f"model: tiny\n\n\nenv:\n  {env}\n")
    place.run("grpo", "bad.yaml", code=2, words=messages)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"tools": ["nowhere.at_all:tool"]}, "there is no module 'nowhere'"),
        ({"tools": [{"calculator": {"digits": 3}}]}, "takes no settings: got 'digits'"),
        ({"user": "vowels:nobody"}, "env.user  module 'vowels' has no 'nobody'"),
        ({"rewards": ["vowels:shares"]}, "env.rewards.0  module 'vowels' has no 'shares'"),
        ({"rewards": ["vowels:share", {"fn": "vowels:share"}]}, "2 are called 'share'"),
    ],
)
def test_what_cannot_be_loaded_is_bad_configuration_too(place, env, message):
    env = {"max_turns": 2, **({"reward": None} if "rewards" in env else {}), **env}
    place.train("grpo", "bad", code=2, words=[message], env=env)


# --- prompts


def test_prompts_are_measured_with_the_tools_that_they_declare(tokenizer):
    schemas = [load_tool("calculator").schema()]
    chat = [{"role": "user", "content": ROW["question"]}]
    [bare], [told] = Renderer(tokenizer).prompt_ids([chat]), Renderer(tokenizer).prompt_ids([chat], tools=schemas)
    assert len(told) > len(bare) + 100

    def kept(limit, **settings):
        settings = BIG.model_copy(update={"max_prompt_tokens": limit, "too_long": "drop", **settings})
        return Task(settings, tokenizer).fit_prompts([ROW, {**ROW, "question": ROW["question"] + " Please."}])[:2]

    assert kept(len(told)) == ([ROW], 1)
    assert kept(len(bare), declare_tools=False) == ([ROW], 1)


def test_tools_that_a_row_declares_are_counted_as_well(tokenizer):
    schema = load_tool("calculator").schema()
    [ids] = Renderer(tokenizer).prompt_ids([[{"role": "user", "content": "Hi"}]], tools=[schema])
    env = EnvSettings(dataset="x", reward="builtins:len", too_long="drop", max_prompt_tokens=len(ids))
    rows = [{"prompt": "Hi", "tools": json.dumps([schema])}, {"prompt": "Hi there", "tools": [schema]}]
    assert Task(env, tokenizer).fit_prompts(rows)[:2] == (rows[:1], 1)


# --- conversations


def test_a_call_is_answered_and_the_answer_that_follows_is_scored():
    data = converse(BIG, [ROW, ROW], [CALL % "4821 + 3977", "<answer>1</answer>", "<answer>8798</answer>"])
    assert data["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert data["next", "tool_use", "ok"].tolist() == [1, 0]
    said = [message["content"] for message in data["history"].prompt.to_chats()[0]]
    assert said == [ROW["question"], CALL % "4821 + 3977", "8798"]


def test_a_user_speaks_where_no_tool_has_answered_and_ends_the_conversation(place):
    place.module(
        "users",
        "def reply(messages, answer):\n"
        "    assert [m['role'] for m in messages][-1] == 'assistant'\n"
        "    return f'It is {answer}, is it?' if len(messages) < 5 else None\n",
    )
    replies = [CALL % "1+1", "Two.", "<answer>8798</answer>"]
    data = converse(BIG, [ROW], replies, user="users:reply", max_turns=9)
    said = [(message["role"], message["content"]) for message in data["history"].prompt.to_chats()[0]]
    assert said[2:] == [("tool", "2"), ("assistant", "Two."), ("user", "It is 8798, is it?")]
    assert data["next", "terminated"].item()
    assert data["next", "reward"].item() == 1.0
    assert data["next", "tool_use", "turns"].item() == 3


def test_rewards_are_added_up_with_their_weights_and_reported_one_by_one(place):
    place.module("two", "def long(completion):\n    return len(completion)\ndef one(completion):\n    return 1.0\n")
    rewards = [{"fn": "two:long", "weight": 0.5}, {"fn": "two:one", "weight": -2, "name": "constant"}]
    place.train("grpo", "two", env={"reward": None, "rewards": rewards}, steps=1)
    [step] = place.steps("two")
    assert step["reward/constant/mean"] == 1.0
    assert step["reward/mean"] == pytest.approx(0.5 * step["reward/long/mean"] - 2)


@pytest.mark.parametrize(
    ("name", "row", "reply", "reward"),
    [
        ("countdown", countdown_problems("test")[0], "<answer>0</answer>", 0.1),
        ("countdown", {"nums": [3, 5, 2], "target": 16}, "<answer>(3 + 5) * 2</answer>", 1.0),
        (
            "ifeval",
            {"prompt": "Hi! No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
            "<think>so</think><answer>Hello</answer>",
            None,
        ),
    ],
)
def test_public_tasks_have_their_prompts_and_rewards(name, row, reply, reward, tokenizer):
    env = EnvSettings(name=name, dataset="x")
    assert Task(env, tokenizer).fit_prompts([row])[:2] == ([row], 0)
    got = converse(env, [row], [reply])["next", "reward"].item()
    assert got == pytest.approx(reward) if reward is not None else got > 0
    with pytest.raises(Exception, match=r"row 2"):
        Task(env, tokenizer).fit_prompts([row, {"question": "?"}])


def test_public_tasks_can_be_solved_with_tools():
    env = EnvSettings(name="countdown", dataset="x", tools=["calculator"], max_turns=2)
    row = {"nums": [3, 5, 2], "target": 16}
    data = converse(env, [row], [CALL % "(3+5)*2", "<answer>(3 + 5) * 2</answer>"])
    assert data["next", "success"].item()
    assert data["next", "tool_use", "calls"].item() == 1


# --- supervised data with calls


@pytest.mark.parametrize("file", ["chats.jsonl", "chats.parquet"])
@pytest.mark.parametrize("as_text", [True, False])
def test_calls_are_trained_and_what_tools_answered_is_not(place, tokenizer, file, as_text):
    schemas = [load_tool("calculator").schema()]
    rows = []
    for name, arguments in (("calculator", {"expression": "6 * 7"}), ("other", {"city": "Rome"})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if as_text:
            call["function"]["arguments"] = json.dumps(arguments)
        messages = [
            {"role": "user", "content": "6 * 7?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ]
        rows.append({"messages": messages, "tools": json.dumps(schemas) if as_text else schemas})
    settings = SFTConfig(model={}, data={"path": place.rows(file, rows)})
    chats = tokenize_chats(settings, tokenizer)
    trained = [text for text, is_trained in chats.samples(1)[0].pieces if is_trained]
    assert trained == [CALL % "6 * 7" + "<|im_end|>", "It is 42.<|im_end|>"]
    [expected] = Renderer(tokenizer).render([rows[0]["messages"]], tools=schemas)
    assert torch.equal(chats.ids[0], expected.ids), "tools are declared as they are in rollouts"


# --- runs


@pytest.fixture(scope="module")
def acting(shared_place):
    """A model that learnt one call by heart, and two steps of GRPO with it."""
    place = shared_place
    call = {"type": "function", "function": {"name": "double", "arguments": {"number": 4}}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": "8"},
        {"role": "assistant", "content": "8"},
    ]
    place.rows("calls.jsonl", [{"messages": messages}] * 16)
    place.rows("go.jsonl", [{"prompt": "Go", "answer": "8"}] * 8)
    place.module("mine", "def double(number: int) -> int:\n    'Twice.'\n    return 2 * number\n")
    model = {"hidden_size": 32, "layers": 2, "heads": 2}
    taught = {"model": model, "data": {"path": "calls.jsonl"}, "batch_size": 8, "steps": 60}
    taught |= {"optim": {"lr": 1e-2, "warmup": 5}, "samples": 0}
    place.run("sft", place.recipe("taught", taught), "--name", "taught")
    env = {"name": "chat", "dataset": "go.jsonl", "reward": "builtins:len", "tools": ["mine:double"], "max_turns": 2}
    env |= {"declare_tools": False, "reward": "sized:size"}
    place.module("sized", "def size(completion, answer):\n    return len(completion)\n")
    settings = {"model": "runs/taught/checkpoints/step60", "env": env, "steps": 2, "prompts_per_step": 2}
    settings |= {"group_size": 4, "sampling": {"max_tokens": 32}, "eval": {"dataset": "go.jsonl", "max_tokens": 32}}
    settings |= {"zero_variance": "keep", "optim": {"lr": 1e-4}, "checkpoint": {"every": 1}}
    place.run("grpo", place.recipe("acting", settings), "--name", "acting")
    return place


@pytest.mark.slow
def test_a_run_counts_what_its_tools_did(acting):
    first, _ = acting.steps("acting")
    assert first["tools/conversations"] == 8
    assert first["tools/call_rate"] > 0.5
    kinds = ("ok", "error", "timeout", "malformed", "unknown", "not_run")
    assert sum(first[f"tools/{kind}_frac"] for kind in kinds) == pytest.approx(1)
    assert first["rollout/failed"] == 0


@pytest.mark.slow
def test_what_a_tool_answered_is_in_the_conversation_and_is_not_trained(acting):
    tokenizer = tiny_tokenizer()
    for number, step in enumerate(acting.steps("acting"), 1):
        rollouts = acting.rollouts("acting", number)
        assert step["tokens/trained"] == sum(rollout.tokens for rollout in rollouts)
        called = [rollout for rollout in rollouts if "<tool_response>\n8\n" in rollout.prompt]
        assert called
        for rollout in called:
            call = rollout.prompt.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0] + "<|im_end|>"
            assert rollout.tokens == len(tokenizer(call).input_ids) + len(tokenizer(rollout.completion).input_ids)


@pytest.mark.slow
def test_evaluation_calls_the_tools_and_says_how_often(acting, capsys):
    assert acting.steps("acting")[-1]["eval/go/call_rate"] == 1.0
    capsys.readouterr()
    acting.run("eval", "acting", "--json")
    assert json.loads(capsys.readouterr().out)["call_rate"] == 1.0
    acting.run("eval", "acting")
    assert "100% call" in capsys.readouterr().out


@pytest.mark.slow
def test_the_plan_says_which_tools_there_are(acting, capsys):
    capsys.readouterr()
    acting.run("grpo", "acting.yaml", "--dry-run")
    assert "double · hermes calls, not in the prompt, at most 10 s each · 2 turns" in capsys.readouterr().out


# --- failures


FAILING = """
calls = []

def some_raise(messages, answer):
    calls.append(answer)
    if int(answer) % 3 == 0:
        raise RuntimeError(f"nobody is there for {answer}")
    return None

def first_try_fails(messages):
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("busy")
    return None

def wrong_shape(completion, answer):
    return [1, 2] if int(answer) % 3 == 0 else len(completion)
"""


def test_conversations_that_the_env_fails_for_are_left_out_and_the_others_are_trained(place):
    place.module("failing", FAILING)
    env = {"max_turns": 2, "user": "failing:some_raise"}
    result = place.train("grpo", "f", env=env, zero_variance="keep", max_failed=0.9, steps=2)
    lost = 0
    for step in place.steps("f"):
        rollouts = place.rollouts("f", step["step"])
        assert step["rollout/failed"] == sum(rollout.reward is None for rollout in rollouts)
        assert step["group/kept_frac"] == len({r.group for r in rollouts if r.reward is not None}) / 4
        assert all((rollout.reward is None) == (rollout.advantage is None) for rollout in rollouts)
        lost += step["rollout/failed"]
    assert lost
    assert result.out.count("Traceback") == 1, "the first one is shown, once"


def test_a_reward_of_the_wrong_shape_ends_the_run_and_names_the_row(place):
    place.module("failing", FAILING)
    words = ["'wrong_shape': a reward must be one number", "got a list for row"]
    place.train("grpo", "f", code=4, words=words, env={"reward": "failing:wrong_shape"}, max_failed=1.0)


def test_a_held_out_problem_that_failed_is_not_one_that_was_answered_wrong(place):
    place.module("failing", FAILING)
    rows = [{"nums": [1, 2], "target": number} for number in range(4)]
    env = {"name": "countdown", "reward": None, "user": "failing:some_raise", "max_turns": 2}
    env |= {"dataset": place.rows("games.jsonl", rows)}
    place.train("grpo", "e", env=env, steps=1, max_failed=1.0, eval={"dataset": "games.jsonl", "max_tokens": 4})
    result = json.loads(place.run("eval", "e", "--json").out)
    assert (result["mean"], result["failed"], result["rows"]) == (0.0, 2, 4), "0 and 3 are those that fail"


@pytest.mark.parametrize(("retries", "lost"), [(0, 1), (1, 0)])
def test_what_failed_once_is_tried_again(place, retries, lost):
    place.module("failing", FAILING)
    env = {"user": "failing:first_try_fails", "max_turns": 2, "retries": retries}
    place.train("grpo", "f", env=env, steps=1)
    assert place.steps("f")[0]["rollout/failed"] == lost


class FailsFor(Transform):
    """A step of the env that raises where one of its rows has this answer."""

    def __init__(self, answer: str):
        super().__init__()
        self.answer = answer

    def _step(self, tensordict, next_tensordict):
        if self.answer in tensordict["answer"]:
            raise RuntimeError("nobody is there")
        return next_tensordict


def test_a_conversation_that_fails_beside_one_with_calls_is_no_call():
    other = {"question": "What is 1 + 1?", "answer": "2"}
    made = Task(BIG, tiny_tokenizer()).make_env([ROW, other], num_envs=2, shuffle=False)
    made.append_transform(FailsFor(ROW["answer"]))
    policy = ScriptedPolicy([CALL % "1", CALL % "1", "two"])
    data = LLMCollector(made, policy=policy, yield_only_last_steps=True, retries=1).rollout()
    assert data["next", "reward"].flatten().isnan().tolist() == [True, False]
    assert data["next", "tool_use", "calls"].tolist() == [0, 1]
