"""A fork server whose workers compile constraints, one at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from tureen.grammar import GrammarError, GrammarSpec, TooComplex, language_of, practise
from tureen.grammar.frontends import translate
from tureen.grammar.guard.guarded import load_guarded
from tureen.grammar_service.loading import LazyCompilers
from tureen.grammar_service.messages import LIMITS, CompileReply, CompilerSetup, broken, invalid, too_complex
from tureen.sandbox import fork_server
from tureen.sandbox.fork_server import Handle, Program

Compile = Callable[[GrammarSpec], CompileReply]
"""Compiles a constraint into what the engine loads. Raises GrammarError."""

_decoder = msgspec.msgpack.Decoder(GrammarSpec)


def program(make_compile: Callable[[CompilerSetup], Compile], setup: bytes) -> Program:
    """Returns the program of a worker that compiles one constraint a message. `setup` is a CompilerSetup."""
    compile_ = make_compile(msgspec.msgpack.decode(setup, type=CompilerSetup))

    def handle(message: bytes) -> bytes:
        try:
            return msgspec.msgpack.encode(_reply(compile_, _decoder.decode(message)))
        finally:
            gc.collect()

    def open_(_: Sequence[int]) -> Handle:
        gc.disable()
        return handle

    return Program(LIMITS, open_)


def compile_with(setup: CompilerSetup) -> Compile:
    """Makes the compilers."""
    compilers = LazyCompilers(setup.vocabulary, lambda text: [])  # a trial needs no tokens of its forced text
    compilers.get(has_specials=False)
    if setup.vocabulary.specials:
        compilers.get(has_specials=True)
    mask = np.zeros(-(-setup.vocabulary.size // 32), dtype=np.uint32)
    practise()

    def compile_(spec: GrammarSpec) -> CompileReply:
        language = language_of(spec, setup.vocabulary)
        has_specials = language.has_specials and bool(setup.vocabulary.specials)
        compiler = compilers.get(has_specials=has_specials)
        language, source = translate(language, spec, compiler)
        grammar = load_guarded(source, language.guard, compiler).start()  # a trial of the first step
        grammar.fill_mask(mask)
        if not mask.any():
            raise GrammarError(f"no text matches this {spec.kind}: its parts contradict each other")
        grammar.forced()
        return CompileReply(source, None, language.guard, language.unenforced, has_specials)

    return compile_


def _reply(compile_: Compile, spec: GrammarSpec) -> CompileReply:
    try:
        return compile_(spec)
    except TooComplex as error:
        return CompileReply(failure=too_complex(spec, str(error)))
    except GrammarError as error:
        return CompileReply(failure=invalid(spec, error))
    except MemoryError:
        return CompileReply(failure=too_complex(spec, f"it takes more than {LIMITS.memory_bytes >> 20} MiB of memory"))
    except RecursionError:
        return CompileReply(failure=too_complex(spec, "it is nested too deeply"))
    except BaseException as error:  # noqa: BLE001 (a Rust library's panic is no Exception; none may pass for a crash)
        return CompileReply(failure=broken(spec, error))


if __name__ == "__main__":
    fork_server.main(partial(program, compile_with))
