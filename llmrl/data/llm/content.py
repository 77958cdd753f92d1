"""`ContentBase`: one part of a message that has more than text, such as an image with a question."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmrl.errors import DataError, did_you_mean

# Per type: the fields of which exactly one is required, and the optional fields.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    **dict.fromkeys(("image", "audio", "video", "file"), (("url", "data"), ("mime_type", "name", "size"))),
    "function_call": (("function_name",), ("function_args",)),
}


@dataclass(frozen=True, slots=True)
class ContentBase:
    """A part of a message's content.

    type           "text", "image", "audio", "video", "file" or "function_call"
    text           for "text"
    url, data      the address of the media, or the media: bytes, or an object that the processor accepts (array, image)
    mime_type, name, size       of media, for people and storage; processors do not read them
    function_name, function_args  for "function_call"

    Raises  DataError for another type, a field that the type does not have, or none of the fields that it needs

    A message's content is a string, a part, or a list of parts; ``History.to_chats`` writes parts as the dicts that the
    processors of the Transformers library read.

    >>> ContentBase("image", url="cat.png").to_part()
    {'type': 'image', 'url': 'cat.png'}
    """

    type: str
    text: str | None = None
    url: str | None = None
    data: Any = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type not in _FIELDS:
            raise DataError(
                f"ContentBase: type must be one of {', '.join(_FIELDS)}: got {self.type!r}."
                f"{did_you_mean(self.type, _FIELDS)}"
            )
        needed, others = _FIELDS[self.type]
        given = [field.name for field in fields(self) if field.name != "type" and getattr(self, field.name) is not None]
        if len([name for name in given if name in needed]) != 1 or not {*given} <= {*needed, *others}:
            may = f", and may have {', '.join(others)}" if others else ""
            raise DataError(
                f"ContentBase: a part of type {self.type!r} needs exactly one of {', '.join(needed)}{may}: got "
                f"{' and '.join(given) or 'none'}."
            )

    def to_part(self) -> dict[str, Any]:
        """The part as a dict, as the processors of the Transformers library read it."""
        if self.type == "text":
            return {"type": "text", "text": self.text}
        if self.type == "function_call":
            return {"type": "function_call", "name": self.function_name, "arguments": dict(self.function_args or {})}
        if self.url is not None:
            return {"type": self.type, "url": self.url}
        if self.type == "image" and isinstance(self.data, bytes):
            return {"type": "image", "base64": base64.b64encode(self.data).decode("ascii")}
        return {"type": self.type, self.type: self.data}


def plain_content(content: Any) -> Any:
    """Content with every `ContentBase` written as a dict; anything else as it is.

    >>> plain_content([ContentBase("text", text="Hi")])
    [{'type': 'text', 'text': 'Hi'}]
    """
    if isinstance(content, ContentBase):
        return [content.to_part()]
    if isinstance(content, (list, tuple)) and any(isinstance(part, ContentBase) for part in content):
        return [part.to_part() if isinstance(part, ContentBase) else part for part in content]
    return content
