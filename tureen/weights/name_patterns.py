"""Matches module names with patterns from a model's or an adapter's files, in time linear in the name.

Python's `re` takes exponential time for some patterns, and nothing can end it. The engine here is Rust's `regex`, as
jsonschema-rs exposes it: it knows no lookaround and no backreferences, and bounds the size of a compiled pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_PATTERN_CHARS: Final = 1024
MAX_COMPILED_BYTES: Final = 1 << 20


class PatternFault(ValueError):
    """A pattern that cannot be used; the message says why."""


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Returns a function that says whether a name contains a match of `pattern`. Raises PatternFault."""
    import jsonschema_rs  # noqa: PLC0415 - few models and adapters have patterns

    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternFault(f"has more than {MAX_PATTERN_CHARS} characters")
    limits = jsonschema_rs.RegexOptions(size_limit=MAX_COMPILED_BYTES, dfa_size_limit=MAX_COMPILED_BYTES)
    try:
        return jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=limits).is_valid
    except ValueError:  # a ValidationError is one
        raise PatternFault(
            "is not a valid pattern, is too large, or has a lookaround or a backreference, which are not supported"
        ) from None
