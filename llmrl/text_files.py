"""Explains why a file is not UTF-8 text, from its first bytes or its first undecodable line, and how to fix it."""

from __future__ import annotations

from pathlib import Path

_BEGINNINGS = {
    b"\x1f\x8b": ("gzip", "unpack it with gunzip"),
    b"BZh": ("bzip2", "unpack it with bunzip2"),
    b"\xfd7zX": ("xz", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it with unzstd"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"PAR1": ("Parquet", "rename it to end in .parquet"),
    b"\xff\xfe": ("UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
}


def why_not_text(path: Path, *, by_line: bool = False) -> str | None:
    """Returns the problem and the remedy; None if the first bytes of the file (``by_line``: all lines) are UTF-8."""
    with path.open("rb") as file:
        head = file.read(4)
        for beginning, (kind, remedy) in _BEGINNINGS.items():
            if head.startswith(beginning):
                return f"{path} must be UTF-8 text: it is {kind}; {remedy}."
        if b"\0" in head:
            return (
                f"{path} must be UTF-8 text: it has null bytes, as UTF-16 and binary files have; convert it to UTF-8."
            )
        file.seek(0)
        for number, line in enumerate(file, 1) if by_line else ():
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return (
                    f"{path}, line {number} must be UTF-8 text: byte {line[error.start]:#04x} at column "
                    f"{error.start + 1} is not; convert the file, for Latin-1 with: iconv -f LATIN1 -t UTF-8."
                )
    return None
