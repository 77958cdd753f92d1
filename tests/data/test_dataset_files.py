"""Files that people have become conversations and prompts; what cannot be used is named with its row."""

import csv
import gzip
import json

import pytest

from llmrl.data.llm.dataset_files import load_rows
from llmrl.data.llm.rows import read_conversation, read_pair, to_messages, to_pair, to_prompt
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
        (to_messages, {"messages": ["Hi"]}, "row 7, message 1 of 'messages' is 'Hi'"),
        (
            to_messages,
            {"messages": [{"role": "user"}, ASSISTANT]},
            "row 7, message 1 of 'messages', role 'user', has none",
        ),
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
        ({"prompt": "a", "level": 3}, {"query": "a"}),
        ({"prompt": "a", "answer": ["yes", {"no": None}]}, {"query": "a", "answer": ["yes", {"no": None}]}),
        (
            {"prompt": "a", "system_prompt": "b"},
            {"query": [{"role": "system", "content": "b"}, USER | {"content": "a"}]},
        ),
        (
            {"instruction": "a", "input": "b", "history": [["Hi", "Hello"]]},
            {"query": [USER, ASSISTANT, {"role": "user", "content": "a\nb"}]},
        ),
    ],
)
def test_rows_become_prompts_with_their_reference_and_all_columns_that_are_not_messages(row, prompt):
    """Regression: a column `solution` was renamed, a list arrived at rewards as its text in Python."""
    kept = {name: value for name, value in row.items() if name != "history" and [USER] != value != [USER, ASSISTANT]}
    assert to_prompt(row) == kept | prompt


def test_columns_can_be_named():
    row = {"task": "a", "gold": "b", "answer": "c"}
    assert to_prompt(row, prompt_column="task", answer_column="gold") == {**row, "query": "a", "answer": "b"}
    with pytest.raises(DataError, match=r"'taks' is missing in row 2.*Did you mean 'task'"):
        to_prompt(row, prompt_column="taks", number=2)
    assert to_messages(row, prompt_column="task", completion_column="gold")[1]["content"] == "b"


# --- formats that public files have ---

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "unit": null}'}}
PARTS = [{"type": "text", "text": ""}]
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"default": None}}}}}
SYSTEM = {"role": "system", "content": "Be brief."}
HH = "\n\nHuman: Hi\n\nAssistant: {}"


def calling(arguments, name="get"):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def by(*turns):
    """Messages as ShareGPT writes them."""
    return [{"from": sender, "value": value} for sender, value in turns]


CONVERSATIONS = {
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, ASSISTANT]),
    "Alpaca with input": ({"instruction": "Hi", "input": "you", "output": "Hello"}, [("user", "Hi\nyou"), ASSISTANT]),
    "Alpaca with history and system": (
        {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief.", "history": [["a", "b"]]},
        [SYSTEM, ("user", "a"), ("assistant", "b"), USER, ASSISTANT],
    ),
    "ShareGPT": (
        {"conversations": by(("human", "Hi"), ("gpt", "Hello")), "system": "Be brief."},
        [SYSTEM, USER, ASSISTANT],
    ),
    "OpenOrca": ({"system_prompt": "Be brief.", "question": "Hi", "response": "Hello"}, [SYSTEM, USER, ASSISTANT]),
    "OpenAI's tools": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    "OpenAI's functions": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "add", "content": "4"},
                ASSISTANT | {"weight": 0},
            ],
            "functions": [SCHEMA["function"]],
        },
        [
            USER | {"tools": [SCHEMA]},
            calling(CALL["function"]["arguments"], "add"),
            {"role": "tool", "content": "4", "name": "add"},
            ASSISTANT | {"weight": 0},
        ],
    ),
    "ShareGPT's calls": (
        {
            "conversations": by(
                ("human", "Hi"),
                ("function_call", '{"name": "add", "arguments": {"a": null}}'),
                ("observation", "4"),
                ("gpt", "Hello"),
            ),
            "tools": json.dumps([SCHEMA]),
        },
        [USER | {"tools": [SCHEMA]}, calling({"a": None}, "add"), ("tool", "4"), ASSISTANT],
    ),
    "one message": ({"prompt": USER, "completion": ASSISTANT}, [USER, ASSISTANT]),
    "numbers": ({"prompt": "Hi", "completion": 4}, [USER, ("assistant", "4")]),
}


PAIRS = {
    "HH-RLHF": {"chosen": HH.format("Hello"), "rejected": HH.format("No")},
    "HH-RLHF with a prompt": {"prompt": HH.format(""), "chosen": " Hello", "rejected": " No"},
    "UltraFeedback": {"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT | {"content": "No"}]},
    "Axolotl": {"messages": [USER], "chosen": ASSISTANT, "rejected": ASSISTANT | {"content": "No"}},
    "LLaMA-Factory": {
        "conversations": by(("human", "Hi")),
        "chosen": {"from": "gpt", "value": "Hello"},
        "rejected": {"from": "gpt", "value": "No"},
    },
    "Alpaca": {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "No"},
}


def message(given):
    return given if isinstance(given, dict) else {"role": given[0], "content": given[1]}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_formats_of_public_files_become_conversations(tmp_path, name):
    row, expected = CONVERSATIONS[name]
    [loaded] = load_rows(write(tmp_path / "data.jsonl", [row]))
    read = read_conversation(loaded)
    assert read.chats[0] == [message(given) for given in expected]
    assert read.unused == ()
    assert read.is_trained


@pytest.mark.parametrize("name", PAIRS)
def test_formats_of_public_pairs_have_the_prompt_the_system_message_and_the_tools_of_their_row(name):
    """Regression: a message alone was trained as its text in Python; tools of pairs were dropped."""
    for more, start in (
        ({}, USER),
        ({"tools": [SCHEMA]}, USER | {"tools": [SCHEMA]}),
        ({"system": "Be brief."}, SYSTEM),
    ):
        chosen, rejected = read_pair(PAIRS[name] | more).chats
        assert chosen[0] == start
        assert [m["content"].strip() for m in chosen[-2:]] == ["Hi", "Hello"]
        assert [m["content"].strip() for m in rejected[-2:]] == ["Hi", "No"]
    assert read_pair(PAIRS[name] | {"source": "x", "weight": 0}).unused == ("source",)
    assert not read_pair(PAIRS[name] | {"source": "x", "weight": 0}).is_trained


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi", "completion": {"name": "Ada"}}, "'completion' must be text .*as text or JSON"),
        ({"prompt": "Hi", "completion": True}, "'completion' must be text .* has True"),
        ({"prompt": "Hi", "completion": float("nan")}, "'completion' must be text .* has nan"),
        ({"prompt": "Hi", "completion": [ASSISTANT | {"content": PARTS}]}, "must not be empty: .*row 7, message 2"),
        ({"messages": [calling("Oslo"), USER, calling('{"city": ')]}, "message 1: the arguments .*: got 'Oslo'"),
        ({"messages": [USER | {"content": [{"type": "audio"}]}, ASSISTANT]}, "only text and images .*'audio'"),
        ({"prompt": ["Hi"], "completion": "x"}, "message 1 of 'prompt' is 'Hi'"),
        ({"prompt": "Hi", "completion": ""}, "must not be empty: .*row 7, message 2"),
        ({"messages": [USER, ASSISTANT | {"content": " "}, USER, ASSISTANT]}, "row 7, message 2, is; .*weight to 0"),
        ({"prompt": "Hi", "completion": "x", "label": False}, "label = False, as KTO's rows"),
        ({"prompt": "Hi", "completion": "x", "weight": 0.5}, "'weight' must be true, false, 0 or 1: got 0.5"),
        ({"messages": [USER, ASSISTANT | {"train": "no"}]}, "row 7, message 2: its 'train' must be true"),
        ({"prompt": "Hi", "completion": "x", "input": "y"}, "'input' would be left out"),
        ({"messages": [USER, ASSISTANT], "history": [["a", "b"]]}, "'history' would be left out"),
        ({"prompt": "Hi", "completion": "x", "videos": ["a.mp4"]}, "only text and images"),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "Other."}, "one system message"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "message 1 of .* is from 'narrator'"),
        ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, "a call must be JSON"),
        ({"text": "Once upon a time"}, "Raw text is not read"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "trained by llmrl dpo"),
        ({"instruction": "Hi", "result": "a"}, "completion_column=NAME names another column"),
    ],
)
def test_what_would_be_lost_trained_as_nothing_or_printed_as_python_is_refused(row, message):
    with pytest.raises(DataError, match=message):
        to_messages(row, number=7)
    with pytest.raises(DataError, match=r"trained by llmrl dpo with dpo\.kind=kto"):
        to_pair({"prompt": "Hi", "completion": "x", "label": True})


def test_columns_that_are_not_read_and_rows_that_are_not_trained_are_told():
    row = {"question": "Hi", "answer": "Hello", "source": "web", "score": 3, "note": None, "label": True, "train": 1}
    assert read_conversation(row).unused == ("source", "score")
    for flag in ({"weight": 0}, {"train": False}, {"trainable": "false"}, {"training": "0"}):
        assert not read_conversation(row | flag).is_trained
    assert not read_conversation({"messages": [USER, ASSISTANT | {"weight": 0}]}).is_trained
    assert not read_conversation({"messages": [USER, calling("Oslo") | {"weight": 0}]}).is_trained
    assert to_messages({"messages": [USER, calling("")]})[1]["tool_calls"][0]["function"]["arguments"] == {}
    with pytest.raises(DataError, match="'rejected' must end with an answer"):
        to_pair({"prompt": "Hi", "chosen": "a", "rejected": ASSISTANT | {"content": PARTS}})
    assert "weight" not in to_prompt({"messages": [USER, ASSISTANT | {"weight": 0}, USER | {"weight": 0}]})["query"][-1]


def test_nulls_are_values_in_text_files_and_missing_fields_in_arrow(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "unit": None}}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [SCHEMA]}
    [loaded] = load_rows(write(tmp_path / "data.jsonl", [row]))
    assert to_messages(loaded) == [USER | {"tools": [SCHEMA]}, row["messages"][1]]
    [loaded] = load_rows(write(tmp_path / "data.parquet", [row]))
    first, second = to_messages(loaded)
    assert first == USER | {"tools": [SCHEMA]}, "a default of null is a value"
    assert second["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_a_dataset_comes_from_parts_patterns_folders_and_saved_datasets(tmp_path):
    import datasets

    folder, rows = tmp_path / "parts", [{**ROWS[n % 2], "n": n} for n in range(4)]
    (folder / "data").mkdir(parents=True)
    for part in range(2):
        write(folder / f"data/train-0000{part}-of-00002.parquet", rows[2 * part : 2 * part + 2])
    write(folder / "data/test-00000-of-00001.parquet", rows[:1])
    (folder / "dataset_info.json").write_text("{}")
    assert list(load_rows(folder)) == rows
    assert load_rows(folder)[3].place.endswith("train-00001-of-00002.parquet, row 2")
    assert list(load_rows(folder, split="test")) == rows[:1]
    with pytest.raises(DataError, match=r"split 'validation', .*it has data/test-00000"):
        load_rows(folder, split="validation")
    assert list(load_rows(str(folder / "data/train-*.parquet"))) == rows
    with pytest.raises(DataError, match="pattern must match a file"):
        load_rows(str(folder / "*.csv"))
    plain = tmp_path / "plain"
    plain.mkdir()
    write(plain / "a.jsonl", rows[:1])
    write(plain / "b.jsonl", rows[1:])
    assert list(load_rows(plain)) == list(load_rows(plain, split="test")) == rows, "as one file, it has no splits"
    write(plain / "c.csv", rows)
    with pytest.raises(DataError, match="one format"):
        load_rows(plain)

    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(str(tmp_path / "splits"))
    for found in (load_rows(tmp_path / "saved"), load_rows(tmp_path / "splits"), load_rows(saved)):
        assert list(found) == rows == found[:] == [found[n] for n in range(4)]
        assert found[-1].place.endswith("row 4")
    assert list(load_rows(tmp_path / "splits", split="test")) == rows[1:2]
    with pytest.raises(DataError, match="must have the split 'tset': it has train, test"):
        load_rows(tmp_path / "splits", split="tset")
