"""The pages of the documents, and the files that they show."""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclasses.dataclass(frozen=True)
class Example:
    """A block with a file name above it, and what the block below it says that it prints."""

    name: str
    text: str
    prints: str | None


def examples() -> list[Example]:
    block = r"^`([\w.]+)`\n\n```\w+\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?"
    text = "\n".join(page.read_text() for page in PAGES)
    return [Example(name, body, prints or None) for name, body, prints in re.findall(block, text, re.M | re.S)]


EXAMPLES = examples()
