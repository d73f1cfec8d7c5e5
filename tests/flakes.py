"""Tests that are known to fail now and then. The list may only shrink (tools/ratchets.py).

By test, without `tests/`: what is known of the cause.
"""

KNOWN: dict[str, str] = {}
