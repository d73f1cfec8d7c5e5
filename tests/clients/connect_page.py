"""The blocks of docs/connect-a-client.md, which the checks run as they are there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "connect-a-client.md"
BLOCK = r"^## {title}\n.*?^```\w*\n(.*?)^```"


def block(title: str, url: str) -> str:
    """Return the first block of the client's section, with `url` as the server's address."""
    found = re.search(BLOCK.format(title=title), PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return found[1].replace("http://127.0.0.1:30000", url)


def variables(title: str, url: str) -> dict[str, str]:
    """Return the environment variables that the client's block exports."""
    return dict(re.findall(r"^export (\w+)=(\S+)", block(title, url), re.MULTILINE))
