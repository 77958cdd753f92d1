"""HTML of conversations for notebooks: static, inline styles, all model output escaped.

`History` and `Rollout` use it for display. The colours are those of the rollout viewer in a run's report.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence

_MAX_CHARS = 4000  # per message
_MAX_MESSAGES = 200  # per output
_TRAINED, _SAMPLED = "rgba(0,114,178,0.34)", "rgba(230,120,0,0.34)"
_TEXT = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;direction:ltr"
_MESSAGE = "margin:4px 0;padding-left:8px;border-left:3px solid rgba(128,128,128,0.4)"
_LABEL = "opacity:0.65;font-size:0.85em"
_CONTROL = "border:1px solid rgba(128,128,128,0.7);border-radius:8px;padding:0 4px"


def visible(text: str, *, marks: bool = False) -> str:
    """Returns the text with invisible characters replaced by their codes; with ``marks``, spaces and newlines too.

    >>> visible("a\u202eb\\0")
    'a⟨U+202E⟩b␀'
    >>> visible("a b\\n", marks=True)
    'a·b⏎\\n'
    """
    spaces = {" ": "·", "\n": "⏎\n", "\t": "⇥\t"} if marks else {" ": " ", "\n": "\n", "\t": "\t"}
    return "".join(spaces.get(letter) or _seen(letter) for letter in text)


def _seen(letter: str) -> str:
    if unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp"):
        return letter
    code = ord(letter)
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def token_html(text: str, numbers: Iterable[tuple[str, object]], *, trained: bool, sampled: bool, control: bool) -> str:
    """One token, coloured if it was trained (blue) or sampled (orange); its numbers are in a tooltip."""
    colour = _TRAINED if trained else _SAMPLED if sampled else "transparent"
    title = html.escape("\n".join(f"{name} {visible(str(value))}" for name, value in numbers))
    style = f"background:{colour};{_CONTROL if control else ''}"
    return f'<span title="{title}" style="{style}">{html.escape(visible(text, marks=True))}</span>'


def message_html(role: str, content: str | None = None, *, tokens: Sequence[str] = (), note: str = "") -> str:
    """Returns the HTML of a message: its role, and its text or its tokens (from `token_html`)."""
    text = "".join(tokens)
    if content is not None:
        left_out = len(content) - _MAX_CHARS
        half = _MAX_CHARS // 2
        if left_out > 0:
            content = f"{content[:half]} [… {left_out} characters left out …] {content[-half:]}"
        text = html.escape(visible(content))
    label = html.escape(visible(f"{role} {note}".strip()))
    return f'<div style="{_MESSAGE}"><div style="{_LABEL}">{label}</div><div style="{_TEXT}">{text}</div></div>'


def conversation_html(title: str, messages: Iterable[str]) -> str:
    """Returns the HTML of a collapsible conversation; ``messages`` come from `message_html`."""
    shown = list(messages)
    left_out = len(shown) - _MAX_MESSAGES
    more = f'<div style="{_LABEL}">{left_out} more</div>' if left_out > 0 else ""
    summary = f"<summary>{html.escape(visible(title))}</summary>"
    return f"<details open>{summary}{''.join(shown[:_MAX_MESSAGES])}{more}</details>"
