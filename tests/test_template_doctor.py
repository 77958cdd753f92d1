"""``llmrl template``: what it finds in good and bad templates, what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrl.commands.template_report import Diagnosis, diagnose
from llmrl.data.llm.templates import template_names
from llmrl.errors import DataError
from llmrl.testing import tiny_tokenizer
from tests.support.saved_models import save_tiny

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def saved(folder: Path, template: str | None) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def found(diagnosis: Diagnosis) -> dict[str, bool | None]:
    return {finding.name: finding.ok for finding in diagnosis.findings}


def detail(diagnosis: Diagnosis, name: str) -> str:
    return {finding.name: finding.detail for finding in diagnosis.findings}[name]


@pytest.mark.parametrize("name", template_names())
def test_every_registered_template_is_fine(name: str):
    diagnosis = diagnose(name)
    assert diagnosis.problems == []
    assert diagnosis.verdict.startswith("fine")
    assert 0 < diagnosis.trained_share < 1
    shown = "".join(text for text, trained in diagnosis.samples[0].pieces if trained)
    assert "It is 4." in shown
    assert "That is 6." in shown
    assert "What is 2+2?" not in shown


@pytest.mark.parametrize(("name", "code"), [("qwen", 0), ("qwen3", 0), ("llama", 1), ("chatml_format", 1)])
def test_exit_code_says_whether_tools_would_work(name: str, code: int, run_llmrl):
    verdict = "ok  verdict" if code == 0 else "NO  verdict       do not train with it: tools"
    words = ["ok  tools=[]      writes the same text"]
    assert run_llmrl("template", name, "--tools", code=code, words=words).out.splitlines()[-1].startswith(verdict)


def test_conversation_is_shown_with_what_is_trained_and_lines_with_the_answers(run_llmrl):
    words = ["ok  tools         are declared", "ok  tool calls    are trained, and their results are not"]
    words += ["ok  stop token    '<|im_end|>'", "ok  prefix        a longer conversation begins with the shorter one"]
    out = run_llmrl("template", "qwen", "--tools", words=["«It is 4.<|im_end|>»", *words]).out
    assert '«<tool_call>\n{"name": "add"' in out


def test_folder_with_a_tokenizer_is_judged_by_its_own_template(tmp_path: Path):
    diagnosis = diagnose(saved(tmp_path, CHATML))
    assert diagnosis.problems == []
    assert "the tokenizer's own; no generation blocks" in detail(diagnosis, "template")
    assert "eos '<|im_end|>'" in detail(diagnosis, "tokenizer")
    bare = tmp_path / "Qwen3-bare"
    assert "none of its own; guessed, that of 'qwen3'" in detail(diagnose(saved(bare, None)), "template")
    save_tiny(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()  # Transformers makes a tokenizer of no entries
    with pytest.raises(DataError, match=r"tokenizer.json is missing"):
        diagnose(str(tmp_path / "model"))


def test_end_of_turn_that_stops_no_generation_is_a_problem(tmp_path: Path, run_llmrl):
    folder = saved(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}")
    assert found(diagnose(folder))["stop token"] is False
    run_llmrl("template", folder, code=1, words=["NO  verdict       do not train with it: stop token"])


def test_template_that_rewrites_the_past_is_said_and_is_fine_for_one_turn(tmp_path: Path):
    dropping = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
    diagnosis = diagnose(saved(tmp_path, dropping))
    assert found(diagnosis)["prefix"] is None
    assert "when the user speaks after an answer with thinking" in detail(diagnosis, "prefix")
    assert diagnosis.verdict == "fine for one turn; each further turn starts a new stream"


def test_tools_that_are_ignored_and_an_empty_list_that_is_not_are_found(tmp_path: Path):
    ignoring = diagnose(saved(tmp_path / "ignoring", CHATML), tools=True)
    assert "does not use tools" in detail(ignoring, "tools")
    assert found(ignoring)["tool calls"] is False
    mentioning = diagnose(saved(tmp_path / "mentioning", "{# tools come later #}" + CHATML), tools=True)
    assert "are not shown to the model" in detail(mentioning, "tools")
    confused = "{% if tools is not none %}<|im_start|>system\nTools:<|im_end|>\n{% endif %}" + CHATML
    assert found(diagnose(saved(tmp_path / "confused", confused)))["tools=[]"] is None


def test_system_prompt_that_a_template_adds_by_itself_is_shown(tmp_path: Path):
    preamble = "<|im_start|>system\nYou are a very helpful assistant.<|im_end|>\n" + CHATML
    assert "You are a very helpful assistant." in detail(diagnose(saved(tmp_path, preamble)), "preamble")
    assert "preamble" not in found(diagnose("qwen"))


def test_template_that_renders_nothing_is_a_problem(tmp_path: Path):
    diagnosis = diagnose(saved(tmp_path, "{{ raise_exception('no chat') }}"))
    assert [finding.name for finding in diagnosis.problems] == ["rendering"]
    assert "no chat" in detail(diagnosis, "rendering")


def test_conversations_of_a_file_are_counted_and_shown(tmp_path: Path, run_llmrl):
    path = tmp_path / "chats.jsonl"
    turns = (("user", "two"), ("user", "three"), ("assistant", "second"))
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"prompt": "one", "completion": "first"}, {"messages": messages}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["«first<|im_end|>»", "«second<|im_end|>»", f"in 2 of 2 conversations of {path}"]
    run_llmrl("template", "qwen", "--data", path, words=words)
    alternating = diagnose("llama", data=str(path))
    assert found(alternating)["coverage"] is False
    assert "in 1 of 2 conversations" in detail(alternating, "coverage")
    assert "conversation 1, message 1, role 'user'" in detail(alternating, "coverage")


def test_json_holds_everything(run_llmrl):
    report = json.loads(run_llmrl("template", "gpt_oss", "--json").out)
    assert report["ok"]
    assert report["template"] == "gpt_oss"
    assert {finding["name"]: finding["ok"] for finding in report["findings"]}["prefix"] is None
    assert 0 < report["trained_share"] < 1


def test_a_chosen_template_and_its_variables_are_what_is_judged(tmp_path: Path, run_llmrl):
    folder = saved(tmp_path / "model", CHATML)
    (tmp_path / "mine.jinja").write_text(CHATML.replace("<|im_start|>", "<|im_start|>The "))
    words = ["<|im_start|>The assistant", "as the settings say; no generation blocks"]
    run_llmrl("template", folder, f"chat_template={tmp_path / 'mine.jinja'}", words=words)
    run_llmrl("template", folder, "chat_template=phi", code=1, words=["that of 'phi'", "do not train with it: stop"])
    quiet = run_llmrl("template", "qwen3", "template_variables.enable_thinking=false", words=["with variables"])
    assert "«<think>" not in quiet.out
    run_llmrl("template", "qwen3", "optim.lr=1", code=2, words=["takes the settings chat_template and"])


def test_unknown_name_is_refused_with_a_near_one(run_llmrl):
    run_llmrl("template", "qwen4", code=3, words=["Registered templates: chatml_format, ", "Did you mean 'qwen"])
    run_llmrl("template", code=2)
