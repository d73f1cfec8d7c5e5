"""A compiler without a process of its own, for engines over the fake runner: real frontends and languages, at once."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer

from tureen.contract.runner import RowError
from tureen.grammar import GrammarError, LanguageCompiler, Vocabulary, language_of
from tureen.grammar.frontends import translate
from tureen.grammar.guard.guarded import load_guarded
from tureen.kernels.cpu import native

VOCABULARY = Vocabulary(tuple(bytes([byte]) for byte in range(256)), (EOS,), VOCAB_SIZE)


class InlineCompiler:
    """Every grammar is ready at the poll after it was asked for."""

    def __init__(self):
        self._tokenizer = make_byte_tokenizer()
        self._languages = None
        self._pending = []
        self.stats = SimpleNamespace(compiles=0, hits=0, failures=0, timeouts=0, compile_ms=0.0)
        self.supervisor = None  # it has no processes

    def submit(self, spec):
        made = SimpleNamespace(spec=spec, state="pending", compiled=None, unenforced=(), error=None)
        self._pending.append(made)
        return made

    def poll(self):
        for one in self._pending:
            self.stats.compiles += 1
            try:
                one.compiled, one.unenforced = self._compile(one.spec)
                one.state = "ready"
            except GrammarError as error:
                self.stats.failures += 1
                one.error, one.state = RowError(f"invalid_{one.spec.kind}", str(error), 400), "failed"
        self._pending.clear()

    def release(self, compilation):
        self._pending = [one for one in self._pending if one is not compilation]  # another may be equal to it

    def clear(self):
        pass

    def close(self):
        pass

    def _compile(self, spec):
        if self._languages is None:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            self._languages = LanguageCompiler(VOCABULARY, encode, native.require())
        language, program = translate(language_of(spec, VOCABULARY), spec, self._languages)
        return load_guarded(program, language.guard, self._languages), language.unenforced
