"""What the fake runner computes as hidden states."""

from __future__ import annotations

from fake_engine import HIDDEN_SIZE

from tureen.runner.fake import digest


def fake_hidden(tokens):
    """What the fake runner computes for each position: the first bytes of a hash over all stored up to there."""
    stored, rows = b"", []
    before = b""
    for token in tokens:
        before = digest(before, token)
        stored += before
        rows.append([float(byte) for byte in digest(stored)[:HIDDEN_SIZE]])
    return rows
