"""Which templates only write what messages say, and what is left of a conversation for them."""

import pytest

from llmrl.data.llm.template_analysis import conversation_shape, reads_contents, stand_ins
from llmrl.data.llm.templates import _BUILT_IN

LOOP = "{%% for m in messages %%}%s{%% endfor %%}"
WRITES = [
    "{{ m.role ~ ': ' ~ m.content }}",
    "{{ m['content'] | trim }}{{ loop.index0 }}",
    "{% if m.content %}{{ m.content }}{% else %}none{% endif %}",
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}",
    "{% if messages[loop.index0 - 1].role != 'tool' and m.role == 'tool' %}{{ m.content }}{% endif %}",
    "{% set text = m.content.strip() %}{{ text if text else 'none' }}",
    "{% if 'tool_calls' in m and m.tool_calls | length == 1 %}{{ m.tool_calls[0].function.arguments }}{% endif %}",
    "{% for call in m.tool_calls or [] %}{% set call = call.function %}{{ call.name }}"
    "{% for key, value in call.arguments | items %}{{ key ~ value | tojson }}{% endfor %}{% endfor %}",
    "{% if loop.previtem is defined and loop.previtem.role == m.role %}{{ raise_exception(m.content) }}{% endif %}",
    "{% generation %}{{ m.content }}{% endgeneration %}",
]
READS = [
    "{{ m.content.split('</think>')[-1] }}",
    "{% if '</think>' in m.content %}{% endif %}",
    "{% set text = m.content %}{{ text[:5] }}",
    "{{ m.content | length }}",
    "{{ m.content | upper }}",
    "{{ m.content | trim('x') }}",
    "{{ m.content.lstrip() }}",
    "{% if m == messages[-1] %}last{% endif %}",
    "{% if m.content == 'stop' %}{% endif %}",
    "{{ {'a': 1}[m.content] }}",
    "{{ loop.changed(m.content) }}",
    "{% for letter in m.content %}x{% endfor %}",
    "{% if m.content is in ['a'] %}{% endif %}",
    "{% set ns = namespace(text='') %}{% if ns.text > 'a' %}{% endif %}{% set ns.text = m.content %}",
    "{% macro size(text) %}{{ text | length }}{% endmacro %}{{ size(m.content) }}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{{ '%5s' % m.content }}",
    "{% set x %}{{ m.content }}{% endset %}{{ x | length }}",
    "{{ messages | map(attribute='content') | join }}",
]


@pytest.mark.parametrize(
    ("jinja", "reads"),
    [
        *((LOOP % body, False) for body in WRITES),
        *((LOOP % body, True) for body in READS),
        ("{% for m in messages %}", True),  # cannot be parsed
        *((row.jinja, bool(row.rewrites)) for row in _BUILT_IN.values()),
    ],
)
def test_contents_are_only_written_or_something_depends_on_them(jinja: str, reads: bool):
    assert reads_contents(jinja) == reads


def test_stand_ins_have_the_shape_of_the_conversation_and_other_texts():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
    chat = [
        {"role": "system", "content": "Be brief.", "tools": [{"name": "add"}]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": " \n", "tool_calls": [call], "is_complete": False},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    probe = stand_ins(chat)
    assert conversation_shape(probe) == conversation_shape(chat)
    texts = [probe[0]["content"], probe[3]["content"], probe[3]["tool_call_id"], probe[4]["content"][0]["text"]]
    texts.append(probe[2]["tool_calls"][0]["function"]["arguments"]["b"])
    assert len(set(texts)) == 5
    assert not {"Be brief.", "42", "c1", "two"} & set(texts)
    assert probe[0]["tools"] == chat[0]["tools"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": None}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "b"}),
        ({"role": "user", "content": "a", "name": "c"}, {"role": "user", "content": "a", "name": "b"}),
        ({"role": "user", "content": " "}, {"role": "user", "content": "\n"}),
        ({"content": "", "name": "user"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": 1}, {"role": "user", "content": True}),
        ({"role": "user", "content": ["a"]}, {"role": "user", "content": ["a", "b"]}),
        ({"role": "user", "content": object()}, {"role": "user", "content": object()}),
    ],
)
def test_what_a_template_can_tell_apart_has_another_shape(one, other):
    assert conversation_shape([one]) != conversation_shape([other])
