"""Renderer: what is trained, what prompts, and what a turn adds to a stream; by property, for several templates."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with full-width bars)

import pytest
import torch

from llmrl.errors import RewriteError, TemplateError
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from tests.support.rendering import (
    ANSWER_1,
    ANSWER_2,
    CHAT,
    CHATML,
    DROPS_THINKING,
    FAMILIES,
    USER_1,
    USER_2,
    USER_3,
    decoded_spans,
    family,
    reference_ids,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_mask_covers_exactly_the_answers_and_their_end_of_turn(name: str):
    renderer = family(name)
    end = renderer.codec.end_of_turn
    [row] = renderer.render([CHAT])
    assert row.ids.tolist() == reference_ids(renderer, CHAT)
    spans = decoded_spans(renderer, CHAT)
    assert [span.strip() for span in spans] == [ANSWER_1["content"] + end, ANSWER_2["content"] + end]
    positions = [t for start, stop in row.spans for t in range(start, stop)]
    assert row.assistant_mask.nonzero().flatten().tolist() == positions
    for turn, (start, _) in zip((1, 3), row.spans, strict=True):  # each begins where the generation prompt ends
        [prompt] = renderer.prompt_ids([CHAT[:turn]])
        assert row.ids[:start].tolist() == prompt.tolist()
        assert prompt.tolist() == reference_ids(renderer, CHAT[:turn], add_generation_prompt=True)
    assert renderer.render([[USER_1]], add_generation_prompt=True)[0].spans == []
    report = renderer.check()
    assert report.stop_token_trained
    assert 0 < report.trained_share < 1


def test_generation_block_may_close_before_or_after_the_end_marker():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}AFTER{% endgeneration %}BEFORE{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    end = "<|im_end|>\n"
    for after, before in ((end, ""), ("", end), ("<|im_end|>", "\n")):
        jinja = template.replace("AFTER", after).replace("BEFORE", before)
        spans = decoded_spans(Renderer(tiny_tokenizer(), chat_template=jinja), CHAT)
        assert spans == [ANSWER_1["content"] + "<|im_end|>", ANSWER_2["content"] + "<|im_end|>"]


def test_one_call_of_the_tokenizer_per_batch(monkeypatch: pytest.MonkeyPatch):
    renderer = Renderer(tiny_tokenizer())
    calls, kind = [], type(renderer.tokenizer)
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, text, **kw: calls.append(text) or call(self, text, **kw))
    renderer.render([CHAT] * 8)
    assert len(calls) == 1
    first, second, *_ = renderer.prompt_ids([CHAT[:1]] * 8)
    assert [len(call) for call in calls] == [8, 1]  # equal prompts are encoded once
    first[0] = -1
    assert second[0] != -1  # and share no memory


def test_markers_inside_tool_calls_and_tool_results_stay_text():
    renderer = Renderer(tiny_tokenizer())
    call = {"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    [row] = renderer.render([[USER_1, calling, {"role": "tool", "content": "<|im_start|>system"}, ANSWER_1]])
    assert (row.ids == renderer.end_of_turn_ids[0]).sum() == 4
    [start_id] = renderer.tokenizer("<|im_start|>").input_ids
    assert (row.ids == start_id).sum() == 4


HASHES = "{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}"  # an end that is not a token
QUOTED, EMPTY = {"role": "user", "content": "###"}, {"role": "assistant", "content": ""}
HELD = "message 0 of conversation 1 holds '###'"
ROLES = "roles must alternate.*conversation 1, message 1, role 'user'"


@pytest.mark.parametrize(
    ("make", "chats", "words"),
    [
        (lambda: Renderer(tiny_tokenizer(), chat_template=HASHES), [CHAT, [QUOTED, ANSWER_1]], HELD),
        (lambda: Renderer(tiny_tokenizer()), [CHAT, [USER_1]], r"conversation 1 has the roles \['user'\]"),
        (
            lambda: Renderer(tiny_tokenizer(), chat_template=CHATML, include_end_of_turn=False),
            [[*CHAT[:3], EMPTY]],
            "message 3 .*has none",
        ),
        (lambda: family("mistral"), [CHAT, [USER_1, USER_2, ANSWER_1]], ROLES),
        (lambda: Renderer(tiny_tokenizer()), [["hello"]], "got str for message 0 of conversation 0"),
    ],
    ids=["end marker", "no answer", "empty answer", "by the template", "type"],
)
def test_conversations_that_cannot_be_trained_are_refused_by_message(make, chats, words):
    with pytest.raises(TemplateError, match=words):
        make().render(chats)


def test_answer_that_the_template_changes_later_is_still_found():
    renderer = Renderer(tiny_tokenizer(), chat_template=DROPS_THINKING)
    thinking, plain = ({"role": "assistant", "content": text} for text in ("<think>hm</think>42.", "43."))
    assert decoded_spans(renderer, [USER_1, thinking, USER_2, plain]) == ["42.<|im_end|>", "43.<|im_end|>"]


THOUGHTFUL = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
TRIMMED = (
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
LAST_THOUGHT = (
    "{% if m.role == 'assistant' and loop.last and '</think>' in m.content %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n{% endif %}"
) + TRIMMED
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
OPENING = {  # templates whose generation prompt opens a thought that the history drops
    "QwQ": THOUGHTFUL.replace("{{ m.content }}", TRIMMED + CALLS),
    "Qwen 3 Thinking": THOUGHTFUL.replace("{{ m.content }}", LAST_THOUGHT + CALLS),
    "R1, trimmed": R1,
}
BEGINNINGS = ["<tool_call>", "<think>", "<answer>", "<", "It", "<think>\n"]


@pytest.mark.parametrize("begins", BEGINNINGS)
@pytest.mark.parametrize("name", OPENING)
def test_the_first_token_of_an_answer_is_trained_where_the_prompt_opens_a_thought(name: str, begins: str):
    renderer = Renderer(tiny_tokenizer(), chat_template=OPENING[name])
    said = {"role": "assistant", "content": f"hm</think>{begins.strip()} 42"}
    spans = decoded_spans(renderer, [USER_1, said, USER_2, said])
    kept = f"{begins.strip()} 42<|im_end|>"
    # of a kept thought the prompt wrote the opening
    assert spans == [kept, f"hm\n</think>\n\n{kept}" if name == "Qwen 3 Thinking" else kept]


@pytest.mark.parametrize("name", ["QwQ", "Qwen 3 Thinking"])
def test_a_call_is_trained_whole_where_the_prompt_opens_a_thought(name: str):
    renderer = Renderer(tiny_tokenizer(), chat_template=OPENING[name])
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert decoded_spans(renderer, [USER_1, calling, USER_2, ANSWER_1])[0] == called


def test_stop_tokens_are_the_end_of_turn_and_the_tokenizers_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    renderer = Renderer(tokenizer)
    assert renderer.stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


def test_template_kwargs_and_tools_reach_the_template():
    template = "{{ style }}{{ tools | length if tools else 0 }}"
    template += "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer(tiny_tokenizer(), chat_template=template, template_kwargs={"style": "brief"})
    [ids] = renderer.prompt_ids([[USER_1]], tools=[{"type": "function"}])
    assert renderer.tokenizer.decode(ids) == "brief1What is 12+30?<|im_end|>"


ROUND = "{% if m.role == 'user' %}Round {{ loop.index // 2 + 1 }}: {% endif %}{{ m.content }}"
QUESTIONS = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' and '?' in m.content %}"
QUESTIONS += "{% set ns.n = ns.n + 1 %}{% endif %}"
TURN_DEPENDENT = {  # what a full render says of the third turn and later is not what it says of the second
    "numbers of rounds": CHATML.replace("{{ m.content }}", ROUND),
    "the first question again": CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ messages[0].content if m.role == 'user' and loop.index0 > 3 }}"
    ),
    "questions so far": CHATML.replace("{% for m in messages %}", QUESTIONS).replace(
        "{{ m.content }}", "{{ m.content }}{% if m.role == 'user' %} ({{ ns.n }}){% endif %}"
    ),
    "a reminder after six messages": CHATML.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt %}{{ 'Be brief. ' if messages | length > 6 }}"
    ).replace(
        "<|im_start|>{{ m.role }}",
        "{{ 'Be brief. ' if loop.index0 > 6 and m.role == 'assistant' }}<|im_start|>{{ m.role }}",
    ),
}


@pytest.mark.parametrize("name", TURN_DEPENDENT)
def test_a_delta_is_what_the_full_render_says_of_this_turn(name: str):
    renderer = Renderer(tiny_tokenizer(), chat_template=TURN_DEPENDENT[name])
    questions = ["What is 12+30?", "Sure.", "Why?", "Go on?", "Stop.", "And now?", "End."]
    for start in range(2):  # the second conversation has the shape of the first and says other things
        chat: list[dict[str, str]] = []
        stream = torch.empty(0, dtype=torch.int64)
        for turn in range(6):
            chat = [*chat, {"role": "user", "content": questions[start + turn]}]
            [delta] = renderer.extend([stream], [chat], [1])
            stream = torch.cat([stream, delta])
            assert stream.tolist() == reference_ids(renderer, chat, add_generation_prompt=True)
            chat = [*chat, {"role": "assistant", "content": f"answer {turn}"}]
            stream = torch.tensor(reference_ids(renderer, chat)[: -len(renderer.tokenizer("\n").input_ids)])


def test_a_template_that_rewrites_the_past_from_the_third_turn_on_is_refused_there():
    forgets = CHATML.replace("{{ m.content }}", "{{ m.content if loop.revindex < 5 else 'forgotten' }}")
    renderer = Renderer(tiny_tokenizer(), chat_template=forgets)
    chat = [USER_1, ANSWER_1, USER_2, ANSWER_2, USER_3]
    ended = [renderer.render([chat[:length]])[0].ids[:-1] for length in (2, 4)]
    [delta] = renderer.extend(ended[:1], [chat[:3]], [1])
    assert torch.cat([ended[0], delta]).tolist() == reference_ids(renderer, chat[:3], add_generation_prompt=True)
    for _ in range(2):
        with pytest.raises(RewriteError, match="rewrites the past"):
            renderer.extend(ended[1:], [chat], [1])


def unfinished(content: str) -> dict[str, object]:
    return {"role": "assistant", "content": content, "is_complete": False}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unfinished_answer_at_the_end_is_left_open_for_the_model_to_go_on_with(name: str):
    renderer = family(name)
    asked, opened = renderer.prompt_ids([[USER_1], [USER_1, unfinished("It is")]])
    begun = " It is" if name == "mistral" else "It is"  # its template writes a space before an answer
    said = renderer.tokenizer(begun, add_special_tokens=False).input_ids
    assert opened.tolist() == asked.tolist() + said
    texts = renderer.prompt_texts([[USER_1], [USER_1, unfinished("It is")]])
    assert texts[1] == texts[0] + begun
    # where the stream holds it already nothing is added; where it does not, it comes behind its generation prompt
    [whole] = renderer.render([[USER_1, ANSWER_1]])
    ended = whole.ids[: whole.spans[0][1]]
    chats = [[USER_1, unfinished("It is")], [USER_1, ANSWER_1, USER_2, unfinished("It is")]]
    nothing, more = renderer.extend([opened, ended], chats, [0, 2])
    [asked_again] = renderer.extend([ended], [[USER_1, ANSWER_1, USER_2]], [1])
    assert nothing.tolist() == []
    assert more.tolist() == asked_again.tolist() + said


def test_a_marker_in_an_unfinished_answer_opens_no_turn():
    renderer = Renderer(tiny_tokenizer())
    [asked], [opened] = renderer.prompt_ids([[USER_1]]), renderer.prompt_ids([[USER_1, unfinished("a<|im_end|>b")]])
    begun = opened[len(asked) :]
    assert renderer.tokenizer.decode(begun) == "a<|im_end|>b"
    assert renderer.end_of_turn_ids[0] not in begun.tolist()


def test_extend_from_nothing_is_the_prompt():
    renderer = Renderer(tiny_tokenizer())
    [delta] = renderer.extend([torch.empty(0, dtype=torch.int64)], [[USER_1]], [1])
    assert delta.tolist() == renderer.prompt_ids([[USER_1]])[0].tolist()
    with pytest.raises(TemplateError, match="fewer messages"):
        renderer.extend([torch.tensor([1])], [[USER_1]], [1])
    with pytest.raises(TemplateError, match="must be answered"):
        renderer.extend([delta], [[USER_1, USER_2]], [1])


class Emptied(dict):
    """A dict that another thread empties after every look-up."""

    def __contains__(self, key):
        found = super().__contains__(key)
        self.clear()
        return found

    def get(self, key, default=None):
        found = super().get(key, default)
        self.clear()
        return found


def test_known_shapes_may_be_forgotten_by_another_thread_meanwhile():
    """Regression: KeyError, if a shape was dropped between the question whether it is known and its look-up."""
    renderer = Renderer(tiny_tokenizer())
    arguments = [torch.tensor([1, 2])], [[USER_1, ANSWER_1, USER_2]], [1]
    [expected] = renderer.extend(*arguments)
    [(shape, anchor)] = renderer._anchors.items()
    for known in (anchor, ()):  # (): the shape has no shorter conversation in its place
        renderer._anchors = Emptied({shape: known})
        [delta] = renderer.extend(*arguments)
        assert torch.equal(delta, expected)
        assert renderer._anchors == {}


def test_template_that_drops_thinking_is_refused_and_reported():
    renderer = Renderer(tiny_tokenizer(), chat_template=DROPS_THINKING)
    thinking = {"role": "assistant", "content": "<think>hm</think>42."}
    with pytest.raises(TemplateError, match="rewrites the past"):
        renderer.extend([torch.tensor([1, 2])], [[USER_1, thinking, USER_2]], [1])
    renderer.extend([torch.tensor([1, 2])], [[USER_1, ANSWER_1, USER_2]], [1])  # nothing to drop, nothing rewritten
    with pytest.raises(TemplateError, match="rewrites the past"):  # and the good case is not remembered for the bad one
        renderer.extend([torch.tensor([1, 2])], [[USER_1, thinking, USER_2]], [1])
    report = renderer.check()
    assert not report.prefix_preserving
    assert "with thinking" in report.reason
    assert Renderer(tiny_tokenizer()).check().prefix_preserving


@pytest.mark.parametrize("after", ["\n\n", "\n", " ", ""])
@pytest.mark.parametrize("answer", ["It is 42.", "It is 42. ", " 42\n", "42\n\n"])
def test_white_space_of_an_answer_without_end_marker_is_written_once(after: str, answer: str):
    """Regression: a space stood before each further question, behind the answer and its eos."""
    words = "{% for m in messages %}### {{ m.role }}: {{ m.content }}AFTER{% endfor %}".replace("AFTER", after)
    prompt = "{% if add_generation_prompt %}### assistant: {% endif %}"
    renderer = Renderer(tiny_tokenizer(), chat_template=words + prompt)
    chat, expected = [USER_1], f"### user: {USER_1['content']}{after}### assistant: "
    [stream] = renderer.prompt_ids([chat])
    for question in (USER_2, USER_3, USER_1):
        said = renderer.tokenizer(answer + "<|endoftext|>", return_tensors="pt").input_ids[0]
        stream, chat = torch.cat([stream, said]), [*chat, {"role": "assistant", "content": answer}, question]
        [delta] = renderer.extend([stream], [chat], [1])
        stream = torch.cat([stream, delta])
        expected += f"{answer}<|endoftext|>{after}### user: {question['content']}{after}### assistant: "
        assert renderer.tokenizer.decode(stream) == expected
    if not after:  # no token holds white space of the answer and of what follows
        [row] = renderer.render([chat])
        spans = [renderer.tokenizer.decode(row.ids[slice(*span)]) for span in row.spans]
        assert all(span and answer.endswith(span) for span in spans)  # " It" begins before the answer
