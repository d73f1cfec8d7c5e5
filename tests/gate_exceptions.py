"""Tests of the gate that may leave their process. The list may only shrink (tools/ratchets.py).

By file, or by file and function: the reason.
"""

EXCEPTIONS: dict[str, str] = {}
