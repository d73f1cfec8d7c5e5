"""Every block of code on a page is run: by tests/ledgers/pages/test_every_block.py, where it only asks a server, or by
the test that BLOCKS names. BLOCKS has the reason where no test runs it."""

from __future__ import annotations

from blocks import BLOCKS
from page_blocks import ROOT, all_blocks


def test_each_block_only_asks_a_server_or_is_listed_once():
    blocks = all_blocks()
    assert len(blocks) > 100
    wrong = [block for block in blocks if len(block.listed) != 1 and not (block.asks and not block.listed)]
    assert wrong == []


def test_what_is_listed_is_a_block_and_what_runs_it_is_a_test():
    blocks = all_blocks()
    for page, entries in BLOCKS.items():
        for words, how in entries.items():
            assert [block for block in blocks if block.page == page and words in block.text], (page, words)
            if how.startswith("tests/"):
                assert (ROOT / how).is_file(), how
            else:
                assert how.startswith("not run: "), how
