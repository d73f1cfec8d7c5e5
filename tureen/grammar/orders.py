"""What the engine and the process that compiles its constraints say to each other."""

from __future__ import annotations

import os
import struct

import msgspec

from tureen.grammar.base import GrammarSpec, Vocabulary
from tureen.grammar.expression import GrammarError

MESSAGE = struct.Struct("<BI")
"""To the forge: what to do, and the number of the compile that it is about."""

COMPILE = 0  # comes with two descriptors: memory with the constraint, where the reply is put too, and a pipe's end
END = 1  # a compile is over for the engine: its child is ended if it still runs
READY, BEGUN, DONE = b"r", b"b", b"d"
"""What the forge says once; what a child says when it has begun, and when its reply is complete."""

MEMORY_BYTES = 1 << 30  # that a child may take on top of what it is born with
LOWER_AFTER_S = 0.05
"""A child that takes more processor time gets only what nobody else wants from then on."""


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What the forge is started with."""

    backend: str
    vocabulary: Vocabulary
    timeout_s: float


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why there is no grammar: what the client is answered."""

    status: int
    code: str
    message: str


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What a child has to say: what to load, or why there is nothing."""

    source: bytes = b""
    failure: Failure | None = None


def invalid(spec: GrammarSpec, error: GrammarError) -> Failure:
    """The client's constraint cannot be enforced."""
    return Failure(400, invalid_code(spec), str(error))


def invalid_code(spec: GrammarSpec) -> str:
    return f"invalid_{spec.kind}"


def too_complex(spec: GrammarSpec, why: str) -> Failure:
    """Compiling takes more than there is."""
    return Failure(
        400,
        "grammar_too_complex",
        f"this {spec.kind} is too complex to compile: {why}; make it smaller: shorter lists of alternatives, "
        "smaller bounds on lengths and repeats, less nesting",
    )


def broken(spec: GrammarSpec, error: BaseException) -> Failure:
    """A fault of ours. It names no more than the place: the exception's text may hold what the client sent."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno}" if place else "?"
    message = f"this {spec.kind} could not be compiled: internal error ({type(error).__name__} in {where})"
    return Failure(500, "grammar_failed", message)
