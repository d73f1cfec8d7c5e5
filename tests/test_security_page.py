"""The page on security names tests that hold what it says: they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.findall(r"\[`(test_\w+)`\]\(\.\./tests/([^)]+)\)", (ROOT / "docs" / "security.md").read_text())


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if "](../tests/" in line]
    assert len(rows) >= 30
    assert len(NAMED) >= len(rows)


@pytest.mark.parametrize(("name", "file"), NAMED)
def test_a_test_that_the_table_names_is_there(name, file):
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
