"""Columns in memory-mapped files, built once: opened if their fingerprint matches, else built under a lock.

root/name-3f9a52c07d1e/     the digest of the recipe: everything that the content depends on
  checkpoint.1/
    dataset.json            the recipe, the number of rows, dtype and row shape of each column
    input_ids.memmap        the rows of a column, end to end
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

from llmrl.data.replay_buffers.directory import current_directory, replace_directory
from llmrl.data.replay_buffers.process_lock import ProcessLock
from llmrl.errors import CheckpointError, DataError, DeadlineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILD_TIMEOUT_S = 3600.0  # wait for another process that builds the same columns
_CONTENT = "dataset.json"
Block = tuple[int, Mapping[str, Any]]  # number of rows read, and the columns of those that are kept
Recipe = dict[str, Any]


def open_or_build(
    root: Path, name: str, recipe: Recipe, build: Callable[[], Iterable[Block]], *, timeout_s: float = BUILD_TIMEOUT_S
) -> TensorDict:
    """The rows that ``build`` yields for ``recipe`` (JSON values), as memory-mapped tensors.

    Files of another recipe, or incomplete ones, are built again. While another process builds them, waits for it. A
    failed build leaves no files behind.

    Raises  DataError if the files cannot be written, DeadlineError after ``timeout_s``
    """
    recipe = json.loads(json.dumps(recipe))  # as it is read from the file, where tuples are lists
    folder = root / f"{name}-{digest(json.dumps(recipe, sort_keys=True))[:12]}"
    found = _open(folder, recipe)
    if found is None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = ProcessLock(folder.with_name(folder.name + ".lock"), timeout_s)
            lock.hand_over()  # it excludes unrelated processes too, not only those that inherit it
            with lock:
                found = _open(folder, recipe)  # another process may have built it meanwhile
                if found is None:
                    _build(folder, recipe, build())
                    found = _open(folder, recipe)
        except DeadlineError as error:
            raise DeadlineError(
                f"{folder} must be built within {timeout_s:g} s: another process builds it and is not finished: {error}"
            ) from error
        except (CheckpointError, OSError) as error:
            raise DataError(
                f"tokenised rows cannot be written: {error} No partial files are kept; root_dir chooses another disk."
            ) from error
    columns, content = found
    if left_out := content["read"] - content["rows"]:
        warnings.warn(
            f"{name}: {left_out} of {content['read']} rows are left out: too long, or not comparable.", stacklevel=4
        )
    return columns


def _open(folder: Path, recipe: Recipe) -> tuple[TensorDict, dict[str, Any]] | None:
    """None if the folder is missing, incomplete, or of another recipe."""
    try:
        folder = current_directory(folder)
        content = json.loads((folder / _CONTENT).read_bytes())
        if content["recipe"] != recipe:
            return None
        rows, entries = content["rows"], {}
        for key, (dtype, shape) in content["columns"].items():
            path, kind = folder / f"{key}.memmap", getattr(torch, dtype)
            # Mapping does not notice a truncated file.
            if path.stat().st_size != rows * kind.itemsize * torch.Size(shape).numel():
                return None
            entries[key] = MemoryMappedTensor.from_filename(path, dtype=kind, shape=(rows, *shape))
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return TensorDict(entries, batch_size=[rows]).unflatten_keys("."), content


def _build(folder: Path, recipe: Recipe, blocks: Iterable[Block]) -> None:
    read = rows = 0
    kinds: dict[str, tuple[str, list[int]]] = {}
    with replace_directory(folder) as draft, ExitStack() as files:
        opened: dict[str, Any] = {}
        for number, (count, columns) in enumerate(blocks):
            columns = columns.flatten_keys(".") if isinstance(columns, TensorDictBase) else columns
            flat = {key: torch.as_tensor(value) for key, value in columns.items()}
            own = {key: (str(v.dtype).removeprefix("torch."), list(v.shape[1:])) for key, v in flat.items()}
            if not number:
                kinds, opened = own, {key: files.enter_context((draft / f"{key}.memmap").open("wb")) for key in own}
            lengths = {len(value) for value in flat.values()}
            if own != kinds or len(lengths) != 1:
                raise DataError(
                    f"tokenised rows must have the same columns, dtypes and widths throughout: got {own} for the rows "
                    f"from {read + 1} on, expected {kinds}; pad to max_length."
                )
            for key, value in flat.items():  # not through a map: a full disk would kill the process with SIGBUS
                opened[key].write(value.contiguous().view(torch.uint8).numpy().data if len(value) else b"")
            read, rows = read + count, rows + lengths.pop()
        if not rows:
            raise DataError("tokenised rows: at least one must be left: got none.")
        files.close()  # buffers are flushed, or fail, before the description declares the files complete
        (draft / _CONTENT).write_text(json.dumps({"recipe": recipe, "read": read, "rows": rows, "columns": kinds}))


# --- fingerprints ---


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes with the vocabulary, the merges, the special tokens, the chat template and the sides."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A serialised tokenizer begins with the padding and truncation of its last call, which are left out.
    own = json.dumps(tokenizer.get_vocab()) if backend is None else backend.to_str().partition('"added_tokens"')[2]
    names = ("special_tokens_map", "chat_template", "padding_side", "truncation_side")
    return digest(repr([type(tokenizer).__qualname__, *(getattr(tokenizer, name, None) for name in names), own]))


@cache
def code_fingerprint() -> str:
    """Changes with the code that turns rows into ids: all of ``llmrl.data.llm``, transformers and tokenizers."""
    sources = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return digest(repr([version("transformers"), version("tokenizers"), sources]))


def callable_fingerprint(function: Any) -> str:
    """Changes with the source of a function or class; without a source, with its name and code."""
    if function is None:
        return ""
    try:
        return digest(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        own = (code.co_code, code.co_consts, code.co_names) if code else type(function)
        return digest(repr((getattr(function, "__qualname__", ""), own)))
