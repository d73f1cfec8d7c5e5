"""Pages of docs/, the decisions and README.md: links lead to files and headings that are there, and the messages on the
page of symptoms are those of the server."""

from __future__ import annotations

import ast
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


def _texts() -> set[str]:
    """Every constant text of the package; of an f-string its parts."""
    return {
        node.value
        for path in (ROOT / "tureen").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_each_message_on_the_page_of_symptoms_is_one_of_the_server_s():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    told, texts = page.partition("## The answer is not")[0], _texts()
    rows = re.findall(r"^\| (?:\d+ )?`([^`]+)` \|", told, re.MULTILINE)
    assert len(rows) > 12
    parts = [part.strip() for row in rows for part in row.split("…") if len(part.strip()) > 2]
    assert [part for part in parts if not any(part in text for text in texts)] == []


def test_the_index_of_decisions_has_each_note_once_with_its_title_and_what_supersedes_it():
    folder = ROOT / "docs" / "decisions"
    index = re.findall(
        r"^- \[(\d+)\]\((\S+?)\) (.*?)(?: \*\((\S+ ?\S*) by .*\)\*)?$", (folder / "README.md").read_text(), re.MULTILINE
    )
    notes = []
    for note in sorted(folder.glob("[0-9]*.md")):
        title, _, first, *_ = note.read_text(encoding="utf-8").splitlines()
        number, _, words = title.removeprefix("# ").partition(". ")
        status = re.match(r"\*\*(Partly superseded|Superseded|Extended)\*\* by", first)
        notes.append((number, note.name, words, status[1].lower() if status else ""))
    assert sorted(index, key=lambda entry: entry[1]) == notes


FOR_CONTRIBUTORS = ("adding-", "architecture", "clients", "native-kernels", "performance", "releases")
"""What the names of pages begin with that are about measurements, tests or the code."""


FIGURES = (
    r"\d times (?:as (?:long|fast|much|many)|faster|slower|longer)|\btwo[- ](?:busy )?cores?\b|\bmedian \d"
    r"|\b(?:took|computed in|answered in) \d|\d % of the \d|tests' corpus"
)
"""What sentences say that report a measurement, and not a limit or a price."""


def test_guides_have_measurements_and_links_to_tests_in_an_appendix_at_the_end():
    pages = [page for page in (ROOT / "docs").glob("*.md") if not page.stem.startswith(FOR_CONTRIBUTORS)]
    assert len(pages) > 40
    early, guides_after = {}, {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        guide, appendix, rest = text.partition("\n## Appendix")
        prose = re.sub(r"^```.*?^```", "", guide, flags=re.MULTILINE | re.DOTALL)  # an example may print figures
        found = [*re.findall(r"\.\./(?:tests|bench)/|\b(?:tests|bench)/\w+", guide), *re.findall(FIGURES, prose)]
        early |= {page.name: found} if found else {}
        headings = re.findall(r"^## (.*)", appendix + rest, re.MULTILINE)
        guides_after |= {page.name: late} if (late := [h for h in headings if not h.startswith("Appendix")]) else {}
    assert (early, guides_after) == ({}, {})
