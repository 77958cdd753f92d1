"""HTML of conversations for notebooks: parsed as a browser does, it holds no markup of a model's."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from llmrl.data.llm import History
from llmrl.run.rollout_log import Rollout, Rollouts, TokenRecord, ToolCallRecord

HOSTILE = [
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "</div></details><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "a\u202eb\u200bc\ud800\0\x1b[31m",
]


class Page(HTMLParser):
    """The tags, the names of attributes, and the text of a piece of HTML."""

    def __init__(self, source: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.titles, self.open = [], set(), "", [], []
        source.encode()  # no lone surrogate is left
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def checked(thing):
    page = Page(thing._repr_html_())
    assert set(page.tags) <= {"details", "summary", "div", "p", "span", "pre"}
    assert page.attributes <= {"open", "style", "title"}
    return page


def rollout(text="answer", **changes):
    fields = {"reward": 1.0, "advantage": None, "stop_reason": "eos", "version": 0, "tokens": 2}
    return Rollout("question", text, **fields | changes)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(text):
    record = TokenRecord([1, 2], [text, text], [text, "assistant"], [0, 0], [True, False], [False, True], [None, -0.5])
    call = ToolCallRecord(0, text, text, text, text)
    calls = [{"function": {"name": text, "arguments": {}}}]
    things = [
        rollout(text, stop_reason=text),
        rollout(text, token_record=record, tool_calls=(call,)),
        Rollouts([rollout(text)]),
        History.from_chats([[{"role": text, "content": text, "tool_calls": calls}]]),
        History(role=text, content=[{"type": "text", "text": text}]),
        History.from_chats([[{"role": "user", "content": text}]]).unsqueeze(0),
    ]
    for thing in things:
        page = checked(thing)
        assert "\u202e" not in page.text
    if "<" in text:
        assert text in checked(things[0]).text  # as it was written, letter by letter


def test_tokens_have_their_numbers_and_colours_and_a_long_one_loses_its_middle():
    count = 5000
    record = TokenRecord(
        ids=list(range(count)),
        texts=["<|im_start|>", *["a b\n"] * (count - 1)],
        roles=["user"] * 2 + ["assistant"] * (count - 2),
        turns=[0] * count,
        control=[True] + [False] * (count - 1),
        trained=[False] * 3 + [True] * (count - 3),
        engine_logp=[None] * 2 + [-0.5] * (count - 2),
        ratio=[None] * 3 + [1.25] * (count - 3),
    )
    page = checked(rollout(token_record=record))
    assert page.tags.count("span") == 2000
    assert page.titles[0] == "id 0"
    assert page.titles[-1] == "id 4999\nengine_logp -0.5\nratio 1.25"
    assert "a·b⏎" in page.text
    assert "3000 tokens of the middle are left out" in page.text


def test_histories_of_every_shape_are_shown():
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    assert "Hi" in checked(History.from_messages(chat)).text
    many = checked(History.from_chats([chat] * 25))
    assert many.tags.count("details") == 20
    assert "5 more conversations" in many.text
    assert "1990000 characters" not in many.text
    assert "6000 characters left out" in checked(History(role="user", content="x" * 10_000)).text
    assert "3 more rollouts" in checked(Rollouts([rollout()] * 23)).text
    assert "more rollouts" not in checked(Rollouts([rollout()] * 23)[1:3]).text, "a part of a list is shown so, too"
    unfinished = History(role="assistant", content="Hel", is_complete=False)
    assert "(unfinished)" in checked(unfinished).text
