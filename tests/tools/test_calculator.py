import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrl.tools import ToolError
from llmrl.tools.calculator import calculator, evaluate

# fmt: off
VALUES = {
    "2 + 3 * 4": "14", "(12 / 60) * 50": "10", "7 // 2 - 7 % 4": "0", "-2 ** 2": "-4", "2 ^ 10": "1024",
    "1,234 + 5,678,901": "5680135", "1/3": "0.3333333333333333", "3 × 4 ÷ 2 − 1": "5",  # noqa: RUF001
    "12 + 30 =": "42", "sqrt(16) + abs(-3)": "7", "max(1,200)": "200", "round(2.71828, 2)": "2.72",
    "log(8, 2) + ln(e) + log10(1000)": "7", "gcd(12, 18) * floor(2.9) - ceil(0.1)": "11", "1e3": "1000",
    "99999999999999999999 * 3": "299999999999999999997", "2 ** -1": "0.5", "+".join(["1"] * 250): "250",
}
REFUSED = {
    "is empty": [""],
    "cannot read": ["1 +"],
    "divides by zero": ["1 / 0", "5 % 0"],
    "has no value": ["sqrt(-1)", "gcd(1.5, 2)"],
    "the root of a negative number": ["(-8) ** 0.5"],
    "too large": ["2 ** 5000", "1e400", "10.0 ** 400", "exp(1000)"],
    "numbers only": ["'a' * 3", "True + 1", "1j"],
    "is not arithmetic": [
        "__import__('os').system('true')", "(1).__class__", "[1, 2]", "x + 1", "lambda: 1", "1 if 1 else 2", "1 << 100",
    ],
    "sqrt takes 1 number: got 2": ["sqrt(1, 2)"],
    "log takes 1 or 2 numbers: got 3": ["log(1, 2, 3)"],
    "whole number below 300": ["round(1, 1000000)"],
    "null byte": ["1\0"],
    "500 characters": ["9" * 501],
}
ADVERSARIAL = [
    "45**67**89", "9**9**9**9", "9**(9**9)", "(((9**999)**999)**999)", "2**-9**9**9", "(-9)**9**9", "round(1, -10**9)",
    "round(1, -999999999)", "round(1.5, 10**9)", "9**1000 * " * 49 + "9**1000", "0.1**9**9**9",
    "(" * 250 + "1" + ")" * 249, "-" * 499 + "1", "exp(exp(exp(exp(9))))", "9" * 490 + "**9",
    "(9**1200) % (9**1199) ** 2",
]
# fmt: on


@pytest.mark.parametrize(("expression", "value"), VALUES.items())
def test_arithmetic_has_the_value_worked_out_by_hand(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(("expression", "words"), [(each, words) for words, texts in REFUSED.items() for each in texts])
def test_what_is_not_arithmetic_is_refused_with_the_reason(expression, words):
    with pytest.raises(ToolError, match=words):
        calculator(expression)


@pytest.mark.parametrize("expression", ADVERSARIAL)
def test_an_adversarial_expression_is_answered_with_few_digits_or_refused(expression):
    with contextlib.suppress(ToolError):
        assert len(calculator(expression)) < 1300


NUMBERS = st.integers(-(10**6), 10**6).map(str) | st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: f"{x:.6f}")
EXPRESSIONS = st.recursive(
    NUMBERS, lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner), max_leaves=8
)


@given(EXPRESSIONS)
def test_the_value_is_that_of_python(expression):
    assert evaluate(expression) == eval(expression)


@given(st.text(max_size=60))
def test_any_text_has_a_value_or_a_tool_error(text):
    try:
        answer = calculator(text)
    except ToolError as error:
        answer = str(error)
    assert answer
