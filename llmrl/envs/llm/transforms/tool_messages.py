"""Changes of the next prompt by an environment: new messages, restructured answers, restarted token streams.

In history mode new messages only extend the history: the policy's wrapper later extends its stream of ids by them. In
text and tokens mode nothing is rendered later, so the ids of the rendered new messages (the delta) are appended here;
the sampled ids before them stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.llm.chat import History
from llmrl.errors import RewriteError, TemplateError
from llmrl.modules.llm.policies.containers import ChatHistory, Text, decode_rows
from llmrl.modules.llm.rendering import Renderer
from llmrl.modules.llm.token_stream import TokenStream

Message = dict[str, Any]

# A delta is rendered after this stand-in conversation, then appended to the ids of the real one.
_ANSWERS = "assistant"
_SYSTEM, _QUESTION, _ANSWER = (
    {"role": role, "content": words} for role, words in (("system", "rule"), ("user", "question"), (_ANSWERS, "answer"))
)
_UNKNOWN_TURNS = 3
_STAND_INS = re.compile("[\U000fe000-\U0010ffff]")  # the renderer represents control tokens by these


def without_stand_ins(text: str) -> str:
    """Text of a tool or an environment for a message, without characters that would become control tokens."""
    return _STAND_INS.sub("\ufffd", text)


def append_messages(
    next_td: TensorDictBase,
    view: str,
    messages: Sequence[Sequence[Message]],
    renderer: Renderer | None,
    said: Mapping[int, Message] | None = None,
) -> None:
    """Adds ``messages[row]`` to the prompt of each row, in place; rows without messages stay as they are.

    Reads   ``said``: row -> fields of its answer's message, for answers with more fields than "content"
            (view, "prompt") of ``next_td``; in text and tokens mode also the token stream: tokens, masks, log_probs
    Writes  (view, "prompt"); in text and tokens mode appends the ids of the delta, with its generation prompt, to
            ("tokens", "prompt"), False to the mask and 0 to the log-probs, and sets ("tokens", "covered"). Padded
            containers become ragged
    Raises  TemplateError if the template's text of new messages depends on the conversation before them (for example
            numbers its rounds), because in text and tokens mode that conversation is not available as messages
    """
    if view == "history":
        prompt = next_td.get("history").prompt
        grown = prompt.extend(History.from_chats(messages), inplace=False, dim=-1)
        next_td.set("history", ChatHistory.from_rows({"prompt": grown}, next_td.batch_size))
        return
    stream = TokenStream.read(next_td)
    texts = next_td.get("text").rows("prompt") if view == "text" else None
    rows = [row for row, new in enumerate(messages) if new]
    # Only the end of the past matters here: it shows if the turn was closed or cut off before its end token.
    ends = [stream.ids[row] if stream is not None else _end_of(texts[row], renderer) for row in rows]
    answers = [{**_ANSWER, **(said or {}).get(row, {})} for row in rows]
    turns = [(None if stream is None else stream.num_answers(row)) or _UNKNOWN_TURNS for row in rows]
    deltas = dict(zip(rows, _deltas(renderer, ends, answers, [messages[row] for row in rows], turns), strict=True))
    covered = None
    if texts is not None:
        added = dict(zip(rows, decode_rows(renderer.tokenizer, [d.tolist() for d in deltas.values()]), strict=True))
        texts = [text + added.get(row, "") for row, text in enumerate(texts)]
        covered = [len(text) for text in texts]
        next_td.set("text", Text.from_rows({"prompt": texts}, next_td.batch_size))
    if stream is not None:
        stream.extend(deltas, covered).write(next_td)


def _deltas(
    renderer: Renderer,
    ends: Sequence[Tensor],
    answers: Sequence[Message],
    messages: Sequence[Sequence[Message]],
    turns: Sequence[int],
) -> list[Tensor]:
    """The ids that messages add after a stand-in conversation, checked to be the same after several kinds of past.

    Only the first row of each `Renderer.shape` is checked: the other rows of that shape give the same result.
    Raises  TemplateError if the past changes the added ids, RewriteError if the messages change the past
    """
    new = [len(added) for added in messages]
    chats = [[_QUESTION, answer, *added] for answer, added in zip(answers, messages, strict=True)]
    # Only the ids of the conversation are available, not its messages: a short stand-in is rendered instead.
    found = renderer.extend(ends, chats, new)
    shapes = [renderer.shape(chat, num) for chat, num in zip(chats, turns, strict=True)]
    first_rows = {shape: row for row, shape in enumerate(shapes) if shape not in renderer.compared}
    for row in first_rows.values():
        answer, added, num = answers[row], messages[row], turns[row]
        wanted = renderer.addition(chats[row], new[row])
        for past in (
            [_SYSTEM, _QUESTION, answer],
            [_QUESTION, *[answer, _QUESTION] * (num - 1), answer],
            [_QUESTION, *[answer, *map(_closed, added)] * (num - 1), answer],
        ):
            try:
                alike = renderer.addition([*past, *added], new[row]) == wanted
            except RewriteError:
                raise
            except TemplateError:
                continue  # the template does not support this kind of conversation
            if not alike:
                raise TemplateError(
                    "append_messages: in text and tokens mode a template must render new messages the same way after "
                    f"any past: template {renderer.template.name!r} renders them differently after {num} turns or a "
                    "system message; use input_mode='history'."
                )
    renderer.note_compared(first_rows)
    return found


def _closed(message: Message) -> Message:
    """The message without its ``is_complete`` mark: an open answer would be continued by the policy."""
    return {key: value for key, value in message.items() if key != "is_complete"}


def restate_answers(next_td: TensorDictBase, said: Mapping[int, Message]) -> None:
    """Replaces the fields of the last answer in these rows, in place; the sampled ids stay unchanged.

    Writes  ("history", "prompt"), if the batch has it
    """
    history = next_td.get("history", None)
    if history is None:
        return
    chats = list(history.chats("prompt"))
    for row, fields in said.items():
        # Searches for the last answer, because other transforms may have appended messages after it.
        place = max(number for number, message in enumerate(chats[row]) if message["role"] == _ANSWERS)
        chats[row] = [*chats[row][:place], {"role": _ANSWERS, **fields}, *chats[row][place + 1 :]]
    next_td.set("history", ChatHistory.from_rows({"prompt": History.from_chats(chats)}, next_td.batch_size))


def begin_anew(next_td: TensorDictBase, rows: Sequence[int], view: str) -> None:
    """Clears ids, masks and log-probs of these rows' prompts, in place; the other rows keep their token streams.

    The policy's wrapper then renders the whole next turn, which starts a new training record: for transforms that edit
    earlier messages.

    Reads   ``view``: the edited one ("history", "text" or "tokens"), which stays unchanged
    Writes  the token stream, and for the history view also ("text", "prompt"): empty in these rows
    """
    if (stream := TokenStream.read(next_td)) is not None:
        stream.cut(set(rows), keep_ids=view == "tokens").write(next_td)
    if view == "history" and (text := next_td.get("text", None)) is not None:
        texts = ["" if row in rows else value for row, value in enumerate(text.rows("prompt"))]
        next_td.set("text", Text.from_rows({"prompt": texts}, next_td.batch_size))


def _end_of(text: str, renderer: Renderer) -> Tensor:
    """The end-of-turn ids if the text ends with that marker, else no ids: for policies that write only text."""
    end = renderer.codec.end_of_turn
    return torch.tensor(renderer.end_of_turn_ids if end and text.endswith(end) else [], dtype=torch.int64)
