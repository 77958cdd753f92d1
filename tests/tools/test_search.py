import math

import pytest

from llmrl.errors import ConfigError, DataError
from llmrl.tools import ToolError, load_tool
from llmrl.tools.search import SearchDocuments


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "moon.md").write_text("# The moon\n\nThe moon is far.\nVery far.\n\n\nCheese is not there.\n")
    (tmp_path / "deep" / "rows.jsonl").write_text(
        '{"text": "Rivers run to the sea."}\n\n{"title": "Rome", "year": 1}\n["a list"]\n'
    )
    (tmp_path / "code.py").write_text("moon = 1")
    return tmp_path


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("cheese", "[1] moon.md:7\nCheese is not there."),
        ("rivers", "[1] deep/rows.jsonl:1\nRivers run to the sea."),
        ("rome", "[1] deep/rows.jsonl:3\ntitle: Rome\nyear: 1"),
        ("zebra", "No passage has any of these words."),
    ],
)
def test_a_hit_names_its_file_and_the_line_where_its_passage_begins(folder, query, answer):
    assert SearchDocuments(str(folder))(query) == answer


def test_a_configuration_names_the_folder_and_the_limit_is_checked(folder):
    search = load_tool("search_documents", {"folder": str(folder)})
    assert search.call({"query": "FAR!", "limit": 1}, conversation=0, deadline=0) == (
        "[1] moon.md:3\nThe moon is far.\nVery far."
    )
    assert search.schema()["function"]["parameters"]["properties"]["limit"]["maximum"] == 10
    with pytest.raises(ToolError, match="'limit': input should be less than or equal to 10: got 11"):
        search.call({"query": "x", "limit": 11}, conversation=0, deadline=0)


def test_scores_are_those_of_bm25(tmp_path):
    # Two passages of 2 and 4 words, mean 3; "a" is in both, "b" once in the second. k1 = 1.5, b = 0.75.
    (tmp_path / "x.txt").write_text("a c\n\na a b c")
    search = SearchDocuments(str(tmp_path))
    rarity_b = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))  # ln 2
    norm = 1.5 * (0.25 + 0.75 * 4 / 3)  # 1.875
    ((passage, score),) = search.search("b", 5)
    assert passage.text == "a a b c"
    assert score == pytest.approx(rarity_b * 2.5 / (1 + norm))
    rarity_a = math.log(1 + (2 - 2 + 0.5) / (2 + 0.5))
    first, second = search.search("a", 5)
    assert first[1] == pytest.approx(rarity_a * 2 * 2.5 / (2 + norm))
    assert second[1] == pytest.approx(rarity_a * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3)))


def test_long_paragraphs_are_split_at_line_ends(tmp_path):
    (tmp_path / "x.txt").write_text("\n".join(f"line {number} " + "x" * 40 for number in range(1, 7)))
    search = SearchDocuments(str(tmp_path), max_passage_chars=100)
    assert [(passage.line, passage.text.count("\n") + 1) for passage in search.passages] == [(1, 3), (4, 3)]


@pytest.mark.parametrize(
    ("name", "rows", "error", "message"),
    [
        ("none", None, ConfigError, "must be a folder of text files"),
        ("empty", [], ConfigError, "got none"),
        ("broken", ['{"text": "ok"}', "{broken"], DataError, r"rows\.jsonl:2: every line must be JSON"),
    ],
)
def test_folders_that_cannot_be_read_say_why(tmp_path, name, rows, error, message):
    if rows is not None:
        (tmp_path / name).mkdir()
    if rows:
        (tmp_path / name / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(error, match=message):
        SearchDocuments(str(tmp_path / name))
