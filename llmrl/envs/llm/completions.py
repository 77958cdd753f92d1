"""What the policy just said, as strings: the one place that finds the text of a turn in any input mode.

Rewards and parsers call `completion_texts`; they see the response only, never the prompt, and the same string whether
the batch carries messages, text or token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.llm.chat import History
from llmrl.data.llm.codec import codec_for
from llmrl.data.llm.templates import find_template
from llmrl.data.ragged.tensordicts import column_values
from llmrl.errors import MissingKeyError, TemplateError
from llmrl.modules.llm.policies.containers import decode_rows, entries
from llmrl.modules.llm.policies.modes import unpadded_rows

if TYPE_CHECKING:
    from llmrl.envs.transforms.base import Transform

__all__ = ["completion_texts", "tokenizer_of", "trim_markers"]


def completion_texts(
    td: TensorDictBase,
    tokenizer: Any | None = None,
    *,
    who: str,
    mode: str | None = None,
    markers: tuple[str, ...] = (),
    as_drawn: bool = False,
) -> list[str]:
    """The response of every row, without the end-of-turn markers (the template's, and ``markers``) and white space at
    its end, and (not ``as_drawn``) without the white space that the template writes before an answer.

    Reads    the contents of ("history", "response"), else ("text", "response"), else ("tokens", "response") decoded;
             where there is none of them the last message of "full" in the same order; with ``mode``, only that view
    Raises   MissingKeyError naming ``who`` where there is none of them, where the last message is that of a system,
             user or tool, and where there are only ids (or text, for "full") and no ``tokenizer``

    Without ``tokenizer`` the only markers known are those of ChatML and ``markers``, which text alone needs.
    """
    markers = (*special_tokens(tokenizer), *markers)
    lead = (
        "" if tokenizer is None or as_drawn else _around_answers(tokenizer)[0]
    )  # a history's content has it no longer
    history, text, tokens = (
        td.get(view, None) if mode in (None, view) else None for view in ("history", "text", "tokens")
    )
    if history is not None and (response := history.get("response", None)) is not None:
        return [trim_markers(_content(messages), markers) for messages in response.to_chats()]
    if text is not None and (texts := _strings(text, "response")) is not None:
        return [trim_markers(response.removeprefix(lead), markers) for response in texts]
    if tokens is not None and tokenizer is not None and (rows := _ids(td, tokens, "response")) is not None:
        # Control tokens inside are kept: without them "3<|im_start|>6" would be the answer 36.
        return [trim_markers(response.removeprefix(lead), markers) for response in decode_rows(tokenizer, rows)]
    if (chats := _whole_chats(td, history, text, tokens, tokenizer)) is not None:
        return [trim_markers(_content(messages), markers) for messages in chats]
    hint = " and a tokenizer" if tokenizer is None and "tokens" in td.keys() else ""
    raise MissingKeyError(
        f"{who}: the policy's response must be in ('text', 'response'), ('history', 'response') or ('tokens', "
        f"'response'){hint}: the batch has {', '.join(map(str, td.keys()))}."
    )


def tokenizer_of(transform: Transform) -> Any | None:
    """The transform's own tokenizer, else that of its env; None where there is neither."""
    own = transform.tokenizer
    return getattr(transform.container, "tokenizer", None) if own is None else own


def special_tokens(tokenizer: Any | None) -> tuple[str, ...]:
    """The markers that may end a turn: the tokenizer's end and padding tokens, its template's, and ChatML's."""
    names = {"<|im_end|>", "<|endoftext|>"}
    if tokenizer is not None:
        names.update(t for t in (tokenizer.eos_token, tokenizer.pad_token, _around_answers(tokenizer)[1]) if t)
    return tuple(names)


def trim_markers(text: str, markers: Iterable[str]) -> str:
    """``text`` without the markers and the white space at its end.

    >>> trim_markers("36 <|im_end|>\\n", ("<|im_end|>",))
    '36'
    """
    text = text.rstrip()
    while any(text.endswith(marker := m) for m in markers):
        text = text[: -len(marker)].rstrip()
    return text


@lru_cache(maxsize=8)
def _around_answers(tokenizer: Any) -> tuple[str, str]:
    """What the tokenizer's template writes around an answer: white space before it, the control token that ends it."""
    with suppress(TemplateError):  # no template for conversations
        codec = codec_for(tokenizer, find_template(tokenizer))
        return codec.answer_lead, codec.end_of_turn.strip() if codec.end_is_control else ""
    return "", ""


def _whole_chats(td: TensorDictBase, history: Any, text: Any, tokens: Any, tokenizer: Any | None) -> Any:
    """The messages of each conversation, of a batch that has conversations only as a whole."""
    if history is not None and (full := history.get("full", None)) is not None:
        return _answered_chats(full.to_chats())
    texts = None if text is None else _strings(text, "full")
    if texts is None and tokens is not None and (rows := _ids(td, tokens, "full")) is not None and tokenizer:
        texts = decode_rows(tokenizer, rows)
    if texts is None or tokenizer is None:
        return None
    return _answered_chats(History.from_text(texts, tokenizer=tokenizer).to_chats())


def _answered_chats(chats: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]] | None:
    return None if any(not chat or chat[-1]["role"] in ("system", "user", "tool") for chat in chats) else chats


def _ids(td: TensorDictBase, tokens: Any, field: str) -> list[list[int]] | None:
    """The ids of each response, or of all of a conversation, without padding."""
    holder, masks = entries(tokens), entries(td.get("masks", None))
    ids = holder.get(field, None, as_list=True)
    if ids is None:
        return None
    attention = None if masks is None else masks.get("all_attention_mask", None, as_list=True)
    if isinstance(ids, Tensor) and isinstance(attention, Tensor):  # padded: the right part of the whole
        attention = attention[..., attention.shape[-1] - ids.shape[-1] :]
    elif attention is not None:
        attention = [mask[len(mask) - len(row) :] for row, mask in zip(ids, attention, strict=True)]
    return [row.tolist() for row in unpadded_rows(holder, field, attention)]


def _strings(container: Any, field: str) -> list[str] | None:
    return column_values(entries(container), field)


def _content(messages: list[dict[str, Any]] | dict[str, Any]) -> str:
    last = messages[-1] if isinstance(messages, list) else messages
    content = last["content"]
    if isinstance(content, list):  # content blocks
        return "".join(block.get("text", "") for block in content if isinstance(block, dict))
    return content or ""
