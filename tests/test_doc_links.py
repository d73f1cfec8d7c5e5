"""The pages of docs/, the decisions and README.md: every link leads to a file and to a heading that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKS = [
    (page.relative_to(ROOT).as_posix(), target)
    for page in PAGES
    for target in dict.fromkeys(re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")))
    if "://" not in target
]


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_a_link_leads_somewhere(page, target):
    path, _, heading = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists()
    if heading:
        assert heading in _anchors(file.read_text(encoding="utf-8"))


def _anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them: lower case, blanks as dashes, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
