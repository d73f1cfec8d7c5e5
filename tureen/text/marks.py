"""Finds the beginning of a mark at the end of a text that comes in pieces."""

from __future__ import annotations


def overlap(text: str, mark: str) -> int:
    """Returns how many of the text's last characters may be the beginning of a mark that later text completes."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
