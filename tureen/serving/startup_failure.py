"""Explains to the operator why an engine could not be built."""

from __future__ import annotations

from tureen.contract.types import EngineFailed
from tureen.errors import TureenError
from tureen.log import get_logger

OUT_OF_MEMORY = (
    "the engine needs more memory than the system gives; lower --context-length or --max-total-tokens, or raise the "
    "limit of this process (ulimit -v)"
)

log = get_logger("serving")


def startup_failure(error: Exception) -> EngineFailed:
    """Return the message about an engine whose factory raised `error`; log a traceback if the error is a fault of the
    program."""
    if isinstance(error, TureenError):
        return EngineFailed(error.message, startup=True)
    if isinstance(error, MemoryError):
        return EngineFailed(OUT_OF_MEMORY, startup=True)
    log.error("the engine could not be built", exc_info=error)
    return EngineFailed(f"the engine could not be built: {type(error).__name__}", startup=True)
