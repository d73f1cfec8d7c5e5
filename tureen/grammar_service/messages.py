"""The messages between the engine and the workers that compile its constraints."""

from __future__ import annotations

import os

import msgspec

from tureen.grammar import GrammarError, GrammarSpec, Unenforced, Vocabulary
from tureen.grammar.guard.facts import GuardFacts
from tureen.sandbox.limits import WorkerLimits

LIMITS = WorkerLimits(memory_bytes=1 << 30, cpu_s=600, is_sealed=True)
"""The limits of a worker that compiles. Its processor time is bounded by the engine, which ends it at the deadline."""

MAX_REPLY_BYTES = 64 << 20


class CompilerSetup(msgspec.Struct, frozen=True, array_like=True):
    """The settings that the fork server is started with."""

    vocabulary: Vocabulary


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why there is no grammar: the client gets it as the answer."""

    status: int
    code: str
    message: str
    retry_after_s: int | None = None  # of a status 503


class CompileReply(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer to a GrammarSpec: the bytes to load, or the reason why there are none."""

    source: bytes = b""
    failure: Failure | None = None
    guard: GuardFacts | None = None  # what no grammar can enforce
    unenforced: tuple[Unenforced, ...] = ()  # of what the constraint says
    has_specials: bool = False  # it is for the vocabulary with the texts of special tokens


def invalid(spec: GrammarSpec, error: GrammarError) -> Failure:
    """The client's constraint cannot be enforced."""
    return Failure(400, invalid_code(spec), str(error))


def invalid_code(spec: GrammarSpec) -> str:
    """Returns the error code that tells the client which field is wrong."""
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
