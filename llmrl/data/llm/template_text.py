"""Renders a chat template as the Transformers library does: with a deadline for a template's first rendering, and the
line of the template at which it failed.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from llmrl.data.llm.templates import Chat, Tools

REFUSALS = Exception  # a template is a program: what it does not support may raise anything
FIRST_RENDER_S = 10.0

_finished: dict[str, bool] = {}  # False: the first rendering of this template did not end


def render(chats: Sequence[Chat], tools: Tools | None, **options: Any) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Texts as the Transformers library renders them, and with ``return_assistant_tokens_mask`` its generation blocks.

    With ``tools`` None, each conversation has the tools that its first message declares under ``"tools"``.
    Raises  ValueError for tools that the template would silently leave out, TimeoutError for a template that loops; and
            whatever the template raises
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # a second that reading rows does not need

    # jinja ignores a variable that the template does not read: the model would not see its tools.
    declared = [chat[0].get("tools") if tools is None and len(chat) else None for chat in chats]
    jinja = options["chat_template"]
    if "tools" not in jinja and (tools or any(declared)):
        raise ValueError("it does not use tools; describe them in the system message instead")
    if not _finished.get(jinja) and len(chats):
        _render_in_time(chats[0], tools or declared[0] or None, options)
        _finished[jinja] = True
    if not any(declared):
        return render_jinja_template(conversations=chats, tools=tools, **options)
    texts, blocks = [], []  # one by one: the library renders all conversations of a call with the same tools
    for chat, own in zip(chats, declared, strict=True):
        text, found = render_jinja_template(conversations=[chat], tools=own or None, **options)
        texts += text
        blocks += found
    return texts, blocks


def _render_in_time(chat: Chat, tools: Any, options: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    too_late = TimeoutError(f"it did not end within {FIRST_RENDER_S:g} s")
    if options["chat_template"] in _finished:
        raise too_late
    errors: list[BaseException] = []

    def call() -> None:
        try:
            render_jinja_template(conversations=[chat], tools=tools, **options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="llmrl-template", daemon=True)
    thread.start()
    thread.join(FIRST_RENDER_S)
    if thread.is_alive():
        stopped = ctypes.py_object(SystemExit)  # raised between two instructions of the template's loop
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), stopped)
        _finished[options["chat_template"]] = False
        raise too_late
    if errors:
        raise errors[0]


def cause(error: Exception) -> str:
    """What a template raised, in words, with its line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in ("<template>", "<unknown>")]
    place = f" (line {lines[-1]} of the template)" if lines else ""
    return ": ".join(filter(None, [type(error).__name__, str(error)])) + place
