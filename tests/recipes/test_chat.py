"""`llmrl chat`: a conversation with a model that a run made, as it is typed."""

import io
import re
import types

import pytest
from rich.console import Console

from llmrl.commands.chat import Conversation, _talk
from llmrl.envs.llm.transforms import ToolTransform
from llmrl.errors import DataError, LLMRLError
from llmrl.modules.llm.policies import LLMWrapperBase, TransformersWrapper
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer


@pytest.fixture
def typed(place, monkeypatch):
    """Runs the command with lines of standard input."""

    def run(*arguments, lines=(), **expected):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return place.run("chat", *arguments, **expected)

    return run


def make_conversation(**options):
    tokenizer = tiny_tokenizer()
    policy = TransformersWrapper(
        tiny_model(tokenizer), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "seed": 0}
    )
    out = io.StringIO()
    return Conversation(policy, Console(file=out, width=80), **options), out


def test_a_run_answers_and_shows_the_tokens_that_it_drew(place, typed):
    place.train("sft", "taught", steps=1)
    arguments = ("taught", "--max-tokens", "5", "--seed", "1")
    words = ["/nonsense is not a command", "a new conversation"]
    result = typed(*arguments, lines=["hello", "/tokens", "/nonsense", "/reset"], words=words)
    rows = re.findall(r"^(\d+) +(\S.*?) +(-?[\d.]+) *$", result.out, re.MULTILINE)
    assert 1 <= len(rows) <= 5
    assert all(float(log_prob) <= 0 for _, _, log_prob in rows)
    again = typed(*arguments, lines=["hello", "/tokens"])
    assert again.out.split("/help")[1].split("log-prob")[0] == result.out.split("/help")[1].split("log-prob")[0]


def test_a_message_that_cannot_be_answered_ends_a_script_and_not_a_conversation(monkeypatch):
    said = iter(["one", "half \ud800", "a" * 300_000, "two"])

    def typed(prompt):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    conversation, out = make_conversation()
    _talk(conversation, conversation.console)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert "surrogate" in out.getvalue()
    assert "shorter than the 32768 tokens that the model takes: with a message of 300000 characters" in " ".join(
        out.getvalue().split()
    )
    said = iter(["half \ud800"])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(LLMRLError, match="surrogate"):
        _talk(conversation, conversation.console)


def test_input_that_is_not_utf_8_is_named(monkeypatch):
    conversation, _ = make_conversation()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(DataError, match="must be utf-8 text: byte 0xe9"):
        _talk(conversation, conversation.console)


def test_what_cannot_be_talked_to_is_said_before_anything_is_loaded(place, typed):
    place.train("reward", "judge", steps=1)
    typed("judge", code=2, words=["reward model"])
    typed("no/such-model", code=3)
    typed("jugde", code=2)  # did you mean judge?


def test_each_message_continues_the_tokens_of_the_turns_before():
    conversation, out = make_conversation(system="Be brief.")
    for text in ("one", "two"):
        conversation.say(text)
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]
    answer = conversation.messages[-1]["content"]
    assert out.getvalue().count(answer) >= 1
    ids = [token for token, _ in conversation.drawn]
    assert conversation.policy.tokenizer.decode(ids, skip_special_tokens=True).strip() == answer.strip()


def test_an_answer_that_is_stopped_is_taken_back_with_its_question():
    conversation, out = make_conversation()
    conversation.say("one")
    before = conversation.messages

    def stop(tokens, log_probs):
        raise KeyboardInterrupt

    conversation.policy.engine.on_tokens = stop
    conversation.say("two")
    assert conversation.messages == before
    assert "taken back" in out.getvalue()


def test_tools_answer_within_a_turn():
    tools = ToolTransform(["calculator"], end_without_call=False)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    tokenizer, out = tiny_tokenizer(), io.StringIO()
    policy = LLMWrapperBase(FakeEngine([call, "It is 42."], tokenizer=tokenizer), tokenizer=tokenizer)
    conversation = Conversation(policy, Console(file=out, width=80), tools=tools, max_turns=3)
    conversation.say("6 * 7?")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[2]["content"] == "42"
    assert "[calculator] 42" in out.getvalue()
    conversation.close()
