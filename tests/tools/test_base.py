import asyncio
import json
import sys
import time
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from llmrl.errors import ConfigError
from llmrl.tools import FunctionTool, Tool, ToolError, ToolTimeout, as_tool, load_tool, tool
from llmrl.tools.load import check_tool
from llmrl.tools.schema import parse_docstring
from tests.support.golden import check_golden
from tests.support.refusals import refusals

FAR = float("inf")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict):
    deep: bool


class Place(BaseModel):
    title: str
    near: Optional["Place"] = None


def call(made: Tool, arguments: dict[str, Any], conversation: Any = 0, deadline: float = FAR) -> str:
    return made.call(arguments, conversation=conversation, deadline=deadline)


def test_signature_and_docstring_are_the_schema_and_arguments_arrive_as_their_types():
    def lookup(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> str:
        """The weather of a city.

        In the next days.

        Args:
            city: its name,
                in English
            days (int): how many

        Returns:
            a text
        """
        return ""

    def take(
        ratio: float,
        flag: bool,
        names: list[str],
        table: dict[str, int],
        color: Color,
        point: Point,
        options: Options,
        title: Annotated[str, "of the page"],
        maybe: int | None = None,
        json: Any = None,
    ) -> str:
        """Takes."""
        return repr((ratio, flag, names, table, color, point, options, title, maybe, json))

    def go(place: Place) -> str:
        """Goes."""
        return place.near.title

    schemas = [as_tool(function).schema() for function in (lookup, take, go)]
    check_golden("tool_schemas", "".join(json.dumps(schema, indent=1) + "\n" for schema in schemas))
    given = {"ratio": 1, "flag": True, "names": ["a"], "table": {"b": 2}, "color": "blue", "title": 12}
    expected = (1.0, True, ["a"], {"b": 2}, Color.BLUE, Point(7, 0), {"deep": False}, "12", None, None)
    assert call(as_tool(take), {**given, "point": {"x": "7"}, "options": {"deep": False}}) == repr(expected)
    assert call(as_tool(go), {"place": {"title": "a", "near": {"title": "b"}}}) == "b"


def test_text_is_read_as_json_where_the_type_needs_it():
    def add(numbers: list[int], scale: float | None = None, note: str = "") -> int:
        """Adds."""
        return f"{sum(numbers)} {scale} {note}"

    assert call(as_tool(add), {"numbers": "[1, 2]", "scale": "null", "note": "[3]"}) == "3 None [3]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "add: argument 'a' is missing; argument 'b' is missing. Expected: a (integer), b (integer), how "),
        ({"a": 1, "b": "two"}, "add: argument 'b': .*integer.*: got 'two' (str). Expected:"),
        ({"a": 1, "b": 2.5}, "argument 'b': .*got a number with a fractional part"),
        ({"a": 1, "b": 2, "hwo": "x"}, "add: .*no argument 'hwo', did you mean 'how'. Expected:"),
        ({"a": 1, "b": 2, "how": "up"}, "argument 'how': .*'plus' or 'minus': got 'up' (str)"),
        ({"a": [0] * 1000, "b": 2}, "got [0, 0, 0, "),
    ],
)
def test_wrong_arguments_are_named_with_what_was_expected(arguments, message):
    def add(a: int, b: int, how: Literal["plus", "minus"] = "plus") -> int:
        """Adds."""
        return a + b

    with pytest.raises(ToolError) as caught:
        call(as_tool(add), arguments)
    for part in message.split(".*"):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 400
    assert 'how (one of "plus", "minus", optional)' in str(caught.value)


def untyped(a: int, b) -> str:
    """Takes two."""


def starred(*numbers: int) -> str:
    """Takes many."""


def opaque(stream: asyncio.Queue) -> str:
    """Takes what JSON cannot say."""


def misdescribed(city: str) -> str:
    """Takes a city.

    Args:
        citty: where
    """


def unknown(a: "Nowhere") -> str:  # noqa: F821
    """Takes what is not there."""


def silent(a: int) -> str:
    return ""


class Needy:
    """Needs a folder."""

    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self) -> str:
        return self.folder


test_what_cannot_be_a_tool_is_refused_with_the_reason = refusals(
    (ConfigError, "'untyped': parameter 'b' has no type hint.*b: str", lambda: as_tool(untyped)),
    (ConfigError, r"'starred': every argument must have a name.*: got \*numbers: int", lambda: as_tool(starred)),
    (ConfigError, "'opaque': .*parameter 'stream' .*JSON schema", lambda: as_tool(opaque)),
    (ConfigError, r"'citty', .*not an argument\. Did you mean 'city'", lambda: as_tool(misdescribed)),
    (ConfigError, "type hint names 'Nowhere'", lambda: as_tool(unknown)),
    (ConfigError, "letters, digits, _ and -, at most 64: got '<lambda>'", lambda: as_tool(lambda: "")),
    (ConfigError, r"a Tool, a function, or .*__call__: got 7 \(int\)", lambda: as_tool(7)),
    (ConfigError, "load_tool", lambda: as_tool("calculator")),
    (ConfigError, "'silent': needs a docstring", lambda: as_tool(silent)),
    (ConfigError, "without arguments: Needy.*'folder'", lambda: as_tool(Needy)),
)


def test_what_lacks_a_description_or_needs_arguments_can_be_given_them():
    assert FunctionTool(silent, description="Says nothing.").description == "Says nothing."
    assert call(as_tool(Needy("here")), {}) == "here"


class Counter:
    """Counts its calls."""

    closed = 0

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int = 1) -> int:
        self.count += step
        return self.count

    def close(self) -> None:
        type(self).closed += 1


@pytest.mark.parametrize(
    ("target", "counts", "closed_at_end", "closed"),
    [(Counter(), ["1", "2", "3", "4"], 0, 1), (Counter, ["1", "2", "1", "1"], 1, 3)],
    ids=["an object serves all conversations", "of a class each conversation has an object"],
)
def test_objects_are_closed_at_the_end_of_their_conversation_or_with_the_tool(target, counts, closed_at_end, closed):
    Counter.closed = 0
    made = as_tool(target)
    assert (made.name, made.description) == ("counter", "Counts its calls.")
    found = [call(made, {}, "a"), call(made, {}, "a"), call(made, {}, "b")]
    made.end("a")
    assert Counter.closed == closed_at_end
    assert [*found, call(made, {}, "a")] == counts
    made.close()
    assert Counter.closed == closed


def test_positional_only_parameters_and_defaults_arrive():
    @tool
    def power(base: int, exponent: int = 2, /) -> int:
        """Raises."""
        return base**exponent

    assert call(power, {"base": 3}) == "9"
    assert call(power, {"base": 2, "exponent": 5}) == "32"
    assert power(2, 3) == 8


def test_async_calls_share_one_event_loop_and_are_cancelled_at_their_deadline():
    loops, cancelled = set(), []

    @tool
    async def wait(seconds: float) -> str:
        """Waits."""
        loops.add(asyncio.get_running_loop())
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(seconds)
            raise
        return "done"

    assert [call(wait, {"seconds": 0}, deadline=time.monotonic() + 10) for _ in range(2)] == ["done", "done"]
    with pytest.raises(ToolTimeout, match="wait: no result in time"):
        call(wait, {"seconds": 60}, deadline=time.monotonic() + 0.1)
    assert call(wait, {"seconds": 0.01}, deadline=time.monotonic() + 10) == "done"
    assert (len(loops), cancelled) == (1, [60])
    wait.close()


def test_results_that_are_not_text_become_json():
    @tool
    def give(what: str) -> Any:
        """Gives."""
        return {"none": None, "point": Point(1, 2), "list": [1, 2.5, "é"], "nan": float("nan"), "flag": True}[what]

    written = {"none": "", "point": '{"x":1,"y":2}', "list": '[1,2.5,"é"]', "nan": "NaN", "flag": "true"}
    assert {what: call(give, {"what": what}) for what in written} == written


def test_docstrings_in_the_style_of_sphinx_are_read():
    found = parse_docstring("Adds.\n\n:param int a: the first\n    one\n:param b: the other\n:returns: a sum")
    assert found == ("Adds.", {"a": "the first one", "b": "the other"})
    assert parse_docstring("Adds.\n\n>>> add(1, 2)\n3") == ("Adds.", {})
    assert parse_docstring("Notes of a run, by day.\n\nExamples:\n    x") == ("Notes of a run, by day.", {})


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_tools_of_a_test.py").write_text(
        "from llmrl.tools import Tool, tool\n"
        "def lookup(word: str) -> str:\n    'Looks a word up.'\n    return word.upper()\n"
        "class Book(Tool):\n"
        "    name, description, parameters = 'book', 'A book.', {'type': 'object', 'properties': {}}\n"
        "    def __init__(self, pages: int = 3):\n        self.pages = pages\n"
        "    def call(self, arguments, *, conversation, deadline):\n        return str(self.pages)\n"
        "import_me = tool(lookup, name='again')\n"
        "number = 7\n"
    )
    (tmp_path / "broken_tools_of_a_test.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "my_tools_of_a_test"
    sys.path[:] = path
    sys.modules.pop("my_tools_of_a_test", None)


def test_a_tool_of_the_user_is_loaded_by_module_and_name(user_module):
    assert call(load_tool(f"{user_module}:lookup"), {"word": "a"}) == "A"
    assert load_tool(f"{user_module}:import_me").name == "again"
    assert call(load_tool(f"{user_module}:Book"), {}) == "3"
    assert call(load_tool(f"{user_module}:Book", {"pages": 9}), {}) == "9"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("calculater", None, r"got 'calculater'\. Did you mean 'calculator'"),
        ("no_such_module_of_a_test:x", None, "no module 'no_such_module_of_a_test'"),
        ("my_tools_of_a_tset:x", None, "no module .* Did you mean 'my_tools_of_a_test'"),
        ("my_tools_of_a_test.more:x", None, "no module 'my_tools_of_a_test.more'"),
        ("my tools:x", None, r"'package\.module:name': got 'my tools:x'"),
        ("my_tools_of_a_test:lokup", None, r"no 'lokup': it has lookup, Book.*Did you mean 'lookup'"),
        ("my_tools_of_a_test:number", None, r"got 7 \(int\)"),
        ("my_tools_of_a_test:Book", {"page": 1}, r"'page'\. Did you mean 'pages'"),
        ("my_tools_of_a_test:lookup", {"a": 1}, "no settings: got 'a'"),
        ("search_documents", None, "missing .*'folder'"),
    ],
)
def test_a_name_that_cannot_be_loaded_says_what_is_wrong(user_module, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_tool(name, settings)


def test_a_module_whose_own_import_fails_shows_its_own_error_and_the_line(user_module):
    reason = r"ModuleNotFoundError: No module named 'a_package_that_is_not_there', at .*broken_tools_of_a_test\.py:1\.$"
    with pytest.raises(ConfigError, match=reason):
        load_tool("broken_tools_of_a_test:x")


def test_a_tool_is_checked_without_being_made(user_module, monkeypatch):
    made = []
    monkeypatch.setattr("llmrl.tools.python.PythonTool.__init__", lambda self, **options: made.append(options))
    check_tool("python", {})
    check_tool(f"{user_module}:Book", {"pages": 9})
    check_tool(f"{user_module}:lookup")
    assert not made
    with pytest.raises(ConfigError, match="Did you mean 'pages'"):
        check_tool(f"{user_module}:Book", {"page": 9})
