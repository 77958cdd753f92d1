"""Appends the messages of the environment to the next prompt, in whichever view the conversation is kept.

In history mode that is a longer history: the policy's wrapper continues its stream of ids by what was appended. In text
and tokens mode nobody renders later, so the ids are appended here: those of the rendered delta, after ids that stay as
they were drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.llm.chat import History
from llmrl.errors import RewriteError, TemplateError
from llmrl.modules.llm.policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens, decode_rows, field_rows
from llmrl.modules.llm.policies.modes import unpadded_rows
from llmrl.modules.llm.rendering import Renderer

__all__ = ["append_messages", "restate_answers"]

Message = dict[str, Any]

# What a delta is rendered after. The ids that it continues are the conversation's own, whatever these words are.
_ANSWERS = "assistant"
_SYSTEM, _QUESTION, _ANSWER = (
    {"role": role, "content": words} for role, words in (("system", "rule"), ("user", "question"), (_ANSWERS, "answer"))
)
_UNKNOWN_TURNS = 3


def append_messages(
    next_td: TensorDictBase,
    view: str,
    messages: Sequence[Sequence[Message]],
    renderer: Renderer | None,
    said: Mapping[int, Message] | None = None,
) -> None:
    """Adds ``messages[row]`` to the prompt of each row, in place; rows without messages stay as they are.

    Reads   ``said``: of rows whose answer is more than its content, the fields of its message
            (view, "prompt") of ``next_td``; in text and tokens mode also the stream beside it: tokens, masks, log_probs
    Writes  (view, "prompt"); in text and tokens mode the ids of the delta, its generation prompt included, behind
            ("tokens", "prompt"), False and 0 behind the mask and the log-probs, and ("tokens", "covered"). Padded
            containers become ragged
    Raises  TemplateError where the template writes new messages as the conversation before them has it (numbers its
            rounds), which in text and tokens mode is not there as messages
    """
    if view == "history":
        prompt = next_td.get("history").prompt
        grown = prompt.extend(History.from_chats(messages), inplace=False, dim=-1)
        next_td.set("history", ChatHistory.from_rows({"prompt": grown}, next_td.batch_size))
        return
    tokens = next_td.get("tokens", None)
    stream = None if tokens is None else _Stream(next_td)
    texts = next_td.get("text").rows("prompt") if view == "text" else None
    rows = [row for row, new in enumerate(messages) if new]
    ends = [stream.ids[row] if stream is not None else _end_of(texts[row], renderer) for row in rows]
    answers = [{**_ANSWER, **(said or {}).get(row, {})} for row in rows]
    turns = [_UNKNOWN_TURNS if stream is None else stream.turns(row) for row in rows]
    deltas = dict(zip(rows, _deltas(renderer, ends, answers, [messages[row] for row in rows], turns), strict=True))
    covered = None
    if texts is not None:
        added = dict(zip(rows, decode_rows(renderer.tokenizer, [d.tolist() for d in deltas.values()]), strict=True))
        texts = [text + added.get(row, "") for row, text in enumerate(texts)]
        covered = [torch.tensor(len(text)) for text in texts]
        next_td.set("text", Text.from_rows({"prompt": texts}, next_td.batch_size))
    if stream is not None:
        stream.write(next_td, deltas, covered)


def _deltas(
    renderer: Renderer,
    ends: Sequence[Tensor],
    answers: Sequence[Message],
    messages: Sequence[Sequence[Message]],
    turns: Sequence[int],
) -> list[Tensor]:
    """What the messages add after a stand-in for the conversation, the same after all that it may have been."""
    rows = list(zip(answers, messages, turns, strict=True))
    pasts = [
        [[_QUESTION, answer] for answer, _, _ in rows],
        [[_SYSTEM, _QUESTION, answer] for answer, _, _ in rows],
        [[_QUESTION, *[answer, _QUESTION] * (num - 1), answer] for answer, _, num in rows],
        [[_QUESTION, *[answer, *map(_closed, new)] * (num - 1), answer] for answer, new, num in rows],
    ]
    found: list[Tensor] | None = None
    for past in pasts:
        chats = [[*before, *new] for before, new in zip(past, messages, strict=True)]
        try:
            deltas = renderer.extend(ends, chats, [len(new) for new in messages])
        except RewriteError:
            raise
        except TemplateError:
            if found is None:
                raise
            continue  # a conversation that the template does not do
        found = deltas if found is None else found
        if not all(map(torch.equal, deltas, found)):
            raise TemplateError(
                "append_messages: in text and tokens mode a template must write new messages whatever came before: "
                f"template {renderer.template.name!r} writes them in another way after {turns[0]} turns or a system "
                "message; use input_mode='history'."
            )
    return found or []


def _closed(message: Message) -> Message:
    """The message, finished: an answer that is left open is one for the policy to go on with."""
    return {key: value for key, value in message.items() if key != "is_complete"}


def restate_answers(next_td: TensorDictBase, said: Mapping[int, Message]) -> None:
    """Gives the last answer in the prompt of these rows other fields, in place; the ids stay what was drawn.

    Writes  ("history", "prompt"), where the batch has it
    """
    history = next_td.get("history", None)
    if history is None:
        return
    chats = list(history.chats("prompt"))
    for row, fields in said.items():
        place = max(number for number, message in enumerate(chats[row]) if message["role"] == _ANSWERS)
        chats[row] = [*chats[row][:place], {"role": _ANSWERS, **fields}, *chats[row][place + 1 :]]
    next_td.set("history", ChatHistory.from_rows({"prompt": History.from_chats(chats)}, next_td.batch_size))


class _Stream:
    """The stream of ids on the prompt side of a batch, with what is known about each id."""

    def __init__(self, td: TensorDictBase) -> None:
        holders = {name: getattr(td.get(name, None), "_tensordict", None) for name in ("tokens", "masks", "log_probs")}
        masks = holders["masks"]
        attention = None if masks is None else field_rows(masks, "prompt_attention_mask")

        def rows(name: str, field: str) -> list[Tensor] | None:
            holder = holders[name]
            return None if holder is None or field not in holder.keys() else unpadded_rows(holder, field, attention)

        self.ids = rows("tokens", "prompt")
        self.covered = rows("tokens", "covered")
        self.mask = rows("masks", "prompt_assistant_mask")
        self.log_probs = {field: rows("log_probs", field) for field in ("prompt", "plain")}

    def turns(self, row: int) -> int:
        """How many answers the stream of a row holds."""
        if self.mask is None:
            return _UNKNOWN_TURNS
        mask = self.mask[row].int()
        return max(1, int((mask.diff(prepend=mask.new_zeros(1)) == 1).sum()))

    def write(self, td: TensorDictBase, deltas: dict[int, Tensor], covered: list[Tensor] | None) -> None:
        lengths = [len(deltas.get(row, ())) for row in range(len(self.ids))]
        ids = [torch.cat([row, deltas[n].to(row.device)]) if n in deltas else row for n, row in enumerate(self.ids)]
        columns = {"prompt": ids}
        if self.covered is not None:
            columns["covered"] = self.covered if covered is None else covered
        td.set("tokens", Tokens.from_rows(columns, td.batch_size))
        if self.mask is not None:
            td.set("masks", Masks.from_rows({"prompt_assistant_mask": _longer(self.mask, lengths)}, td.batch_size))
        scores = {field: _longer(rows, lengths) for field, rows in self.log_probs.items() if rows is not None}
        if scores:
            td.set("log_probs", LogProbs.from_rows(scores, td.batch_size))


def _longer(rows: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """False or 0 behind each row."""
    return [torch.nn.functional.pad(row, (0, n)) if n else row for row, n in zip(rows, lengths, strict=True)]


def _end_of(text: str, renderer: Renderer) -> Tensor:
    """The ids that say whether a turn was ended, where a policy left text alone."""
    end = renderer.codec.end_of_turn
    return torch.tensor(renderer.end_of_turn_ids if end and text.endswith(end) else [], dtype=torch.int64)
