# ruff: noqa: RUF001 (one format is written with full-width bars)
"""Chat templates: the registered families, the rule that chooses one for a tokenizer, and the text that they write.

A template is jinja text in the dialect of the Transformers library; what the assistant writes is enclosed in
``{% generation %}`` and ``{% endgeneration %}``. The tokenizer's own template is preferred to a guess, and a template
that the user registered for the model to both. The built-in texts are the files of ``llmrl.chat_templates``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from llmrl.errors import ConfigError, TemplateError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # {"role": str, "content": str, ...} as in the chat format of the Transformers library
Chat = Sequence[Message]
Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]
Parser = Callable[[str], Any]  # text -> list[Message], or a History

_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def plain_columns(chat: Chat) -> tuple[list[str], list[str]] | None:
    """The roles and the texts of messages that are dicts of both and nothing else, as nearly all are; else None.

    No step of Python per message: each request of a long conversation repeats all of it.
    """
    if {*map(type, chat)} != {dict} or {*map(len, chat)} != {2}:
        return None
    try:
        roles, texts = [*map(_ROLE, chat)], [*map(_CONTENT, chat)]
    except KeyError:
        return None
    return (roles, texts) if {*map(type, roles), *map(type, texts)} == {str} else None


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat format of one model family: its template, its parser, and what identifies its models."""

    name: str
    jinja: str
    parse: Parser | None = None  # inverse of ``jinja``; a cut-off last message carries "is_complete": False
    answer: Callable[[str], Message] | None = None  # parses an answer into fields; None: its text is its content
    keywords: tuple[str, ...] = ()  # lower-case substrings of the names of models that use it
    special_tokens: tuple[str, ...] = ()  # control tokens that the format uses, the end of a turn last
    text_markers: tuple[str, ...] = ()  # structure that tokenizes as ordinary text: refused inside messages
    rewrites: str = ""  # what changes in the text when the conversation continues; "" if nothing does
    recognised_by: tuple[str, ...] = ()  # control tokens that identify other templates of this format

    @property
    def marks_generation(self) -> bool:
        """True if generation blocks in the template mark the text that the assistant writes."""
        return _GENERATION_BLOCK.search(self.jinja) is not None


@dataclass(frozen=True, slots=True)
class _Parser:
    """A function of `llmrl.data.llm.parsers`, imported when it is called. Equal by value: templates are cached by it.

    home  its file and name, such as "chatml.parse_qwen3"
    """

    home: str
    keywords: tuple[tuple[str, Any], ...] = ()

    def __call__(self, text: str) -> Any:
        file, name = self.home.split(".")
        return getattr(importlib.import_module(f"llmrl.data.llm.parsers.{file}"), name)(text, **dict(self.keywords))


_OTHER_CHATML = re.compile(r"<\|im_(?!start|end)")  # dialects with a marker between role and content

_TEMPLATES: dict[str, ChatTemplate] = {}
_BUILT_IN: dict[str, ChatTemplate] = {}


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Parser | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Registers a model family's chat format for this process.

    Reads   template               jinja text with a generation block around what the assistant writes
            inverse_parser         text -> messages (a list of dicts, or a `History`), for ``History.from_text``
            model_family_keywords  the template is used for tokenizers whose name contains one of them (ignoring case),
                                   even if the tokenizer has a template of its own
    Raises  TemplateError if there is no generation block, if the name is taken by another template of yours (a
            built-in one is replaced), for an empty keyword, or a parser that cannot be called

    >>> jinja = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    >>> add_chat_template("contents_only", jinja)
    >>> find_template(None, "contents_only").marks_generation
    True
    """
    if isinstance(model_family_keywords, str):
        model_family_keywords = [model_family_keywords]
    keywords = tuple(keyword.lower() for keyword in model_family_keywords or ())
    if "" in keywords:
        raise TemplateError(
            f"add_chat_template: a keyword must be part of a model's name: got {keywords} for {template_name!r}; an "
            "empty one is in every name."
        )
    if not (inverse_parser is None or callable(inverse_parser)):
        raise TemplateError(
            f"add_chat_template: inverse_parser must be a function of a text: got {type(inverse_parser).__name__}."
        )
    row = ChatTemplate(template_name, template, inverse_parser, keywords=keywords)
    if not row.marks_generation:
        raise TemplateError(
            f"add_chat_template: template {template_name!r} must mark what the assistant writes: got no "
            "{% generation %} block; wrap the assistant's content in {% generation %}...{% endgeneration %}."
        )
    taken = _TEMPLATES.get(template_name)
    if taken not in (None, row, _BUILT_IN.get(template_name)):
        raise TemplateError(
            f"add_chat_template: template name must be new: {template_name!r} is taken by another template; "
            f"names taken: {', '.join(sorted(_TEMPLATES))}."
        )
    _TEMPLATES[template_name] = row


def find_template(
    tokenizer: PreTrainedTokenizerBase | None, name: str | None = None, *, template: str | None = None
) -> ChatTemplate:
    """The template to use: ``template`` itself, else ``name``, else one that you registered for this model, else
    the tokenizer's own, else a built-in one by the model's name, else ChatML.

    Reads   tokenizer.chat_template  text, or a table of texts by name; its "default" entry is *its own* template
            tokenizer.name_or_path   compared with the keywords of the templates that you registered and, only when the
                                     tokenizer has no template, of the built-in ones; longer keywords first
    Raises  TemplateError for an unknown name, listing the known ones, or a table without "default"; TypeError for a
            tokenizer given by name
    """
    if isinstance(tokenizer, str):
        raise TypeError(
            f"find_template: a tokenizer must be the object: got the name {tokenizer!r}; load it with "
            "AutoTokenizer.from_pretrained."
        )
    own = getattr(tokenizer, "chat_template", None)
    own_by_name = own if isinstance(own, dict) else {}
    if template is not None:
        return _unregistered("custom", template)
    if name is not None:
        if name in _TEMPLATES:
            return _TEMPLATES[name]
        if name in own_by_name:
            return _unregistered(name, own_by_name[name])
        known = sorted({*_TEMPLATES, *own_by_name})
        raise TemplateError(
            f"find_template: chat template must be registered: got {name!r}, known: {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )
    if isinstance(own, dict):
        if own and "default" not in own:
            raise TemplateError(
                "find_template: a tokenizer with several chat templates must have a default one: it has "
                f"{', '.join(own)}; name one of them."
            )
        own = own.get("default")
    model_name = (getattr(tokenizer, "name_or_path", None) or "").lower()
    found = [
        (row not in _BUILT_IN.values(), len(keyword), row)
        for row in _TEMPLATES.values()
        for keyword in row.keywords
        if keyword in model_name
    ]
    # Registered templates before built-in ones, then the longest keyword; rows themselves cannot be ordered.
    is_yours, _, row = max(found, key=lambda match: match[:2], default=(False, 0, _TEMPLATES["chatml_format"]))
    return _unregistered("tokenizer", own) if own and not is_yours else row


def choose_template(
    tokenizer: PreTrainedTokenizerBase, asked: str | None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template that settings ask for, with its ``variables`` as defaults written at its beginning.

    Reads   asked  jinja text, a name as in `find_template`, or "module:name" for one that a module registers under that
                   name or holds as text; None: as `find_template`
    Raises  TemplateError for an unknown name; ConfigError for a module that cannot be imported, or for a variable that
            the template does not use, or that every rendering sets
    """
    if asked is None:
        row = find_template(tokenizer)
    elif "{%" in asked or "{{" in asked:
        row = find_template(tokenizer, template=asked)
    elif ":" in asked and asked not in _TEMPLATES:
        row = _of_module(tokenizer, asked)
    else:
        row = find_template(tokenizer, asked)
    if not variables:
        return row
    check_variables(row, variables, "template_variables")
    if fixed := sorted({*variables} & {"messages", "tools", "add_generation_prompt", *tokenizer.special_tokens_map}):
        raise ConfigError(
            f"template_variables: must be variables of the template's own: got {', '.join(fixed)}, which the messages "
            "or the tokenizer set."
        )
    # trim_blocks removes the newline behind each block
    lines = [f"{{%- set {name} = {name} | default({value!r}) %}}\n" for name, value in variables.items()]
    return replace(row, jinja="".join(line for line in lines if line not in row.jinja) + row.jinja)


_DEFAULTS = re.compile(r"\A(?:\{%- set (\w+) = \1 \| default\([^\n]*\) %\}\n)+")


def _of_module(tokenizer: PreTrainedTokenizerBase, asked: str) -> ChatTemplate:
    from llmrl.loading import load_object, split_name

    name = split_name(asked, what="chat_template")[1]
    try:
        held = load_object(asked, what="chat_template")
    except ConfigError:
        if name not in _TEMPLATES:  # the module need not hold what it registers
            raise
        held = None
    if name in _TEMPLATES:
        return _TEMPLATES[name]
    if not isinstance(held, str):
        raise ConfigError(
            f"chat_template: {asked!r} must be a template's text, or be registered under its name with "
            f"add_chat_template: got {type(held).__name__}."
        )
    return find_template(tokenizer, template=held)


def check_variables(template: ChatTemplate, variables: Mapping[str, Any] | None, who: str = "template_kwargs") -> None:
    """Raises ConfigError for a variable that a template does not use: it would have no effect."""
    for name in variables or ():
        if not re.search(rf"\b{re.escape(name)}\b", template.jinja):
            words = sorted(set(re.findall(r"[a-z]\w+", template.jinja)))
            raise ConfigError(
                f"{who}: template {template.name!r} does not use the variable {name!r}.{did_you_mean(name, words)}"
            )


def ending_with(token: str | None) -> list[str]:
    """The names of the registered templates that end a turn with this token, and need no other, sorted."""
    return sorted(row.name for row in _TEMPLATES.values() if row.special_tokens == (token,))


def template_names() -> list[str]:
    """The names of the registered templates, sorted."""
    return sorted(_TEMPLATES)


def _unregistered(name: str, jinja: str) -> ChatTemplate:
    """A row for a template given as text. If its control tokens identify the format, the row has that parser."""
    base = _DEFAULTS.sub("", jinja)
    for row in _TEMPLATES.values():
        if row.jinja == base:  # a tokenizer that was saved with a registered template: its parser fits
            return row if row.jinja == jinja else replace(row, jinja=jinja)
    for row in _BUILT_IN.values():
        tokens = row.recognised_by
        if tokens and all(token in jinja for token in tokens) and not _OTHER_CHATML.search(jinja):
            parse, answer = row.parse, row.answer
            if row.name == "gpt_oss":
                from llmrl.data.llm.parsers.gpt_oss import thought_key

                thought = (("thought", thought_key(jinja)),)
                parse, answer = replace(parse, keywords=thought), replace(answer, keywords=thought)
            return ChatTemplate(name, jinja, parse, answer, special_tokens=row.special_tokens)
    return ChatTemplate(name, jinja)


# The table of families; tokens are separated by spaces. The longest keyword wins: "llama3" before "llama".


def _family(
    name: str, parse: str, tokens: str, keywords: str = "", *, markers: str = "", known_by: str = "", **fields: Any
) -> None:
    jinja = resources.files("llmrl.chat_templates").joinpath(f"{name}.jinja").read_text("utf-8")
    lists = {"keywords": keywords, "special_tokens": tokens, "text_markers": markers, "recognised_by": known_by}
    fields |= {field: tuple(value.split()) for field, value in lists.items()}
    _BUILT_IN[name] = _TEMPLATES[name] = ChatTemplate(name, jinja, _Parser(parse), **fields)


_CHATML, _ROLES = "<|im_start|> <|im_end|>", "<|system|> <|user|> <|assistant|>"
_LLAMA3, _GEMMA = "<|start_header_id|> <|end_header_id|> <|eot_id|>", "<start_of_turn> <end_of_turn>"
_LLAMA3_TURNS = "<|start_header_id|> <|eot_id|>"
_MISTRAL = "<s> [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [INST] [/INST] </s>"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> "
    "<｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
    "<｜tool▁outputs▁end｜> <｜end▁of▁sentence｜>"
)
_GPT_OSS = "<|start|> <|channel|> <|constrain|> <|message|> <|call|> <|end|> <|return|>"
_DROPS_THINKING = "only the answers after the last question keep their thinking, or an empty block in its place"
_DROPS_ANALYSIS = "an answer that is not the last ends with another marker, and what was thought up to it is dropped"

_family("chatml_format", "chatml.parse_chatml", _CHATML, known_by=_CHATML)
_family("qwen", "chatml.parse_chatml", _CHATML, "qwen")
_family("qwen3", "chatml.parse_qwen3", _CHATML, "qwen3 qwen-3", rewrites=_DROPS_THINKING)
_family("llama", "turns.parse_llama", "<s> </s>", "llama", markers="[INST] [/INST] <<SYS>> <</SYS>>")
_family("llama3", "turns.parse_llama3", f"<|begin_of_text|> {_LLAMA3}", "llama-3 llama3", known_by=_LLAMA3_TURNS)
_family("mistral", "turns.parse_mistral", _MISTRAL, "mistral mixtral ministral")
_family("gemma", "turns.parse_gemma", f"<bos> {_GEMMA}", "gemma", known_by=_GEMMA)
_family("phi", "turns.parse_phi", f"{_ROLES} <|end|>", "phi-3 phi3")
_family("deepseek", "deepseek.parse_deepseek", _DEEPSEEK, "deepseek", known_by="<｜User｜> <｜Assistant｜>")
_family("falcon", "turns.parse_falcon", "<|endoftext|>", "falcon", markers=_ROLES)
_family("dialogpt", "turns.parse_dialogpt", "<|endoftext|>", "dialogpt")
_family(
    "gpt_oss",
    "gpt_oss.parse_gpt_oss",
    _GPT_OSS,
    "gpt-oss gpt_oss",
    known_by="<|channel|> <|message|> <|return|>",
    answer=_Parser("gpt_oss.read_gpt_oss_answer"),
    rewrites=_DROPS_ANALYSIS,
)
