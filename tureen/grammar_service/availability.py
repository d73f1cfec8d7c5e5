"""Whether this machine and installation can constrain outputs."""

from __future__ import annotations

from functools import cache

from tureen.kernels.cpu import native
from tureen.sandbox.supervisor import why_no_helpers


@cache
def why_unconstrained() -> str:
    """Returns why constraints are refused here, and the fix; "" if they are accepted."""
    if why := why_no_helpers():
        return f"{why}; leave it out, or run tureen on Linux"
    return "" if native.is_built() else native.MISSING
