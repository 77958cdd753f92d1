"""The same answer gets the same score in every input mode, and the score is that of the answer, not of its spelling."""

import json

import pytest
from tensordict import TensorDict

from llmrl.envs.llm import ChatEnv, GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
from llmrl.envs.llm.answers import normalize_answer, reference_answer
from llmrl.errors import ConfigError, DataError, MissingKeyError
from tests.support.refusals import refusals

# fmt: off
RIGHT = [  # in an answer block, for 36
    "36", " 36 \n", "36 snakes", "There are 36 snakes.", "\\boxed{36}", "$\\boxed{36}$",
    "\\boxed{\\text{36 snakes}}", "\\(36\\)", "36 \\text{ cm}^2", "36\\,\\mathrm{m}^{2}", "36 m\u00b2",
    "36^\\circ", "\\frac{72}{2}", "\\dfrac{108}{3}", "72/2", "35 2/2", "$36", "US$36", "36 \u20ac", "$36.00",
    "\\$36", "36%", "36\\%", "36 percent", "36.", "36.0", "**36**", "6 * 6 = 36", "x \\approx 36", "036", "+36",
    "36 km/h", "\uff13\uff16",
]
WRONG = [
    "35", "-36", "- 36", "\u221236", "-$36", "3.6", "3,6", "360", "36.01", "36 or 37", "3 6", "6^2", "36/0", "36e0",
    "9**9**9", "\\boxed{35} and 36", "", "thirty-six",
]
NO_ANSWER = [
    "36", "\\boxed{36}", "", "<answer>36", "<ANSWER>36</ANSWER>", "<think><answer>36</answer></think>",
    "<think>so <answer>36</answer>", "<answer>36</answer></think>",
]
# fmt: on
ANSWERS = [(f"<answer>{text}</answer>", 1.0) for text in RIGHT] + [(f"<answer>{text}</answer>", 0.1) for text in WRONG]
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


@pytest.mark.parametrize(("completion", "reward"), ANSWERS)
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_response_has_one_score_in_every_mode(mode, completion, reward, tokenizer, answered):
    prompt = "Answer as in <answer>36</answer>."  # the first answer block of the conversation is not the policy's
    env = ChatEnv(batch_size=[1], input_mode=mode, system_prompt=prompt, tokenizer=tokenizer)
    env = env.append_transform(GSM8KRewardParser(tokenizer=tokenizer))
    after = answered(env, [completion], query=["6 * 6?"], answer=["6 * 6 = 36\n#### 36"])["next"]
    assert after["reward"].tolist() == [[[pytest.approx(reward)]]]
    assert after["success"].tolist() == [[[reward == 1]]]
    assert after["done"].item() == after["terminated"].item() == (reward > 0)


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


def test_the_environment_reads_a_local_file_and_ends_after_one_turn(tmp_path, say):
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"Add one.\n#### {n + 1}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    env = GSM8KEnv(dataset=path, num_envs=3, shuffle=False)
    td = env.reset()
    assert td["history"].prompt.shape == (3, 2)
    assert "<answer>" in td["history"].prompt.to_chats()[0][0]["content"]
    td = env.step(say(td, ["<answer>1</answer>", "<answer>5</answer>", "?"]))
    assert td["next", "reward"].flatten().tolist() == [1.0, pytest.approx(0.1), 0.0]
    assert td["next", "reward"].shape == (3, 1, 1)
    assert td["next", "done"].all()
    assert td["next", "terminated"].flatten().tolist() == [True, True, False]
    assert td["next", "history"].prompt.shape == (3, 3)


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
