"""Which template is used, what may be registered, what a template reads of a conversation, and its tools."""

from pathlib import Path

import pytest
from tensordict import lazy_stack

from llmrl.data.llm import History, add_chat_template, find_template
from llmrl.data.llm.template_analysis import conversation_shape, reads_contents, stand_ins
from llmrl.data.llm.templates import _BUILT_IN, choose_template
from llmrl.errors import ConfigError, TemplateError
from llmrl.modules.llm import Renderer
from llmrl.testing import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BLOCK = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.fixture(autouse=True)
def _restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrl.data.llm.templates._TEMPLATES", dict(_BUILT_IN))


def without_template(name_or_path: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.name_or_path = name_or_path
    return tokenizer


def test_every_built_in_name_is_in_the_documents():
    text = (Path(__file__).parents[3] / "docs/extending.md").read_text()
    assert [name for name in _BUILT_IN if f"`{name}`" not in text] == []


def test_settings_choose_text_a_name_or_what_a_module_registers_or_holds(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Regression: a template that a module registers could not be named, as nothing imported the module."""
    register = f"from llmrl.data.llm import add_chat_template\nadd_chat_template('lines', {TEMPLATE!r})\n"
    (tmp_path / "bracket_module.py").write_text(f"{register}held, number = {TEMPLATE + ' '!r}, 3\n")
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    assert choose_template(tokenizer, None).jinja == tokenizer.chat_template
    assert choose_template(tokenizer, "bracket_module:lines").name == "lines"
    assert choose_template(tokenizer, "bracket_module:held").jinja == TEMPLATE + " "
    assert choose_template(tokenizer, TEMPLATE).jinja == TEMPLATE
    for name, words in (("number", "must be a template's text, or be registered"), ("other", "has no 'other'")):
        with pytest.raises(ConfigError, match=words):
            choose_template(tokenizer, f"bracket_module:{name}")


@pytest.mark.parametrize("value", [False, None, 3, 'it\'s "so" é\n', ["a", {"b": 1.5}]])
def test_variables_of_a_template_are_defaults_that_stay_with_its_text(value):
    jinja = "\n{{ style | tojson }}" + TEMPLATE
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = jinja
    chat = [{"role": "user", "content": "Hi"}]
    [expected] = Renderer(tokenizer, template_kwargs={"style": value}).prompt_texts([chat])
    tokenizer.chat_template = choose_template(tokenizer, None, {"style": value}).jinja
    assert Renderer(tokenizer).prompt_texts([chat]) == [expected]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(chat, **options) == expected  # by any other program, too
    assert tokenizer.apply_chat_template(chat, style="other", **options) == '\n"other"[user]Hi</s>[assistant]'
    assert choose_template(tokenizer, None, {"style": value}).jinja == tokenizer.chat_template


def test_a_template_with_variables_keeps_its_name_and_parser():
    tokenizer = tiny_tokenizer(template="qwen3")
    tokenizer.chat_template = choose_template(tokenizer, None, {"enable_thinking": False}).jinja
    assert find_template(tokenizer).name == "qwen3"
    assert find_template(tokenizer).parse is find_template(None, "qwen3").parse
    for name, words in (("enable_thinkin", "Did you mean 'enable_thinking'"), ("messages", "the template's own")):
        with pytest.raises(ConfigError, match=words):
            choose_template(tokenizer, None, {name: 1})


def test_registered_template_is_taken_by_keyword_where_the_tokenizer_has_one_of_its_own():
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "org/My-Bracket-7b"
    add_chat_template("bracket", TEMPLATE)
    assert find_template(tokenizer).jinja == tokenizer.chat_template  # no keyword, and so no model that it is for
    add_chat_template("bracket 2", TEMPLATE + " ", model_family_keywords=["bracket"])
    assert find_template(tokenizer).name == "bracket 2"
    assert find_template(tokenizer, template=tokenizer.chat_template).jinja == tokenizer.chat_template
    text = History.from_chats([{"role": "user", "content": "Hi"}]).apply_chat_template(tokenizer=tokenizer)
    assert text.startswith("[user]Hi</s>")
    tokenizer.name_or_path = "org/other"
    assert find_template(tokenizer).jinja == tokenizer.chat_template


def test_your_keyword_goes_before_a_built_in_one_whatever_the_case():
    add_chat_template("bracket", TEMPLATE, model_family_keywords=["qwen"])
    tokenizer = without_template("Qwen/Qwen3-0.6B")
    assert find_template(tokenizer).name == "bracket"
    [text] = History.from_chats([[{"role": "user", "content": "Hi"}]]).apply_chat_template(tokenizer=tokenizer)
    assert text == "[user]Hi</s>[assistant]"


def test_of_several_templates_that_for_tools_is_named_where_it_is_needed():
    tokenizer = tiny_tokenizer()
    tools, default = tokenizer.chat_template, TEMPLATE
    tokenizer.chat_template = {"default": default, "tool_use": tools}
    chat = [{"role": "user", "content": "Hi", "tools": [{"type": "function", "function": {"name": "add"}}]}]
    with pytest.raises(TemplateError, match=r"does not use tools.*; the tokenizer has .*chat_template=tool_use"):
        Renderer(tokenizer).prompt_ids([chat])
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(TemplateError, match=r"does not use tool_calls.*chat_template=tool_use"):
        Renderer(tokenizer).render([[{"role": "user", "content": "Hi"}, calling]])
    assert (
        Renderer(tokenizer, chat_template_name="tool_use").prompt_ids([chat])[0].tolist()
        == (tokenizer.apply_chat_template(chat, tools=chat[0]["tools"], add_generation_prompt=True)["input_ids"])
    )
    tokenizer.chat_template = {"rag": default, "tool_use": tools}
    with pytest.raises(TemplateError, match="must have a default one: it has rag, tool_use"):
        find_template(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bracket", TEMPLATE + " "), "'bracket' is taken"),
        (("silent", "{{ messages }}"), "mark what the assistant writes"),
        (("other", TEMPLATE, "parse"), "inverse_parser .*function"),
        (("other", TEMPLATE, None, ["", "other"]), "an empty one is in every name"),
    ],
)
def test_what_cannot_be_registered_is_refused_the_same_template_twice_is_fine(arguments, message):
    """Regression: a keyword that was no list was taken letter by letter, and chosen for nearly every model."""
    for _ in range(2):
        add_chat_template("bracket", TEMPLATE, model_family_keywords="Bracket")
    assert find_template(None, "bracket").keywords == ("bracket",)
    with pytest.raises(TemplateError, match=message):
        add_chat_template(*arguments)
    with pytest.raises(TemplateError, match=r"got 'brakket', known: bracket, chatml.*Did you mean 'bracket'\?"):
        find_template(None, "brakket")


@pytest.mark.parametrize(
    ("written", "held"),
    [
        (BLOCK, "hold question and answer"),
        ("{{ m.content }}{% generation %}{% endgeneration %}", "hold neither"),
        ("{% if m.role == 'user' %}" + BLOCK + "{% else %}{{ m.content }}{% endif %}", "hold question"),
    ],
)
def test_generation_blocks_around_other_roles_are_refused(written, held):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>" + written + "<|im_end|>{% endfor %}"
    with pytest.raises(TemplateError, match=f"they {held}"):
        Renderer(tokenizer)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "qwen"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama"),
        ("meta-llama/Llama-3.2-1B", "llama3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek"),  # what it was trained with, not what it was made of
        ("tiiuae/falcon-7b-instruct", "falcon"),
        ("microsoft/DialoGPT-medium", "dialogpt"),
        ("mistralai/Mixtral-8x7B", "mistral"),
        ("google/gemma-2b", "gemma"),
        ("microsoft/Phi-3-mini", "phi"),
        ("openai/gpt-oss-20b", "gpt_oss"),
        ("EleutherAI/pythia-70m", "chatml_format"),
    ],
)
def test_family_is_guessed_only_where_the_tokenizer_has_no_template(model: str, name: str):
    tokenizer = without_template(model)
    assert find_template(tokenizer).name == name
    tokenizer.chat_template = TEMPLATE
    assert find_template(tokenizer).jinja == TEMPLATE


def test_a_parser_that_fails_is_named_with_the_text():
    def parse(text: str) -> History:
        return lazy_stack([History(role="user", content=turn) for turn in text.split("[user]")[1:]])

    add_chat_template("silent", TEMPLATE + " ")
    with pytest.raises(TemplateError, match="inverse parser"):
        History.from_text("[user]Hi</s>", chat_template_name="silent")
    add_chat_template("bracket", TEMPLATE, parse)
    assert History.from_text(["[user]a[user]b"], chat_template_name="bracket").content == [["a", "b"]]
    with pytest.raises(TemplateError, match=r"'bracket' must read the text: got RuntimeError .*'no'"):
        History.from_text("no", chat_template_name="bracket")


@pytest.mark.parametrize(
    ("jinja", "words"),
    [
        ("a\n{{ 1 // 0 }}", r"ZeroDivisionError: .* by zero \(line 2 of the template\)"),
        ("{% macro f() %}\n\n{{ f() }}{% endmacro %}{{ f() }}", r"RecursionError.*\(line 3 of the template\)"),
        ("\n{{ 'x'.center(99999999999999) }}", r"MemoryError \(line 2 of the template\)"),
        ("{{ messages[0].content.nothing.more }}", r"UndefinedError.*\(line 1 of the template\)"),
        ("{% for m in messages %}\n{{ m.content | nofilter }}{% endfor %}", r"nofilter.*\(line 2 of the template\)"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", r"not end within 0\.2 s"),
    ],
)
def test_a_template_that_fails_or_loops_is_an_error_with_its_line(monkeypatch: pytest.MonkeyPatch, jinja, words):
    """Regression: these ended in an error of Python, and the last one never."""
    if "not end" in words:
        monkeypatch.setattr("llmrl.data.llm.template_text.FIRST_RENDER_S", 0.2)
    with pytest.raises(TemplateError, match=words):
        Renderer(tiny_tokenizer(), chat_template=jinja)
    with pytest.raises(TemplateError, match=words):
        History.from_messages([{"role": "user", "content": "Hi"}]).apply_chat_template(chat_template=jinja)


# --- what a template reads of a conversation ---
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


# --- tools that a conversation declares ---
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "1+1?"}


def declaring(*tools, system=None):
    first = {"role": "system", "content": system} if system else dict(ASK)
    return [{**first, "tools": list(tools)}, *([ASK] if system else [])]


@pytest.mark.parametrize("system", [None, "Help."])
def test_declared_tools_render_as_given_tools_do(system):
    tokenizer = tiny_tokenizer()
    chat = declaring(TOOL, system=system)
    plain = [{key: value for key, value in message.items() if key != "tools"} for message in chat]
    expected = tokenizer.apply_chat_template(plain, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert '"name": "add"' in expected
    [ids] = Renderer(tokenizer).prompt_ids([chat])
    assert tokenizer.decode(ids) == expected
    assert History.from_messages(chat).apply_chat_template(tokenizer=tokenizer) == expected


def test_tools_and_calls_that_a_template_does_not_use_are_refused_and_not_dropped():
    """Regression: ChatML wrote an empty answer where a tool was called, and said nothing of the tools it was given."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    renderer = Renderer(tiny_tokenizer(template="chatml_format"))
    with pytest.raises(TemplateError, match=r"message 1 .*role 'assistant': .*not use tool_calls"):
        renderer.render([[ASK, calling]])
    for chat, tools in ((declaring(TOOL), None), ([ASK], [TOOL])):
        with pytest.raises(TemplateError, match="does not use tools; describe them"):
            renderer.prompt_ids([chat], tools=tools)
