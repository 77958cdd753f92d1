"""The ids that a turn adds to a stream: equal to a full render, refused where the template rewrites the past."""

import pytest
import torch

from llmrl.errors import RewriteError, TemplateError
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_tokenizer
from tests.support.rendering import (
    ANSWER_1,
    ANSWER_2,
    CHATML,
    DROPS_THINKING,
    FAMILIES,
    USER_1,
    USER_2,
    USER_3,
    family,
    reference_ids,
)

ADD = {"function": {"name": "add", "arguments": {"a": 1}}}
CALL = {"role": "assistant", "content": "Let me see.", "tool_calls": [ADD]}
TOOL_1, TOOL_2 = {"role": "tool", "content": "42"}, {"role": "tool", "content": "forty-two é"}
TURNS = [  # what the assistant says, and what the environment adds after it
    (CALL, [TOOL_1]),
    (ANSWER_1, [USER_2]),
    (CALL, [TOOL_1, TOOL_2]),
    (ANSWER_2, [USER_3]),
    (ANSWER_1, [USER_1]),
]


def test_extend_equals_a_full_render_over_five_turns_with_tools():
    renderer = Renderer(tiny_tokenizer())
    chat = [{"role": "system", "content": "Be brief."}, USER_1]
    [stream] = renderer.prompt_ids([chat])
    for answer, added in TURNS:
        chat = [*chat, answer]
        [whole] = renderer.render([chat])
        start, end = whole.spans[-1]
        stream = torch.cat([stream, whole.ids[start:end]])  # the engine draws the answer
        assert stream.tolist() == whole.ids[:end].tolist()
        chat = [*chat, *added]
        [delta] = renderer.extend([stream], [chat], [len(added)])
        stream = torch.cat([stream, delta])
        assert stream.tolist() == reference_ids(renderer, chat, add_generation_prompt=True)


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
