"""How idle CPU threads wait. No torch: this must be settled before torch is imported."""

from __future__ import annotations

import os

SPINS = "2000"  # some microseconds


def wait_politely() -> None:
    """Let torch's idle threads sleep soon: spinning ones starve each other when other work wants the same CPUs.

    Where every CPU is ours alone this costs nothing; beside one busy process a decode step is several times faster.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
