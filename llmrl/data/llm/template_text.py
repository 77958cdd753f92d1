"""Conversations -> the text that a chat template makes of them: the Transformers library's own rendering.

The tools are those that are given, or that the first message of a conversation declares under ``"tools"``. What jinja
would leave out without a word is refused. Escapes, spans and ids are added by `llmrl.data.llm.codec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import render_jinja_template

from llmrl.data.llm.masks import Span
from llmrl.data.llm.templates import ChatTemplate, Message, check_variables
from llmrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["REFUSALS", "Chat", "Tools", "render_text", "rendered"]

Chat = Sequence[Message]
Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]

REFUSALS = (
    JinjaError,
    TypeError,
    KeyError,
    ValueError,
)  # what a template raises for a conversation that it does not do


def render_text(
    template: ChatTemplate,
    chats: Sequence[Chat],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """The text of each conversation as the template writes it, nothing escaped: to be shown, not to be tokenised.

    Raises  TemplateError if the template refuses a conversation, ConfigError if it never speaks of one of
            ``template_kwargs``
    """
    check_variables(template, template_kwargs)
    holder = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds its tokenizer
    special_tokens = holder.special_tokens_map if holder is not None else {}
    try:
        return rendered(
            chats,
            tools,
            chat_template=template.jinja,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**special_tokens, **(template_kwargs or {})},
        )[0]
    except REFUSALS as error:
        raise TemplateError(
            f"render_text: template {template.name!r} must render the conversation: {error}."
        ) from error


def rendered(chats: Sequence[Chat], tools: Tools | None, **options: Any) -> tuple[list[str], list[list[Span]]]:
    """The library's rendering; with ``tools`` None, of the tools that a conversation's first message declares.

    Raises  ValueError for tools, or calls of them, in a template that jinja would leave them out of without a word
    """
    declared = [chat[0].get("tools") if tools is None and len(chat) else None for chat in chats]
    jinja = options["chat_template"]
    if "tools" not in jinja and (tools or any(declared)):
        raise ValueError("its text never speaks of tools: describe them in the system message instead")
    if "tool_calls" not in jinja and any(message.get("tool_calls") for chat in chats for message in chat):
        raise ValueError("its text never speaks of tool_calls: what a message calls would be lost; write it as content")
    if not any(declared):
        return render_jinja_template(conversations=chats, tools=tools, **options)
    rows = [
        render_jinja_template(conversations=[chat], tools=own or None, **options)
        for chat, own in zip(chats, declared, strict=True)
    ]
    return [text for texts, _ in rows for text in texts], [block for _, blocks in rows for block in blocks]
