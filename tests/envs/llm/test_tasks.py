"""Tasks with answers that can be checked: their rows, their scores, and each through the collector and a buffer.

The same answer gets the same score in every input mode, and the score is that of the answer, not of its spelling.
"""

import itertools
from fractions import Fraction

import pytest
from tensordict import TensorDict

from llmrl.collectors.llm import LLMCollector
from llmrl.data import LazyStackStorage, ReplayBuffer
from llmrl.envs.llm import (
    ChatEnv,
    CountdownEnv,
    GSM8KEnv,
    GSM8KPrepareQuestion,
    GSM8KRewardParser,
    IFEvalEnv,
    MATHEnv,
    make_gsm8k_env,
)
from llmrl.envs.llm.answers import normalize_answer, reference_answer
from llmrl.envs.llm.tasks.countdown import countdown_correct, countdown_problems
from llmrl.errors import ConfigError, DataError, MissingKeyError
from llmrl.objectives.llm import MCAdvantage
from llmrl.testing import ScriptedPolicy
from tests.support.refusals import refusals

# --- GSM8K ---

# fmt: off
RIGHT_NUMBERS = [  # in an answer block, for 36
    "36", " 36 \n", "36 snakes", "There are 36 snakes.", "\\boxed{36}", "$\\boxed{36}$",
    "\\boxed{\\text{36 snakes}}", "\\(36\\)", "36 \\text{ cm}^2", "36\\,\\mathrm{m}^{2}", "36 m\u00b2",
    "36^\\circ", "\\frac{72}{2}", "\\dfrac{108}{3}", "72/2", "35 2/2", "$36", "US$36", "36 \u20ac", "$36.00",
    "\\$36", "36%", "36\\%", "36 percent", "36.", "36.0", "**36**", "6 * 6 = 36", "x \\approx 36", "036", "+36",
    "36 km/h", "\uff13\uff16",
]
WRONG_NUMBERS = [
    "35", "-36", "- 36", "\u221236", "-$36", "3.6", "3,6", "360", "36.01", "36 or 37", "3 6", "6^2", "36/0", "36e0",
    "9**9**9", "\\boxed{35} and 36", "", "thirty-six",
]
NO_ANSWER = [
    "36", "\\boxed{36}", "", "<answer>36", "<ANSWER>36</ANSWER>", "<think><answer>36</answer></think>",
    "<think>so <answer>36</answer>", "<answer>36</answer></think>",
]
# fmt: on
ANSWERS = [(f"<answer>{text}</answer>", 1.0) for text in RIGHT_NUMBERS] + [
    (f"<answer>{text}</answer>", 0.1) for text in WRONG_NUMBERS
]
ANSWERS += [
    *((text, 0.0) for text in NO_ANSWER),
    ("<think>6 * 6</think><answer>36</answer>", 1.0),
    ("<answer>1</answer> no, <answer>36</answer>", 1.0),
    ("<think>it is <answer>1</answer></think><answer>36</answer>", 1.0),
    ("6 * 6</think><answer>36</answer>", 1.0),
    ("<think>a</think><think>b</think><answer>36</answer>", 1.0),
    ("<answer>36</answer> so 37?", 1.0),
    ("<answer>1 <answer>36</answer>", 1.0),
    ("<answer>36</answer> no, <answer>1</answer>", 0.1),
]


def test_a_right_number_anywhere_is_reported_but_not_rewarded(answered):
    env = ChatEnv(batch_size=[4]).append_transform(GSM8KRewardParser())
    said = ["1236.00 snakes", "<answer>1,236</answer>", "<answer>12,36</answer>", "12 and 36"]
    after = answered(env, said, answer=["#### 1,236"] * 4)["next"]
    assert after["reward_contained"].shape == (4, 1, 1)
    assert after["reward_contained"].flatten().tolist() == pytest.approx([0.1, 0.1, 0.0, 0.0])
    assert after["reward"].flatten().tolist() == pytest.approx([0.0, 1.0, 0.1, 0.0])
    assert env.reward_spec["reward_contained"].is_in(after["reward_contained"])


# fmt: off
NORMAL = {
    "1,234": "1234", "1,234,567.50": "1234567.5", "120.00": "120", "100%": "100", ".5": "0.5", "0.50": "0.5",
    "-$5": "-5", "$-5": "-5", "\N{MINUS SIGN}7": "-7", "-0": "0", "5-3": "5-3", "1, 2": "1, 2", "36km2": "36",
    "1e3": "1e3", "1/3": "1/3", "4/12": "1/3", "-\\frac{1}{2}": "-0.5", "1\\frac{1}{2}": "1.5", "\\frac12": "0.5",
    "1 1/2 cups": "1.5", "1\u00bd": "1.5", "0.125/0.5": "0.25", "1{,}234": "1234", "1\\,234": "1234",
    "1\u202f234": "1234", "1234,567": "1234,567", "3/4/2020": "3/4/2020", "3:30": "3:30", "1.2.3": "1.2.3",
    "5\u20137": "5-7", "5\u00b2": "5^2", "x^2": "x^2", "1/0": "1/0", "\\text{Paris}": "paris", "Paris.": "paris",
    "New  York": "new york",
}
# fmt: on


@pytest.mark.parametrize(("text", "normal"), NORMAL.items())
def test_normal_forms(text, normal):
    assert GSM8KRewardParser.normalize_answer(text) == normal


def test_numbers_of_any_length_are_compared():
    assert normalize_answer("1" * 200_000 + ".0") == "1" * 200_000
    assert normalize_answer("1" * 200 + "/3") == "1" * 200 + "/3"  # too long a fraction stays text


def test_a_reference_without_marks_is_read_or_refused_with_its_row(answered):
    env = ChatEnv(batch_size=[2]).append_transform(GSM8KRewardParser())
    with pytest.raises(DataError, match=r"row 2 of the batch .*'#### <number>'"):
        answered(env, ["<answer>36</answer>"] * 2, answer=["36", "first 3 and then 4 make 7"])


def test_references_are_what_follows_the_marks_or_one_answer():
    assert reference_answer("3 + 4 = 7 and 7 * 2 = 14\n#### 14") == "14"
    assert reference_answer("1,234") == "1234"
    assert reference_answer("Paris") == "paris"


def test_magnitudes_keys_and_done_can_be_chosen(answered):
    parser = GSM8KRewardParser(
        set_done_if_answer=False, format_reward=0.5, correct_reward=2.0, out_keys=["a", "t", "r", "score", "ok"]
    )
    env = ChatEnv(batch_size=[2]).append_transform(parser)
    after = answered(env, ["<think>x</think><answer>1</answer>", "<answer>1</answer>"], answer=["1", "2"])["next"]
    expected = {"score": [2.0, 0.5], "t": [0.5, 0.0], "a": [0.5, 0.5], "r": [2.0, 0.0], "ok": [True, False]}
    assert {key: after[key].flatten().tolist() for key in expected} == expected
    assert not after["done"].any()


def test_columns_that_are_missing_are_named(answered):
    env = ChatEnv(batch_size=[1]).append_transform(GSM8KRewardParser())
    with pytest.raises(MissingKeyError, match="reference must be in 'answer'"):
        answered(env, ["4"])
    env = ChatEnv(batch_size=[1]).append_transform(GSM8KPrepareQuestion(in_keys=["question"], out_keys=["query"]))
    with pytest.raises(MissingKeyError, match=r"question must be in .question.; keys present: 'qestion'"):
        env.reset(TensorDict(qestion=["a"], batch_size=[1]))


ONE = [{"question": "a", "answer": "#### 1"}]
test_wrong_arguments_are_named = refusals(
    (ConfigError, "input_mode must be", lambda: GSM8KRewardParser(input_mode="txt")),
    (ConfigError, "Did you mean 'shuffle'", lambda: GSM8KEnv(dataset=ONE, shufle=True)),
    (ConfigError, "prompt_column cannot", lambda: GSM8KEnv(dataset=ONE, prompt_column="a")),
    (DataError, "must end in", lambda: reference_answer("")),
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "b"}, "row 2 .*reference column.*columns are question"),
        ({"question": "b", "anser": "1"}, "columns are question, anser. Did you mean 'anser'"),
        ({"question": "b", "answer": "1 or 2, or 3."}, "reference of row 2 .*'#### <number>'"),
        ({"answer": "1"}, "row 2 .*prompt column"),
        ("b", "row 2 is a str"),
    ],
)
@pytest.mark.parametrize("make", [lambda rows: GSM8KEnv(dataset=rows), make_gsm8k_env], ids=["GSM8KEnv", "make"])
def test_a_row_that_cannot_be_asked_or_scored_is_named_when_the_environment_is_made(make, row, message):
    with pytest.raises(DataError, match=message):
        make([{"question": "a", "answer": "#### 1"}, row])


def test_the_reward_can_be_left_out(say):
    env = GSM8KEnv(dataset=ONE, compute_reward=False)
    td = env.step(say(env.reset(), ["<answer>1</answer>"]))
    assert "reward" not in td["next"].keys()


def test_the_instructions_can_stand_in_the_question_for_templates_without_a_system_role(tokenizer, say):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]
    env = make_gsm8k_env(rows, num_envs=2, repeats=2, group_repeats=True, tokenizer=tokenizer, seed=0)
    td = env.reset()
    chats = td["history"].prompt.to_chats()
    assert [len(chat) for chat in chats] == [1] * 4
    assert all(chat[0]["content"].startswith(GSM8KPrepareQuestion.INSTRUCTIONS) for chat in chats)
    answers = [chat[0]["content"][-6] for chat in chats]  # n of "n + n?"
    td = env.step(say(td, [f"<answer>{2 * int(n)}</answer>" for n in answers]))
    assert td["next", "reward"].flatten().tolist() == [1.0] * 4


# --- Countdown ---

SOLVES = ["55 + 36 - 7 - 19", "(55 + 36) - (7 + 19)", "55+36-7-19=65", "$55 + 36 - 7 - 19$"]
SOLVES += ["55 + 36 - 7 \N{MINUS SIGN} 19"]
FAILS = [
    "36 + 55 - 7",
    "65",
    "55 + 36 - 7 - 19 + 7 - 7",
    "55 + 36 - 26",
    "55.0 + 36 - 7 - 19",
    "55 // 7 + 36 + 19",
]
FAILS += [
    "55 + 36 - 7 - 19; import os",
    "__import__('os')",
    "max(55, 36) - 7",
    "55 ** 1",
    "55 / (7 - 7)",
    "(55 + 36",
]
FAILS += [""]


@pytest.mark.parametrize(("expression", "right"), [(e, True) for e in SOLVES] + [(e, False) for e in FAILS])
def test_an_expression_makes_the_target_from_numbers_used_once(expression, right):
    assert countdown_correct(expression, [19, 36, 55, 7], 65) is right


def test_fractions_on_the_way_do_not_matter():
    assert countdown_correct("3 * (7 / 3)", [3, 3, 7], 7)
    assert countdown_correct("8 \\div 3 \\times 3", [3, 3, 8], 8)
    assert not countdown_correct("7 / 3", [3, 7], 2)


def reachable(values: list[Fraction], target: int) -> bool:
    if target in values:
        return True
    for a, b in itertools.permutations(range(len(values)), 2):
        rest = [v for i, v in enumerate(values) if i not in (a, b)]
        x, y = values[a], values[b]
        results = [x + y, x - y, x * y] + ([x / y] if y else [])
        if any(reachable([*rest, result], target) for result in results):
            return True
    return False


def test_generated_problems_have_solutions_and_no_split_shares_numbers():
    splits = {split: countdown_problems(split, 60) for split in ("train", "validation", "test")}
    numbers = {split: {tuple(sorted(row["nums"])) for row in rows} for split, rows in splits.items()}
    assert not numbers["train"] & numbers["test"]
    assert not numbers["validation"] & (numbers["train"] | numbers["test"])
    for row in splits["test"]:
        assert reachable([Fraction(n) for n in row["nums"]], row["target"])
        assert 10 <= row["target"] <= 99
        assert row["target"] not in row["nums"]
    assert {len(row["nums"]) for row in splits["train"]} == {3, 4}
    assert countdown_problems("test", 60) == splits["test"]


GOOD, MISNAMED = {"nums": [1, 2], "target": 3}, {"numbers": [1], "target": 1}
test_rows_and_arguments_that_cannot_be_used_are_refused = refusals(
    (DataError, "row 2 .*nums and target.*numbers, target", lambda: CountdownEnv(dataset=[GOOD, MISNAMED])),
    (DataError, "row 2 .*'12' and 'x'", lambda: CountdownEnv(dataset=[GOOD, {"nums": "12", "target": "x"}])),
    (DataError, "nums .*whole numbers", lambda: CountdownEnv(dataset=[GOOD, {"nums": [], "target": 1}])),
    (ConfigError, r"validation.*got 'tset'\. Did you mean 'test'", lambda: countdown_problems("tset")),
    (ConfigError, "at least 2 numbers", lambda: countdown_problems(size=1)),
)


# --- all of them ---

IFEVAL = {"key": 1, "prompt": "Hi 1", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
TASKS = [
    (GSM8KEnv, [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]),
    (MATHEnv, [{"problem": f"{n} + 1?", "solution": f"\\boxed{{{n + 1}}}"} for n in range(4)]),
    (CountdownEnv, [{"nums": [n, 7], "target": n + 7} for n in range(4)]),
    (IFEvalEnv, [IFEVAL, {**IFEVAL, "key": 2, "prompt": "Hi 2"}] * 2),
]


def policy():
    """Alternately thinks aloud, which ends no conversation, and answers."""
    turns = []

    def reply(chat):
        turns.append(chat)
        return "Hm, let me see" if len(turns) % 3 == 0 else f"<answer>{len(turns)}</answer>"

    return ScriptedPolicy(reply)


@pytest.mark.parametrize(("kind", "rows"), TASKS, ids=[kind.__name__ for kind, _ in TASKS])
def test_a_task_keeps_its_specs_also_without_a_policy(kind, rows):
    if kind is MATHEnv:
        pytest.importorskip("math_verify")
    env = kind(dataset=rows, num_envs=2, max_steps=2)
    env.check_env_specs()
    env.check_env_specs(policy=policy(), break_when_any_done="both")
    batch = env.rollout(4)
    for key in env.reward_keys:
        assert batch["next"][:, -1].get(key).shape == env.full_reward_spec[key].shape


HALF = [{"problem": "Half of 1?", "solution": "Halve: $\\boxed{\\frac12}$", "level": "Level 1", "type": "Algebra"}]
SIX = [{"question": "6 * 6?", "answer": "6 * 6 = 36\n#### 36"}]
SCORED = [
    *((GSM8KEnv, SIX, said, reward) for said, reward in ANSWERS),
    (CountdownEnv, [{"nums": [2, 3], "target": 6}], "<think>2 * 3</think><answer>2 * 3</answer>", 1.0),
    (CountdownEnv, [{"nums": [2, 3], "target": 6}], "<answer>2 + 3</answer>", 0.1),
    (CountdownEnv, [{"nums": [2, 3], "target": 6}], "<answer>2 * 3", 0.0),
    (MATHEnv, HALF, "<think>\\boxed{1}</think><answer>0.5</answer>", 1.0),
    (MATHEnv, HALF, "so it is $\\boxed{\\frac{1}{2}}$", 1.0),
    (MATHEnv, HALF, "<answer>2</answer> or \\boxed{0.5}", 0.1),  # the answer block is the answer
    (MATHEnv, HALF, "<think>\\boxed{0.5}</think>", 0.0),
    (MATHEnv, HALF, "0.5", 0.0),
]


NUMBERS = range(3, len(RIGHT_NUMBERS) + len(WRONG_NUMBERS))  # their spelling is read alike in every mode
IN_MODES = [("history", *case) for case in SCORED]
IN_MODES += [(m, *case) for m in ("text", "tokens") for n, case in enumerate(SCORED) if n not in NUMBERS]


@pytest.mark.parametrize(("mode", "kind", "rows", "said", "reward"), IN_MODES)
def test_a_response_has_one_score_in_every_mode(mode, kind, rows, said, reward, tokenizer, say):
    if kind is MATHEnv:
        pytest.importorskip("math_verify")
    prompt = "Answer as in <answer>36</answer>."  # the first answer block of the conversation is not the policy's
    env = kind(dataset=rows, input_mode=mode, tokenizer=tokenizer, system_prompt=prompt)
    after = env.step(say(env.reset(), [said]))["next"]
    assert after["reward"].item() == pytest.approx(reward)
    assert (after["success"].item(), after["terminated"].item()) == (reward == 1, reward > 0)
    env.close()


@pytest.mark.parametrize(("kind", "rows"), TASKS, ids=[kind.__name__ for kind, _ in TASKS])
def test_a_task_feeds_a_buffer_with_groups_of_scored_conversations(kind, rows):
    if kind is MATHEnv:
        pytest.importorskip("math_verify")
    env = kind(dataset=rows, num_envs=2, repeats=2, group_repeats=True, max_steps=2, shuffle=False, seed=0)
    collector = LLMCollector(
        env, policy=policy(), dialog_turns_per_batch=8, total_dialog_turns=24, yield_only_last_steps=True
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(grpo_size=2), batch_size=4)
    for batch in collector:
        assert batch["next", "reward"].shape[1:] == (1, 1)
        assert batch["next", "done"].all()
        buffer.extend(batch)
    assert len(buffer) >= 8
    sample = buffer.sample()
    assert sample["advantage"].isfinite().all()
    collector.shutdown()
