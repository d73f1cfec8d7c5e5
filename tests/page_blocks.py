"""The blocks of code on the pages: docs/*.md, README.md, CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from blocks import BLOCKS

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code of a page."""

    page: str
    language: str
    text: str

    @property
    def asks(self) -> bool:
        """Whether it does nothing but ask a server."""
        return self.text.startswith("curl ") or (self.language == "python" and "127.0.0.1:30000" in self.text)

    @property
    def listed(self) -> list[str]:
        """The entries of BLOCKS that mean it."""
        return [words for words in BLOCKS.get(self.page, {}) if words in self.text]


def all_blocks() -> list[Block]:
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [
        Block(path.name, language, text)
        for path in pages
        for language, text in CODE.findall(path.read_text(encoding="utf-8"))
    ]


def block_with(page: str, words: str) -> str:
    """Return the only block of a page with these words."""
    [block] = [block.text for block in all_blocks() if block.page == page and words in block.text]
    return block
