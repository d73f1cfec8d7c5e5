"""docs/architecture.md: what its table of places names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Where to look")[2].partition("\n## ")[0]
ROWS = [
    line.split(" | ", 1)
    for line in TABLE.splitlines()
    if line.startswith("| ") and line != "| to find, or to change | look in |"
]
PLACES = sorted({place for _, cell in ROWS for place in re.findall(r"`([^`]+)`", cell)})


def test_every_row_names_a_place_but_for_the_headings():
    assert [topic for topic, cell in ROWS if "`" not in cell and not topic.startswith("| **")] == []
    assert len(PLACES) > 50


@pytest.mark.parametrize("place", PLACES)
def test_the_place_is_there(place):
    path, _, name = place.partition(": ")
    assert (ROOT / "tureen" / path).exists()
    if name:
        assert name in _names(ast.parse((ROOT / "tureen" / path).read_text(encoding="utf-8")))


def _names(tree: ast.Module) -> set[str]:
    """Returns the functions and classes of a module, and Class.method."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = set()
    for node in (node for node in tree.body if isinstance(node, kinds)):
        names |= {node.name, *(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds))}
    return names


def test_a_stranger_finds_what_the_page_promises_to_show():
    for topic in (
        "where a stop string is decided",
        "a KV page is allocated and freed",
        "OpenAI's `usage`",
        "where a replica is chosen",
        "where a field is reported as ignored",
        "a new kind of KV memory",
        "a new attention backend",
    ):
        assert sum(topic in row[0] for row in ROWS) == 1
