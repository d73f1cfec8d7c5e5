"""A compiler without a process of its own, for engines over the fake runner: real frontends and backend, at once."""

from __future__ import annotations

from types import SimpleNamespace

from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer

from tureen.contract.runner import RowError
from tureen.grammar import GrammarError, Vocabulary, compile_grammar, find_backend, language_of
from tureen.grammar.closing import ClosingCompiler, ClosingGrammar
from tureen.kernels.cpu import native

VOCABULARY = Vocabulary(tuple(bytes([byte]) for byte in range(256)), (EOS,), VOCAB_SIZE)


class InlineCompiler:
    """Every grammar is ready at the poll after it was asked for."""

    def __init__(self, backend="llguidance"):
        self._tokenizer = make_byte_tokenizer()
        self._backend_name, self._backend = backend, None
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
                one.compiled, one.state = self._compile(one.spec), "ready"
                one.unenforced = language_of(one.spec).unenforced
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
        if self._backend is None:
            encode = self._tokenizer.encode
            self._backend = find_backend(self._backend_name)(
                VOCABULARY, lambda text: encode(text, add_special_tokens=False)
            )
            self._closings = ClosingCompiler(VOCABULARY, native.load())
        compiled = compile_grammar(spec, self._backend)
        return ClosingGrammar(compiled, self._closings.load(self._closings.translate(language_of(spec))))
