"""Search in local text files: BM25 over passages, with the file and line of each hit. No search library is needed."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from llmrl.errors import ConfigError, DataError
from llmrl.strict_json import JSONError, parse_json

SUFFIXES = (".txt", ".md", ".jsonl")
_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75


@dataclass(frozen=True)
class Passage:
    """A piece of a file: a paragraph, or a row of a JSON-lines file."""

    file: str  # relative to the folder
    line: int  # of its first line, from 1
    text: str


class SearchDocuments:
    """Ranks the passages of a folder's .txt, .md and .jsonl files by BM25; all are read and indexed at construction.

    A passage is a paragraph (longer ones are split at line ends after ``max_passage_chars``) or a row of a .jsonl file:
    its ``"text"`` if it has one, else all its values. Words are compared without case, and are not stemmed.

    Raises   ConfigError if the folder does not exist or holds no such file; DataError for a row that is not JSON
    Source   Robertson and Zaragoza 2009, The Probabilistic Relevance Framework: BM25 and Beyond; k1 = 1.5, b = 0.75

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.txt").write_text("The moon is far.\\n\\nThe sun is farther than the moon.")
    ...     search = SearchDocuments(folder)
    >>> print(search("Sun"))
    [1] a.txt:3
    The sun is farther than the moon.
    """

    def __init__(self, folder: str, *, max_passage_chars: int = 1200, name: str = "search_documents"):
        self.name = name
        root = Path(folder)
        if not root.is_dir():
            raise ConfigError(f"SearchDocuments: folder must be a folder of text files: got {folder!r}.")
        files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        self.passages = [passage for path in files for passage in _passages(path, root, max_passage_chars)]
        if not self.passages:
            raise ConfigError(f"SearchDocuments: {folder!r} must hold {', '.join(SUFFIXES)} files with text: got none.")
        counts = [Counter(_words(passage.text)) for passage in self.passages]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths)
        # word -> (passage, weight of the word in that passage, without the word's rarity)
        self._weights: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for index, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            # BM25 is a product of two factors. This one depends only on word and passage, so it is computed once.
            norm = _K1 * (1 - _B + _B * length / mean)
            for word, times in count.items():
                self._weights[word].append((index, times * (_K1 + 1) / (times + norm)))

    def __call__(self, query: str, limit: Annotated[int, Field(ge=1, le=10)] = 3) -> str:
        """Search the documents for words. Returns the passages that fit best, each with its file and line.

        Args:
            query: the words to look for
            limit: how many passages to return, at most 10
        """
        hits = self.search(query, limit)
        if not hits:
            return "No passage has any of these words."
        return "\n\n".join(f"[{rank}] {hit.file}:{hit.line}\n{hit.text}" for rank, (hit, _) in enumerate(hits, 1))

    def search(self, query: str, limit: int) -> list[tuple[Passage, float]]:
        """The best passages and their scores, best first; at equal scores in the order of the files."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(query)):
            found = self._weights.get(word, [])
            # The other factor depends on the word. "1 +" keeps it positive for words in most passages.
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for index, weight in found:
                scores[index] += rarity * weight
        best = sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]
        return [(self.passages[index], score) for index, score in best]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _passages(path: Path, root: Path, max_chars: int) -> list[Passage]:
    name = path.relative_to(root).as_posix()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if path.suffix == ".jsonl":
        rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        return [Passage(name, number, _row_text(line, path, number)) for number, line in rows]
    passages: list[Passage] = []
    kept: list[str] = []
    # An extra empty line ends the last paragraph.
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            kept.append(line)
        if kept and (not line.strip() or sum(map(len, kept)) >= max_chars):
            first = number - len(kept) + bool(line.strip())
            passages.append(Passage(name, first, "\n".join(kept)))
            kept = []
    return passages


def _row_text(line: str, path: Path, number: int) -> str:
    try:
        row = parse_json(line)
    except JSONError as error:
        raise DataError(f"SearchDocuments: {path}:{number}: every line must be JSON: {error}.") from None
    if isinstance(row, dict):
        return str(row["text"]) if "text" in row else "\n".join(f"{key}: {value}" for key, value in row.items())
    return str(row)
