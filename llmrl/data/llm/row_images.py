"""The images of a row: paths resolved from the file of the rows, and their places in the messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmrl.data.llm.images import load_image
from llmrl.errors import DataError

Message = dict[str, Any]

IMAGE_COLUMNS = ("image", "images")
MARK = "<image>"  # the place of an image in a text, as LLaVA, LLaMA-Factory and ms-swift write it
_PART_KEYS = ("image", "path", "url")


def resolve_images(row: dict[str, Any], folder: Path) -> None:
    """Replaces paths in the columns and in the parts of messages by paths that begin at ``folder``."""

    def resolved(image: Any) -> Any:
        is_path = isinstance(image, str) and image and not image.startswith(("data:", "http://", "https://"))
        return str(folder / Path(image).expanduser()) if is_path else image

    for column in IMAGE_COLUMNS:
        if value := row.get(column):
            row[column] = [resolved(image) for image in value] if isinstance(value, list) else resolved(value)
    for value in row.values():
        if isinstance(value, list):
            for part in _parts(value):
                if part.get("type") == "image":
                    part |= {key: resolved(part[key]) for key in _PART_KEYS if key in part}


def _parts(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def with_images(messages: list[Message], row: Mapping[str, Any], where: str) -> list[Message]:
    """The messages with the images of the row, at the parts ``{"type": "image"}`` and the marks ``<image>``, or before
    the first text of the user.

    Raises  DataError naming row and column of an image that cannot be read; also for other than one place per image
    """
    images = []
    for column in IMAGE_COLUMNS:
        value = row.get(column)
        for image in (value if isinstance(value, (list, tuple)) else [value]) if value else ():
            _check(image, f"column {column!r} of {where}")
            images.append({"type": "image", "image": image})
    for number, message in enumerate(messages, 1):
        for part in message["content"] if isinstance(message["content"], (list, tuple)) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind not in ("text", "image", "image_url"):
                raise DataError(
                    f"dataset: only text and images are read: {where}, message {number}, has a part of type {kind!r}."
                )
            if isinstance(part, Mapping) and part.get("type") == "image" and not _is_place(part):
                source = next((part[key] for key in _PART_KEYS if part.get(key) is not None), None)
                if source is not None:
                    _check(source, f"{where}, message {number}")
    if not images:
        return messages
    filled, rest = [], list(images)
    places = 0
    for message in messages:
        parts: list[Any] = []
        for part in _content(message):
            if _is_place(part):
                places += 1
                part = rest.pop(0) if rest else part
            parts.append(part)
        filled.append({**message, "content": parts} if any(map(_is_image, parts)) else message)
    if places and places != len(images):
        raise DataError(
            f"dataset: {where} must have as many images as its messages have places for: got {len(images)} images for "
            f"{places} parts {{'type': 'image'}} or marks {MARK}."
        )
    if not places:
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        said = messages[first]["content"]
        text = [{"type": "text", "text": said}] if isinstance(said, str) else said
        filled[first] = {**messages[first], "content": [*images, *text]}
    return filled


def _content(message: Message) -> Iterator[Any]:
    """The parts of a message, with a part ``{"type": "image"}`` for each mark in a text that the model reads."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts if isinstance(parts, (list, tuple)) else ():
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str) or message["role"] == "assistant":
            yield part
            continue
        for number, piece in enumerate(text.split(MARK)):
            if number:
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}


def _is_place(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and len(part) == 1


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _check(image: Any, what: str) -> None:
    try:
        load_image(image, only_check=True)
    except DataError as error:
        raise DataError(f"dataset: {what}: {error}") from error
