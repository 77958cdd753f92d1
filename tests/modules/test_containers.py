"""The containers of a batch: rows in, rows out, through every operation that a collector or a buffer does; and
conversions.
"""

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from llmrl.data.llm.chat import History
from llmrl.data.ragged.stack import RaggedStack
from llmrl.errors import ConfigError, ShapeError, TemplateError
from llmrl.modules.llm import ChatHistory, LogProbs, Masks, Text, Tokens
from llmrl.testing import tiny_tokenizer
from tests.support.refusals import refusals

LENGTHS = [3, 1, 4, 1, 5]
VIEWS = ("prompt", "response", "full")


def conversation(question, answer=None):
    chat = [{"role": "user", "content": question}]
    return chat if answer is None else [*chat, {"role": "assistant", "content": answer}]


def make_batch(offset=0):
    ids = [torch.arange(length) + 10 * row + offset for row, length in enumerate(LENGTHS)]
    columns = {
        "tokens": Tokens.from_rows({"full": ids, "covered": torch.tensor(LENGTHS)}),
        "masks": Masks.from_rows({"all_assistant_mask": [row % 2 == 0 for row in ids]}),
        "log_probs": LogProbs.from_rows({"full": [-row.float() for row in ids]}),
        "text": Text.from_rows({"full": [f"row {row + offset}" for row in range(5)]}),
        "history": ChatHistory.from_rows(
            {"full": History.from_chats([conversation(f"q{row + offset}") for row in range(5)])}
        ),
        "reward": torch.arange(5.0) + offset,
    }
    return TensorDict(columns, batch_size=[5])


def contents(td):
    """Everything in the batch as plain Python, row by row."""
    lists = (
        [row.tolist() for row in td["tokens"].rows("full")],
        [int(value) for value in td["tokens"].rows("covered")],
        [row.tolist() for row in td["masks"].rows("all_assistant_mask")],
        [row.tolist() for row in td["log_probs"].rows("full")],
        [str(text) for text in td["text"].rows("full")],
        [chat[0]["content"] for chat in td["history"].chats("full")],
        td["reward"].flatten().tolist(),
    )
    return list(zip(*lists, strict=True))


REFERENCE = contents(make_batch())
MASK = torch.tensor([True, False, False, True, True])


def test_rows_come_back_as_they_went_in():
    td = make_batch()
    log_probs = [-20.0, -21.0, -22.0, -23.0]
    assert REFERENCE[2] == ([20, 21, 22, 23], 4, [True, False] * 2, log_probs, "row 2", "q2", 2.0)
    listed = td.get(("tokens", "full"), as_list=True)
    assert isinstance(listed, list)
    assert [row.tolist() for row in listed] == [row[0] for row in REFERENCE]
    padded = td.get(("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=-1)
    assert padded[1].tolist() == [-1, -1, -1, -1, 10]
    assert td.get(("tokens", "prompt"), None) is None
    assert td["tokens"].prompt is None
    assert td["tokens"].padded is False
    assert td["tokens"].covered.tolist() == LENGTHS


@pytest.mark.parametrize("touched", [False, True], ids=["columns", "members"])
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda td: td[2], [2]),
        (lambda td: td[-1], [4]),
        (lambda td: td[1:4], [1, 2, 3]),
        (lambda td: td[::2], [0, 2, 4]),
        (lambda td: td[MASK], [0, 3, 4]),
        (lambda td: td[torch.tensor([4, 0, 4])], [4, 0, 4]),
        (lambda td: td[[3, 1]], [3, 1]),
        (lambda td: td[range(2)], [0, 1]),
        (lambda td: td.clone(), [0, 1, 2, 3, 4]),
        (lambda td: td.copy(), [0, 1, 2, 3, 4]),
        (lambda td: td.to("cpu"), [0, 1, 2, 3, 4]),
        (lambda td: pickle.loads(pickle.dumps(td)), [0, 1, 2, 3, 4]),
        (lambda td: lazy_stack(list(td.unbind(0))), [0, 1, 2, 3, 4]),
        (lambda td: lazy_stack([td[3], td[0]]), [3, 0]),
        (lambda td: torch.cat([td[:2], td[4:]]), [0, 1, 4]),
        (lambda td: td.split(3)[1], [3, 4]),
        (lambda td: td.reshape(5, 1), [0, 1, 2, 3, 4]),
        (lambda td: td.unsqueeze(0), [0, 1, 2, 3, 4]),
        (lambda td: td[:4].reshape(2, 2), [0, 1, 2, 3]),
        (lambda td: td.select("tokens", "masks", "log_probs", "text", "history", "reward"), [0, 1, 2, 3, 4]),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_operations_on_a_batch_keep_the_rows(operation, expected, touched):
    td = make_batch()
    if touched:
        td.unbind(0)
    assert contents(operation(td)) == [REFERENCE[row] for row in expected]
    assert contents(td) == REFERENCE


def test_a_batch_stays_columns_until_a_row_is_asked_for():
    td = make_batch()
    stack = td["tokens"]._tensordict
    td.get(("tokens", "full"), as_list=True), td[1:], td[MASK], td.copy(), td["tokens"].rows("full"), td.keys()
    assert stack.own_columns() is not None
    assert isinstance(stack, RaggedStack)
    assert isinstance(stack[1:], RaggedStack)
    stack.unbind(0)
    assert stack.own_columns() is None


def test_entries_can_be_written_into_the_batch_and_its_rows():
    td = make_batch()
    td["tokens"].covered = torch.zeros(5, dtype=torch.int64)
    assert td["tokens"].rows("covered") == [0] * 5
    td[3]["tokens"].set("full", torch.tensor([7]))
    assert td["tokens"].rows("full")[3].tolist() == [7]
    td.set(("log_probs", "response"), torch.ones(5, 2))
    assert td["log_probs"].rows("response")[4].tolist() == [1.0, 1.0]


def test_padded_containers():
    tokens = Tokens.from_padded({"full": torch.arange(6).reshape(2, 3)})
    assert tokens.padded is True
    assert tokens[0].padded is True
    assert [row.tolist() for row in tokens.rows("full")] == [[0, 1, 2], [3, 4, 5]]
    assert torch.cat([tokens, tokens]).full.shape == (4, 3)


def test_a_lazy_stack_of_rows_is_read_like_a_batch():
    td = make_batch()
    tokens = Tokens._from_tensordict(LazyStackedTensorDict(*[row["tokens"]._tensordict for row in td.unbind(0)]))
    assert [row.tolist() for row in tokens.rows("full")] == [row[0] for row in REFERENCE]


@pytest.mark.parametrize("name", ["tokens", "masks", "log_probs", "text", "history"])
def test_default_specs_describe_what_is_there(name):
    container = make_batch()[name]
    field = "all_assistant_mask" if name == "masks" else "full"
    spec = type(container).default_spec((5,), [field])
    assert spec.is_in(container)
    assert not type(container).default_spec((4,), [field]).is_in(container)
    with pytest.raises(ConfigError, match="unknown field"):
        type(container).default_spec((5,), ["fulll"])


def make_history(batch_size=(2,)):
    num = torch.Size(batch_size).numel()
    prompts = [conversation(f"What is {row} + {row}?") for row in range(num)]
    answers = [[{"role": "assistant", "content": f"It is {2 * row}."}] for row in range(num)]
    prompt, response = History.from_chats(prompts), History.from_chats(answers)
    full = prompt.extend(response, inplace=False, dim=-1)
    return ChatHistory.from_rows({"prompt": prompt, "response": response, "full": full}, batch_size)


@pytest.mark.parametrize("batch_size", [(), (2,), (2, 2)])
def test_histories_texts_and_tokens_convert_into_each_other_and_back(tokenizer, batch_size):
    history = make_history(batch_size)
    text = history.to_text(tokenizer)
    assert text.batch_size == batch_size
    asked = history.chats("prompt")[0]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text.rows("prompt")[0] == prompt
    assert text.rows("full")[-1] == tokenizer.apply_chat_template(history.chats("full")[-1], tokenize=False)
    for prompt, response, full in zip(*(text.rows(name) for name in VIEWS), strict=True):
        assert full == prompt + response
    back = text.to_history(tokenizer)
    assert back.batch_size == batch_size
    for name in VIEWS:
        assert back.chats(name) == history.chats(name)
    for tokens in (history.to_tokens(tokenizer), text.to_tokens(tokenizer)):
        assert tokens.batch_size == batch_size
        assert tokens.padded in (False, None)
        for prompt, response, full in zip(*(tokens.rows(name) for name in VIEWS), strict=True):
            assert torch.equal(full, torch.cat([prompt, response]))
            assert isinstance(full, torch.Tensor)
        assert tokens.to_history(tokenizer).chats("full") == history.chats("full")
        for name in VIEWS:
            assert tokens.to_text(tokenizer).rows(name) == text.rows(name)


def test_a_template_without_a_boundary_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ loop.length }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(TemplateError, match="rewrites the past"):
        make_history().to_tokens(tokenizer)


def test_a_view_of_one_field_is_converted_by_itself(tokenizer):
    text = Text.from_rows({"full": ["<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>user\nYou<|im_end|>\n"]})
    tokens = text.to_tokens(tokenizer)
    assert tokens.prompt is None
    assert tokens.to_text(tokenizer).rows("full") == text.rows("full")
    assert tokens.to_history(tokenizer).chats("full")[1] == [{"role": "user", "content": "You"}]
    assert Text.from_rows({}, [0]).to_history(tokenizer).full is None
    assert Tokens.from_rows({"full": []}).batch_size == (0,)


def test_characters_cut_by_the_boundary_are_decoded_on_their_own_side(tokenizer):
    first, *rest = tokenizer.encode("é", add_special_tokens=False)
    ids = [torch.tensor([first]), torch.tensor(rest)]
    tokens = Tokens.from_rows({"prompt": ids[:1], "response": ids[1:], "full": [torch.cat(ids)]})
    text = tokens.to_text(tokenizer)
    assert text.rows("full") == ["\ufffd\ufffd"]  # full == prompt + response, also where neither is a character


@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_a_missing_dimension_of_messages_is_added_and_said(batch_size):
    one = History.from_messages([{"role": "user", "content": "Hi"}])[0]
    history = one if batch_size == () else torch.stack([one, one])
    with pytest.warns(UserWarning, match="prompt must have a dimension of messages"):
        container = ChatHistory(prompt=history, batch_size=batch_size)
    assert container.prompt.shape == (*batch_size, 1)
    assert container.chats("prompt")[0] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("batch_size", [(2,), (2, 2)])
def test_the_plain_constructor_holds_and_converts_a_whole_batch(tokenizer, batch_size):
    built = make_history(batch_size)
    history = ChatHistory(**{name: built.get(name) for name in VIEWS})
    assert history.batch_size == batch_size
    assert history.to_text(tokenizer).rows("full") == built.to_text(tokenizer).rows("full")
    tokens = history.to_tokens(tokenizer)
    torch.testing.assert_close(list(tokens.rows("full")), list(built.to_tokens(tokenizer).rows("full")))
    assert tokens.to_history(tokenizer).chats("full") == built.chats("full")
    text = Text(full=built.to_text(tokenizer).full)
    assert text.batch_size == batch_size
    assert text.full == built.to_text(tokenizer).full
    assert text.to_history(tokenizer).chats("full") == built.chats("full")
    assert text.to_tokens(tokenizer).to_text(tokenizer).rows("full") == text.rows("full")


def test_rows_of_ids_in_a_list_are_a_ragged_batch(tokenizer):
    rows = [torch.arange(3), torch.arange(4)]
    tokens = Tokens(full=rows, covered=torch.tensor([1, 2]))
    assert tokens.batch_size == (2,)
    assert [row.tolist() for row in tokens.get("full", as_list=True)] == [row.tolist() for row in rows]
    assert (tokens[1].full.tolist(), tokens.covered.tolist()) == ([0, 1, 2, 3], [1, 2])
    assert tokens.to_text(tokenizer).rows("full") == tokenizer.batch_decode([row.tolist() for row in rows])
    assert Tokens(full=torch.ones(2, 3)).batch_size == Masks(all_attention_mask=torch.ones(2, 3)).batch_size == (2,)
    assert Tokens(full=torch.ones(3)).batch_size == Text(full="a").batch_size == ()


def test_a_lazy_stack_of_batches_is_converted_like_its_members(tokenizer):
    first, second = make_history((2,)), make_history((2,))
    stacked = lazy_stack([ChatHistory(full=first.full), ChatHistory(full=second.full)])
    assert stacked.batch_size == (2, 2)
    texts = first.to_text(tokenizer).rows("full")
    assert stacked.to_text(tokenizer).rows("full") == texts * 2
    assert stacked.to_tokens(tokenizer).to_history(tokenizer).chats("full") == first.chats("full") * 2
    words = lazy_stack([Text(full=texts), Text(full=texts)])
    assert words.to_tokens(tokenizer).to_text(tokenizer).rows("full") == texts * 2


def test_clones_do_not_share_memory_and_copies_do():
    td = make_batch()
    clone, copy = td.clone(), td.copy()
    clone["tokens"].rows("full")[0].fill_(-1)
    assert contents(td) == REFERENCE
    copy["tokens"].rows("full")[0].fill_(-1)
    assert td["tokens"].rows("full")[0].tolist() == [-1, -1, -1]


def test_a_locked_batch_reads_and_refuses_writes():
    td = make_batch().lock_()
    assert contents(td) == REFERENCE
    with pytest.raises(RuntimeError, match="locked"):
        td["tokens"].set("covered", torch.zeros(5))
    assert contents(td.unlock_()) == REFERENCE


PADDED = Tokens.from_padded({"full": torch.zeros(2, 3, dtype=torch.int64)})
test_what_does_not_fit_or_cannot_be_converted_is_named = refusals(
    (ShapeError, "one value per row: got 1 for 2 rows", lambda: Text.from_rows({"prompt": ["a", "b"], "full": ["a"]})),
    (
        ShapeError,
        r"ChatHistory: .*same rows: got prompt of \[1\], exp",
        lambda: ChatHistory(full=make_history((2,)).full, prompt=make_history((1,)).prompt),
    ),
    (ShapeError, r"Text: .*same rows: got .*, expected \[2\]", lambda: Text(full=["a", "b"], prompt=["a"])),
    (ValueError, "padded tokens", lambda: PADDED.to_text(tiny_tokenizer())),
    (ValueError, "padded tokens", lambda: PADDED.to_history(tiny_tokenizer())),
    (
        ValueError,
        "Padding is not yet supported",
        lambda: Text.from_rows({"prompt": ["a"]}).to_tokens(tiny_tokenizer(), padding=True),
    ),
)
