"""IFEval: its 25 instructions, strict and loose evaluation, the reward, and the environment around them."""

import json
import sys

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm import ChatEnv, IFEvalEnv, IFEvalScoreData, IfEvalScorer
from llmrl.envs.llm.ifeval import CHECKS, Instructions, Verdict, evaluate
from llmrl.envs.llm.tasks.ifeval_checks import (
    NEEDS_LANGUAGE,
    _detected,
    count_capital_words,
    count_sentences,
    count_words,
    is_language,
)
from llmrl.errors import ConfigError, DataError, MissingDependencyError, MissingKeyError
from llmrl.modules.llm.engines import StopReason
from tests.support.refusals import refusals

NO_COMMA, QUOTED = "punctuation:no_comma", "startend:quotation"


def told(**instructions):
    return Instructions.of([name.replace("__", ":") for name in instructions], list(instructions.values()), "row 1")


LOOSELY = ['Sure:\n"a"', '"a"\nBye.', 'Sure:\n"a"\nBye.', '*"a"*', '*Sure:*\n**"a"**', '**"a"**\nBye.']
LOOSELY += ['Sure:\n**"a"**\nBye.']
NOT_AT_ALL = ['Sure:\nhere:\n"a"', "a", "", " \n"]


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ('"a"', (True, True)),
        *((text, (False, True)) for text in LOOSELY),
        *((text, (False, False)) for text in NOT_AT_ALL),
    ],
)
def test_loose_evaluation_forgives_first_line_last_line_and_asterisks(response, verdict):
    found = evaluate(response, told(startend__quotation={}))
    assert (*found.strict, *found.loose) == verdict


def test_an_empty_response_follows_nothing_even_if_it_breaks_nothing():
    assert evaluate("", told(punctuation__no_comma={})).strict == [False]
    assert evaluate("*", told(punctuation__no_comma={})).strict == [True]


def test_the_reward_of_a_batch_of_scores_has_its_shape():
    scores = torch.stack([IFEvalScoreData.of([True, False], [True, True]), IFEvalScoreData.of([True], [True])])
    scorer = IfEvalScorer()
    assert scorer.default_reward_aggregator(scores[0], ["t"], ["a"]).shape == ()
    assert scorer.default_reward_aggregator(scores).tolist() == pytest.approx([0.3 * 0.5 + 0.2 + 0.1, 1.0])
    rewards = scorer.default_reward_aggregator(scores.unsqueeze(-1), ["t"], ["a"])
    assert (rewards.shape, rewards.dtype) == ((2, 1), torch.float32)
    assert rewards[1].item() == pytest.approx(1.15)


def step(answered, responses, instructions=(NO_COMMA,), **options):
    count = len(responses)
    env = ChatEnv(batch_size=[count]).append_transform(IfEvalScorer(**options))
    columns = {"instruction_id_list": [list(instructions)] * count, "kwargs": [[{} for _ in instructions]] * count}
    return answered(env, responses, **columns)["next"]


def test_a_perfect_response_gets_1_15_and_an_empty_one_0(answered):
    perfect = "<think>no commas</think><answer>fine</answer>"
    after = step(answered, [perfect, "", "<think>x", "<answer>a, b</answer>", "fine", "a, b"])
    assert after["reward"].flatten().tolist() == pytest.approx([1.15, 0.0, 0.05, 0.1, 1.0, 0.0])
    assert after["reward"].shape == (6, 1, 1)
    assert after["terminated"].flatten().tolist() == [True, False, False, True, False, False]
    assert after["ifeval_score"].prompt_level_strict_acc.shape == (6, 1)


@pytest.mark.parametrize(("weights", "reward"), [({}, 0.55), ({"format_weights": [0, 1, 0, 0]}, 0.6)])
def test_the_reward_is_the_weighted_sum_of_the_four_numbers_and_the_blocks(answered, weights, reward):
    # strict: one of two; loose (first line left out): both. 0.4*0 + 0.3*0.5 + 0.2*1 + 0.1*1 + 0.1 for the answer block
    after = step(answered, ['<answer>Sure:\n"a"</answer>'], [NO_COMMA, QUOTED], **weights)
    assert after["reward"].item() == pytest.approx(reward)


def test_the_structured_aggregation_counts_blocks_and_being_complete(answered):
    perfect = "<think>no commas</think><answer>fine</answer>"
    after = step(answered, [perfect, "", "<answer>a, b</answer>"], aggregate_reward="structured")
    assert after["reward"].flatten().tolist() == pytest.approx([2.2, 0.2, 0.7])
    scorer = IfEvalScorer(aggregate_reward="structured")
    score = IFEvalScoreData.of([True], [True])
    assert scorer.default_reward_aggregator(score, ["t"], ["a", "b"], False).item() == pytest.approx(1.5)


def test_the_aggregation_can_be_replaced_or_left_out(answered):
    seen = []

    def mine(score, think_blocks, answer_blocks, complete):
        seen.append((score.inst_level_strict_acc.item(), think_blocks, answer_blocks, complete))
        return 7

    assert step(answered, ["<think>t</think><answer>a</answer>"], aggregate_reward=mine)["reward"].item() == 7
    assert seen == [(1.0, ["t"], ["a"], True)]
    after = step(answered, ["a"], aggregate_reward=False, set_done_if_answer=False)
    assert "reward" not in after.keys()
    assert after["ifeval_score"].inst_level_loose_acc.item() == 1.0


def test_a_response_that_was_cut_off_is_not_complete(say):
    seen = []
    scorer = IfEvalScorer(aggregate_reward=lambda score, think, answer, complete: seen.append(complete) or 0.0)
    env = ChatEnv(batch_size=[2]).append_transform(scorer)
    td = TensorDict(query=column(["q"] * 2), instruction_id_list=column([[NO_COMMA]] * 2), batch_size=[2])
    td.set("kwargs", column([[{}]] * 2))
    td = say(env.reset(td), ["a", "b"])
    td["stop_reason"] = torch.tensor([int(StopReason.EOS), int(StopReason.LENGTH)])
    env.step(td)
    assert seen == [True, False]


WORDS = "length_constraints:number_words"
ROWS = [
    {"key": 7, "prompt": "Hi", "instruction_id_list": [NO_COMMA], "kwargs": [{"num_words": None, "letter": None}]},
    {"key": 8, "prompt": "Ho", "instruction_id_list": [WORDS, QUOTED]}
    | {"kwargs": [{"relation": "at least", "num_words": 2, "letter": None}, {}]},
]


def test_the_environment_reads_a_local_file_of_the_public_format(tmp_path, say):
    path = tmp_path / "input_data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    env = IFEvalEnv(dataset=path, num_envs=2, shuffle=False)
    td = env.reset()
    assert td.get("key").tolist() == [7, 8]
    assert td.get("kwargs").tolist() == [[{}], [{"num_words": 2, "relation": "at least"}, {}]]
    td = env.step(say(td, ["<answer>a</answer>", '<answer>"a b"</answer>']))
    assert td["next", "reward"].flatten().tolist() == pytest.approx([1.1, 1.1])
    assert td["next", "done"].all()


def with_row(**change):
    """An environment whose second row differs in this from a good one."""
    return IFEvalEnv(dataset=[ROWS[0], {**ROWS[0], **change}])


MISSPELT = {"instruction_id_list": ["punctuation:no_coma"]}
MORE_THAN = {"instruction_id_list": [WORDS], "kwargs": [{"num_words": 3, "relation": "more than"}]}
test_what_cannot_be_checked_is_named_when_the_environment_is_made = refusals(
    (DataError, "row 2 .*'punctuation:no_coma'.*Did you mean", lambda: with_row(**MISSPELT)),
    (DataError, "row 2 .*argument 'keywords': .*none", lambda: with_row(instruction_id_list=["keywords:existence"])),
    (DataError, "row 2 .*one entry of kwargs per", lambda: with_row(instruction_id_list=[QUOTED, QUOTED])),
    (DataError, "row 2 .*column 'instruction_id_list'", lambda: with_row(instruction_id_list=None)),
    (DataError, "relation .*row 2 .*'less than' or 'at least': got 'more than'", lambda: with_row(**MORE_THAN)),
    (ConfigError, "four numbers that sum to 1", lambda: IfEvalScorer(format_weights=[1, 1, 1, 1])),
    (ConfigError, "True, False, 'structured' or a function", lambda: IfEvalScorer(aggregate_reward="sum")),
)


def test_an_instruction_that_cannot_be_checked_is_named_at_a_step(answered):
    with pytest.raises(DataError, match="row 1 of the batch has 'no:such'"):
        step(answered, ["a"], ["no:such"])
    with pytest.raises(MissingKeyError, match="'instruction_id_list'"):
        answered(ChatEnv(batch_size=[1]).append_transform(IfEvalScorer()), ["4"])


def test_langdetect_is_asked_for_only_by_instructions_that_need_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    IFEvalEnv(dataset=ROWS)
    row = {"prompt": "a", "instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]}
    with pytest.raises(MissingDependencyError, match=r"english_capital' of row 1.*pip install 'llmrl\[ifeval\]'"):
        IFEvalEnv(dataset=[row])


# --- the instructions, each on responses that the public definition decides ---

ENGLISH = "the quick brown fox jumps over the lazy dog, and then it goes home to sleep for the whole night."
GERMAN = "Der schnelle braune Fuchs springt gerne über den faulen Hund und geht danach wieder nach Hause."
LESS, LEAST = "less than", "at least"

# name, arguments, responses that follow it, responses that do not
# fmt: off
TABLE = [
    ("keywords:existence", {"keywords": ["cat", "c++"]}, ["A CAT that writes C++.", "category c++"],
     ["a cat", "a dog that writes c++", "cat cc"]),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": LEAST},
     ["War and war", "warfare warms", "war war war"], ["war", "peace"]),
    ("keywords:frequency", {"keyword": " war ", "frequency": 2, "relation": LESS}, ["war", "peace"], ["War. War."]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "roll"]}, ["A rocket.", "rocks and rolls"],
     ["Rock!", "let it ROLL", "rock-hard"]),
    ("keywords:letter_frequency", {"letter": "T", "let_frequency": 3, "let_relation": LEAST},
     ["tTt", "a title that"], ["tt", ""]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": LESS}, ["#a"], ["#a #b"]),
    ("language:response_language", {"language": "de"}, [GERMAN, "12345 !?"], [ENGLISH]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": LEAST},
     ["One. Two! Three?", "We ran. They sat. All fell. No."],
     ["One. Two.", "Dr. Smith paid 3.50. Mr. Jones did not.", "no end"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": LESS}, ["Just one."], ["One. Two."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["one ***two", "one\n***\ntwo", "***\none\n***\ntwo\n***", "a\n\nb *** c"],
     ["one", "one *** *** two", "one *** two *** three", "one\n\ntwo"]),
    ("length_constraints:number_words", {"num_words": 4, "relation": LEAST},
     ["one two three four", "it's a trap", "a-b c-d"], ["one two three", "***"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["one two"], ["one two three"]),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "However"},
     ["one\n\nhowever, two", 'one\n\n"HOWEVER" two', "one\n\n  however's two"],
     ["one\n\ntwo", "however\n\ntwo", "one\n\nhowever\n\nthree", "one\n\nhowever-two x", "one\n\n\n\nhowever"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] at [address]", "[][]", "[a [b] [c]"], ["[name]", "[na\nme] [", "none", "]["]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. One more.", "bye p. s. one more"],
     ["Bye.", "PS: one more", "p..s."]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S. more", "p. p. s more"], ["P.S. more"]),
    ("detectable_content:postscript", {"postscript_marker": "Note+"}, ["x note+ y"], ["notee"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* one\n* two", "- one\n- two", "text\n  * one\n\n\n  - two\ntext", "*one\n*two", "*\nno\n* two"],
     ["* one", "* one\n* two\n* three", "** one\n** two", "1. one\n2. two", "* one\n*"]),
    ("detectable_format:constrained_response", {}, ["My answer is yes.", "Well. My answer is maybe. Sorry."],
     ["My answer is yes", "Yes.", "my answer is no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*one* and *two*", "**one** and *two*", "**one** *x* **two**"],
     ["*one*", "*one\ntwo* *", "* * and **", "one two"]),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2", "SECTION 1 SECTION 2 SECTION 3"],
     ["SECTION 1", "Section 1 Section 2", "SECTION A SECTION B", "SECTION  1 SECTION  2"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": [1, 2]}\n```', "```\n[]\n```", " 3 "],
     ["{a: 1}", '{"a": 1} there', "```json\n```", "[" * 5000]),
    ("detectable_format:title", {}, ["<<My Poem>>\nroses", "text <<a>> <<>>", "<<<a>>>"],
     ["<<>>", "<< >>", "<title>", "<<a\nb>>", ">>a<<"]),
    ("combination:two_responses", {}, ["one ****** two", "******one******two******"],
     ["one ****** one", "one", "one ****** two ****** three", "one ****** ****** two", "******"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": " Write a poem. "},
     ["Write a poem.\nRoses", "  WRITE A POEM. Roses"], ["Sure! Write a poem.", "Write the poem."]),
    ("startend:end_checker", {"end_phrase": "Any other questions? "},
     ["Well. Any other questions?", '"Any other QUESTIONS?" \n', "any other questions?"],
     ["Any other questions? No.", "Any questions?"]),
    ("startend:quotation", {}, ['"all of it"', ' "a" and "b" \n', '""'],
     ['"', 'not "all"', "'all'", "\u201call\u201d"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": LEAST},
     ["NASA and ESA", "I AM here", "DON'T"], ["NASA", "Nasa And Esa", "eS"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": LESS}, ["only ONE", "none"],
     ["ONE, TWO", "**BOLD** and (ROUND)"]),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, ENGLISH.upper() + " a", GERMAN.upper()]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.capitalize(), GERMAN.lower()]),
    ("punctuation:no_comma", {}, ["no comma; none.", "\uff0c"], ["one, two", ","]),
]
# fmt: on


@pytest.mark.parametrize(("name", "arguments", "followed", "broken"), TABLE)
def test_an_instruction_is_followed_or_not_strictly_and_loosely(name, arguments, followed, broken):
    if name in NEEDS_LANGUAGE:
        pytest.importorskip("langdetect")
    check, told = CHECKS[name], Instructions.of([name], [arguments], "row 1")
    assert told.arguments == [arguments]
    assert [check(response, **arguments) for response in followed] == [True] * len(followed)
    assert [check(response, **arguments) for response in broken] == [False] * len(broken)
    for response in filter(str.strip, followed):  # an empty response follows nothing
        assert evaluate(response, told) == Verdict([True], [True])
        framed = evaluate(f"Sure, here it is:\n{response.strip()}\n\nBye, bye.", told)
        if check(response.strip(), **arguments):
            assert framed.loose == [True]
        assert framed.loose[0] >= framed.strict[0]
    assert [evaluate(response, told).strict for response in broken] == [[False]] * len(broken)


def test_all_25_instructions_are_there_and_tested():
    assert len(CHECKS) == 25
    assert {name for name, *_ in TABLE} == set(CHECKS)


# fmt: off
SENTENCES = {
    "": 0, "no end": 1, "One. Two.": 2, "One.\nTwo.": 2, "Wow!!! Really?! Yes.": 3, "It costs $3.50. Fine.": 2,
    "Mr. Smith met Dr. Jones.": 1, "J. R. Smith came. The end.": 2, "He lives in the U.S. The weather is good.": 2,
    "He lives in the U.S. and likes it.": 1, "Fruit, e.g. apples, is good.": 1, "Well... maybe. I mean... The end.": 3,
    '"Stop." He ran.': 2, "He (the boss.) left.": 2, "1. Apples\n2. Pears": 3, "It was 1999. Then came 2000.": 2,
    "On the 5. of May.": 1, "First.Second.": 1, "*The end.*": 2,  # the last is a peculiarity of the public counter
}
CAPITALS = {  # contractions are two words
    "NASA and the ESA.": 2, "I AM HERE": 3, "DON'T, CAN'T": 4, "NASA'S IT'S": 4, "A-OK COVID-19": 2,
    "U.S. p.m. (USA) [X]": 3, "A/B A:B A,B A--B": 7, "10:30 1,000 #42": 0, "**BOLD** \"QUOTED\" 'SINGLE'": 3, "CaSe": 0,
}
# fmt: on


@pytest.mark.parametrize(
    ("counted", "text", "count"),
    [(count_sentences, *item) for item in SENTENCES.items()]
    + [(count_capital_words, *item) for item in CAPITALS.items()]
    + [(count_words, "It's a well-known fact: 3.14!", 8), (count_words, "", 0)],
)
def test_sentences_and_words_are_counted(counted, text, count):
    assert counted(text) == count


def test_the_language_is_the_same_every_time():
    pytest.importorskip("langdetect")
    assert len({_detected.__wrapped__("ok no problem") for _ in range(20)}) == 1
    assert is_language("...", "xx")  # nothing to go by counts as followed
