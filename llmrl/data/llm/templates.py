"""Chat templates: the table of registered families, and the one rule that chooses a template for a tokenizer.

A template is jinja text in the dialect of the Transformers library; what the assistant writes stands between
``{% generation %}`` and ``{% endgeneration %}``. The tokenizer's own template always wins over a guess. The built-in
texts are the files of ``llmrl.chat_templates``; rendering is left to `llmrl.data.llm.codec`, reading to the parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from llmrl.data.llm.parsers import parse_chatml
from llmrl.errors import TemplateError, near

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # {"role": str, "content": str, ...} as in the chat format of the Transformers library
Parser = Callable[[str], Any]  # text -> list[Message], or a History

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One model family's chat format: how to write it, how to read it back, whose models use it."""

    name: str
    jinja: str
    parse: Parser | None = None  # inverse of ``jinja``; a cut-off last message carries "is_complete": False
    keywords: tuple[str, ...] = ()  # lower-case substrings of the names of models that use it

    @property
    def marks_generation(self) -> bool:
        """Whether the template says itself which text the assistant writes."""
        return _GENERATION_BLOCK.search(self.jinja) is not None


_TEMPLATES: dict[str, ChatTemplate] = {}


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Parser | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Registers a model family's chat format for this process.

    Reads   template               jinja text with a generation block around what the assistant writes
            inverse_parser         text -> messages (a list of dicts, or a `History`), for ``History.from_text``
            model_family_keywords  the template is taken for a tokenizer *without* a template of its own whose name
                                   holds one of them, whatever the case
    Raises  TemplateError if there is no generation block, or if the name is taken by another template

    >>> jinja = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    >>> add_chat_template("contents_only", jinja)
    >>> find_template(None, "contents_only").marks_generation
    True
    """
    row = ChatTemplate(
        template_name, template, inverse_parser, tuple(keyword.lower() for keyword in model_family_keywords or ())
    )
    if not row.marks_generation:
        raise TemplateError(
            f"add_chat_template: template {template_name!r} must mark what the assistant writes: got no "
            "{% generation %} block; wrap the assistant's content in {% generation %}...{% endgeneration %}."
        )
    if _TEMPLATES.setdefault(template_name, row) != row:
        raise TemplateError(
            f"add_chat_template: template name must be new: {template_name!r} is taken by another template; "
            f"names taken: {', '.join(sorted(_TEMPLATES))}."
        )


def find_template(
    tokenizer: PreTrainedTokenizerBase | None, name: str | None = None, *, template: str | None = None
) -> ChatTemplate:
    """The template to use: ``template`` itself, else ``name``, else the tokenizer's own, else a guess, else ChatML.

    Reads   tokenizer.chat_template  text, or a table of texts by name; its "default" entry is *its own* template
            tokenizer.name_or_path   only when it has no template: compared with the keywords of registered families
    Raises  TemplateError for an unknown name, listing the known ones
    """
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
            f"{near(name, known)}"
        )
    if isinstance(own, dict):
        own = own.get("default")
    if own:
        return _unregistered("tokenizer", own)
    model_name = (getattr(tokenizer, "name_or_path", None) or "").lower()
    for row in _TEMPLATES.values():
        if any(keyword in model_name for keyword in row.keywords):
            return row
    return _TEMPLATES["chatml_format"]


def _unregistered(name: str, jinja: str) -> ChatTemplate:
    """A row for a template that comes as text. ChatML is recognised by its marker, so it can be read back."""
    for row in _TEMPLATES.values():
        if row.jinja == jinja:
            return row
    return ChatTemplate(name, jinja, parse_chatml if "<|im_start|>" in jinja else None)


def _add_built_in(template_name: str, inverse_parser: Parser, model_family_keywords: Sequence[str] = ()) -> None:
    text = resources.files("llmrl.chat_templates").joinpath(f"{template_name}.jinja").read_text("utf-8")
    add_chat_template(template_name, text, inverse_parser, model_family_keywords)


_add_built_in("chatml_format", parse_chatml)
_add_built_in("qwen", parse_chatml, ("qwen",))
