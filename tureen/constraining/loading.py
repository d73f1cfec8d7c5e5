"""Compilers for one vocabulary, and for the same with the texts of its special tokens."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import NamedTuple

from tureen.constraining.messages import CompileReply
from tureen.grammar import Backend, Encode, Vocabulary, find_backend
from tureen.grammar.closing import ClosingCompiler, ClosingGrammar
from tureen.grammar.guard.guarded import guarded
from tureen.kernels.cpu import native


class GrammarCompilers(NamedTuple):
    """A backend, and what brings its outputs to an end, for one vocabulary."""

    backend: Backend
    closings: ClosingCompiler

    def load(self, reply: CompileReply) -> ClosingGrammar:
        """Makes ready what a worker compiled. Raises GrammarError."""
        compiled = guarded(self.backend.load(reply.source), reply.guard, self.backend)
        return ClosingGrammar(compiled, self.closings.load(reply.closing))


def grammar_compilers(backend: str, vocabulary: Vocabulary, encode: Encode) -> GrammarCompilers:
    """Makes the compilers for a vocabulary; with a large one it takes a second."""
    return GrammarCompilers(find_backend(backend)(vocabulary, encode), ClosingCompiler(vocabulary, closing_kernels()))


def closing_kernels() -> ModuleType | None:
    """Returns the native kernels; None where there are none that run here: then no output is brought to an end."""
    try:
        return native.load()
    except (ImportError, RuntimeError):
        return None


class LazyCompilers:
    """The compilers for both vocabularies, each made when it is needed first. Thread-safe."""

    def __init__(self, backend: str, vocabulary: Vocabulary, encode: Encode) -> None:
        self._backend, self._vocabulary, self._encode = backend, vocabulary, encode
        self._lock = threading.Lock()
        self._known: dict[bool, GrammarCompilers] = {}

    def get(self, *, has_specials: bool) -> GrammarCompilers:
        """Returns the compilers; `has_specials`: for the vocabulary with the texts of special tokens."""
        with self._lock:
            if has_specials not in self._known:
                vocabulary = self._vocabulary.with_specials() if has_specials else self._vocabulary
                self._known[has_specials] = grammar_compilers(self._backend, vocabulary, self._encode)
            return self._known[has_specials]
