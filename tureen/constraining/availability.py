"""Says whether outputs can be constrained here at all."""

from __future__ import annotations

from functools import cache

from tureen.kernels.cpu import native
from tureen.sandbox.supervisor import why_no_helpers


@cache
def why_unconstrained() -> str:
    """Says why constraints are refused here, and what to do; empty where they are not."""
    if why := why_no_helpers():
        return f"{why}; leave it out, or run tureen on Linux"
    return "" if native.is_built() else native.MISSING
