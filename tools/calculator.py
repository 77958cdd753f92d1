"""The calculator: arithmetic by its own evaluator, which never runs Python.

Integers are exact and at most 4,000 bits long, so the most expensive expression takes milliseconds; larger ones are
refused before they are computed.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from llmrl.tools.base import ToolError

MAX_CHARS = 500
MAX_BITS = 4000

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 300:  # Python would compute 10**digits
        raise ValueError("digits must be a whole number below 300")
    return round(value, digits)


_OF_ONE = ("acos", "asin", "atan", "ceil", "cos", "exp", "floor", "log10", "log2", "sin", "sqrt", "tan")
_FUNCTIONS: dict[str, tuple[Callable[..., Number], tuple[int, ...]]] = {  # name -> function, numbers of arguments
    **{name: (getattr(math, name), (1,)) for name in _OF_ONE},
    "abs": (abs, (1,)),
    "gcd": (math.gcd, (2,)),
    "ln": (math.log, (1,)),
    "log": (math.log, (1, 2)),
    "max": (max, tuple(range(1, 21))),
    "min": (min, tuple(range(1, 21))),
    "round": (_round, (1, 2)),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SIGNS = {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "^": "**", "\u03c0": "pi"}
_GLUED = re.compile(r"\d(?:and|else|for|if|in|is|not|or)")  # Python parses it, with a warning on stderr
_GROUPED = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?![\d,])")


def calculator(expression: str) -> str:
    """Evaluate arithmetic and return the number.

    Operators: + - * / // % ** and parentheses; functions such as sqrt, abs, round, floor, ceil, min, max, log, exp,
    sin, cos; constants pi and e. Whole numbers are exact.

    Args:
        expression: for example "(12 / 60) * 50"

    >>> calculator("(12 / 60) * 50"), calculator("2 ** 0.5"), calculator("1,000 × 3")
    ('10', '1.4142135623730951', '3000')
    """
    value = evaluate(expression)
    # Beyond 2**53 a float cannot represent every whole number, so the digits shown would not be exact.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression; raises ToolError with the reason if it has none."""
    text = expression.strip().removesuffix("=").strip()
    if not text:
        raise ToolError("calculator: the expression is empty.")
    if len(text) > MAX_CHARS:
        raise ToolError(f"calculator: an expression may have {MAX_CHARS} characters: got {len(text)}.")
    text = _ascii(text)
    if _GLUED.search(text):
        raise ToolError(f"calculator: cannot read {_shown(expression)}: a number runs into a word.")
    try:
        tree = ast.parse(text, mode="eval")
        return _checked(_value(tree.body))
    except SyntaxError as error:
        raise ToolError(f"calculator: cannot read {_shown(expression)}: {error.msg}.") from None
    except ZeroDivisionError:
        raise ToolError(f"calculator: {_shown(expression)} divides by zero.") from None
    except OverflowError:
        raise ToolError(f"calculator: {_shown(expression)} is too large a number.") from None
    except (ValueError, TypeError) as error:  # the logarithm of a negative number; a null byte
        raise ToolError(f"calculator: {_shown(expression)} has no value: {error}.") from None
    except (RecursionError, MemoryError):  # the parser's own limits
        raise ToolError("calculator: the expression is nested too deeply.") from None


def _value(node: ast.expr) -> Number:
    # These cases are exhaustive: any other syntax is refused, and Python never evaluates the expression.
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes() | None):
            raise ToolError(f"calculator: must compute with numbers only: got {node.value!r}.")
        case ast.Constant(value=int() | float() as value):
            return _checked(value)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            function, counts = _FUNCTIONS[name]
            if len(args) not in counts:
                number = " or ".join(map(str, counts[:2])) + (" number" if counts == (1,) else " numbers")
                raise ToolError(f"calculator: {name} takes {number}: got {len(args)}.")
            return _checked(function(*(_value(argument) for argument in args)))
    names = ", ".join(sorted(_FUNCTIONS))
    raise ToolError(f"calculator: {_shown(ast.unparse(node))} is not arithmetic; functions are {names}.")


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if whole and base.bit_length() * exponent > 2 * MAX_BITS:  # refused before it is computed
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the root of a negative number")
    return value


def _checked(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value


def _ascii(text: str) -> str:
    """Replaces common signs; ``^`` is a power. Drops digit-grouping commas where they cannot separate arguments."""
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    if re.search(r"[a-zA-Z]", text):
        return text  # max(1,200) has two arguments
    return _GROUPED.sub(lambda match: match[0].replace(",", ""), text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
