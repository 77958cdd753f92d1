"""Downloads files: resumes broken connections, checks size and checksum, renames each file when it is complete.

`downloads.json` in the folder lists what was downloaded, with the SHA-256 of every complete file. A file without a
published checksum that is downloaded again from the same address must have the same SHA-256 as the first time.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from llmrl.data.replay_buffers.directory import file_digest
from llmrl.errors import DataError

LEDGER = "downloads.json"
ATTEMPTS = 5  # consecutive failures without a new byte
PAUSE_S = 1.0  # before the second attempt; each further pause is longer by this
_TIMEOUT_S = 60.0
_PIECE = 1 << 20


class RemoteFile(NamedTuple):
    """A file to download: its name in the folder, its address, and the checksum and size if they are published."""

    name: str
    url: str
    checksum: str | None = None  # "sha256:..." or "md5:..."
    size: int | None = None


def fetch(who: str, files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Downloads the files that the folder lacks; returns the paths in order. Only one caller per folder at a time.

    Raises   DataError for an unreadable address, a connection that keeps failing (the bytes received are kept for the
             next call), a full disk, and content that differs from what was published or downloaded before
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as progress:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return [_fetch_one(who, file, folder, progress) for file in files]
        except OSError as error:  # connection errors are DataErrors already
            raise DataError(
                f"{who}: cannot write the download to {folder}: {error}; make room, or choose another root. "
                "The bytes received are kept for the next call."
            ) from error


def note_files(folder: Path) -> list[Path]:
    """Records files that another program downloaded to the folder, for `remove_downloads`; returns their paths."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LEDGER]
    for path in files:
        _note(folder, path.relative_to(folder).as_posix(), {"bytes": path.stat().st_size})
    return files


def read_ledger(folder: Path) -> dict[str, dict[str, Any]]:
    """The downloads of the folder, by name."""
    try:
        return json.loads((folder / LEDGER).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def remove_downloads(folder: Path, *, forget: bool = False) -> None:
    """Removes only the downloaded files; with ``forget`` also their checksums."""
    for name in read_ledger(folder):
        for path in (folder / name, _part(folder / name)):
            path.unlink(missing_ok=True)
        for parent in list(Path(name).parents)[:-1]:
            if (folder / parent).is_dir() and not any((folder / parent).iterdir()):
                (folder / parent).rmdir()
    if forget:
        (folder / LEDGER).unlink(missing_ok=True)


def open_url(who: str, url: str) -> bytes:
    """The content of a small page."""
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as response:
            return response.read()
    except (OSError, HTTPException) as error:
        raise DataError(f"{who}: {url} must be readable: {_reason(error)}; check the connection.") from error


def hub_files(who: str, repo: str, folder: str, suffixes: tuple[str, ...]) -> list[RemoteFile]:
    """The files below a folder of a dataset on the Hugging Face hub, named without that folder."""
    from huggingface_hub import HfApi, RepoFile, hf_hub_url  # imported late: it takes longer to import than torch

    try:
        tree = list(HfApi().list_repo_tree(repo, folder, recursive=True, repo_type="dataset"))
    except (OSError, ValueError, RuntimeError) as error:  # from the hub, httpx, or the offline mode
        raise DataError(f"{who}: {repo} on the hub must list its folder {folder}: {error}") from error
    return [
        RemoteFile(
            entry.path.removeprefix(f"{folder}/"),
            hf_hub_url(repo, entry.path, repo_type="dataset"),
            None if entry.lfs is None else f"sha256:{entry.lfs.sha256}",
            entry.size,
        )
        for entry in sorted(tree, key=lambda entry: entry.path)
        if isinstance(entry, RepoFile) and entry.path.endswith(suffixes)
    ]


def _fetch_one(who: str, file: RemoteFile, folder: Path, progress: Progress) -> Path:
    path = folder / file.name
    known = read_ledger(folder).get(file.name, {})
    known = known if known.get("url") == file.url else {}
    if path.exists() and known.get("bytes") == path.stat().st_size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    task = progress.add_task(file.name, total=file.size)
    if progress.disable:
        print(f"{who}: downloading {file.url}", file=sys.stderr)
    failures = 0
    while True:
        had = part.stat().st_size if part.exists() else 0
        try:
            _receive(file, part, folder, known, lambda done, total: progress.update(task, completed=done, total=total))
            break
        except (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            # A connection may break any number of times as long as each attempt brings bytes. Three 4xx codes are worth
            # a retry: 408 (request timeout), 416 (range not satisfiable) and 429 (too many requests).
            grew = part.exists() and part.stat().st_size > had
            failures = 1 if grew else failures + 1
            fatal = isinstance(error, HTTPError) and error.code < 500 and error.code not in (408, 416, 429)
            if fatal or failures >= ATTEMPTS:
                raise DataError(
                    f"{who}: {file.url} must be readable: {_reason(error)}; check the address and the connection. "
                    f"{part.stat().st_size if part.exists() else 0:,} bytes were received and are kept."
                ) from error
            time.sleep(PAUSE_S * failures)
    _check(who, file, part, known)
    _note(folder, file.name, {"url": file.url, "bytes": part.stat().st_size, "sha256": file_digest(part)})
    part.replace(path)
    return path


def _receive(file: RemoteFile, part: Path, folder: Path, known: dict[str, Any], report: Any) -> None:
    """Appends the rest of the file to ``part``, or starts over if the file on the server has changed."""
    validator = read_ledger(folder).get(file.name, {}).get("validator")
    start = part.stat().st_size if part.exists() and validator else 0
    # With If-Range the server sends the whole file if it has changed, instead of a range of the new file.
    headers = {"Range": f"bytes={start}-", "If-Range": validator} if start else {}
    try:
        response = urlopen(Request(file.url, headers=headers), timeout=_TIMEOUT_S)
    except HTTPError as error:
        if error.code != 416:
            raise
        part.unlink()  # the partial file is longer than the file
        response = urlopen(file.url, timeout=_TIMEOUT_S)
    with response:
        resumed = response.status == 206
        validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
        weak = validator is not None and validator.startswith("W/")  # a weak ETag does not guarantee the same bytes
        length = response.headers.get("Content-Length")
        start = start if resumed else 0  # 0: the server ignored the range
        total = None if length is None else start + int(length)
        # Recorded before the first byte arrives, so that a later process can resume an interrupted download.
        _note(folder, file.name, {**known, "url": file.url, "validator": None if weak else validator, "bytes": None})
        with part.open("ab" if resumed else "wb") as out:
            while piece := response.read(_PIECE):
                out.write(piece)
                report(out.tell(), total)
            arrived = out.tell()
    if total is not None and arrived < total:
        raise ConnectionError(f"the connection broke after {arrived:,} of {total:,} bytes")


def _check(who: str, file: RemoteFile, part: Path, known: dict[str, Any]) -> None:
    expected = file.checksum or (f"sha256:{known['sha256']}" if known.get("sha256") else None)
    algorithm = (expected or "").partition(":")[0]
    if file.size is not None and part.stat().st_size != file.size:
        what = f"{part.stat().st_size:,} bytes, expected {file.size:,}"
    elif expected is not None and (got := f"{algorithm}:{file_digest(part, algorithm)}") != expected:
        what = f"{got}, expected {expected}"
    else:
        return
    part.unlink()
    since = "was published" if file.checksum or file.size is not None else "was downloaded the first time"
    raise DataError(
        f"{who}: {file.url} must be what {since}: got {what}; try again, or call delete() if the file has been "
        "replaced on purpose."
    )


def _note(folder: Path, name: str, entry: dict[str, Any]) -> None:
    ledger = {**read_ledger(folder), name: entry}
    draft = folder / f"{LEDGER}.draft"  # renamed atomically: a killed process leaves a complete ledger
    draft.write_text(json.dumps(ledger, indent=1))
    draft.replace(folder / LEDGER)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _reason(error: BaseException) -> str:
    return str(error.reason) if isinstance(error, URLError) and not isinstance(error, HTTPError) else str(error)
