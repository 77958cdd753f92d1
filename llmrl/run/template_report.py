"""``llmrl template``: what a chat template does to training, shown on a conversation and said in one line per question.

The answers come from rendering, not from reading the jinja. What makes training wrong is a problem; the rest is worth
knowing, such as earlier turns that are written anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from llmrl.data.llm.dataset_files import load_rows, to_messages
from llmrl.data.llm.templates import find_template, render_text, template_names
from llmrl.errors import DataError, TemplateError, did_you_mean
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.run.console import Sample, make_console, print_conversations
from llmrl.train.sft_data import marked_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Diagnosis", "Finding", "diagnose", "run"]

Chat = list[dict[str, Any]]

_MAX_ROWS = 1000  # conversations of a file that are looked at
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


@dataclass(frozen=True)
class Finding:
    """One line: ``ok`` True is as it should be, False makes training wrong, None is worth knowing."""

    name: str
    ok: bool | None
    detail: str


@dataclass
class Diagnosis:
    """What was found, and the conversations that it was found on."""

    name: str
    template: str
    findings: list[Finding] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    trained_share: float = 0.0

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.ok is False]

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"do not train with it: {', '.join(finding.name for finding in self.problems)}"
        rewriting = any(finding.name == "prefix" and finding.ok is None for finding in self.findings)
        return "fine for one turn; each further turn starts a new stream" if rewriting else "fine"


def run(name: str, *, tools: bool = False, data: str | None = None, as_json: bool = False) -> int:
    """Prints the diagnosis of the template of ``name``; returns 0 if there is no problem, else 1.

    Reads   name   a folder with a tokenizer, a registered template, or a name on the Hugging Face hub
            tools  whether conversations with tools are to work
            data   a dataset file, or a name on the hub, to look at its conversations instead of a made-up one
    Raises  DataError if the tokenizer or the data cannot be loaded
    """
    diagnosis = diagnose(name, tools=tools, data=data)
    if as_json:
        report = asdict(diagnosis) | {"verdict": diagnosis.verdict, "ok": not diagnosis.problems}
        print(json.dumps(report))
        return int(bool(diagnosis.problems))
    console = make_console()
    print_conversations(console, diagnosis.samples)
    for finding in [*diagnosis.findings, Finding("verdict", not diagnosis.problems, diagnosis.verdict)]:
        sign, style = {True: ("ok", "green"), False: ("NO", "bold red"), None: ("--", "dim")}[finding.ok]
        console.print(Text.assemble((f"{sign:<4}", style), f"{finding.name:<14}", finding.detail), soft_wrap=True)
    return int(bool(diagnosis.problems))


def diagnose(name: str, *, tools: bool = False, data: str | None = None) -> Diagnosis:
    """Tries the template on conversations. See :func:`run`."""
    tokenizer, source = _load_tokenizer(name)
    template = find_template(tokenizer)
    diagnosis = Diagnosis(name, template.name, [Finding("tokenizer", True, source)])
    add = diagnosis.findings.append
    try:
        renderer = Renderer(tokenizer)
    except TemplateError as error:
        add(Finding("rendering", False, str(error)))
        return diagnosis
    if template.marks_generation:
        spans = "generation blocks say what the assistant writes"
    else:
        spans = "no generation blocks: what the assistant writes is found by rendering what comes before it"
    own = "the tokenizer's own" if getattr(tokenizer, "chat_template", None) else "none of its own; guessed"
    registered = "" if template.name in ("tokenizer", "custom") else f", that of {template.name!r}"
    add(Finding("template", True, f"{own}{registered}; {spans}"))
    conversations = _conversations(data) if data else [[_QUESTION, _ANSWER, *_MORE]]
    _look_at_coverage(diagnosis, renderer, conversations, data)
    _look_at_tools(diagnosis, renderer, wanted=tools)
    report = renderer.check()
    stop = tokenizer.decode(renderer.end_of_turn_ids) if renderer.end_of_turn_ids else "none"
    add(
        Finding(
            "stop token",
            report.stop_token_trained,
            f"{stop.strip()!r} ends an answer and is trained"
            if report.stop_token_trained
            else f"an answer ends with {stop!r}, which stops no generation: the model will not learn to stop",
        )
    )
    add(
        Finding(
            "prefix",
            True if report.prefix_preserving else None,
            "a longer conversation begins with the shorter one" if report.prefix_preserving else report.reason,
        )
    )
    _look_at_preamble(diagnosis, renderer)
    _look_at_inverse(diagnosis, renderer)
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
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"llmrl template: must be a folder with a tokenizer, a registered template "
            f"({', '.join(template_names())}) or a name on the hub: got {name!r}."
            f"{did_you_mean(name, template_names())} "
            f"({str(error).splitlines()[0]})"
        ) from error
    return tokenizer, f"{type(tokenizer).__name__} of {name}, {len(tokenizer)} tokens, eos {tokenizer.eos_token!r}"


def _conversations(data: str) -> list[Chat]:
    rows = load_rows(data)
    return [to_messages(rows[index], number=index + 1) for index in range(min(len(rows), _MAX_ROWS))]


def _look_at_coverage(diagnosis: Diagnosis, renderer: Renderer, chats: Sequence[Chat], data: str | None) -> None:
    """Renders and masks the conversations, one by one where a batch is refused."""
    try:
        rendered: list[Rendered | None] = list(renderer.render(chats))
        refused = ""
    except TemplateError as error:
        rendered, refused = [], str(error)
        for chat in chats if len(chats) > 1 else ():
            try:
                rendered += renderer.render([chat])
            except TemplateError:
                rendered.append(None)
    good = [row for row in rendered if row is not None]
    trained, total = sum(int(row.assistant_mask.sum()) for row in good), sum(len(row.ids) for row in good)
    diagnosis.trained_share = trained / total if total else 0.0
    what = f"{len(good)} of {len(chats)} conversations of {data}" if data else "a made-up conversation"
    detail = f"{trained} of {total} tokens trained ({diagnosis.trained_share:.0%}) in {what}"
    diagnosis.findings.append(
        Finding("coverage", trained > 0 and not refused, f"{detail}. {refused}".removesuffix(" "))
    )
    shown = [row for row in good[:_SHOWN] if row is not None]
    diagnosis.samples += [
        Sample(marked_pieces(renderer.tokenizer, row.ids, row.assistant_mask), label="trained") for row in shown
    ]


def _look_at_tools(diagnosis: Diagnosis, renderer: Renderer, *, wanted: bool) -> None:
    """What ``tools=None``, ``tools=[]`` and a tool do to the text, and whether a call can be trained."""
    texts: dict[str, str] = {}
    for case, tools in (("None", None), ("[]", []), ("one", [_TOOL])):
        try:
            [texts[case]] = render_text(renderer.template, [[_QUESTION, _ANSWER]], renderer.tokenizer, tools=tools)
        except TemplateError as error:
            texts[case] = f"refused: {error}"
    if texts["None"] == texts["[]"]:
        diagnosis.findings.append(Finding("tools=[]", True, "writes the same text as tools=None"))
    else:
        diagnosis.findings.append(
            Finding("tools=[]", None, "writes another text than tools=None; llmrl renders both as None")
        )
    bad = False if wanted else None
    if texts["one"].startswith("refused: "):
        diagnosis.findings.append(Finding("tools", bad, texts["one"]))
    elif texts["one"] == texts["None"]:
        diagnosis.findings.append(
            Finding("tools", bad, "are not shown to the model: the text is the same without them")
        )
    else:
        diagnosis.findings.append(Finding("tools", True, "are declared to the model"))
    if not wanted:
        return
    try:
        [row] = renderer.render([_WITH_TOOL], tools=[_TOOL])
    except TemplateError as error:
        diagnosis.findings.append(Finding("tool calls", False, str(error)))
        return
    decode = renderer.tokenizer.decode
    call = decode(row.ids[slice(*row.spans[0])])
    written = "add" in call and len(row.spans) == 2
    untrained = "4" not in call
    diagnosis.findings.append(
        Finding(
            "tool calls",
            written and untrained,
            "are trained, and their results are not"
            if written and untrained
            else f"the call must be trained and its result not: trained is {call!r}",
        )
    )
    diagnosis.samples.append(
        Sample(marked_pieces(renderer.tokenizer, row.ids, row.assistant_mask), label="with a tool")
    )


def _look_at_preamble(diagnosis: Diagnosis, renderer: Renderer) -> None:
    """A system prompt that nobody asked for."""
    [text] = render_text(renderer.template, [[_QUESTION]], renderer.tokenizer)
    before = text.partition(_QUESTION["content"])[0]
    for token in renderer.tokenizer.all_special_tokens:
        before = before.replace(token, " ")
    words = before.split()
    if len(words) > 3:  # more than the names of roles
        diagnosis.findings.append(Finding("preamble", None, f"appears by itself: {' '.join(words)!r}"))


def _look_at_inverse(diagnosis: Diagnosis, renderer: Renderer) -> None:
    parse = renderer.template.parse
    if parse is None:
        diagnosis.findings.append(
            Finding("reading back", None, "text cannot be read back into messages: give add_chat_template a parser")
        )
        return
    chat = [_QUESTION, _ANSWER, *_MORE]
    try:
        [text] = render_text(renderer.template, [chat], renderer.tokenizer)
    except TemplateError:
        return
    same = [(message["role"], message["content"]) for message in parse(text)] == [
        (message["role"], message["content"]) for message in chat
    ]
    diagnosis.findings.append(
        Finding(
            "reading back", True if same else None, f"text {'gives' if same else 'does not give'} its messages back"
        )
    )
