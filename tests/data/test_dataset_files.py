"""Files that people have become conversations and prompts; what cannot be used is named with its row."""

import csv
import gzip
import json

import pytest

from llmrl.data.llm.dataset_files import load_rows, to_messages, to_prompt
from llmrl.errors import DataError

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ROWS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path, suffix):
    assert list(load_rows(write(tmp_path / f"data{suffix}", ROWS))) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_survive_the_file(tmp_path, suffix):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [{"messages": [USER, call]}, {"messages": [USER, ASSISTANT]}]
    loaded = load_rows(write(tmp_path / f"data{suffix}", rows))
    assert [to_messages(row) for row in loaded] == [[USER, call], [USER, ASSISTANT]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nothing.jsonl", None, r"dataset file must exist: .*nothing.jsonl"),
        ("broken.jsonl", '{"a": 1}\n{"a": ', r"broken.jsonl, line 2 must be JSON"),
        ("list.jsonl", "[1]\n", "line 1 must hold an object"),
        ("empty.jsonl", "\n", "at least one row"),
        ("data.txt", "x", "must end in one of .jsonl"),
        ("bad.parquet", "x", "cannot be read as Parquet"),
        ("list.json", "[3]", r"row 1 of .* is 3"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / name)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_files_in_another_encoding_or_format_say_which_and_what_to_do(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    text = write(path, ROWS).read_text(encoding="utf-8")
    parquet = write(tmp_path / "data.parquet", ROWS).read_bytes()
    contents = [
        (text.replace("2?", "é").encode("latin-1"), r"line \d must be UTF-8 text: byte 0xe9 at column \d+.*iconv"),
        (text.encode("utf-16"), "it is UTF-16; convert it: iconv"),
        (text.encode("utf-16-le"), "it has null bytes, as UTF-16"),
        (gzip.compress(text.encode()), "it is gzip; unpack it with gunzip"),
        (parquet, "it is Parquet; rename it to end in .parquet"),
    ]
    for data, says in contents:
        path.write_bytes(data)
        with pytest.raises(DataError, match=says) as raised:
            load_rows(path)
        assert str(path) in str(raised.value)
    path.write_bytes(text.encode("utf-8-sig"))
    assert list(load_rows(path)) == ROWS, "a byte order mark is allowed"


@pytest.mark.parametrize("value", ["[" * 2000 + "]" * 2000, "9" * 5000, '"\\ud800"'])
def test_json_that_cannot_be_used_is_named_with_its_line(tmp_path, value):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"a": 1}}\n{{"a": {value}}}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"data.jsonl, line 2 .*JSON: .*(nested|integer|holds)"):
        load_rows(path)
    with pytest.raises(DataError, match=r"'tools' must be .*: row 7: "):
        to_messages({"messages": [USER, ASSISTANT], "tools": f'[{{"a": {value}}}]'}, number=7)


def test_csv_fields_may_be_long_and_rows_with_more_fields_than_the_header_are_named(tmp_path):
    limit = csv.field_size_limit()
    rows = [{"question": "x" * 500_000, "answer": "y"}]
    assert list(load_rows(write(tmp_path / "data.csv", rows))) == rows
    path = tmp_path / "wide.csv"
    path.write_text("question,answer\na,b\nc,d,e,f\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"row 2 of .*wide.csv, .*line 3, has 2 more"):
        load_rows(path)
    path.write_text('question,answer\na,b\nc,"d', encoding="utf-8")
    with pytest.raises(DataError, match=r"wide.csv, line 3 must be CSV: unexpected end of data"):
        load_rows(path)
    path.write_bytes(b"question,answer\na\rb,c\n")
    assert len(load_rows(path)) == 2, "as files of old Macs end their lines"
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"prompt": "Hi", "completion": "Hello"}, [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER, ASSISTANT]),
        ({"question": "Hi", "answer": "Hello"}, [USER, ASSISTANT]),
        ({"problem": "Hi", "solution": "Hello", "level": 3}, [USER, ASSISTANT]),
    ],
)
def test_rows_become_conversations(row, messages):
    assert to_messages(row) == messages
    system = {"role": "system", "content": "Be brief."}
    assert to_messages(row, system_prompt="Be brief.") == [system, *messages]
    assert to_messages({"messages": [system, *messages]}, system_prompt="Other.") == [system, *messages]


@pytest.mark.parametrize(
    ("convert", "row", "message"),
    [
        (to_messages, {"messages": [USER]}, "row 7 has only user"),
        (to_messages, {"messages": []}, "list of messages: row 7"),
        (to_messages, {"messages": ["Hi"]}, "message 1 of 'messages' in row 7 is 'Hi'"),
        (to_messages, {"messages": [{"role": "user"}, ASSISTANT]}, r"message 1 \(user\) .* row 7 has none"),
        (to_messages, {"prompt": "Hi"}, "row 7 must have a completion column"),
        (to_messages, {"prompt": "Hi", "completion": [USER]}, "row 7 has only user, user"),
        (to_messages, {"propmt": "Hi", "completion": "x"}, "row 7 .*prompt column.*Did you mean 'prompt'"),
        (to_prompt, {"messages": [ASSISTANT]}, "row 7 has only an assistant turn"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(convert, row, message):
    with pytest.raises(DataError, match=message):
        convert(row, number=7)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "1 + 1?", "answer": "#### 2"}, {"query": "1 + 1?", "answer": "#### 2"}),
        ({"prompt": "1 + 1?", "ground_truth": 2}, {"query": "1 + 1?", "answer": "2"}),
        ({"prompt": [USER], "reference": "Hello"}, {"query": [USER], "answer": "Hello"}),
        ({"messages": [USER, ASSISTANT]}, {"query": [USER], "answer": "Hello"}),
        ({"messages": [USER], "solution": "x"}, {"query": [USER], "answer": "x"}),
        ({"prompt": "a", "level": 3}, {"query": "a", "level": 3}),
        ({"prompt": "a", "query": "b"}, {"query": "a"}),
    ],
)
def test_rows_become_prompts_with_their_reference_and_other_columns(row, prompt):
    assert to_prompt(row) == prompt


def test_columns_can_be_named():
    row = {"task": "a", "gold": "b", "answer": "c"}
    assert to_prompt(row, prompt_column="task", answer_column="gold") == {"query": "a", "answer": "b"}
    with pytest.raises(DataError, match=r"'taks' is missing in row 2.*Did you mean 'task'"):
        to_prompt(row, prompt_column="taks", number=2)
    assert to_messages(row, prompt_column="task", completion_column="gold")[1]["content"] == "b"
