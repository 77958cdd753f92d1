"""The same answer gets the same score in every input mode, and the score is that of the answer, not of its spelling."""

from __future__ import annotations

import json
import time

import pytest
from tensordict import TensorDict

from llmrl.data.llm.columns import column
from llmrl.envs.llm import ChatEnv, GSM8KEnv, GSM8KRewardParser
from llmrl.envs.llm.gsm8k import normalize_answer, reference_answer
from llmrl.errors import ConfigError, DataError, MissingKeyError

RIGHT, WRONG, NOTHING = 1.0, 0.1, 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>6 * 6</think><answer>36</answer>", RIGHT),
        ("<answer>36</answer>", RIGHT),
        ("<answer> 36 \n</answer>", RIGHT),
        ("<answer>36 snakes</answer>", RIGHT),
        ("<answer>There are 36 snakes.</answer>", RIGHT),
        ("<answer>\\boxed{36}</answer>", RIGHT),
        ("<answer>$\\boxed{36}$</answer>", RIGHT),
        ("<answer>\\boxed{\\text{36 snakes}}</answer>", RIGHT),
        ("<answer>$36</answer>", RIGHT),
        ("<answer>$36.00</answer>", RIGHT),
        ("<answer>36%</answer>", RIGHT),
        ("<answer>36.</answer>", RIGHT),
        ("<answer>**36**</answer>", RIGHT),
        ("<answer>6 * 6 = 36</answer>", RIGHT),
        ("<answer>036</answer>", RIGHT),
        ("<answer>+36</answer>", RIGHT),
        ("<answer>1</answer> no, <answer>36</answer>", RIGHT),
        ("<think>it is <answer>1</answer></think><answer>36</answer>", RIGHT),
        ("6 * 6</think><answer>36</answer>", RIGHT),
        ("<answer>36</answer> so 37?", RIGHT),
        ("<answer>36</answer> no, <answer>1</answer>", WRONG),
        ("<answer>35</answer>", WRONG),
        ("<answer>-36</answer>", WRONG),
        ("<answer>3.6</answer>", WRONG),
        ("<answer>36 or 37</answer>", WRONG),
        ("<answer></answer>", WRONG),
        ("<answer>thirty-six</answer>", WRONG),
        ("36", NOTHING),
        ("", NOTHING),
        ("<answer>36", NOTHING),
        ("<think><answer>36</answer></think>", NOTHING),
        ("<think>so <answer>36</answer>", NOTHING),
        ("<answer>36</answer></think>", NOTHING),
    ],
)
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_response_has_one_score_in_every_mode(mode, completion, reward, tokenizer, say):
    prompt = "Answer as in <answer>36</answer>."  # the first answer block of the conversation is not the policy's
    env = ChatEnv(batch_size=[1], input_mode=mode, system_prompt=prompt, tokenizer=tokenizer)
    env = env.append_transform(GSM8KRewardParser(tokenizer=tokenizer))
    td = TensorDict(query=column(["6 * 6?"]), answer=column(["6 * 6 = 36\n#### 36"]), batch_size=[1])
    after = env.step(say(env.reset(td), [completion]))["next"]
    assert after["reward"].tolist() == [[[pytest.approx(reward)]]]
    assert after["success"].tolist() == [[[reward == RIGHT]]]
    assert after["done"].item() == after["terminated"].item() == (reward > 0)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("120.00", "120"),
        ("100%", "100"),
        (".5", "0.5"),
        ("0.50", "0.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\N{MINUS SIGN}7", "-7"),
        ("-0", "0"),
        ("5-3", "5-3"),
        ("1, 2", "1, 2"),
        ("36km2", "36"),
        ("1e3", "1e3"),
        ("Paris.", "paris"),
        ("New  York", "new york"),
    ],
)
def test_normal_forms(text, normal):
    assert GSM8KRewardParser.normalize_answer(text) == normal


def test_numbers_of_any_length_are_compared_quickly():
    start = time.perf_counter()
    assert normalize_answer("1e999999999") == "1e999999999"  # text, not a number to be computed
    assert normalize_answer("1" * 200_000 + ".0") == "1" * 200_000
    assert time.perf_counter() - start < 0.5


def test_references_are_what_follows_the_marks_or_one_answer():
    assert reference_answer("3 + 4 = 7 and 7 * 2 = 14\n#### 14") == "14"
    assert reference_answer("1,234") == "1234"
    assert reference_answer("Paris") == "paris"
    with pytest.raises(DataError, match="reference of row 2 of the batch must end in '#### <number>'"):
        reference_answer("first 3 and then 4 make 7", 2)
    with pytest.raises(DataError, match="must end in"):
        reference_answer("")


def test_magnitudes_keys_and_done_can_be_chosen(say):
    parser = GSM8KRewardParser(
        set_done_if_answer=False, format_reward=0.5, correct_reward=2.0, out_keys=["a", "t", "r", "score", "ok"]
    )
    env = ChatEnv(batch_size=[2]).append_transform(parser)
    td = TensorDict(query=column(["a", "b"]), answer=column(["1", "2"]), batch_size=[2])
    after = env.step(say(env.reset(td), ["<think>x</think><answer>1</answer>", "<answer>1</answer>"]))["next"]
    assert after["score"].flatten().tolist() == [2.0, 0.5]
    assert after["t"].flatten().tolist() == [0.5, 0.0]
    assert after["a"].flatten().tolist() == [0.5, 0.5]
    assert after["r"].flatten().tolist() == [2.0, 0.0]
    assert after["ok"].flatten().tolist() == [True, False]
    assert not after["done"].any()


def test_missing_references_and_wrong_arguments_are_named(say):
    env = ChatEnv(batch_size=[1]).append_transform(GSM8KRewardParser())
    with pytest.raises(MissingKeyError, match="reference must be in 'answer'"):
        env.step(say(env.reset(TensorDict(query=column(["a"]), batch_size=[1])), ["4"]))
    with pytest.raises(ConfigError, match="input_mode must be"):
        GSM8KRewardParser(input_mode="txt")


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


def test_the_reward_can_be_left_to_someone_else(say):
    env = GSM8KEnv(dataset=[{"question": "a", "answer": "#### 1"}], compute_reward=False)
    td = env.step(say(env.reset(), ["<answer>1</answer>"]))
    assert "reward" not in td["next"].keys()
