"""Changes of the next prompt by an environment: new messages, answers said in other words, conversations cut off.

In history mode new messages are a longer history: the policy's wrapper continues its stream of ids by what was
appended. In text and tokens mode nothing is rendered later, so the ids are appended here: those of the rendered delta,
after ids that stay as they were drawn.
"""

from __future__ import annotations

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

# A delta is rendered behind these words; the ids that it continues are the conversation's own.
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
    Raises  TemplateError if the template writes new messages as the conversation before them has it (numbers its
            rounds), which in text and tokens mode is not there as messages
    """
    if view == "history":
        prompt = next_td.get("history").prompt
        grown = prompt.extend(History.from_chats(messages), inplace=False, dim=-1)
        next_td.set("history", ChatHistory.from_rows({"prompt": grown}, next_td.batch_size))
        return
    stream = TokenStream.read(next_td)
    texts = next_td.get("text").rows("prompt") if view == "text" else None
    rows = [row for row, new in enumerate(messages) if new]
    # Of the past only its end matters here: whether the turn was closed, or was cut off before its end token.
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
    """The ids that messages add behind a stand-in for the conversation: the same behind each kind of past.

    Only the first row of a shape is tried behind all of them: the others would repeat what was found for it.
    Raises  TemplateError if a past changes what messages add, RewriteError if they change the past
    """
    new = [len(added) for added in messages]
    chats = [[_QUESTION, answer, *added] for answer, added in zip(answers, messages, strict=True)]
    # The conversation itself is not there as messages, only its ids: a short stand-in is rendered in its place.
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
                continue  # a conversation that the template does not do
            if not alike:
                raise TemplateError(
                    "append_messages: in text and tokens mode a template must write new messages alike after any past: "
                    f"template {renderer.template.name!r} writes them in another way after {num} turns or a system "
                    "message; use input_mode='history'."
                )
    renderer.note_compared(first_rows)
    return found


def _closed(message: Message) -> Message:
    """The message, finished: an answer that is left open is one for the policy to go on with."""
    return {key: value for key, value in message.items() if key != "is_complete"}


def restate_answers(next_td: TensorDictBase, said: Mapping[int, Message]) -> None:
    """Replaces the fields of the last answer in these rows, in place; the ids stay as they were drawn.

    Writes  ("history", "prompt"), if the batch has it
    """
    history = next_td.get("history", None)
    if history is None:
        return
    chats = list(history.chats("prompt"))
    for row, fields in said.items():
        # Other transforms may have appended messages already.
        place = max(number for number, message in enumerate(chats[row]) if message["role"] == _ANSWERS)
        chats[row] = [*chats[row][:place], {"role": _ANSWERS, **fields}, *chats[row][place + 1 :]]
    next_td.set("history", ChatHistory.from_rows({"prompt": History.from_chats(chats)}, next_td.batch_size))


def begin_anew(next_td: TensorDictBase, rows: Sequence[int], view: str) -> None:
    """Leaves the prompts of these rows without ids, masks and log-probs, in place; the other rows go on.

    The policy's wrapper then renders the whole next turn, and a training record starts with it: for transforms that
    edit what was said.

    Reads   ``view``: the one that was edited ("history", "text" or "tokens"), which stays as it is
    Writes  the token stream, and if the view is the history ("text", "prompt"): empty in these rows
    """
    if (stream := TokenStream.read(next_td)) is not None:
        stream.cut(set(rows), keep_ids=view == "tokens").write(next_td)
    if view == "history" and (text := next_td.get("text", None)) is not None:
        texts = ["" if row in rows else value for row, value in enumerate(text.rows("prompt"))]
        next_td.set("text", Text.from_rows({"prompt": texts}, next_td.batch_size))


def _end_of(text: str, renderer: Renderer) -> Tensor:
    """The ids that say whether a turn was ended, if a policy left text alone."""
    end = renderer.codec.end_of_turn
    return torch.tensor(renderer.end_of_turn_ids if end and text.endswith(end) else [], dtype=torch.int64)
