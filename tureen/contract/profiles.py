"""Limits of what a profile may be asked for, at the HTTP server and at the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

MAX_STEPS = 10_000

Activity = Literal["CPU", "GPU"]
NumSteps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
Prefix = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$|^$")]
"""Beginning of a file's name. 64 characters are a client's; the rest names the replica."""
