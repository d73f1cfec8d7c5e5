"""Join the parts that a parser of tool calls gave, and count its work."""

from __future__ import annotations

import sys

from tureen.text.messages import CallArguments, CallStart, Content


def joined(parts):
    """Return the content, and the name and arguments of each call. Check that parts are complete and in order."""
    content, calls = "", []
    for part in parts:
        match part:
            case Content(text):
                assert text
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def assert_linear(read, unit):
    """Four times as much text, in pieces or whole, takes at most about four times as many calls of functions."""

    def num_calls(num_chars, size):
        """Count calls of functions, including built-in ones."""
        text, count = unit * (num_chars // len(unit)), 0

        def note(_, event, __):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            read([text[at : at + size] for at in range(0, len(text), size)])
        finally:
            sys.setprofile(None)
        return count

    for size in (5, 10**6):
        assert num_calls(12_000, size) < 4.5 * num_calls(3_000, size) + 500
