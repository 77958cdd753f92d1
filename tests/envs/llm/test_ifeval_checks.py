"""The 25 instructions of IFEval, each on responses that the public definition decides."""

import pytest

from llmrl.envs.llm.ifeval import CHECKS, Instructions, Verdict, evaluate
from llmrl.envs.llm.tasks.ifeval_checks import (
    NEEDS_LANGUAGE,
    _detected,
    count_capital_words,
    count_sentences,
    count_words,
    is_language,
)

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
