"""Names of SGLang's that its documentation uses, served by tureen. This is not SGLang."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is used: `sgl.Engine`."""
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415

        return Engine
    raise AttributeError(f"module 'sglang' of tureen has no {name}: it has the names of SGLang's documentation only")
