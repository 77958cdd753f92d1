# ruff: noqa: RUF001 (the markers of DeepSeek have full-width bars)
"""Hostile text is read in linear time and without an exception by every parser, reward and check.

The strings are those that scanners take quadratic time for, with a limit on processor time that linear ones stay far
below: a quadratic one takes minutes for a million characters.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest

from llmrl.data.llm.codec import codec_for
from llmrl.data.llm.parsers import chatml, deepseek, gpt_oss, turns
from llmrl.data.llm.templates import find_template
from llmrl.envs.llm.answers import code_block, extract_tags, last_boxed, normalize_answer
from llmrl.envs.llm.completions import trim_markers
from llmrl.envs.llm.rewards import JudgeReward
from llmrl.envs.llm.tasks.countdown import countdown_correct
from llmrl.envs.llm.tasks.gsm8k import GSM8KRewardParser
from llmrl.envs.llm.tasks.ifeval import Instructions, evaluate
from llmrl.envs.llm.tasks.ifeval_checks import CHECKS
from llmrl.envs.llm.tasks.math import MATHRewardParser
from llmrl.envs.llm.tasks.mlgym import command_of
from llmrl.envs.llm.tasks.sums import sums_reward
from llmrl.envs.llm.tool_calls import (
    AnyFormat,
    DeepSeekFormat,
    FunctionFormat,
    HarmonyFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    PythonFence,
    TaggedFormat,
)
from llmrl.errors import RolloutError, TemplateError
from llmrl.testing import tiny_tokenizer
from llmrl.tools.base import ToolError
from llmrl.tools.calculator import calculator
from llmrl.tools.schema import Signature

LENGTH = 50_000
CPU_S = 5  # of processor time, for all strings of one reader; linear ones take a few hundredths of it

UNITS = [*"a 9.*`\"'\\{}[]()<>$-_é?!@/\n\t\ud800", "[{", '{"a":', '{"a":[', "{\n", ';{"a', ';{"', "1,", "1 ", "1/2 "]
UNITS += ["\r\n", "a ", " \n", "a\n", "- \n", "* ", "** ", "[a", "<<", "x@", "A. ", "N'T ", "::", "\\u", '\\"', "1."]
UNITS += ["P. "]
ANSWERS = ["<think>", "</think>", "<answer>", "</answer>", "####"]
LATEX = ["\\boxed{", "\\text{", "\\text{}", "\\frac{", "\\frac{1}{", "}", "1", " ", "met", "$"]
FENCES = ["```", "```\n", "```python\n", "```text\n", "````\n", "\n```", "x\n"]
DEEPSEEK_CALLS = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
DEEPSEEK_CALLS += ["<｜tool▁calls▁end｜>"]
DEEPSEEK = ["<｜User｜>", "<｜Assistant｜>", *DEEPSEEK_CALLS]
DEEPSEEK += ["function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>"]
OUTPUTS = ["<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"]
HARMONY = ["<|start|>", "<|channel|>", " to=functions.f", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "{}"]
MISTRAL = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "{}", '[{"name"', "f"]
HERMES = ["<tool_call>", "</tool_call>", '{"name": "f"}', "{", '"']
FUNCTION = ["<function=", "<function=f>", "<parameter=", "<parameter=a>", "</parameter>", "</function>"]
LLAMA = ["<|python_tag|>", '{"name": "f"', '{"name": "f", "parameters": {}}', "; ", "\n", "{"]
TAGGED = ["<tool", "<tool>", '<tool name="', "</tool>", "{", "f", "\n"]
CHATML = ["<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "<tool_response>\n", "\n</tool_response>\n"]
CHATML += HERMES[:3]
RESPONSES = ["<tool_response>\n", "\n</tool_response>", "\n</tool_response>\n", "a"]

FORMATS = [
    (HermesFormat(), HERMES),
    (LlamaFormat(), LLAMA),
    (MistralFormat(), MISTRAL),
    (DeepSeekFormat(), [*DEEPSEEK_CALLS, "f", "\n```json\n", "{}", "\n```"]),
    (HarmonyFormat(), HARMONY),
    (FunctionFormat(), FUNCTION),
    (TaggedFormat(), TAGGED),
    (PythonFence(), FENCES),
    (AnyFormat(), [HERMES[0], FUNCTION[0], TAGGED[0], MISTRAL[0], DEEPSEEK_CALLS[1], LLAMA[1], " to=f<|message|>"]),
]
JSON = {  # the format's place above -> what stands before the JSON of a call
    0: "<tool_call>", 1: "<|python_tag|>", 2: "[TOOL_CALLS]", 3: "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    4: "<|channel|>commentary to=functions.f<|message|>", 6: "<tool>f\n",
}  # fmt: skip
ARGUMENTS = {  # of each check, so that it has to read all of the text
    "keywords": ["zebra"], "keyword": "zebra", "frequency": 2, "relation": "at least", "forbidden_words": ["zebra"],
    "letter": "q", "let_frequency": 2, "let_relation": "at least", "language": "en", "num_sentences": 3, "num_words": 3,
    "num_paragraphs": 3, "nth_paragraph": 1, "first_word": "zebra", "num_placeholders": 3, "postscript_marker": "P.S.",
    "num_bullets": 3, "num_highlights": 10**9, "section_spliter": "Section", "num_sections": 3,
    "prompt_to_repeat": "Hi", "end_phrase": "Bye", "capital_frequency": 3, "capital_relation": "at least",
}  # fmt: skip
IFEVAL = ["***", "******", "\n\n", "Section", "<<", ">>", "[", "]", '"', "* "]


def read_calls(form: Any) -> Callable[[str], Any]:
    """As `ToolTransform` reads an answer: its calls, and what templates are told of them."""

    def read(text: str) -> None:
        if calls := form.parse(text):
            form.message(text, [(call, "id") for call in calls])

    return read


def instructions(name: str) -> Instructions:
    return Instructions.of([name], [ARGUMENTS], "row 1")


def followed(name: str, text: str) -> None:
    CHECKS[name](text, **instructions(name).arguments[0])


def refusing(error: type[Exception], read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads a text, which may be refused with this error."""

    def run(text: str) -> None:
        with contextlib.suppress(error):
            read(text)

    return run


def bound(text: str) -> None:
    Signature(_tool, "f").bind({"number": text, "values": text})


def _tool(number: int, values: list[int]) -> None:
    """A tool."""


def mathematics(text: str) -> None:
    if len(text.strip()) > 10_000 and "boxed" not in text:  # others go to a process
        MATHRewardParser().score(f"<answer>{text}</answer>", "36")


def after(before: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads a hostile text that follows this one."""
    return lambda text: read(before + text)


READERS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "chatml": (chatml.parse_chatml, CHATML),
    "chatml_answer": (after(CHATML[1], chatml.parse_chatml), HERMES),
    "chatml_responses": (after(f"{CHATML[0]}{RESPONSES[0]}", chatml.parse_chatml), RESPONSES),
    "qwen3": (chatml.parse_qwen3, [*CHATML[1:3], "<think>\n", "\n</think>\n\n"]),
    "qwen3_thought": (after(f"{CHATML[1]}<think>\n", chatml.parse_qwen3), ["<think>\n", "\n</think>\n", *HERMES]),
    "deepseek": (deepseek.parse_deepseek, [*DEEPSEEK, *OUTPUTS]),
    "deepseek_answer": (after("<｜Assistant｜>", deepseek.parse_deepseek), DEEPSEEK[2:]),
    "deepseek_outputs": (after("<｜tool▁outputs▁begin｜>", deepseek.parse_deepseek), OUTPUTS),
    "dialogpt": (turns.parse_dialogpt, ["<|endoftext|>"]),
    "falcon": (turns.parse_falcon, ["<|user|>\n", "<|assistant|>\n", "<|endoftext|>"]),
    "gemma": (turns.parse_gemma, ["<start_of_turn>", "<start_of_turn>user\n", "<end_of_turn>"]),
    "gpt_oss": (gpt_oss.parse_gpt_oss, HARMONY),
    "gpt_oss_call": (after("<|start|>assistant<|channel|>commentary to=functions.f", gpt_oss.parse_gpt_oss), HARMONY),
    "gpt_oss_answer": (after("<|channel|>", gpt_oss.read_gpt_oss_answer), HARMONY),
    "llama": (turns.parse_llama, ["[INST]", "<<SYS>>\n", "\n<</SYS>>\n\n", "[/INST]", "</s>"]),
    "llama3": (turns.parse_llama3, ["<|start_header_id|>", "assistant<|end_header_id|>\n\n", "<|eot_id|>"]),
    "llama3_answer": (after("<|start_header_id|>assistant<|end_header_id|>\n\n{", turns.parse_llama3), LLAMA),
    "mistral": (turns.parse_mistral, ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "</s>"]),
    "phi": (turns.parse_phi, ["<|user|>\n", "<|assistant|>\n", "<|end|>"]),
    **{f"calls_{form.name}": (read_calls(form), own) for form, own in FORMATS},
    **{f"arguments_{FORMATS[n][0].name}": (after(JSON[n], read_calls(FORMATS[n][0])), FORMATS[n][1]) for n in JSON},
    "blocks": (extract_tags, ANSWERS),
    "boxed": (last_boxed, LATEX),
    "code_block": (code_block, FENCES),
    "mlgym": (command_of, [*FENCES, *ANSWERS[:2]]),
    "normalize": (normalize_answer, [*LATEX, "9**9**9", "1e999999999", "9^9^9^9", "7" * 400 + "/"]),
    "gsm8k": (lambda text: GSM8KRewardParser().score(text, "36"), ANSWERS),
    "math": (mathematics, LATEX),
    "countdown": (lambda text: countdown_correct(text, [1, 2], 3), ["\\times", "$", "(", "1+", "45**67**", "9^9^"]),
    "sums": (lambda text: sums_reward(text, "36"), ["<answer>", "1", "</answer>", " "]),
    "judge": (
        refusing(RolloutError, JudgeReward("http://localhost:1/v1", "judge").score),
        ["score", "score: ", "1", ".", "<think>"],
    ),
    "markers": (lambda text: trim_markers(text, ("<|im_end|>", "<pad>")), ["<|im_end|>", "<pad>"]),
    "calculator": (refusing(ToolError, calculator), ["1+", "(", "**", "9"]),
    "arguments": (refusing(ToolError, bound), ["[", "1,", "9"]),
    "loose_evaluation": (lambda text: evaluate(text, instructions("combination:repeat_prompt")), IFEVAL),
    **{name: (partial(followed, name), IFEVAL) for name in CHECKS},
}


def hostile(own: list[str]) -> Iterator[str]:
    pairs = product(own, repeat=2) if len(own) < 10 else ()
    for unit in [*UNITS, *own, *map("".join, pairs)]:
        yield unit * (LENGTH // len(unit))
    for unit in ("", *own):
        yield unit + " " * LENGTH + "x"
        yield unit + "[" * (LENGTH // 2) + "]" * (LENGTH // 2)
        yield (unit + " " * 10) * (LENGTH // (len(unit) + 10))
        yield (unit + "\n") * (LENGTH // (len(unit) + 1))
        yield unit + '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"
        yield unit + '{"name": "f", "arguments": {"a": "\\ud800"}}'


@pytest.fixture
def limited_cpu() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise AssertionError(f"took more than {CPU_S} s of processor time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", READERS)
def test_a_hostile_text_is_read_in_linear_time_and_without_an_exception(name, limited_cpu):
    read, own = READERS[name]
    for text in hostile(own):
        read(text)


@pytest.mark.parametrize("number", JSON)
@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "[" * 100_000, "9" * 5000, '"\\ud800"', "NaN"])
def test_json_that_cannot_be_gone_on_with_is_a_malformed_call(number, value):
    """Regression: depth raised RecursionError where it was copied, half a surrogate pair TypeError in the tokenizer."""
    calls = FORMATS[number][0].parse(f'{JSON[number]}{{"name": "f", "arguments": {{"a": {value}}}}}')
    assert [call.arguments for call in calls] == [None]
    assert "could not be read" in calls[0].error
    assert len(calls[0].error) < 500


def test_of_many_calls_the_first_ones_are_read_and_the_last_says_so():
    calls = HermesFormat().parse(HermesFormat().render("f", {}) * 1000)
    assert len(calls) == 65
    assert not any(call.error for call in calls[:64])
    assert "at most 64" in calls[64].error or "64 calls" in calls[64].error


def test_a_name_too_long_to_be_shown_is_not_repeated():
    (call,) = FunctionFormat().parse(f"<function={'f' * 1000}>\n</function>")
    assert (call.name, call.arguments) == ("", None)
    assert "1000 characters" in call.error


def test_a_message_that_no_tokenizer_takes_is_named():
    tokenizer = tiny_tokenizer()
    codec = codec_for(tokenizer, find_template(tokenizer))
    texts = codec.render([[{"role": "user", "content": "fine"}], [{"role": "user", "content": "half: \ud800"}]])
    with pytest.raises(TemplateError, match=r"conversation 1 holds half of a surrogate pair, '\\ud800', in '.*half: "):
        codec.encode(texts)
