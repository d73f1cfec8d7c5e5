"""Compilers for one vocabulary, and for the same with the texts of its special tokens."""

from __future__ import annotations

import threading

from tureen.grammar import CompiledGrammar, Encode, LanguageCompiler, Vocabulary
from tureen.grammar.guard.guarded import load_guarded
from tureen.grammar_service.messages import CompileReply
from tureen.kernels.cpu import native


class LazyCompilers:
    """The compilers for both vocabularies, each made when it is needed first. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self._vocabulary, self._encode = vocabulary, encode
        self._lock = threading.Lock()
        self._known: dict[bool, LanguageCompiler] = {}

    def get(self, *, has_specials: bool) -> LanguageCompiler:
        """Returns the compiler; `has_specials`: for the vocabulary with the texts of special tokens."""
        with self._lock:
            if has_specials not in self._known:
                vocabulary = self._vocabulary.with_specials() if has_specials else self._vocabulary
                self._known[has_specials] = LanguageCompiler(vocabulary, self._encode, native.require())
            return self._known[has_specials]

    def load(self, reply: CompileReply) -> CompiledGrammar:
        """Makes ready what a worker compiled. Raises GrammarError."""
        return load_guarded(reply.source, reply.guard, self.get(has_specials=reply.has_specials))
