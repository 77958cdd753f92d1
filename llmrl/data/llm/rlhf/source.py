"""The rows of one split of a dataset: a file, a folder of files, a saved dataset, or a name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from llmrl.data.llm.dataset_files import FILE_FORMATS, load_rows
from llmrl.data.llm.rlhf.cache import Block, code_fingerprint, open_or_build, tokenizer_fingerprint
from llmrl.errors import ConfigError, DataError, did_you_mean

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
        path = self._path()
        files = [path] if path is not None and path.is_file() else []
        if self.from_disk:
            files = sorted(path.rglob("*.arrow"))
        # Size and time represent the content: hashing a file takes as long as reading it.
        stamp = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
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
        path = self._path()
        if self.from_disk:
            return self._from_disk(path)
        if path is None:
            rows = load_rows(self.name, split=self.split)
            if self.split.startswith("valid"):
                rows = rows.select(range(min(len(rows), _VALID_ROWS if self.valid_size is None else self.valid_size)))
            return rows, 0
        rows = load_rows(path)
        return self._part(rows) if path == Path(self.name).expanduser() else (rows, 0)

    def _path(self) -> Path | None:
        """The file; None for a name on the hub."""
        path = Path(self.name).expanduser()
        if self.from_disk or path.is_file():
            return path
        if not path.is_dir():
            return path if path.suffix.lower() in FILE_FORMATS else None
        files = [file for file in sorted(path.iterdir()) if file.suffix.lower() in FILE_FORMATS]
        own = [file for file in files if file.stem == self.split]
        if len(own) == 1:
            return own[0]
        saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
        advice = "pass from_disk=True" if saved else "rename one, or name the file"
        raise DataError(
            f"dataset: the folder {path} must have one file for the split {self.split!r}, such as {self.split}.jsonl: "
            f"it has {', '.join(file.name for file in files) or 'no data file'}; {advice}."
            f"{did_you_mean(self.split, [file.stem for file in files])}"
        )

    def _part(self, rows: Sequence[Row]) -> tuple[Sequence[Row], int]:
        """Divides data without splits: the last ``valid_size`` rows are "valid", all before them "train"."""
        held = self.valid_size or 0
        if self.split not in ("train", "valid") or (self.split == "valid" and not held):
            raise DataError(
                f"dataset: {self.name} is one file, without splits: got split={self.split!r}; 'train' is all of it; "
                "with valid_size=N its last N rows are 'valid' and the others 'train'; or give a folder with a file "
                "for each split."
            )
        if held >= len(rows):
            raise DataError(
                f"dataset: valid_size must leave rows to train on: got {held} of the {len(rows)} rows of {self.name}."
            )
        cut = len(rows) - held
        part = range(cut) if self.split == "train" else range(cut, len(rows))
        taken = rows[part.start : part.stop] if isinstance(rows, list) else rows.select(part)
        return taken, part.start

    def _from_disk(self, path: Path) -> tuple[Sequence[Row], int]:
        import datasets  # a second of imports

        try:
            saved = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise DataError(f"dataset: {path} must be what datasets' save_to_disk wrote: {error}") from error
        if not isinstance(saved, datasets.DatasetDict):
            return self._part(saved)
        if self.split not in saved:
            raise DataError(
                f"dataset: {path} must have the split {self.split!r}: it has {', '.join(saved)}."
                f"{did_you_mean(self.split, saved)}"
            )
        return saved[self.split], 0


def blocks_of(rows: Sequence[Row], before: int) -> Iterator[tuple[int, list[Row]]]:
    """The rows in blocks, each with the number of its first row, counted from 1."""
    for start in range(0, len(rows), AT_ONCE):
        block = rows[start : start + AT_ONCE]
        if not isinstance(block, list):  # a slice of a Dataset is a dict of columns
            names = list(block)
            block = [dict(zip(names, values, strict=True)) for values in zip(*block.values(), strict=True)]
        yield before + start + 1, block
