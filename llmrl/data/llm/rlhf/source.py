"""The rows of one split of a dataset: a file, a folder of files, a saved dataset, or a name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from llmrl.data.llm.dataset_files import has_splits, load_rows, local_files
from llmrl.data.llm.rlhf.cache import Block, code_fingerprint, open_or_build, tokenizer_fingerprint
from llmrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
_DEFAULT_ROOT = Path("~/.cache/llmrl/data")
_VALID_ROWS = 2000  # at most, of a hub dataset's "valid" split
AT_ONCE = 1024  # rows per block


@dataclass(frozen=True)
class Source:
    """One split of a dataset; the fields are arguments of `TokenizedDatasetLoader`."""

    name: str
    split: str
    root_dir: str | Path | None = None
    from_disk: bool = False
    valid_size: int | None = None
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers not in (None, 0, 1):
            raise ConfigError(
                f"dataset: num_workers has no effect, so it must be left out: got {self.num_workers}; fast tokenizers "
                "use all cores, or as many as the environment variable RAYON_NUM_THREADS says."
            )
        if self.valid_size is not None and self.valid_size < 0:
            raise ConfigError(f"dataset: valid_size must not be negative: got {self.valid_size}.")

    def tokenised(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        build: Callable[[], Iterable[Block]],
        recipe: Mapping[str, Any],
    ) -> TensorDict:
        """The rows that ``build`` makes of this split, cached until anything changes that they depend on."""
        files = self._files() or []
        if files and files[0].is_dir():
            files = sorted(files[0].rglob("*.arrow"))
        # Size and time represent the content: hashing a file takes as long as reading it.
        stamp = [
            [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()
        ]
        recipe = {
            **recipe,
            "source": {"name": self.name, "split": self.split, "valid_size": self.valid_size, "stamp": stamp},
            "max_length": max_length,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "code": code_fingerprint(),
        }
        root = Path(self.root_dir or _DEFAULT_ROOT).expanduser()
        words = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(self.name).name)
        return open_or_build(root, f"{words}-{self.split}", recipe, build)

    def rows(self) -> tuple[Sequence[Row], int]:
        """The rows, and the number of rows before them in the file.

        Raises  DataError for data that are missing, broken or empty, or without the split
        """
        files = self._files()
        if files is None:
            rows = load_rows(self.name, split=self.split)
            if self.split.startswith("valid"):
                rows = rows[: _VALID_ROWS if self.valid_size is None else self.valid_size]
            return rows, 0
        rows = load_rows(self.name, split=self.split)
        return (rows, 0) if has_splits(self.name) else self._part(rows)

    def _files(self) -> list[Path] | None:
        """The files of the split, or a saved folder; None for a name on the hub."""
        files = local_files(self.name, self.split)
        if self.from_disk and (files is None or not files[0].is_dir()):
            raise DataError(f"dataset: {self.name} must be a folder that datasets' save_to_disk wrote: it is not.")
        return files

    def _part(self, rows: Sequence[Row]) -> tuple[Sequence[Row], int]:
        """Divides data without splits: the last ``valid_size`` rows are "valid", all before them "train"."""
        held = self.valid_size or 0
        if self.split not in ("train", "valid") or (self.split == "valid" and not held):
            raise DataError(
                f"dataset: {self.name} has no splits: got split={self.split!r}; 'train' is all of it; "
                "with valid_size=N its last N rows are 'valid' and the others 'train'; or give a folder with a file "
                "for each split."
            )
        if held >= len(rows):
            raise DataError(
                f"dataset: valid_size must leave rows to train on: got {held} of the {len(rows)} rows of {self.name}."
            )
        cut = len(rows) - held
        part = range(cut) if self.split == "train" else range(cut, len(rows))
        return rows[part.start : part.stop], part.start


def blocks_of(rows: Sequence[Row], before: int) -> Iterator[tuple[int, list[Row]]]:
    """The rows in blocks, each with the number of its first row, counted from 1."""
    for start in range(0, len(rows), AT_ONCE):
        yield before + start + 1, list(rows[start : start + AT_ONCE])
