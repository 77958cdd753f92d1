"""Images of messages and datasets: extraction from a conversation, and loading."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.errors import DataError
from llmrl.optional import require

if TYPE_CHECKING:
    from PIL.Image import Image

Chat = Sequence[Mapping[str, Any]]

_SOURCES = ("image", "url", "path", "base64", "bytes", "image_url")  # keys of a part's image
_BROKEN = (OSError, ValueError, TypeError, AttributeError, SyntaxError)  # what PIL raises for broken files


def take_images(chat: Chat) -> tuple[Chat, list[list[Any]]]:
    """The conversation as a template needs it, with placeholders for images, and the images of each message.

    >>> take_images([{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
    ([{'role': 'user', 'content': [{'type': 'image', 'image': ''}]}], [['cat.png']])
    """
    images: list[list[Any]] = [[] for _ in chat]
    plain: list[Any] = list(chat)
    for number, message in enumerate(chat):
        content = message.get("content") if isinstance(message, (dict, Mapping)) else None
        if isinstance(content, (list, tuple)) and any(map(_is_image, content)):
            images[number] = [_source_of(part) for part in content if _is_image(part)]
            parts = [{"type": "image", "image": ""} if _is_image(part) else part for part in content]
            plain[number] = {**chat[number], "content": parts}
    return (plain if any(images) else chat), images


def refuse_images(chat: Chat, reader: str) -> None:
    """Raises DataError, for a ``reader`` of text, if the conversation has images."""
    if any(take_images(chat)[1]):
        raise DataError(f"{reader}: reads text alone: the conversation has images; leave them out, or use another.")


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and (part.get("type") in ("image", "image_url") or "image" in part)


def _source_of(part: Mapping[str, Any]) -> Any:
    name = next((name for name in _SOURCES if part.get(name) is not None), None)
    if name is None:
        raise DataError(
            f"image: a part of type 'image' must have its image under one of {', '.join(_SOURCES)}: its keys are "
            f"{', '.join(part)}."
        )
    source = part[name]
    if name == "image_url":
        source = source["url"] if isinstance(source, Mapping) else source
    if name == "base64":
        return _decoded(source)
    return source


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"image: must be base64: got {text[:40]!r}: {error}.") from error


def image_key(source: Any) -> tuple[Any, Image | None]:
    """A key that is equal only for equal images, and the image if it had to be loaded for that."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return hashlib.blake2b(source).digest(), None
    if isinstance(source, (str, Path)):
        try:
            found = Path(source).stat()  # time and size: reading each file again would cost what the key saves
            return (str(source), found.st_mtime_ns, found.st_size), None
        except (OSError, ValueError):  # a "data:" URL, which is its own content, or a file that is missing
            return str(source), None
    image = load_image(source)
    return (image.size, hashlib.blake2b(image.tobytes()).digest()), image


def load_image(source: Any, *, only_check: bool = False) -> Image | None:
    """An image in RGB, from a PIL image, a path, bytes of a file, a "data:" URL, uint8[H, W, 3], or a dict with "bytes"
    or "path" as in the ``datasets`` library.

    only_check  reads no pixels, and returns None
    Raises      DataError if it cannot be read; images are not fetched from the network
    """
    module = require("PIL.Image", extra="vision", used_by="images in conversations")
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    shown = f"{source[:80]!r}" if isinstance(source, (str, bytes)) else f"{source!r:.80}"
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise DataError(f"image: must be a local file: got {shown}; download it, and give its path.")
    if isinstance(source, str) and source.startswith("data:"):
        source = _decoded(source.partition(",")[2])
    try:
        if isinstance(source, (str, Path)):
            source = Path(source).expanduser().read_bytes()
        if isinstance(source, bytes):
            source = module.open(io.BytesIO(source))
            if only_check:
                return source.verify()  # None, after checksums; decoding every image of a dataset would take minutes
        elif not isinstance(source, module.Image):
            source = module.fromarray(source.numpy() if hasattr(source, "numpy") else source)
        return None if only_check else source.convert("RGB")
    except _BROKEN as error:
        raise DataError(f"image: {shown} cannot be read: {type(error).__name__}: {error}.") from error
