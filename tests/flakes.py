"""Tests that are known to fail now and then. The list may only shrink (tools/ratchets.py).

By test, without `tests/`: the known cause, or a suspicion.
"""

KNOWN: dict[str, str] = {}
