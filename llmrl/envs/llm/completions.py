"""What the policy just said, as strings: the one place that finds the text of a turn in any input mode.

Rewards and parsers call `completion_texts`; they see the response only, never the prompt, and the same string whether
the batch carries messages, text or token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase

from llmrl.data.llm.columns import column_values
from llmrl.errors import MissingKeyError

__all__ = ["completion_texts", "trim_markers"]


def completion_texts(
    td: TensorDictBase,
    tokenizer: Any | None = None,
    *,
    who: str,
    mode: str | None = None,
    markers: tuple[str, ...] = (),
) -> list[str]:
    """The response of every row, without the end-of-turn markers (the template's, and ``markers``) at its end.

    Reads    ("text", "response"), else the contents of ("history", "response"), else ("tokens", "response") decoded;
             with ``mode``, only that one of the three
    Raises   MissingKeyError naming ``who`` where there is none of them, or only tokens and no ``tokenizer``
    """
    markers = (*special_tokens(tokenizer), *markers)
    text, history, tokens = (
        td.get(view, None) if mode in (None, view) else None for view in ("text", "history", "tokens")
    )
    if text is not None and (texts := _strings(text, "response")) is not None:
        return [trim_markers(response, markers) for response in texts]
    if history is not None and (response := history.response) is not None:
        return [trim_markers(_content(messages), markers) for messages in response.to_chats()]
    if (container := tokens) is not None and tokenizer is not None:
        ids = container.get("response", as_list=True)
        if ids is not None:
            rows = [row.tolist() for row in ids]
            return tokenizer.batch_decode(rows, skip_special_tokens=True)
    hint = " and a tokenizer" if tokenizer is None and "tokens" in td.keys() else ""
    raise MissingKeyError(
        f"{who}: the policy's response must be in ('text', 'response'), ('history', 'response') or ('tokens', "
        f"'response'){hint}: the batch has {', '.join(map(str, td.keys()))}."
    )


def special_tokens(tokenizer: Any | None) -> tuple[str, ...]:
    """The markers that may end a turn: the tokenizer's end and padding tokens, and ChatML's where none is known."""
    names = {"<|im_end|>", "<|endoftext|>"}
    if tokenizer is not None:
        names.update(t for t in (tokenizer.eos_token, tokenizer.pad_token) if t)
    return tuple(names)


def trim_markers(text: str, markers: Iterable[str]) -> str:
    """``text`` without the markers and line ends at its end.

    >>> trim_markers("36<|im_end|>\\n", ("<|im_end|>",))
    '36'
    """
    trimmed = text.rstrip()
    found = False
    while any(trimmed.endswith(marker := m) for m in markers):
        trimmed, found = trimmed[: -len(marker)].rstrip(), True
    return trimmed if found else text


def _strings(container: Any, field: str) -> list[str] | None:
    inner = container if isinstance(container, TensorDictBase) else container._tensordict
    return column_values(inner, field)


def _content(messages: list[dict[str, Any]] | dict[str, Any]) -> str:
    last = messages[-1] if isinstance(messages, list) else messages
    content = last["content"]
    if isinstance(content, list):  # content blocks
        return "".join(block.get("text", "") for block in content if isinstance(block, dict))
    return content or ""
