"""Renderer: what is trained, what prompts, and what a turn adds. By property, for templates of several families."""

# ruff: noqa: RUF001 (DeepSeek writes its markers with full-width bars)

import pytest
import torch

from llmrl.errors import TemplateError
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
    decoded_spans,
    family,
    reference_ids,
)


@pytest.fixture(params=FAMILIES)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return family(request.param)


def test_ids_equal_those_of_the_tokenizers_own_method(renderer: Renderer):
    rendered = renderer.render([CHAT, CHAT[:2]])
    assert [row.ids.tolist() for row in rendered] == [reference_ids(renderer, CHAT), reference_ids(renderer, CHAT[:2])]
    [prompt] = renderer.prompt_ids([CHAT[:3]])
    assert prompt.tolist() == reference_ids(renderer, CHAT[:3], add_generation_prompt=True)
    assert prompt.dtype == torch.int64
    assert renderer.render([[USER_1]], add_generation_prompt=True)[0].spans == []


def test_mask_covers_exactly_the_answers_and_their_end_of_turn(renderer: Renderer):
    end = renderer.codec.end_of_turn
    [row] = renderer.render([CHAT])
    spans = decoded_spans(renderer, CHAT)
    assert [span.strip() for span in spans] == [ANSWER_1["content"] + end, ANSWER_2["content"] + end]
    positions = [t for start, stop in row.spans for t in range(start, stop)]
    assert row.assistant_mask.nonzero().flatten().tolist() == positions
    for turn, (start, _) in zip((1, 3), row.spans, strict=True):  # each begins where the generation prompt ends
        [prompt] = renderer.prompt_ids([CHAT[:turn]])
        assert row.ids[:start].tolist() == prompt.tolist()
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
