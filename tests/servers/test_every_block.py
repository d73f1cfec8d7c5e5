"""Every block of code on a page is run and its output judged: here, where it only asks a server, or by the test that
BLOCKS names. What no test runs has its reason there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from blocks import BLOCKS

pytestmark = [pytest.mark.e2e, pytest.mark.model]

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):30000")
CURL = 'curl() { command curl -sS --fail-with-body --max-time 120 -w "\\n" "$@" || exit 1; }\n'


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


def blocks() -> list[Block]:
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [
        Block(path.name, language, text)
        for path in pages
        for language, text in CODE.findall(path.read_text(encoding="utf-8"))
    ]


ALL = blocks()


def named(block: Block) -> str:
    return f"{block.page} {ALL.index(block)}"


@pytest.mark.parametrize("block", ALL, ids=named)
def test_each_block_is_run_here_or_listed_once(block):
    assert len(block.listed) == (0 if block.asks and not block.listed else 1), block.text


def test_what_is_listed_is_a_block_and_what_runs_it_is_a_test():
    for page, entries in BLOCKS.items():
        for words, how in entries.items():
            assert [block for block in ALL if block.page == page and words in block.text], (page, words)
            if how.startswith("tests/"):
                assert (ROOT / how).is_file(), how
            else:
                assert how.startswith("not run: "), how


@pytest.mark.parametrize("block", [block for block in ALL if block.asks and not block.listed], ids=named)
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_a_block_that_asks_a_server_is_answered(server, block, tmp_path):
    text = ADDRESS.sub(server.url.removeprefix("http://"), block.text)
    command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-ec", CURL + text]
    env = os.environ | {"no_proxy": "*", "NO_PROXY": "*"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\w", done.stdout), done.stderr
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            assert json.loads(line).get("error") is None, line
    if "The capital of France is" in block.text and '"temperature": 0' in block.text and "-N" not in block.text:
        assert "Paris" in done.stdout
