"""``llmrl template``: the effect of a chat template on training, shown on a conversation, one line per check.

The checks render conversations; they do not read the jinja. A problem makes training wrong; other findings are for
information, such as a template that renders earlier turns differently once a conversation is longer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.data.llm.dataset_files import load_rows
from llmrl.data.llm.message_forms import render_text
from llmrl.data.llm.rows import read_conversation
from llmrl.data.llm.templates import choose_template, template_names
from llmrl.errors import DataError, TemplateError
from llmrl.modules.llm.model_files import check_letters
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.run.console import Finding, Sample, make_console, print_conversations, print_findings
from llmrl.train.adapter_files import start_adapter, tokenizer_of
from llmrl.train.data.sft import marked_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, Any]]

_MAX_ROWS = 1000  # conversations of a file that are checked
_SHOWN = 2  # conversations of a file that are printed
_QUESTION, _ANSWER = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}
_MORE = [{"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "That is 6."}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
_WITH_TOOL = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    _ANSWER,
]


@dataclass
class Diagnosis:
    """The findings on a template, and the conversations that it was checked with."""

    name: str
    template: str
    findings: list[Finding] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    trained_share: float = 0.0

    def add(self, name: str, ok: bool | None, detail: str) -> None:
        self.findings.append(Finding(name, ok, detail))

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.ok is False]

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"do not train with it: {', '.join(finding.name for finding in self.problems)}"
        rewriting = any(finding.name == "prefix" and finding.ok is None for finding in self.findings)
        return "fine for one turn; each further turn starts a new stream" if rewriting else "fine"


def run(name: str, *, tools: bool = False, data: str | None = None, as_json: bool = False, **chosen: Any) -> int:
    """Prints the diagnosis of the template of ``name``; returns 1 if it has a problem, else 0.

    Reads   name   a folder with a tokenizer, a registered template, or a name on the Hugging Face hub
            tools  True if conversations with tools must work
            data   a dataset file, or a name on the hub, whose conversations replace the built-in one
            chosen  ``chat_template`` and ``template_variables`` of `choose_template`
    Raises  DataError if the tokenizer or the data cannot be loaded
    """
    diagnosis = diagnose(name, tools=tools, data=data, **chosen)
    failed = bool(diagnosis.problems)
    if as_json:
        print(json.dumps(asdict(diagnosis) | {"verdict": diagnosis.verdict, "ok": not failed}))
        return int(failed)
    console = make_console()
    print_conversations(console, diagnosis.samples)
    print_findings(console, [*diagnosis.findings, Finding("verdict", not failed, diagnosis.verdict)])
    return int(failed)


def diagnose(
    name: str,
    *,
    tools: bool = False,
    data: str | None = None,
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Checks the template on conversations. See :func:`run`."""
    tokenizer, source = _load_tokenizer(name)
    template = choose_template(tokenizer, chat_template, template_variables)
    own = "the tokenizer's own" if getattr(tokenizer, "chat_template", None) else "none of its own; guessed"
    if chat_template is not None or template_variables:
        own = "as the settings say" if chat_template is not None else f"{own}, with variables"
        tokenizer.chat_template = template.jinja
    diagnosis = Diagnosis(name, template.name)
    diagnosis.add("tokenizer", True, source)
    try:
        renderer = Renderer(tokenizer)
    except TemplateError as error:
        diagnosis.add("rendering", False, str(error))
        return diagnosis
    spans = "no generation blocks: what the assistant writes is found by rendering what comes before it"
    if template.marks_generation:
        spans = "generation blocks say what the assistant writes"
    registered = "" if template.name in ("tokenizer", "custom") else f", that of {template.name!r}"
    diagnosis.add("template", True, f"{own}{registered}; {spans}")
    _check_coverage(diagnosis, renderer, data)
    _check_tools(diagnosis, renderer, wanted=tools)
    if tools:
        _check_tool_calls(diagnosis, renderer)
    report = renderer.check()
    stop = tokenizer.decode(renderer.end_of_turn_ids) if renderer.end_of_turn_ids else "none"
    detail = f"an answer ends with {stop!r}, which does not stop generation: the model will not learn to stop"
    if report.stop_token_trained:
        detail = f"{stop.strip()!r} ends an answer and is trained"
    diagnosis.add("stop token", report.stop_token_trained, detail)
    kept = report.prefix_preserving or None
    diagnosis.add("prefix", kept, "a longer conversation begins with the shorter one" if kept else report.reason)
    _check_preamble(diagnosis, renderer)
    _check_parser(diagnosis, renderer)
    return diagnosis


def _load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, str]:
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from llmrl.testing import tiny_tokenizer

    if not Path(name).expanduser().is_dir() and name in template_names():
        return tiny_tokenizer(template=name), f"a stand-in with the control tokens of the registered template {name!r}"
    disable_progress_bar()
    try:
        path = str(Path(name).expanduser()) if Path(name).exists() else name
        path = path if (adapter := start_adapter(path)) is None else tokenizer_of(adapter)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"llmrl template: {name} must have a tokenizer: {' '.join(str(error).split())}") from error
    check_letters(tokenizer, name)
    return tokenizer, f"{type(tokenizer).__name__} of {name}, {len(tokenizer)} tokens, eos {tokenizer.eos_token!r}"


def _check_coverage(diagnosis: Diagnosis, renderer: Renderer, data: str | None) -> None:
    """Renders and masks the conversations, one by one if the template refuses the batch."""
    chats: list[Chat] = [[_QUESTION, _ANSWER, *_MORE]]
    if data:
        rows = load_rows(data)
        read = [read_conversation(rows[index], number=index + 1) for index in range(min(len(rows), _MAX_ROWS))]
        chats = [row.chats[0] for row in read if row.is_trained]
    rendered: list[Rendered] = []
    refused = ""
    try:
        rendered = renderer.render(chats)
    except TemplateError as error:
        refused = str(error)
        for chat in chats if len(chats) > 1 else ():
            with suppress(TemplateError):
                rendered += renderer.render([chat])
    trained, total = sum(int(row.assistant_mask.sum()) for row in rendered), sum(len(row.ids) for row in rendered)
    diagnosis.trained_share = trained / total if total else 0.0
    source = f"{len(rendered)} of {len(chats)} conversations of {data}" if data else "a made-up conversation"
    detail = f"{trained} of {total} tokens trained ({diagnosis.trained_share:.0%}) in {source}"
    diagnosis.add("coverage", trained > 0 and not refused, f"{detail}. {refused}".removesuffix(" "))
    diagnosis.samples += [_sample(renderer, row, "trained") for row in rendered[:_SHOWN]]


def _sample(renderer: Renderer, row: Rendered, label: str) -> Sample:
    return Sample(marked_pieces(renderer.tokenizer, row.ids, row.assistant_mask), label=label)


def _check_tools(diagnosis: Diagnosis, renderer: Renderer, *, wanted: bool) -> None:
    """Compares the texts rendered with ``tools=None``, with ``tools=[]`` and with one tool."""
    texts: list[str] = []
    for tools in (None, [], [_TOOL]):
        try:
            texts += render_text(renderer.template, [[_QUESTION, _ANSWER]], renderer.tokenizer, tools=tools)
        except TemplateError as error:
            texts.append(f"refused: {error}")
    without, empty, one = texts
    same = "writes the same text as tools=None"
    other = "writes a different text than tools=None; llmrl renders both as None"
    diagnosis.add("tools=[]", without == empty or None, same if without == empty else other)
    bad = False if wanted else None
    if one.startswith("refused: "):
        diagnosis.add("tools", bad, one)
    elif one == without:
        diagnosis.add("tools", bad, "are not shown to the model: the text is the same without them")
    else:
        diagnosis.add("tools", True, "are declared to the model")


def _check_tool_calls(diagnosis: Diagnosis, renderer: Renderer) -> None:
    try:
        [row] = renderer.render([_WITH_TOOL], tools=[_TOOL])
    except TemplateError as error:
        diagnosis.add("tool calls", False, str(error))
        return
    call = renderer.tokenizer.decode(row.ids[slice(*row.spans[0])])
    right = "add" in call and len(row.spans) == 2 and "4" not in call
    wrong = f"the call must be trained and its result not: trained is {call!r}"
    diagnosis.add("tool calls", right, "are trained, and their results are not" if right else wrong)
    diagnosis.samples.append(_sample(renderer, row, "with a tool"))


def _check_preamble(diagnosis: Diagnosis, renderer: Renderer) -> None:
    """Reports a system prompt that the template adds by itself."""
    [text] = render_text(renderer.template, [[_QUESTION]], renderer.tokenizer)
    before = text.partition(_QUESTION["content"])[0]
    for token in renderer.tokenizer.all_special_tokens:
        before = before.replace(token, " ")
    words = before.split()
    if len(words) > 3:  # more than role names
        diagnosis.add("preamble", None, f"appears by itself: {' '.join(words)!r}")


def _check_parser(diagnosis: Diagnosis, renderer: Renderer) -> None:
    parse = renderer.template.parse
    if parse is None:
        diagnosis.add("reading back", None, "text cannot be read back into messages: give add_chat_template a parser")
        return
    chat = [_QUESTION, _ANSWER, *_MORE]
    try:
        [text] = render_text(renderer.template, [chat], renderer.tokenizer)
    except TemplateError:
        return
    same = [{"role": message["role"], "content": message["content"]} for message in parse(text)] == chat or None
    diagnosis.add("reading back", same, f"text {'gives' if same else 'does not give'} its messages back")
