# ruff: noqa: RUF001 (the markers of DeepSeek have full-width bars)
"""Formats of tool calls: each reads back what it writes, and no text can make one raise."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.envs.llm.tool_calls import (
    AnyFormat,
    DeepSeekFormat,
    FunctionFormat,
    HarmonyFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    ParsedCall,
    PatternFormat,
    PythonFence,
    TaggedFormat,
    call_format,
)
from llmrl.envs.llm.tool_calls.choice import FORMATS
from llmrl.errors import ConfigError
from llmrl.modules.llm import Renderer
from llmrl.testing import tiny_tokenizer
from llmrl.train.settings.types import TOOL_FORMATS
from tests.support.refusals import refusals

OF_FAMILIES = [MistralFormat(), MistralFormat(named=True), DeepSeekFormat(), DeepSeekFormat(fenced=False)]
OF_FAMILIES += [HarmonyFormat()]
OWN_FORMATS = [HermesFormat(), LlamaFormat(), TaggedFormat(), FunctionFormat(), *OF_FAMILIES]
JSON_FORMATS = [*OWN_FORMATS, AnyFormat()]
ALL_FORMATS = [*JSON_FORMATS, PythonFence(), PatternFormat(r"CALL (\w+) (\{.*\})")]
# fmt: off
MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>",
    "</function>", "```", "```py\n", "<tool>", "</tool>", "<|python_tag|>", '{"name": "f", "parameters": {',
    "}", "\n", ";", "f", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '[{"name": "f", "arguments": {}}',
    "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json\n", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|channel|>commentary ", "to=functions.f ", "<|message|>", "<|call|>", "<|start|>assistant", "<|end|>",
]
# fmt: on

words = st.text(st.characters(codec="utf-8"))
marked = st.lists(st.one_of(words, st.sampled_from(MARKERS)), max_size=12).map("".join)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}", fullmatch=True)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words, marked),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
json_arguments = st.dictionaries(names, values, max_size=4)


@pytest.mark.parametrize("form", JSON_FORMATS, ids=lambda form: form.name)
@settings(max_examples=40)
@given(name=names, arguments=json_arguments, before=words, after=words)
def test_a_call_is_read_back_as_it_was_written(form, name, arguments, before, after):
    calls = form.parse(f"{plain(before)}\n{form.render(name, arguments)}\n{plain(after)}")
    assert calls == [ParsedCall(name, arguments)]


@settings(max_examples=40)
@given(code=marked)
def test_code_is_read_back_character_for_character(code):
    form = PythonFence("python")
    assert form.parse(form.render("python", {"code": code})) == [ParsedCall("python", {"code": code})]


@pytest.mark.parametrize("form", ALL_FORMATS, ids=lambda form: form.name)
@settings(max_examples=40)
@given(text=marked, thinking=st.booleans())
def test_no_text_can_make_a_parser_raise(form, text, thinking):
    for call in form.parse(text, {"f": {"properties": {"a": {"type": "string"}}}}, thinking=thinking):
        assert (call.arguments is None) == (call.error is not None)


def plain(text: str) -> str:
    """Words around a call that open nothing themselves."""
    return "".join(character for character in text if character not in "<`{;[=")


@pytest.mark.parametrize("form", OWN_FORMATS, ids=lambda form: form.name)
def test_several_calls_come_in_order_and_words_between_them_do_not_matter(form):
    text = f"First.\n{form.render('a', {'x': 1})}\nand then\n{form.render('b', {})}"
    assert [(call.name, call.arguments) for call in form.parse(text)] == [("a", {"x": 1}), ("b", {})]


A, B = ParsedCall("a", {"x": 1}), ParsedCall("b", {})
UNFENCED = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n{"x": 1}'
# fmt: off
DIALECTS = [
    (LlamaFormat(), '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "arguments": {}}', [A, B]),
    (LlamaFormat(), '{"name": "Ada", "age": 36}\n{"a": 1}\n{not json}', []),
    (LlamaFormat(), 'The call {"name": "a", "parameters": {}} in a sentence.', []),
    (HermesFormat(), '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [A]),
    (TaggedFormat(), '<tool name="a" tag="1">{"x": 1}</tool>', [A]),
    (TaggedFormat(), "<tool>b</tool>", [B]),
    *[(PythonFence(), f"So:\n```{word}\n1\n```\nDone.", [ParsedCall("python", {"code": "1"})])
      for word in ("python", "Python", "PY", "py", "python3", "python3.12")],
    (PythonFence(), "```bash\nls\n```\n```\nx\n```\n```pytb\nx\n```", []),
    *[(DeepSeekFormat(), UNFENCED + end, [A]) for end in ("", "\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")],
    (DeepSeekFormat(), UNFENCED * 2, [A, A]),
    # what gpt-oss says to people
    (HarmonyFormat(), '<|channel|>analysis<|message|>{"x": 1}<|end|><|start|>assistant<|channel|>final<|message|>'
     "to=functions.a {}", []),
    (HarmonyFormat(), '<|start|>functions.a to=assistant<|channel|>commentary<|message|>{"x": 1}<|end|>', []),
    (HarmonyFormat(), '<|channel|>commentary to=user<|message|>{"x": 1}<|end|>', []),
]
# fmt: on


@pytest.mark.parametrize(("form", "text", "calls"), DIALECTS)
def test_dialects_of_a_format_are_read_and_what_only_looks_like_a_call_is_not(form, text, calls):
    assert form.parse(text) == calls


@pytest.mark.parametrize("form", [*OWN_FORMATS, PythonFence()])
def test_a_call_inside_thinking_is_not_made(form):
    call = form.render("python", {"code": "1"})
    assert form.parse(f"<think>\nI could write\n{call}\n</think>\nNo need.") == []
    assert form.parse(f"<think>\n{call}\n") == [], "a thought that does not end"
    assert form.parse(f"\n{call}\n</think>\nNo need.") == [], "the prompt opened the thought"
    assert form.parse(f"\n{call}\n", thinking=True) == [], "the prompt opened it and it does not end"
    assert len(form.parse(f"<think>\n{call}\n</think>\n{call}")) == 1
    assert len(form.parse(f"hm\n</think>\n{call}", thinking=True)) == 1
    assert len(form.parse(f"\n{call}\n<think>\n{call}\n</think>\n{call}")) == 2, "thoughts between calls"


BEGIN = "<｜tool▁call▁begin｜>"
NAMED_MISTRAL = MistralFormat(named=True)
TO_A = "<|channel|>commentary to=functions.a<|message|>"
# fmt: off
UNREADABLE = [
    (HermesFormat(), "<tool_call>[1]</tool_call>", "a call is a JSON object, not a list"),
    (HermesFormat(), "<tool_call>5</tool_call>", "not a number"),
    (HermesFormat(), '<tool_call>{"tool": "a"}</tool_call>', 'no "name"'),
    (HermesFormat(), '<tool_call>{"name": 5}</tool_call>', '"name" must be a string'),
    (HermesFormat(), '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "must be a JSON object, not a list"),
    (HermesFormat(), "<tool_call>add(1, 2)</tool_call>", "invalid JSON at 'add(1, 2)</tool_call>'"),
    (HermesFormat(), '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not a JSON value"),
    (HermesFormat(), "<tool_call>" + '{"a":' * 200_000, "nested too deeply"),
    (HermesFormat(), '<tool_call>{"name": "a"} and so on</tool_call>', "'and so on</tool_call>' stands between"),
    (LlamaFormat(), '<|python_tag|>print("hi")', "invalid JSON"),
    (LlamaFormat(), '{"name": "a", "parameters": {"x": }}', "invalid JSON"),
    (TaggedFormat(), "<tool>add\n{x: 1}</tool>", "invalid JSON"),
    (TaggedFormat(), "<tool></tool>", "names no tool"),
    (FunctionFormat(), "<function=a><parameter=x>1", "the value of 'x' does not end"),
    (FunctionFormat(), "<function=a>x = 1</function>", "'x = 1</function>' stands where"),
    (FunctionFormat(), "<function=></function>", "names no tool"),
    (PythonFence(), "```python\nprint(1)", "does not end"),
    (PatternFormat(r"CALL (\w+) (.*)"), "CALL add {1}", "invalid JSON"),
    (MistralFormat(), "[TOOL_CALLS] [5]", "not a number"),
    (MistralFormat(), '[TOOL_CALLS] [{"name": "a", "arguments": ', "invalid JSON"),
    (NAMED_MISTRAL, "[TOOL_CALLS]a[ARGS](1)", "invalid JSON at '(1)'"),
    (NAMED_MISTRAL, "[TOOL_CALLS]a[ARGS][1]", "must be a JSON object, not a list"),
    (NAMED_MISTRAL, "[TOOL_CALLS](a)", "names no tool"),
    (DeepSeekFormat(), f"{BEGIN}a(1)<｜tool▁call▁end｜>", "<｜tool▁sep｜> must follow the name"),
    (DeepSeekFormat(), f"{BEGIN}function<｜tool▁sep｜>a\n```json\n{{1}}\n```", "invalid JSON"),
    (DeepSeekFormat(), f"{BEGIN}a<｜tool▁sep｜>{{}} then<｜tool▁call▁end｜>", "stands between the JSON object"),
    (DeepSeekFormat(fenced=False), f"{BEGIN}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>", "names no tool"),
    (HarmonyFormat(), f"{TO_A}x=1<|call|>", "invalid JSON at 'x=1"),
    (HarmonyFormat(), f"{TO_A}[1]<|call|>", "must be a JSON object"),
    (HarmonyFormat(), f"{TO_A}{{}} {{}}<|call|>", "the JSON object and <|call|>"),
]
# fmt: on


@pytest.mark.parametrize(("form", "text", "reason"), UNREADABLE)
def test_what_cannot_be_read_says_what_is_wrong_and_what_a_call_looks_like(form, text, reason):
    [call] = form.parse(text)
    assert call.arguments is None
    assert reason in call.error
    assert form.example in call.error
    assert len(call.error) < 500


def test_one_bad_call_does_not_hide_the_next():
    text = '<tool_call>{"name": }</tool_call><tool_call>{"name": "b"}</tool_call><tool_call>[<tool_call>{"name": "c"}'
    assert [call.name for call in HermesFormat().parse(text)] == ["", "b", "", "c"]


def test_plain_values_take_the_type_that_the_schema_gives_them():
    given = {"a": "12", "b": "12", "c": "[1]", "d": "two\nlines"}
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items())
    text = f"<function=f>\n{values}</function>"
    schemas = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
    [call] = FunctionFormat().parse(text, schemas)
    assert call.arguments == {"a": "12", "b": 12, "c": [1], "d": "two\nlines"}


def test_any_format_reads_each_call_by_its_looks():
    text = "\n".join(form.render(form.name, {"x": 1}) for form in OWN_FORMATS)
    assert [call.name for call in AnyFormat().parse(text)] == [form.name for form in OWN_FORMATS]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        *[("qwen", "hermes"), ("qwen3", "hermes"), ("llama3", "llama"), ("deepseek", "deepseek")],
        *[("gpt_oss", "harmony"), ("chatml_format", "auto"), ("mistral", "auto"), ("falcon", "auto")],
    ],
)
def test_the_chat_template_says_which_format_its_models_write(family, expected):
    assert call_format("auto", tiny_tokenizer(template=family).chat_template).name == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '[TOOL_CALLS] [' + calls + ']' }}", MistralFormat().example),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MistralFormat(named=True).example),
        ("{{ '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n' }}", DeepSeekFormat().example),
        ("{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", DeepSeekFormat(fenced=False).example),
        ("{{ '<|start|>assistant to=functions.' + name + '<|channel|>commentary json' }}", HarmonyFormat().example),
    ],
)
def test_a_tokenizers_own_template_says_it_too_and_which_dialect(template, expected):
    assert call_format("auto", template).example == expected


CALLING = [("add", {"a": 12, "b": [1.5, None]}), ("say", {"text": 'é "quoted"\n</think>'})]


@pytest.mark.parametrize(
    ("family", "most"), [("qwen", 2), ("qwen3", 2), ("llama3", 1), ("deepseek", 2), ("gpt_oss", 1), ("named", 2)]
)
def test_what_a_template_writes_for_the_calls_of_a_message_is_read_back(family, most):
    tokenizer = tiny_tokenizer(template="mistral" if family == "named" else family)
    if family == "named":
        tokenizer.chat_template = NAMED
    form = call_format("auto", tokenizer.chat_template)
    for called in (CALLING[:1], CALLING[1:], CALLING)[: 1 + most]:
        entries = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in called]
        answer = {"role": "assistant", "content": "", "tool_calls": entries}
        [row] = Renderer(tokenizer).render([[{"role": "user", "content": "?"}, answer]])
        written = tokenizer.decode(row.ids[row.assistant_mask])
        assert [(call.name, call.arguments) for call in form.parse(written)] == called
        assert form.parse("".join(form.render(*one) for one in called)) == form.parse(written)


NAMED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}"
    "{% endfor %}</s>{% endgeneration %}{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("form", OF_FAMILIES, ids=lambda form: form.example[:24])
def test_an_answer_with_calls_is_given_to_the_template_as_a_message_with_calls(form):
    text = form.render("a", {"x": 1})
    calls = [(call, "id0") for call in form.parse(text)]
    message = form.message(text, calls)
    [entry] = message["tool_calls"]
    arguments = entry["function"]["arguments"]
    assert message["content"] == ""
    assert (entry["id"], entry["type"], entry["function"]["name"]) == ("id0", "function", "a")
    assert (json.loads(arguments) if isinstance(form, DeepSeekFormat) else arguments) == {"x": 1}
    assert HermesFormat().message(text, calls) is None, "there it is part of the content"


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        (MistralFormat(), "Hm. [TOOL_CALLS]a[ARGS]{x: 1}", "Hm.", "a[ARGS]{x: 1}"),
        (DeepSeekFormat(), f"Hm.\n{DeepSeekFormat().render('a', {})}".replace("{}", "{x: 1}"), "Hm.\n", "{x: 1}"),
        (DeepSeekFormat(), "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{x: 1}<｜tool▁call▁end｜>", "", "{x: 1}"),
        (HarmonyFormat(), "<|channel|>commentary to=functions.a<|message|>{x: 1}<|call|>", "", "{x: 1}"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_as_it_was_written(form, text, content, arguments):
    message = form.message(text, [(call, "id0") for call in form.parse(text)])
    assert message["content"] == content
    assert message["tool_calls"][0]["function"] == {"name": "a", "arguments": arguments}


def test_what_gpt_oss_thought_before_a_call_is_its_reasoning():
    thought = "<|channel|>analysis<|message|>Twelve and\nthirty.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>Let me add.<|end|><|start|>assistant"
    text = thought + preamble + HarmonyFormat().render("a", {})
    message = HarmonyFormat().message(text, [(call, "id0") for call in HarmonyFormat().parse(text)])
    assert message["reasoning_content"] == "Twelve and\nthirty.\nLet me add."


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.a <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.a<|message|>",
        " to=functions.a<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.a<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>analysis to=a code<|message|>",
    ],
)
def test_the_recipient_of_a_call_may_stand_on_either_side_of_the_channel(header):
    assert HarmonyFormat().parse(f'{header}{{"x": 1}}<|call|>') == [ParsedCall("a", {"x": 1})]
    assert HarmonyFormat().parse(f"{header}<|call|>") == [ParsedCall("a", {})]
    assert HarmonyFormat().parse(f'{header}{{"x": 1}}') == [ParsedCall("a", {"x": 1})], "the stop token was cut off"


def test_the_id_that_a_mistral_model_gave_a_call_is_its_id_if_templates_can_take_it():
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "D681PevKs"}, {"name": "b", "id": "call_1"}]'
    assert [call.id for call in MistralFormat().parse(text)] == ["D681PevKs", None]
    assert MistralFormat().parse('[TOOL_CALLS]a[CALL_ID]D681PevKs[ARGS]{"x": 1}')[0].id == "D681PevKs"
    ids = {MistralFormat().call_id(c, t, n) for c in (0, 1, 35, 36, 10_000) for t in (0, 1, 40) for n in (0, 7)}
    assert len(ids) == 30
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_the_formats_that_settings_can_name_are_those_that_there_are():
    assert set(TOOL_FORMATS) == {"auto", *FORMATS}


test_settings_that_cannot_be_used_are_refused = refusals(
    (ConfigError, "Did you mean 'hermes'", lambda: call_format("hermess")),
    (ConfigError, "two groups", lambda: PatternFormat("CALL")),
    (ConfigError, "regular expression", lambda: PatternFormat("(")),
)
