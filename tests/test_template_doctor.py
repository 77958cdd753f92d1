"""``llmrl template``: what it finds in good and bad templates, what it prints, and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmrl.commands.template_report import diagnose
from llmrl.data.llm.templates import template_names
from llmrl.errors import DataError
from llmrl.testing import tiny_tokenizer
from tests.support.golden import check_golden
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


DROPPING = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
CASES = {  # a template -> its text, where it is none of the registered ones, and arguments of the command
    "qwen": (None, "--tools"),
    "qwen3": (None, "template_variables.enable_thinking=false"),
    "llama": (None, "--tools"),
    "own": (CHATML,),
    "rewrites-the-past": (DROPPING,),
    "stops-no-generation": ("{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}",),
    "ignores-tools": (CHATML, "--tools"),
    "mentions-tools": ("{# tools come later #}" + CHATML, "--tools"),
    "takes-none-for-tools": ("{% if tools is not none %}<|im_start|>system\nTools:<|im_end|>\n{% endif %}" + CHATML,),
    "has-a-preamble": ("<|im_start|>system\nYou are a very helpful assistant.<|im_end|>\n" + CHATML,),
    "renders-nothing": ("{{ raise_exception('no chat') }}",),
    "chosen-otherwise": (CHATML, "chat_template=phi"),
}


def test_the_report_shows_what_is_trained_and_what_is_wrong(tmp_path: Path, run_llmrl, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = ""
    for name, (template, *arguments) in CASES.items():
        if template is not None:
            saved(tmp_path / name, template)
        fine = name in ("qwen", "qwen3", "own", "rewrites-the-past", "takes-none-for-tools", "has-a-preamble")
        result = run_llmrl("template", name, *arguments, code=0 if fine else 1)
        pages += f"$ llmrl template {' '.join([name, *arguments])}\n{result.out}{result.err}\n"
    check_golden("template", re.sub(r"(tokenizer +)\w+ of", r"\1a tokenizer of", pages))


def test_folder_without_a_template_or_a_tokenizer(tmp_path: Path):
    bare = {finding.name: finding.detail for finding in diagnose(saved(tmp_path / "Qwen3-bare", None)).findings}
    assert "none of its own; guessed, that of 'qwen3'" in bare["template"]
    save_tiny(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()  # Transformers makes a tokenizer of no entries
    with pytest.raises(DataError, match=r"tokenizer.json is missing"):
        diagnose(str(tmp_path / "model"))


def test_conversations_of_a_file_are_counted_and_shown(tmp_path: Path, run_llmrl):
    path = tmp_path / "chats.jsonl"
    turns = (("user", "two"), ("user", "three"), ("assistant", "second"))
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"prompt": "one", "completion": "first"}, {"messages": messages}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["«first<|im_end|>»", "«second<|im_end|>»", f"in 2 of 2 conversations of {path}"]
    run_llmrl("template", "qwen", "--data", path, words=words)
    coverage = next(finding for finding in diagnose("llama", data=str(path)).findings if finding.name == "coverage")
    assert coverage.ok is False
    assert "in 1 of 2 conversations" in coverage.detail
    assert "conversation 1, message 1, role 'user'" in coverage.detail


def test_json_holds_everything(run_llmrl):
    report = json.loads(run_llmrl("template", "gpt_oss", "--json").out)
    assert report["ok"]
    assert report["template"] == "gpt_oss"
    assert {finding["name"]: finding["ok"] for finding in report["findings"]}["prefix"] is None
    assert 0 < report["trained_share"] < 1


def test_a_chosen_template_is_what_is_judged(tmp_path: Path, run_llmrl):
    folder = saved(tmp_path / "model", CHATML)
    (tmp_path / "mine.jinja").write_text(CHATML.replace("<|im_start|>", "<|im_start|>The "))
    words = ["<|im_start|>The assistant", "as the settings say; no generation blocks"]
    run_llmrl("template", folder, f"chat_template={tmp_path / 'mine.jinja'}", words=words)
    run_llmrl("template", "qwen3", "optim.lr=1", code=2, words=["takes the settings chat_template and"])


def test_unknown_name_is_refused_with_a_near_one(run_llmrl):
    run_llmrl("template", "qwen4", code=3, words=["Registered templates: chatml_format, ", "Did you mean 'qwen"])
    run_llmrl("template", code=2)
