"""MATH: answers are compared as mathematics, in bounded time, from any thread."""

import json
from contextlib import closing

import pytest

from llmrl.envs.llm import ChatEnv, MATHEnv, MATHRewardParser
from llmrl.envs.llm.tasks.math import MathEquality
from llmrl.errors import DataError, MissingDependencyError

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def equality():
    with closing(MathEquality(deadline_s=20)) as equality:
        yield equality


# fmt: off
EQUAL = [
    ("\\frac{1}{2}", "0.5"), ("\\frac{1}{2}", "1/2"), ("\\boxed{\\frac12}", "$\\frac{2}{4}$"), ("1{,}234", "1234"),
    ("5", "x = 5"), ("5", "5.0"), ("\\sqrt{8}", "2\\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), ("\\{1,2\\}", "\\{2,1\\}"),
    ("(1,2)", "( 1, 2 )"), ("2^{10}", "1024"), ("\\text{Monday}", "Monday"), ("90^\\circ", "90"), ("10\\%", "10"),
    ("\\frac{\\pi}{4}", "The answer is $\\frac{\\pi}{4}$."),
]
DIFFERENT = [
    ("5", "-5"), ("\\frac13", "0.333"), ("(1,2)", "(2,1)"), ("2x", "2"), ("\\text{Monday}", "Tuesday"),
    ("\\frac{3}{4}", "{"), ("7", ""),
]
# fmt: on


@pytest.mark.parametrize(
    ("reference", "answer", "equal"), [(*pair, True) for pair in EQUAL] + [(*pair, False) for pair in DIFFERENT]
)
def test_answers_are_compared_as_mathematics(equality, reference, answer, equal):
    assert equality.equal(reference, answer) is equal


def test_an_answer_that_never_ends_is_wrong_at_the_deadline_and_the_next_one_is_decided():
    with closing(MathEquality(deadline_s=1.0)) as equality:
        assert equality.equal("\\sqrt{4}", "2")  # the process is there
        assert not equality.equal("\\sqrt{8}", "\\sum_{n=1}^{10^{12}} n^{n}")
        assert equality.counters["timeouts"] == 1
        assert not equality.equal("2", "x" * 5000)
        assert equality.counters["too_long"] == 1


def test_pairs_are_compared_side_by_side_and_one_that_never_ends_costs_no_other():
    equality = MathEquality(deadline_s=3.0, processes=2)
    pairs = [("\\sqrt{8}", "2\\sqrt{2}"), ("\\sqrt{8}", "\\sum_{n=1}^{10^{12}} n^{n}"), ("x+1", "1+x"), ("2", "2")]
    assert (equality.equal_all(pairs), equality.equal_all([])) == ([True, False, True, True], [])
    assert equality.counters == {"compared": 4, "timeouts": 1, "too_long": 0}
    equality.close()


def test_an_empty_reference_is_refused_with_its_row(answered):
    with pytest.raises(DataError, match="row 2 of the dataset must be an expression"):
        MATHEnv(dataset=[{"problem": "a", "answer": "1"}, {"problem": "b", "solution": "\\boxed{}"}])
    with pytest.raises(DataError, match=r"row 2 of the dataset .*reference.*columns are problem, level"):
        MATHEnv(dataset=[{"problem": "a", "answer": "1"}, {"problem": "b", "level": "1"}])
    with pytest.raises(DataError, match="row 1 of the batch"):
        answered(ChatEnv(batch_size=[1]).append_transform(MATHRewardParser()), ["<answer>1</answer>"], answer=[" "])


def test_without_math_verify_the_extra_is_named_at_construction(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'llmrl\[math\]'"):
        MATHEnv(dataset=[{"problem": "a", "answer": "1"}])


def test_the_last_nested_box_is_the_reference(tmp_path):
    path = tmp_path / "math.jsonl"
    solution = "First \\boxed{1}, then $\\boxed{\\frac{\\sqrt{3}}{2}}$."
    path.write_text(json.dumps({"problem": "sin 60?", "solution": solution}), encoding="utf-8")
    assert MATHEnv(dataset=path).reset().get("answer").tolist() == ["\\frac{\\sqrt{3}}{2}"]
    rows = [{"problem": "sin 30?", "solution": "Known.", "answer": "\\frac12"}]  # as in MATH-500
    assert MATHEnv(dataset=rows).reset().get("answer").tolist() == ["\\frac12"]
