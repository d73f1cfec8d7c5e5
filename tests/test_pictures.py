"""The pictures of the pages show what the results and the code say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

import pictures  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = pictures.pictures()


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_current_and_says_in_words_what_it_shows(name):
    committed = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    assert committed == DRAWN[name], "run: make docs"
    root = ElementTree.fromstring(committed)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    assert "href" not in committed


def test_a_bar_of_the_speeds_is_as_long_as_the_ratio_of_the_results():
    results = json.loads((pictures.RESULTS / "2026-11-22-throughput-avx2-llama.json").read_text())["results"]
    speeds = {
        (one["target"], one["round"]): one["total_tok_s"] for one in results if one["workload"] == "throughput-64"
    }
    rounds = sorted({number for _, number in speeds})
    times = sorted(speeds["ours", number] / speeds["llama", number] for number in rounds)
    middle = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2
    assert f"64 streams, all held to AVX2: {middle:.2f} times llama.cpp" in DRAWN["speed.svg"]


def test_what_the_page_says_of_its_first_processor_is_what_is_drawn():
    page = (ROOT / "docs" / "performance.md").read_text()
    [row] = re.findall(r"^\| 64 streams \| [^|]*?([\d.]+) × OpenVINO", page, re.MULTILINE)
    assert f"64 streams, AVX-512: {row} times OpenVINO" in DRAWN["speed.svg"]


def test_every_package_is_in_the_house_and_every_line_leads_down():
    root = ElementTree.fromstring(DRAWN["house.svg"])
    shown = {text.text for text in root.iter(f"{SVG}text")}
    packages = {path.parent.name for path in (ROOT / "tureen").glob("*/__init__.py")}
    assert packages <= shown
    lines = list(root.iter(f"{SVG}line"))
    assert len(lines) > len(packages) / 2
    assert all(float(line.get("y1")) < float(line.get("y2")) for line in lines)
