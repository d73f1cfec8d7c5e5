"""The README's table of speed says what docs/performance.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = {"one stream": "single stream", "a prompt of 512 tokens": "prefill 512", "16 streams": "16 streams"}
ROWS |= {"64 streams": "64 streams"}


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The cells of a table's rows, by the first. `heading`: a word of the last cell of its first line."""
    lines = (ROOT / page).read_text(encoding="utf-8").partition(f"{heading} |\n")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[1 : next(i for i, line in enumerate(lines) if not line)]]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("row", ROWS)
def test_each_ratio_of_the_readme_is_one_of_the_column_that_was_held_to_avx2(row):
    llama, openvino = table("README.md", "OpenVINO GenAI 2026.4, int8")[row]
    measured = table("docs/performance.md", "`avx2` as it was")[ROWS[row]][1]
    assert re.search(rf"(?<![\d.]){llama} × llama\.cpp", measured)
    assert re.search(rf"(?<![\d.]){openvino} × OpenVINO", measured)


def test_peers_and_arithmetic_are_named_as_there():
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/performance.md"))
    for words in ("llama.cpp b11434", "OpenVINO GenAI 2026.4", "`--activations int8`", "two virtual CPUs", "AVX2"):
        assert words in readme
        assert words in page
