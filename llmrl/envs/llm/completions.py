"""The text of the policy's turn, identical in every input mode, and the base class of transforms that score it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.llm.codec import codec_for
from llmrl.data.llm.history import History
from llmrl.data.llm.templates import find_template
from llmrl.data.ragged.tensordicts import column_values, inner, present_keys
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.options import MODES
from llmrl.envs.specs import DONE_KEYS
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform, innermost
from llmrl.errors import MissingKeyError, TemplateError
from llmrl.modules.llm.policies.containers import decode_rows
from llmrl.modules.llm.policies.rows import field_rows, kept_parts
from llmrl.modules.llm.rendering import Renderer


class ScoringTransform(Transform):
    """Scores each turn of an env with `_step`; in a buffer, or when called, scores collected batches.

    A collected batch gets the same entries in ``next``; rewards are added to the ones that are already there. Its done
    flags stay as they were collected.

    >>> import torch
    >>> class Constant(ScoringTransform):
    ...     def _step(self, td, next_td):
    ...         return next_td.set("reward", torch.ones(*td.batch_size, 1, 1))
    >>> Constant()(TensorDict(batch_size=[2]))["next", "reward"].shape
    torch.Size([2, 1, 1])
    """

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        before = td.get("next", None)
        if before is None:
            before = TensorDict({}, batch_size=td.batch_size, device=td.device)
        scored = self._step(td, shallow_copy(before))
        ends = {key: before.get(key) for key in DONE_KEYS if key in before.keys()}
        td.set("next", scored.exclude(*DONE_KEYS).update(ends))
        return td


def add_reward(
    next_td: TensorDictBase, values_B: Tensor, key: str = "reward", *, applies_B: Tensor | None = None
) -> None:
    """Adds one value per row to the reward, float32[B, 1, 1]; a missing reward counts as 0.

    ``applies_B``  bool: a row of False has no value of this function. It is NaN as long as no function had a value,
                   which "scored", bool[B, 1, 1], keeps for the next function; a value of NaN (failed) stays NaN
    """
    values_B11, before = values_B.view(-1, 1, 1), next_td.get(key, None)
    if applies_B is None:
        next_td.set(key, values_B11 if before is None else before + values_B11)
        return
    before = torch.zeros_like(values_B11) if before is None else before
    scored = next_td.get("scored", None)
    scored = before != 0 if scored is None else scored  # a turn of a user adds 0, which is not a score
    applies = applies_B.view(-1, 1, 1)
    total = torch.where(scored, before, 0.0) + torch.where(applies, values_B11, 0.0)
    scored = scored | applies
    next_td.set("scored", scored).set(key, torch.where(scored, total, math.nan))


def completion_texts(
    td: TensorDictBase,
    tokenizer: Any | None = None,
    *,
    who: str,
    mode: str | None = None,
    markers: tuple[str, ...] = (),
    as_drawn: bool = False,
) -> list[str]:
    """The response of every row, without end-of-turn markers (the template's, and ``markers``) and white space at its
    end. The white space that the template writes before an answer is removed too, unless ``as_drawn``.

    Reads    the contents of ("history", "response"), else ("text", "response"), else ("tokens", "response") decoded;
             if all are missing, the last message of "full" in the same order; with ``mode``, only that view
    Raises   MissingKeyError naming ``who`` if all are missing, if the last message has the role system, user or tool,
             and if only ids (or text, for "full") are present and ``tokenizer`` is None

    Without ``tokenizer`` only the markers of ChatML and ``markers`` are removed.
    """
    views = MODES if mode is None else (mode,)
    history = td.get("history", None) if "history" in views else None
    # Histories need no trimming: their content lacks the white space that the template writes.
    lead = "" if tokenizer is None or as_drawn else _around_answers(tokenizer)[0]
    texts: Iterable[str]
    if history is not None and (response := history.get("response", None)) is not None:
        texts = map(_content, response.to_chats())
    elif (written := _written(td, views, "response", tokenizer)) is not None:
        texts = (response.removeprefix(lead) for response in written)
    elif (chats := _whole_chats(td, views, history, tokenizer)) is not None:
        texts = map(_content, chats)
    else:
        hint = " and a tokenizer" if tokenizer is None and "tokens" in td.keys() else ""
        raise MissingKeyError(
            f"{who}: the policy's response must be in ('text', 'response'), ('history', 'response') or ('tokens', "
            f"'response'){hint}: the batch has {', '.join(map(str, td.keys()))}."
        )
    ends = (*special_tokens(tokenizer), *markers)
    return [trim_markers(text, ends) for text in texts]


def unpadded_ids(td: TensorDictBase, field: str) -> list[Tensor] | None:
    """The ids of ("tokens", field), one row each, without padding; None if there are none."""
    if (tokens := td.get("tokens", None)) is None:
        return None
    masks, rows = inner(td.get("masks", None)), field_rows(inner(tokens), field)
    kept = None if masks is None else field_rows(masks, "all_attention_mask")
    if rows is None or kept is None or getattr(tokens, "padded", True) is False:
        return rows
    # The mask covers the whole turn: the prompt is at its start, the response at its end.
    starts = [0 if field == "prompt" else len(mask) - len(row) for row, mask in zip(rows, kept, strict=True)]
    columns = zip(rows, kept, starts, strict=True)
    return kept_parts(rows, [mask[start : start + len(row)].bool() for row, mask, start in columns])


def strings_of(td: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """The values of a column, or of a field of a container, one per row; None if it is missing."""
    *path, name = (key,) if isinstance(key, str) else key
    holder = inner(td.get(tuple(path), None)) if path else td
    return None if holder is None else column_values(holder, name)


def required_column(td: TensorDictBase | None, key: str, who: str, noun: str, remedy: str = "") -> list[Any]:
    """The values of an entry, one per row. Raises MissingKeyError if it is missing."""
    values = None if td is None else column_values(td, key)
    if values is None:
        keys = "none" if td is None else present_keys(td)
        raise MissingKeyError(f"{who}: {noun} must be in {key!r}; keys present: {keys}{remedy and '; ' + remedy}.")
    return values


def view_of(td: TensorDictBase) -> str | None:
    """The view in which a batch holds its conversations: "history", "text" or "tokens"; None if it has none."""
    return next((view for view in MODES if td.get(view, None) is not None), None)


def tokenizer_of(transform: Transform) -> Any | None:
    """The transform's own tokenizer, else that of its env; None if both are missing."""
    own = transform.tokenizer
    return getattr(transform.container, "tokenizer", None) if own is None else own


def renderer_of(env: EnvBase | None) -> Renderer | None:
    """The renderer of the chat env below the transforms; None in history mode, or without an env."""
    return getattr(innermost(env), "renderer", None)


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
    """The template's text around an answer: white space before it, the control token that ends it."""
    with suppress(TemplateError):  # no template for conversations
        codec = codec_for(tokenizer, find_template(tokenizer))
        return codec.answer_lead, codec.end_of_turn.strip() if codec.end_is_control else ""
    return "", ""


def _written(td: TensorDictBase, views: Sequence[str], field: str, tokenizer: Any | None) -> list[str] | None:
    """The text of a field, else its ids decoded; None if the batch has neither."""
    texts = strings_of(td, ("text", field)) if "text" in views else None
    if texts is None and "tokens" in views and tokenizer is not None and (rows := unpadded_ids(td, field)) is not None:
        # Keeps control tokens inside the text: without them "3<|im_start|>6" would be the answer 36.
        texts = decode_rows(tokenizer, [row.tolist() for row in rows])
    return texts


def _whole_chats(
    td: TensorDictBase, views: Sequence[str], history: Any, tokenizer: Any | None
) -> list[list[dict[str, Any]]] | None:
    """The messages of each whole conversation ("full"); None if "full" is missing or a conversation does not end with
    an answer."""
    if history is not None and (full := history.get("full", None)) is not None:
        chats = full.to_chats()
    elif tokenizer is None or (texts := _written(td, views, "full", tokenizer)) is None:
        return None
    else:
        chats = History.from_text(texts, tokenizer=tokenizer).to_chats()
    return None if any(not chat or chat[-1]["role"] in ("system", "user", "tool") for chat in chats) else chats


def _content(messages: list[dict[str, Any]] | dict[str, Any]) -> str:
    last = messages[-1] if isinstance(messages, list) else messages
    content = last["content"]
    if isinstance(content, list):  # content blocks
        return "".join(block.get("text", "") for block in content if isinstance(block, dict))
    return content or ""
