"""History: a tensorclass over plain messages, that batches, slices, grows and renders."""

import pickle
from itertools import product

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.data.llm import History
from llmrl.errors import ConfigError, DataError, ShapeError, TemplateError
from llmrl.testing import tiny_tokenizer
from tests.support.refusals import refusals


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **extra) -> dict:
    return {"role": "assistant", "content": content, **extra}


CHATS = [[user("a")], [user("b"), assistant("c")]]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def materialised(history: History) -> list[bool]:
    return [row.source is None for row in history._tensordict.tensordicts]


# --- shape, fields, indexing ---


def test_ragged_batch_keeps_each_conversations_length():
    history = History.from_chats(CHATS)
    assert history.batch_size == (2, -1)
    assert history.content == [["a"], ["b", "c"]]
    assert history.to_chats() == CHATS
    assert [row.batch_size for row in history.unbind(0)] == [(1,), (2,)]
    assert History.stack(list(history.unbind(0))).to_chats() == CHATS
    one = History.from_chats(CHATS[1])
    assert (one.shape, one.to_chats()) == ((2,), CHATS[1])


PARTS = [0, -1, np.int64(1), torch.tensor(1), slice(1, 3), slice(None), ..., None, [2, 0], torch.tensor([1, 1])]
PARTS += [np.array([0, 2]), torch.tensor([True, False, True])]


def test_indexing_is_that_of_tensors():
    """Regression: numbers of numpy were a TypeError."""
    names = [[f"{row}{column}" for column in range(3)] for row in range(3)]
    pairs = [pair for pair in product(PARTS, PARTS) if not pair[0] is pair[1] is ...]
    for index in [*PARTS, *pairs, (), (0, ..., 1), (..., -1, slice(2))]:
        numbers = torch.arange(9).reshape(3, 3)[index]
        history = History(role=names, content=names)[index]
        expected = [names[number // 3][number % 3] for number in numbers.flatten().tolist()]
        assert (history.shape, np.array(history.content).ravel().tolist()) == (numbers.shape, expected), index


def test_extra_keys_of_messages_survive():
    calling = assistant("", tool_calls=[CALL], reasoning_content="hm")
    chat = [user("q"), calling, {"role": "tool", "content": "2", "tool_call_id": "x"}]
    history = History.from_messages(chat)
    assert history.to_chats() == chat
    assert history.tool_calls == [None, [CALL], None]
    rebuilt = lazy_stack([history[index] for index in range(3)])  # through one TensorDict per message
    assert isinstance(rebuilt, History)
    assert rebuilt.to_chats() == chat
    assert len(history._tensordict.tensordicts) == 3  # builds the members: they are now what the history says
    assert history.to_chats() == chat


def test_a_field_can_be_assigned_and_nothing_else_changes_a_history():
    chat = [user("a")]
    history = History.from_messages(chat)
    chat[0]["content"] = "changed"
    history.to_chats()[0]["content"] = "changed"
    assert history.content == ["a"]
    history = History.from_chats(CHATS)
    other = history.clone()
    history.content = [["1"], ["2", "3"]]
    assert history.content == [["1"], ["2", "3"]]
    assert other.content == [["a"], ["b", "c"]]


def without_padding():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


test_what_makes_no_history_or_no_text_is_refused = refusals(
    (ShapeError, "batch_size", lambda: History(role=["user"], content=["a"], batch_size=[2])),
    (ShapeError, "content", lambda: History(role=["user", "assistant"], content=["a"])),
    (ConfigError, "names", lambda: History(role=["user"], content=["a"], names=["message"])),
    (TypeError, "missing", History),
    (ShapeError, "dim", lambda: History.stack([History.from_messages(CHATS[0]), History(**user("a"))])),
    (ShapeError, "mask", lambda: History.from_chats(CHATS)[torch.tensor([True, False, True])]),
    (TypeError, "append.*got dict", lambda: History.from_chats(CHATS).append(user("a"))),
    (TypeError, "tokenizer", lambda: History.from_chats(CHATS).apply_chat_template(tokenizer="Qwen/Qwen2")),
    (ConfigError, "pad token", lambda: History.from_chats(CHATS).apply_chat_template(
        tokenizer=without_padding(), return_dict=True, padding=True
    )),
)  # fmt: skip


# --- append and extend ---
def test_append_adds_a_message_to_every_conversation_or_a_conversation_to_the_batch():
    history = History.from_chats(CHATS)
    answer = History(role=["assistant"] * 2, content=["x", "y"])
    longer = history.append(answer, inplace=False)
    assert longer.content == [["a", "x"], ["b", "c", "y"]]
    assert history.content == [["a"], ["b", "c"]]
    assert history.append(answer) is history
    assert history.content == longer.content
    history.append(History.from_messages([user("d")]), dim=0)
    assert history.content == [["a", "x"], ["b", "c", "y"], ["d"]]


@pytest.mark.parametrize(
    ("method", "grown", "new", "message"),
    [
        ("append", History(**user("a")), History(**user("b")), "unsqueeze"),
        ("extend", History(**user("a")), History(**user("b")), "unsqueeze"),
        ("append", History.from_chats(CHATS), History(**user("b")), "one dimension fewer.*: got 0 and 2"),
        ("extend", History.from_chats(CHATS), History.from_messages(CHATS[0]), "The new history to extend"),
        ("append", History.from_chats(CHATS), History(role=["user"], content=["b"]), "a row for each of 2 .*: got 1"),
        ("extend", History.from_chats(CHATS), History.from_chats([[user("a")]] * 3), "a row for each of 2 .*: got 3"),
    ],
)
def test_messages_that_do_not_fit_are_a_shape_error_and_a_runtime_error(method, grown, new, message):
    with pytest.raises(ShapeError, match=message) as caught:
        getattr(grown, method)(new, dim=-1)
    assert isinstance(caught.value, RuntimeError)


# --- in containers: the list stays a list until its members are read ---
def test_history_in_a_dense_tensordict_stays_a_list():
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    td["history"] = History.from_chats(CHATS)
    assert td["history"].to_chats() == CHATS
    assert td[1]["history"].to_chats() == CHATS[1]
    assert td[torch.tensor([False, True])]["history"].to_chats() == CHATS[1:]
    assert [row["history"].to_chats() for row in td.unbind(0)] == CHATS
    assert td.clone()["history"].to_chats() == CHATS
    assert materialised(td["history"]) == [False, False]
    assert td.to("cpu")["history"].to_chats() == CHATS


def test_default_spec_describes_a_history_and_padding_messages_are_no_part_of_chats():
    history = History(role=[["user", "<none>"], ["user", "assistant"]], content=[["a", ""], ["b", "c"]])
    assert history.to_chats() == CHATS
    assert History.default_spec((2, -1)).is_in(History.from_chats(CHATS))
    assert History.default_spec((-1,)).is_in(History.from_messages(CHATS[1]))
    assert not History.default_spec((-1,)).is_in(TensorDict({"role": torch.zeros(2)}, batch_size=[2]))


# --- text and ids ---
def test_text_is_a_string_for_one_conversation_and_a_list_for_a_batch():
    tokenizer = tiny_tokenizer()
    history = History.from_chats(CHATS)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    assert history.apply_chat_template(tokenizer=tokenizer) == texts
    assert history[1].apply_chat_template(tokenizer=tokenizer) == texts[1]
    assert history[0].apply_chat_template(chat_template_name="qwen") == texts[0]  # text needs no tokenizer
    options = {"add_generation_prompt": False, "continue_final_message": True}
    continued = History.from_messages(CHATS[1]).apply_chat_template(tokenizer=tokenizer, **options)
    assert continued.endswith("<|im_start|>assistant\nc")


def test_dict_has_ids_and_the_assistants_mask():
    tokenizer = tiny_tokenizer()
    history = History.from_chats(CHATS[1:])
    options = {"tokenizer": tokenizer, "add_generation_prompt": False, "return_assistant_tokens_mask": True}
    result = history.apply_chat_template(return_dict=True, **options)
    assert result["assistant_masks"].shape == result["input_ids"].shape == (1, len(result[0]["input_ids"]))
    [ids] = result.get("input_ids", as_list=True)
    assert ids.tolist() == tokenizer.apply_chat_template(CHATS[1])["input_ids"]
    assert tokenizer.decode(ids[result[0]["assistant_masks"]]) == "c<|im_end|>"
    options["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    options["chat_template"] += "{% if add_generation_prompt %}assistant: {% endif %}"
    [row] = history.apply_chat_template(include_end_of_turn=False, **options)
    assert tokenizer.decode(row["input_ids"][row["assistant_masks"]]) == "c"


def test_ids_of_an_open_last_message_end_with_its_content():
    tokenizer = tiny_tokenizer()
    options = {"tokenizer": tokenizer, "add_generation_prompt": False, "continue_final_message": True}
    [ids] = History.from_chats([[user("a <|im_end|>"), assistant("c")]]).apply_chat_template(tokenize=True, **options)
    assert tokenizer.decode(ids).endswith("<|im_end|><|im_end|>\n<|im_start|>assistant\nc")
    assert (ids == tokenizer.eos_token_id).sum() == 1  # the one that was spelled in the message is plain text
    row = History.from_messages(CHATS[1]).apply_chat_template(return_dict=True, **options)
    assert tokenizer.decode(row["input_ids"]).endswith("assistant\nc")


def test_ids_are_tensors_and_a_padded_dict_is_dense():
    tokenizer, history = tiny_tokenizer(), History.from_chats(CHATS)
    expected = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in CHATS]
    for options in ({"tokenize": True}, {"return_tensors": "pt"}):
        one = history[0].apply_chat_template(tokenizer=tokenizer, **options)
        assert (one.dtype, one.tolist()) == (torch.int64, expected[0])
        assert [row.tolist() for row in history.apply_chat_template(tokenizer=tokenizer, **options)] == expected
    padded = history.apply_chat_template(tokenizer=tokenizer, return_dict=True, padding=True)
    lengths = [len(row) for row in expected]
    assert padded["input_ids"].shape == (2, max(lengths))
    assert padded["attention_mask"].sum(-1).tolist() == lengths


# --- text back to messages (that reading inverts writing: tests/modules/test_template_families.py) ---


@pytest.mark.parametrize(
    ("text", "content", "is_complete"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n", ["Hi", "Hello"], [True, True]),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel", ["Hi", "Hel"], [True, False]),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|endoftext|>", ["Hi", "Hello"], [True, True]),
        ("<|im_start|>user\nHi", ["Hi"], [False]),
        ("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>", ["", ""], [True, True]),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ["Hi"], [True]),
    ],
)
def test_complete_and_cut_off_messages_are_distinguished(text: str, content: list[str], is_complete: list[bool]):
    history = History.from_text(text)
    assert history.content == content
    assert history.is_complete == is_complete


# --- bad input ---
@pytest.mark.parametrize(
    "chats",
    [
        [user("a"), [user("b")]],
        ["hello"],
        [[user("a"), "hello"]],
        [[{"content": "a"}]],
        user("a"),
        [{"messages": [user("a")]}],
    ],
)
def test_what_is_not_a_list_of_messages_is_named(chats):
    """Regression: "dictionary update sequence element #0 has length 1", or a KeyError much later."""
    with pytest.raises(DataError, match=r"from_chats: .*list of dicts with 'role'.*: got "):
        History.from_chats(chats)


def test_an_empty_batch_and_an_empty_conversation_have_a_shape_and_can_be_shown():
    """Regression: an empty batch had three dimensions, and an empty conversation could not be printed."""
    empty = History.from_chats([])
    assert (empty.shape, empty.to_chats(), empty.apply_chat_template()) == ((0, 0), [], [])
    with pytest.raises(ShapeError, match="at least one conversation"):
        empty.apply_chat_template(tokenizer=tiny_tokenizer(), return_dict=True)
    assert History.from_text([]).shape == (0, 0)
    for history in (History.from_chats([[]]), History.from_messages([]), History.from_chats([[], [user("a")]]), empty):
        assert repr(history).startswith("History([")
    shown = (
        "[{'content': 'a', 'role': 'user'}], [{'content': 'b', 'role': 'user'}, {'content': 'c', 'role': 'assistant'}]"
    )
    assert repr(History.from_chats(CHATS)) == f"History([2, -1], [{shown}])"
    assert History.from_messages([]).append(History(**user("a"))).content == ["a"]


@pytest.mark.parametrize("text", [5, None, ["<|im_start|>user\nHi<|im_end|>", None], "hello"])
def test_text_without_a_message_and_other_objects_are_named(text):
    with pytest.raises((DataError, TemplateError), match=r"must be given text: got|must hold a message"):
        History.from_text(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenize": False, "return_dict": True}, "return_dict requires tokenize=True"),
        ({"tokenize": False, "return_tensors": "pt"}, "return_tensors requires"),
        ({"tokenize": False, "return_assistant_tokens_mask": True}, "return_assistant_tokens_mask requires"),
        ({"padding": True}, "padding requires tokenize=True"),
        ({"truncation": True}, "truncation requires tokenize=True"),
        ({"tokenize": True, "tokenizer": None}, "ids need a tokenizer"),
        ({"return_tensors": "np"}, "must be 'pt' or None: got 'np'"),
        ({"return_assistant_tokens_mask": True, "return_dict": False}, "a mask is returned in a dict"),
        ({"continue_final_message": True}, "continue_final_message must come without"),
        ({"tokenize": True, "padding": "max_length"}, "padding must be True or False: got 'max_length'"),
        ({"tokenize": True, "truncation": "longest_first"}, "truncation must be True or False"),
    ],
)
def test_arguments_that_exclude_each_other_or_would_do_nothing_are_refused(arguments, message):
    """Regression: text came back, unpadded, whatever had been asked for beside it."""
    with pytest.raises(ConfigError, match=message):
        History.from_chats(CHATS).apply_chat_template(**{"tokenizer": tiny_tokenizer(), **arguments})


@pytest.mark.parametrize("tokenize", [True, False])
def test_a_misspelt_argument_is_refused_instead_of_handed_to_the_template(tokenize):
    history, tokenizer = History.from_chats(CHATS), tiny_tokenizer(template="qwen3")
    with pytest.raises(ConfigError, match=r"'enable_thinkng'.*Did you mean 'enable_thinking'"):
        history.apply_chat_template(tokenizer=tokenizer, tokenize=tokenize, enable_thinkng=False)
    with pytest.raises(ConfigError, match="does not use the variable 'max_length'"):
        history.apply_chat_template(tokenizer=tokenizer, tokenize=True, truncation=True, max_length=5)
    thoughtless = history.apply_chat_template(tokenizer=tokenizer, tokenize=False, enable_thinking=False)
    assert thoughtless[0].endswith("<think>\n\n</think>\n\n")


def test_history_survives_pickling_and_locking():
    td = TensorDict({"history": History.from_chats(CHATS)}, batch_size=[2])
    assert pickle.loads(pickle.dumps(td))["history"].to_chats() == CHATS
    td.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        td["history"].append(History(role=["user"] * 2, content=["x", "y"]))
    td.unlock_()
    assert td["history"].append(History(role=["user"] * 2, content=["x", "y"])).shape == (2, -1)


def test_malformed_tool_call_stays_in_the_content():
    for body in ("{not json", "[1]", '{"arguments": {}}', "5"):
        content = f"x\n<tool_call>\n{body}\n</tool_call>"
        [message] = History.from_text(f"<|im_start|>assistant\n{content}<|im_end|>").to_chats()
        assert message == assistant(content)
