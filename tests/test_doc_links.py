"""The pages of docs/, the decisions and README.md: every link leads to a file and to a heading that are there."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKS = [
    (page.relative_to(ROOT).as_posix(), target)
    for page in PAGES
    for target in dict.fromkeys(re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")))
    if "://" not in target
]


def test_every_link_leads_somewhere():
    assert [(page, target) for page, target in LINKS if not _leads_somewhere(page, target)] == []


def _leads_somewhere(page: str, target: str) -> bool:
    path, _, heading = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    return file.exists() and (not heading or heading in _anchors(file))


@functools.cache
def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them: lower case, blanks as dashes, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
