"""Every block of code on a page that only asks a server is answered by one. tests/test_page_blocks.py finds the blocks
that no test runs."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from page_blocks import Block, all_blocks
from page_commands import completed

GUARDS = ("docs/*.md", "README.md", "CONTRIBUTING.md", "cli", "app", "http", "dialects", "contract", "requests")

pytestmark = pytest.mark.model

ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):30000")
CURL = 'curl() { command curl -sS --fail-with-body --max-time 120 -w "\\n" "$@" || exit 1; }\n'
ASKING = [block for block in all_blocks() if block.asks and not block.listed]


def fault_of(block: Block, printed: str) -> str | None:
    """Return the faults in the output of a block."""
    if not re.search(r"\w", printed):
        return "it printed nothing"
    for line in printed.splitlines():
        if line.startswith("{") and json.loads(line).get("error") is not None:
            return line
    if "The capital of France is" in block.text and '"temperature": 0' in block.text and "-N" not in block.text:
        return None if "Paris" in printed else printed
    return None


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("page", sorted({block.page for block in ASKING}))
def test_blocks_that_ask_a_server_are_answered(server, page, tmp_path):
    faults = {}
    for block in ASKING:
        if block.page != page:
            continue
        text = ADDRESS.sub(server.url.removeprefix("http://"), block.text)
        if block.language == "python":
            (tmp_path / "program.py").write_text(text, encoding="utf-8")
            text = f"{sys.executable} program.py"
        done = completed(CURL + text, tmp_path)
        fault = fault_of(block, done.stdout) if done.returncode == 0 else done.stdout + done.stderr
        if fault:
            faults[block.text] = fault
    assert faults == {}
