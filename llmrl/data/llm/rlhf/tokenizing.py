"""Tokenisation of text columns to one width, and a loader of datasets that are tokenised once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, unravel_key
from tensordict.base import is_tensor_collection
from torch import Tensor

from llmrl.data.llm.dataset_files import load_rows
from llmrl.data.llm.placed_rows import ArrowRows
from llmrl.data.llm.rlhf.cache import Block, callable_fingerprint
from llmrl.data.llm.rlhf.source import Source, blocks_of
from llmrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TOKENIZER = "gpt2"
_NO_PADDING = (False, "do_not_pad")


class TensorDictTokenizer:
    """Tokenises a column of text.

    Reads    ``key``  a text, or a list of B texts
    Returns  a TensorDict of "input_ids" and "attention_mask", int64[B, max_length]; ids beyond it are cut off. With
             ``return_tensordict=False`` a dict of lists
    Raises   DataError for a missing column or a value that is not text, ConfigError for ragged rows without padding

    padding  "max_length"; True or "longest": to the longest row of the call; False. Pads on the tokenizer's side with
             its padding token, or its end of sequence if it has none (masks come from lengths)

    >>> from llmrl.testing import tiny_tokenizer
    >>> process = TensorDictTokenizer(tiny_tokenizer(), max_length=6)
    >>> process({"text": ["Hi", "2 + 2?"]})["attention_mask"]
    tensor([[1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 0]])
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        key: str = "text",
        padding: str | bool = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self.tokenizer, self.max_length, self.key = tokenizer, max_length, key
        self.padding, self.truncation = padding, truncation
        self.return_tensordict, self.device = return_tensordict, device
        self.first_row = 1  # its number, for errors
        if padding not in ("max_length", "longest", True, *_NO_PADDING):
            raise ConfigError(
                f"TensorDictTokenizer: padding must be 'max_length', 'longest' or False: got {padding!r}."
            )

    def __call__(self, sample: Mapping[str, str | Sequence[str]]) -> TensorDict | dict[str, Any]:
        texts = self._texts(sample, self.key)
        cut = {"truncation": True, "max_length": self.max_length} if self.truncation else {}
        rows = self.tokenizer(texts, return_attention_mask=False, verbose=False, **cut)["input_ids"] if texts else []
        return self._result(sample, rows, {}, self.tokenizer.padding_side)

    def _texts(self, sample: Mapping[str, str | Sequence[str]], key: str) -> list[str]:
        who = type(self).__name__
        if key not in sample:
            raise DataError(f"{who}: the column {key!r} is missing: there are {', '.join(sample)}.")
        texts = [sample[key]] if isinstance(sample[key], str) else list(sample[key])
        for number, text in enumerate(texts, self.first_row):
            if not isinstance(text, str):
                raise DataError(f"{who}: the column {key!r} must hold text: row {number} has {text!r:.60}.")
        return texts

    def _result(
        self, sample: Mapping[str, Any], rows: list[list[int]], columns: dict[str, Tensor], side: str
    ) -> TensorDict | dict[str, Any]:
        longest, who = max(map(len, rows), default=0), type(self).__name__
        width = self.max_length if self.padding == "max_length" else longest
        if longest > width:
            raise ConfigError(
                f"{who}: rows must fit max_length={width}: one has {longest} ids; pass truncation=True, or "
                "padding='longest'."
            )
        ragged = self.padding in _NO_PADDING
        if ragged and self.return_tensordict and len(set(map(len, rows))) > 1:
            raise ConfigError(f"{who}: rows of different lengths need padding in a TensorDict.")
        ids, mask = same_width(rows, width, padding_id(self.tokenizer), side)
        columns = {"input_ids": ids, "attention_mask": mask, **columns}
        single = isinstance(sample[self.key], str)
        if not self.return_tensordict:
            lists = {name: value.tolist() for name, value in columns.items()}
            lists |= {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]} if ragged else {}
            return {name: v[0] for name, v in lists.items()} if single else lists
        batch = TensorDict(columns, batch_size=[len(rows)], device=self.device)
        return batch[0] if single else batch


class PromptTensorDictTokenizer(TensorDictTokenizer):
    """Tokenises prompts and their answers, concatenated unchanged.

    Reads    ``key`` and "label", lists of B texts
    Returns  as `TensorDictTokenizer`, always padded on the right, and "prompt_rindex" int64[B], the position of the
             prompt's last id, and "valid_sample" bool[B], False where ids were cut off
    Raises   DataError for an answer without any token

    >>> from llmrl.testing import tiny_tokenizer
    >>> process = PromptTensorDictTokenizer(tiny_tokenizer(), max_length=8)
    >>> batch = process({"prompt": ["2 + 2?", "2 + 2?"], "label": [" 4", " 4, four and no more"]})
    >>> batch["prompt_rindex"].tolist(), batch["valid_sample"].tolist()
    ([4, 4], [True, False])
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, key: str = "prompt", *others: Any, **options: Any
    ) -> None:
        super().__init__(tokenizer, max_length, key, *others, **options)

    def __call__(self, sample: Mapping[str, str | Sequence[str]]) -> TensorDict | dict[str, Any]:
        prompts, labels = self._texts(sample, self.key), self._texts(sample, "label")
        encoded = encode_answers(self.tokenizer, prompts, labels)
        for number, (ids, start) in enumerate(encoded, self.first_row):
            if start == len(ids):
                raise DataError(f"{type(self).__name__}: an answer must have a token: row {number}'s has none.")
        limit = self.max_length if self.truncation else None
        rows = [ids[:limit] for ids, _ in encoded]
        columns = {
            "prompt_rindex": torch.tensor(
                [min(start, len(row)) - 1 for (_, start), row in zip(encoded, rows, strict=True)]
            ),
            "valid_sample": torch.tensor([len(ids) == len(row) for (ids, _), row in zip(encoded, rows, strict=True)]),
        }
        return self._result(sample, rows, columns, "right")


def encode_answers(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], answers: Sequence[str]
) -> list[tuple[list[int], int]]:
    """The ids of each prompt with its answer, tokenised as one text, and the position of the answer's first id.

    An id with characters of both belongs to the answer. An answer without ids starts at the end.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenised answers need the character offsets of a fast tokenizer: got {type(tokenizer).__name__}."
        )
    if not prompts:
        return []
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batch = tokenizer(texts, return_attention_mask=False, verbose=False)
    found = []
    for text, ids, encoding, prompt in zip(texts, batch["input_ids"], batch.encodings, prompts, strict=True):
        # Skips characters without a token: tokenizers drop some white space.
        places = (encoding.char_to_token(place) for place in range(len(prompt), len(text)))
        found.append((ids, next((place for place in places if place is not None), len(ids))))
    return found


def same_width(rows: Sequence[Sequence[int]], width: int, pad: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Padded ids and their mask (1 for an id, else 0), both int64[N, width]."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))[:, None]
    place = np.arange(width)
    mask = place < lengths if side == "right" else place >= width - lengths
    ids = np.full(mask.shape, pad, dtype=np.int64)
    # Assigning through a mask fills row by row, left to right: the order of the concatenated ids.
    ids[mask] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | None, tokenizer_class: Any | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or the one of this folder or hub name. Raises DataError if it cannot be loaded."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    if tokenizer_class is None:
        from transformers import AutoTokenizer as tokenizer_class
    name = tokenizer or DEFAULT_TOKENIZER
    try:
        return tokenizer_class.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset: the tokenizer {str(name)!r} cannot be loaded; pass tokenizer=, one or its folder: {error}"
        ) from error


class TokenizedDatasetLoader:
    """Tokenises one split of a dataset once, and opens the memory-mapped result in later calls.

    Reads    ``dataset_name``  a .jsonl, .json, .parquet or .csv file; a folder with one for each split; a name on the
             hub; with ``from_disk`` what ``datasets`` saved
    Calls    tokenizer_fn(tokenizer=, max_length=), such as `TensorDictTokenizer`; its result with dicts of lists, 1024
             rows at a time. pre_tokenization_hook(datasets.Dataset) -> Dataset before that
    Raises   DataError for data that are missing, broken or empty; ConfigError

    The result is built again when the data, the split, the tokenizer, ``max_length``, the two functions or the code of
    llmrl change. A dataset that changes on the hub is not noticed: remove its folder of ``root_dir``.

    root_dir    ~/.cache/llmrl/data by default
    valid_size  rows of "valid": the last ones of a single file, which "train" then excludes (none by default); at
                most this many of a hub dataset (2000 by default)
    num_workers accepted for compatibility: tokenizers use all cores
    tokenizer   a tokenizer, or its name; replaces ``tokenizer_model_name`` ("gpt2" by default), which
                ``tokenizer_class`` loads
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        dataset_name: str | Path,
        tokenizer_fn: Callable[..., Callable[[Mapping[str, Any]], Mapping[str, Any]]],
        pre_tokenization_hook: Callable[[Any], Any] | None = None,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        valid_size: int | None = None,
        num_workers: int | None = None,
        tokenizer_class: Any | None = None,
        tokenizer_model_name: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
    ) -> None:
        if tokenizer is not None and (tokenizer_class is not None or tokenizer_model_name is not None):
            raise ConfigError("TokenizedDatasetLoader: give tokenizer, or its class and name: got both.")
        self.source = Source(str(dataset_name), split, root_dir, from_disk, valid_size, num_workers)
        self.max_length, self.tokenizer_fn, self.pre_tokenization_hook = max_length, tokenizer_fn, pre_tokenization_hook
        self.tokenizer = load_tokenizer(tokenizer or tokenizer_model_name, tokenizer_class)

    def load(self) -> TensorDict:
        """The rows [N] with the entries that ``tokenizer_fn`` makes."""
        functions = {"tokenizer_fn": self.tokenizer_fn, "hook": self.pre_tokenization_hook}
        recipe = {name: callable_fingerprint(function) for name, function in functions.items()}
        return self.source.tokenised(self.tokenizer, self.max_length, self._blocks, recipe)

    @staticmethod
    def dataset_to_tensordict(
        dataset: Any,
        data_dir: str | Path,
        prefix: NestedKey | None = None,
        features: Sequence[str] | None = None,
        batch_dims: int = 1,
        valid_mask_key: NestedKey | None = None,
    ) -> TensorDict:
        """Writes columns of a ``datasets.Dataset``, or entries of a tensordict, into ``data_dir``, memory-mapped.

        Returns  the memory-mapped tensordict; the columns are under ``prefix``, with the ``batch_dims`` first
                 dimensions of the first one as batch size
        Raises   DataError for a column that is missing, or that is not numbers of one shape

        features        the columns to write; None: all
        valid_mask_key  a column bool[N]: rows where it is False are left out
        """
        columns = dataset if is_tensor_collection(dataset) else dataset.with_format("torch")[:]
        known = list(columns.keys(True, True) if is_tensor_collection(columns) else columns)
        names = [unravel_key(name) for name in (known if features is None else features)]
        for name in (*names, *([] if valid_mask_key is None else [valid_mask_key])):
            if name not in known or not isinstance(columns[name], Tensor):
                raise DataError(
                    f"dataset_to_tensordict: column {name!r} must be numbers of one shape in every row: got "
                    f"{type(columns[name]).__name__ if name in known else 'none'}; columns: {known}."
                )
        if not names:
            raise DataError("dataset_to_tensordict: there must be a column to write: got none.")
        rows = TensorDict({name: columns[name] for name in names}, columns[names[0]].shape[:batch_dims])
        if valid_mask_key is not None:
            rows = rows[columns[valid_mask_key].bool()]
        return (rows if prefix is None else TensorDict().set(prefix, rows)).memmap_(str(data_dir))

    def _blocks(self) -> Iterator[Block]:
        process = self.tokenizer_fn(tokenizer=self.tokenizer, max_length=self.max_length)
        rows, before = self.source.rows()
        if self.pre_tokenization_hook is not None:
            import datasets  # a second of imports

            before_hook = rows.dataset if isinstance(rows, ArrowRows) else datasets.Dataset.from_list(list(rows))
            rows = load_rows(self.pre_tokenization_hook(before_hook))
        for first, block in blocks_of(rows, before):
            if isinstance(process, TensorDictTokenizer):
                process.first_row = first
            yield len(block), process({name: [row.get(name) for row in block] for name in block[0]})
